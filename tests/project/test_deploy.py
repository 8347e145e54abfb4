"""What can be known of the files in `deploy/` without a cluster."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podracer import recipes
from podracer.cli import pods, resume, train
from podracer.cli.commands import COMMANDS
from podracer.cli.main import main
from podracer.devices.startup import Hosts

DEPLOY = Path(__file__).parents[2] / "deploy"
yaml = pytest.importorskip("yaml")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# --- the custom resources -------------------------------------------------------------------------


def test_the_processes_of_the_job_set_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    jobset = read("jobset-multihost.yaml")
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    hosts = Hosts().with_environment()
    name = jobset["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert hosts == Hosts(f"{name}-{workers['name']}-0-0.{name}:{port}", 4, 3)
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == hosts.num_processes


def test_the_task_is_one_that_skypilot_takes(tmp_path: Path) -> None:
    """And its script gives each machine the address of the first and its own number."""
    task = read("skypilot.yaml")
    pod = task["config"]["kubernetes"]["pod_config"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 0  # it refuses the image's user, who has no sudo
    (tmp_path / "podracer").write_text('#!/bin/sh\nenv | grep ^JAX | sort; echo "$@"\n')
    (tmp_path / "podracer").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "JAX_COORDINATOR_ADDRESS=10.0.0.1:1234",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
        "train breakout_ppo --run-dir /shared/run --num-envs 4096",
    ]


@pytest.mark.parametrize("name", ["jobset-multihost.yaml", "kuberay-tournament.yaml"])
def test_the_pods_are_ones_that_kubernetes_takes(name: str) -> None:
    """By the schemas of Kubernetes itself, where the package that has them is installed."""
    validator = pytest.importorskip("kubernetes_validate")
    for pod in (pod for pod in mappings(read(name)) if "containers" in pod):
        resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": pod}
        validator.validate(resource, "1.33", strict=True)


@pytest.mark.parametrize("name", ["jobset-multihost.yaml", "kuberay-tournament.yaml"])
def test_all_pods_share_the_volume_and_none_is_root(name: str) -> None:
    pods = [pod for pod in mappings(read(name)) if "containers" in pod]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "podracer"
        for container in pod["containers"]:
            assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings inside one."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from mappings(item)


# --- the image and the script ---------------------------------------------------------------------


def test_the_image_is_pinned_and_has_no_root() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert bases == ["python:3.12-slim"]
    assert any("--require-hashes -r constraints.txt" in line for line in lines)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["1000"]
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert all((DEPLOY.parent / name).exists() for name in copied)
    settings = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    assert set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(copied)


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


@pytest.mark.parametrize(
    ("code", "restarts", "queued"),
    [
        (77, 19, QUEUED),
        (77, 20, ""),
        (75, 20, QUEUED),  # no loss: whenever the time is over
    ],
)
def test_the_slurm_script_goes_on_after_a_loss_a_number_of_times(
    tmp_path: Path, code: int, restarts: int, queued: str
) -> None:
    output = slurm(tmp_path, tmp_path, code, SLURM_RESTART_COUNT=str(restarts))[1]
    assert output.partition("\n")[2] == queued


@pytest.mark.parametrize(("code", "queued"), [(0, ""), (75, QUEUED), (77, QUEUED), (70, "")])
def test_the_slurm_script_starts_resumes_and_queues(tmp_path: Path, code: int, queued: str) -> None:
    run = tmp_path / "a run"
    started = f"srun podracer train catch --seed 1 --run-dir {run}\n"
    assert slurm(tmp_path, run, code) == (code, started + queued)
    run.mkdir()
    (run / "config.json").touch()
    assert slurm(tmp_path, run, code) == (code, f"srun podracer resume {run}\n{queued}")


# --- every command that they name -----------------------------------------------------------------


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
