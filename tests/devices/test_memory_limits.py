"""Runs with little memory: control groups and address space that are limited by the kernel itself.

Groups need the rights of root; where there are none to be had, their tests are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child import command, environment

MIB = 2**20
RUN = (
    "train", "catch_a2c", "--num-envs", 8192, "--rollout-length", 128, "--hidden", 512,
    "--evaluations", 0, "--frames", 10**9,
)  # fmt: skip


@pytest.fixture
def group():
    """A control group inside that of this process, of either version: its directory."""
    mounts = Path("/sys/fs/cgroup")
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {names: path.strip("/") for _, names, path in lines}
    v1 = "memory" in paths
    parent = mounts / "memory" / paths["memory"] if v1 else mounts / paths.get("", "")
    directory = parent / f"podracer-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if v1 else "memory.max"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        if not (directory / name).exists():
            pytest.skip("the control group has no limit of memory")
        yield directory / name
    finally:
        directory.rmdir()


def run_in_group(limit_file, mebibytes, arguments, timeout=300):
    """Exit code, output and error of a process whose memory is limited."""
    limit_file.write_text(str(mebibytes * MIB))
    join = 'echo $$ > "$0"; exec "$@"'
    return subprocess.run(
        ["sh", "-c", join, str(limit_file.with_name("cgroup.procs")), *arguments],
        env=environment(), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.figure(20)
def test_a_run_that_its_group_cannot_hold_is_refused(group, tmp_path):
    result = run_in_group(group, 1500, command(*RUN, "--run-dir", tmp_path / "run"))
    assert result.returncode == 78, result.stderr
    [sentence] = [line for line in result.stderr.splitlines() if line.startswith("podracer:")]
    assert "the program needs" in sentence
    assert "are free: take fewer environments" in sentence
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_run_without_address_space_says_so(tmp_path):
    """A limit that no group has."""
    limit = f'ulimit -v {2500 * 1024}; exec "$0" "$@"'
    result = subprocess.run(
        ["sh", "-c", limit, *command(*RUN, "--run-dir", tmp_path / "run")],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 71, result.stderr
    assert "podracer: out of device memory: take fewer environments" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((tmp_path / "run" / "crash.json").read_text())["code"] == 71


HUNGRY = """
import json, sys
import gymnasium, numpy as np

class Hungry(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if action:
            self.food = np.ones(2**28)  # 2 GiB
        return np.zeros(2, np.float32), 1.0, False, False, {}

if __name__ == "__main__":
    from podracer.envs.host.gymnasium import Gymnasium

    batch = Gymnasium(Hungry, step_seconds=120.0).make(4, 2)
    batch.reset(0, np.arange(4), 0)
    for action in (0, 1, 0):
        timestep = batch.step(np.array([0, 0, 0, action], np.int32))
    batch.close()
    print(json.dumps([dict(batch.faults), dict(batch.first_faults), timestep.reward.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.figure(7)
def test_an_environment_that_takes_all_memory_is_replaced(group, tmp_path):
    """The kernel kills its process, the largest; the others are stepped on."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    result = run_in_group(group, 1500, [sys.executable, str(tmp_path / "hungry.py")])
    assert result.returncode == 0, result.stderr
    faults, first_faults, reward = json.loads(result.stdout)
    assert faults["died"] == 1
    assert "SIGKILL, as where memory has run out" in first_faults["died"]
    assert reward == [1.0, 1.0, 1.0, 1.0]
