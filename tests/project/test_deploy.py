"""What can be known of the files in `deploy/` without a cluster."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podracer import recipes
from podracer.cli import pods, resume, train
from podracer.cli.commands import COMMANDS
from podracer.cli.main import main

DEPLOY = Path(__file__).parents[2] / "deploy"
yaml = pytest.importorskip("yaml")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# --- the scripts ----------------------------------------------------------------------------------


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


# --- every command that they name -----------------------------------------------------------------


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings inside one."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from mappings(item)


def commands() -> Iterator[str]:
    """What the files have podracer do."""
    for path in sorted(DEPLOY.iterdir()):
        texts = [path.read_text()]
        if path.suffix == ".yaml":
            texts = [text for item in mappings(read(path.name)) for text in strings(item)]
        elif path.suffix == ".sh":
            texts = [line for line in texts[0].splitlines() if not line.startswith("#")]
        for text in texts:
            yield from re.findall(rf"\bpodracer (?:{'|'.join(COMMANDS)}) [^;\n]*", text)


def strings(mapping: dict[str, Any]) -> Iterator[str]:
    for value in mapping.values():
        values = value if isinstance(value, list) else [value]
        yield from (item for item in values if isinstance(item, str))


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_is_one_that_podracer_has(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (usage,) = re.findall(r"slurm\.sh (.*)", (DEPLOY / "slurm.sh").read_text())
    text = command.replace('"$@"', usage).replace("$RUN", "/shared/run")
    _, name, *arguments = shlex.split(text)
    begun = []

    def begin(chosen: Any, *_: Any, **__: Any) -> int:
        chosen.check()
        begun.append(chosen)
        return 0

    for module, function in (
        (train, "run"),
        (pods, "run"),
        (resume, "run"),
        (pods, "run_on_terminal"),
    ):
        monkeypatch.setattr(module, function, begin)
    catch = recipes.find("catch")
    monkeypatch.setattr(resume.ResumeOptions, "reopen", lambda *_: catch)
    with pytest.raises(SystemExit) as leaving:
        main([name, *arguments])
    assert leaving.value.code == 0
    assert begun
