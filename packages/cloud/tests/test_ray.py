"""Real Ray, real kills: what the orchestrator promises also holds where others start the pods."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from child import command, wait_until

from podracer import recipes
from podracer.tournament import selection
from podracer.tournament.config import Tournament
from podracer.tournament.engine import EngineLost
from podracer.tournament.events import Failed, Submitted
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer_cloud.ray_engine import RayEngine

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs ray")
slow = pytest.mark.slow


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str
    command: str


def processes() -> list[Process]:
    """Everything that runs on this machine; zombies do not."""
    listing = subprocess.check_output(["ps", "-ewwo", "pid=,ppid=,sid=,stat=,args="], text=True)
    split = (line.split(maxsplit=4) for line in listing.splitlines())
    found = [Process(int(a), int(b), int(c), d, e) for a, b, c, d, e in split]
    return [process for process in found if not process.state.startswith("Z")]


@dataclasses.dataclass
class Run:
    """A tournament under the command line, and what belongs to it on this machine."""

    directory: Path
    driver: subprocess.Popen[str]

    @property
    def holder(self) -> int:
        """The process that holds Ray, and leads the session of all of Ray's."""
        return wait_until(
            lambda: [
                each.pid
                for each in processes()
                if each.parent == self.driver.pid and "podracer_cloud.ray_cluster" in each.command
            ]
        )[0]

    def pods(self, name: str = "") -> list[Process]:
        mine = str(self.directory / "pods" / name)
        return [each for each in processes() if f"tournament.process {mine}" in each.command]

    def end(self, seconds: float = 240.0) -> tuple[int, str]:
        """Exit code and output of the driver."""
        output, _ = self.driver.communicate(timeout=seconds)
        return self.driver.returncode, output

    def events(self, kind: type) -> list[Any]:
        return [each for each in read_events(self.directory) if isinstance(each, kind)]


def tournament(**changes: Any) -> Tournament:
    """Two pods of Catch for two rounds, each saved at every chunk."""
    catch = dataclasses.replace(recipes.find("catch_a2c"), save_seconds=0.0, devices=1)
    defaults: dict[str, Any] = {
        "experiments": (catch,),
        "selection": selection.Independent(),
        "pods": 2,
        "rounds": 2,
        "round_frames": 1_000_000,
        "episodes": 8,
        "engine": "ray",
        "pod_cpus": 0.5,
    }
    return Tournament(**defaults | changes)


@contextlib.contextmanager
def resumed(directory: Path, **environment: str) -> Iterator[Run]:
    """`podracer resume`, whose session ends with the test."""
    driver = subprocess.Popen(
        command("resume", directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )
    run = Run(directory, driver)
    try:
        yield run
    finally:
        driver.kill()
        driver.communicate()
        for process in run.pods():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def begun(directory: Path, chosen: Tournament) -> Path:
    """A tournament that has only its header."""
    Leaderboard(directory, chosen.header()).close()
    return directory


def saved(run: Run, name: str) -> bool:
    """Whether a round's process runs and has something to go on from."""
    manifests = (run.directory / "pods" / name / "checkpoints").glob("0*/manifest.json")
    return bool(run.pods(name)) and any(manifests)


def assert_whole(run: Run, pods: int = 2, rounds: int = 2) -> None:
    """Every round of every pod counts once."""
    counts = Counter((each.pod, each.round) for each in run.events(Submitted))
    assert counts == dict.fromkeys([(p, r) for p in range(pods) for r in range(rounds)], 1)


def assert_nothing_left(run: Run, session: int, seconds: float = 30.0) -> None:
    wait_until(lambda: not run.pods(), seconds)
    wait_until(lambda: not [each for each in processes() if each.session == session], seconds)


def listening(session: int) -> list[str]:
    """Addresses on which processes of a session accept connections."""
    inodes = set()
    for process in processes():
        if process.session == session:
            for link in Path(f"/proc/{process.pid}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    ]


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.figure(17)
@slow
def test_a_tournament_ends_quietly_and_is_heard_by_this_machine_only(tmp_path: Path) -> None:
    with resumed(begun(tmp_path, tournament(round_frames=50_000))) as run:
        holder = run.holder
        wait_until(run.pods)
        addresses = listening(holder)
        assert addresses
        assert set(addresses) <= LOOPBACK
        code, output = run.end()
        assert code == 0, output
        assert "ray" not in output.lower().replace(str(tmp_path), "")
        assert_nothing_left(run, holder)
    assert_whole(run)
    assert not run.events(Failed)


@pytest.mark.figure(13)
@slow
def test_killed_pods_and_workers_go_on_from_their_last_save(tmp_path: Path) -> None:
    with resumed(begun(tmp_path, tournament())) as run:
        holder = run.holder
        first = {}
        for name, victim in (("p0r0", "pod"), ("p1r0", "worker")):
            wait_until(lambda name=name: saved(run, name))
            pod = run.pods(name)[0]
            metrics = tmp_path / "pods" / name / "metrics.jsonl"
            first[metrics] = metrics.read_text().splitlines()[0]
            os.kill(pod.pid if victim == "pod" else pod.parent, signal.SIGKILL)
        code, output = run.end()
        assert code == 0, output
        assert_nothing_left(run, holder)
    assert_whole(run)
    failed = run.events(Failed)
    assert sorted(each.pod for each in failed) == [0, 1]
    assert all(each.frames > 0 for each in failed)
    for metrics, line in first.items():
        assert metrics.read_text().splitlines()[0] == line, "it began anew"


@pytest.mark.figure(13)
@slow
def test_a_killed_driver_takes_its_pods_along_and_loses_nothing(tmp_path: Path) -> None:
    begun(tmp_path, tournament())
    with resumed(tmp_path) as run:
        holder = run.holder
        wait_until(lambda: saved(run, "p1r0"))
        run.driver.kill()
        assert_nothing_left(run, holder)
    with resumed(tmp_path) as run:
        code, output = run.end()
        assert code == 0, output
    assert_whole(run)


@pytest.mark.figure(13)
@slow
@pytest.mark.parametrize("victim", ["raylet", "gcs_server", "podracer_cloud.ray_cluster"])
def test_when_the_engine_dies_it_says_how_to_go_on_and_leaves_nothing(
    tmp_path: Path, victim: str
) -> None:
    begun(tmp_path, tournament(round_frames=300_000_000))
    with resumed(tmp_path) as run:
        holder = run.holder
        wait_until(lambda: saved(run, "p0r0"))
        for each in processes():
            if each.session == holder and victim in each.command.split(" --")[0]:
                os.kill(each.pid, signal.SIGKILL)
        killed = time.monotonic()
        code, output = run.end(30.0)
        print(f"{victim}: the orchestrator ended after {time.monotonic() - killed:.1f} s")
        assert code == 77, output
        assert f"podracer resume {tmp_path}" in output
        assert_nothing_left(run, holder)
        print(f"{victim}: nothing left after {time.monotonic() - killed:.1f} s")


@slow
def test_told_to_stop_it_saves_all_pods(tmp_path: Path) -> None:
    with resumed(begun(tmp_path, tournament(round_frames=300_000_000))) as run:
        holder = run.holder
        wait_until(lambda: saved(run, "p0r0") and saved(run, "p1r0"))
        run.driver.terminate()
        code, output = run.end()
        assert code == 75, output
        assert_nothing_left(run, holder)
    for name in ("p0r0", "p1r0"):
        metrics = (tmp_path / "pods" / name / "metrics.jsonl").read_text().splitlines()
        steps = (tmp_path / "pods" / name / "checkpoints").glob("0*/manifest.json")
        assert max(int(step.parent.name) for step in steps) == json.loads(metrics[-1])["updates"]


@slow
def test_a_cluster_that_is_not_there_is_a_lost_engine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    engine = RayEngine(tmp_path)
    try:
        with pytest.raises(EngineLost, match="podracer resume"):
            wait_until(lambda: engine.poll())
    finally:
        engine.close()
