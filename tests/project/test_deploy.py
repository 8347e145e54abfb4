"""What can be known of the files in `deploy/` without a cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("name", ["slurm.sh", "xpk.sh"])
def test_the_scripts_are_sound(name: str) -> None:
    script = str(DEPLOY / name)
    subprocess.run(["bash", "-n", script], check=True)
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (shellcheck := shutil.which("shellcheck", path=places)) is None:
        pytest.skip("needs shellcheck")
    subprocess.run([shellcheck, script], check=True)


def slurm(directory: Path, run: Path, code: int, **variables: str) -> tuple[int, str]:
    """The script with an `srun` that ends with `code`; its exit code and what was called."""
    for name, status in (("srun", code), ("scontrol", 0)):
        stub = directory / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*"\nexit {status}\n')
        stub.chmod(0o755)
    environment = {
        "PATH": f"{directory}:/usr/bin:/bin",
        "RUN": str(run),
        "SLURM_JOB_ID": "7",
    } | variables
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm.sh"), "catch", "--seed", "1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


QUEUED = "scontrol requeue 7\n"


@pytest.mark.parametrize(("code", "queued"), [(0, ""), (75, QUEUED), (77, QUEUED), (70, "")])
def test_the_slurm_script_starts_resumes_and_queues(tmp_path: Path, code: int, queued: str) -> None:
    run = tmp_path / "a run"
    started = f"srun podracer train catch --seed 1 --run-dir {run}\n"
    assert slurm(tmp_path, run, code) == (code, started + queued)
    run.mkdir()
    (run / "config.json").touch()
    assert slurm(tmp_path, run, code) == (code, f"srun podracer resume {run}\n{queued}")
