"""A Ray cluster of several nodes under seeded faults: every account closes, no pod is blamed.

Ray, its nodes, the driver and the engine are real, on one machine. Pods only pretend to train, as
`sitecustomize` on the nodes' path takes the place of their processes, at a fraction of the cost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import child
import pytest

import podracer
from podracer import recipes
from podracer.tournament import selection
from podracer.tournament.config import Tournament
from podracer.tournament.events import Failed, Started, Submitted, state_after
from podracer.tournament.leaderboard import Leaderboard, read_events

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs ray"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:os.fork"),  # Ray starts a node by a fork that execs at once
]
PODS, ROUNDS = 4, 3
BEST = 0.5  # the score of all pods; a node of other code gives ten times as much
POD = """
import fcntl, json, os, pathlib, select, signal, sys, time
if "podracer.tournament.process" in sys.orig_argv:
    directory = pathlib.Path(sys.orig_argv[sys.orig_argv.index("podracer.tournament.process") + 1])
    root = directory.parents[1]
    task = json.loads((directory / "task.json").read_text())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    lock = open(directory / "lock", "a")
    fcntl.flock(lock, fcntl.LOCK_EX)  # as the real one waits for an earlier attempt
    steps = directory / "checkpoints"
    number = len(list(steps.glob("*/manifest.json")))
    hold = root / "hold"
    while number < 8 or (task["round"] == LAST and hold.exists()):
        if (root / "full").exists():
            print("No space left on device", flush=True)
            os._exit(73)
        if select.select([0], [], [], 0.2)[0]:  # its engine is gone
            os._exit(75)
        number += 1
        step = steps / f"{number:012d}"
        step.mkdir(parents=True, exist_ok=True)
        (step / "manifest.json").write_text("{}")
        print("saved", flush=True)
    step = steps / f"{number:012d}"
    report = {
        "token": task["token"], "score": SCORE, "standard_error": 0.1, "episodes": 8,
        "frames": number, "seconds": 1.0, "digest": "0" * 64,
        "checkpoint": step.relative_to(root).as_posix(),
    }
    (directory / "report.json.new").write_text(json.dumps(report))
    os.replace(directory / "report.json.new", directory / "report.json")
    os._exit(0)
"""
KINDS = (
    *("pod killed", "worker killed", "raylet killed", "node drained", "node joins", "other code"),
    *("no directory", "node is slow", "node is cut off", "disk is full", "driver killed"),
    *("driver stopped", "GCS killed"),
)


def write_pod(folder: Path, score: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = f"LAST, SCORE = {ROUNDS - 1}, {score}\n{POD}"
    (folder / "sitecustomize.py").write_text(text)
    return folder


wait_until = partial(child.wait_until, seconds=240.0)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclasses.dataclass
class Storm:
    """A tournament on a cluster, and the faults that hit it."""

    folder: Path
    rng: random.Random
    cluster: Any = None
    driver: Any = None
    nodes: list[int] = dataclasses.field(default_factory=list)  # process ids of raylets
    others: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def directory(self) -> Path:
        return self.folder / "tournament"

    def start_cluster(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster, self.nodes = None, []
        while self.cluster is None:
            with contextlib.suppress(Exception):  # Ray waits for 30 seconds, a busy machine longer
                self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.join()
        self.join()

    def join(self, path: Path | None = None) -> None:
        """Add a node with room for two pods."""
        places = [path or self.folder / "pod", *sys.path, os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(map(str, filter(None, places)))}
        node = None
        while node is None:
            with contextlib.suppress(Exception):  # Ray waits for 30 seconds, a busy machine longer
                node = self.cluster.add_node(num_cpus=2, env_vars=variables, wait=False)
        if path is None:
            self.nodes.append(node.all_processes["raylet"][0].process.pid)

    def join_without_directory(self) -> None:
        """Add a node whose tournament's directory is an empty one of its own."""
        ray = f"{sys.executable} -m ray.scripts.scripts start --block --num-cpus=2"
        command = f"mount -t tmpfs none {self.directory} && exec {ray}"
        command += f" --address={self.cluster.address}"
        places = [self.folder / "pod", *sys.path]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, places)))}
        with (self.folder / "other.txt").open("wb") as log:
            self.others.append(
                subprocess.Popen(
                    ["unshare", "-m", "sh", "-c", command],
                    env=variables, stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip

    def start_driver(self) -> None:
        with (self.folder / "driver.txt").open("ab") as log:
            self.driver = subprocess.Popen(
                child.command("resume", self.directory),
                cwd=self.folder, stdout=log, stderr=log,
                env=os.environ | {"RAY_ADDRESS": self.cluster.address},
            )  # fmt: skip

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in read_events(self.directory))

    def pod_processes(self) -> list[tuple[int, int]]:
        """Process ids of pods and of their workers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if f"tournament.process {self.directory}" in command:
                    fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
                    found.append((int(path.parent.name), int(fields[1])))
        return found

    def hit(self, kind: str) -> None:
        """Let one fault happen, and return when the tournament goes on."""
        self.faults[kind] += 1
        before = self.count(Started)
        if kind in ("pod killed", "worker killed"):
            pod, worker = self.rng.choice(wait_until(self.pod_processes))
            send(pod if kind == "pod killed" else worker, signal.SIGKILL)
        elif kind in ("raylet killed", "node drained"):
            node = self.nodes.pop(self.rng.randrange(len(self.nodes)))
            send(node, signal.SIGKILL if kind == "raylet killed" else signal.SIGTERM)
            self.join()
        elif kind == "node joins":
            self.join()
        elif kind == "other code":
            self.join(self.folder / "other")
        elif kind == "no directory":
            self.join_without_directory()
        elif kind in ("node is slow", "node is cut off"):
            node = self.rng.choice(self.nodes)
            send(node, signal.SIGSTOP)
            time.sleep(3.0 if kind == "node is slow" else 25.0)
            send(node, signal.SIGCONT)
        elif kind == "disk is full":
            (self.directory / "full").touch()
            wait_until(lambda: self.count(Started) > before)
            (self.directory / "full").unlink()
        elif kind in ("driver killed", "driver stopped"):
            send(self.driver.pid, signal.SIGKILL if kind == "driver killed" else signal.SIGTERM)
            code = self.driver.wait(240.0)
            assert code == (-9 if kind == "driver killed" else 75)
            self.start_driver()
        elif kind == "GCS killed":
            self.cluster.head_node.kill_gcs_server()
            assert self.driver.wait(240.0) == 77
            self.end_cluster()
            self.start_cluster()
            self.start_driver()

    def end_cluster(self) -> None:
        for process in self.others:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.others.clear()
        with contextlib.suppress(Exception):  # of nodes that were killed
            self.cluster.shutdown()


@contextlib.contextmanager
def storm(folder: Path, seed: int) -> Iterator[Storm]:
    """A tournament that runs on a cluster, whose last rounds are held until the faults are over."""
    write_pod(folder / "pod", BEST)
    write_pod(folder / "other", 10 * BEST)
    package = folder / "other" / "podracer"
    shutil.copytree(Path(podracer.__file__).parent, package)
    with (package / "envs" / "catch.py").open("a") as file:
        file.write("# another reward\n")
    catch = dataclasses.replace(recipes.find("catch_a2c"), devices=1)
    tournament = Tournament(
        (catch,), selection.Uniform(), PODS, ROUNDS, 1000, episodes=8, engine="ray",
        pod_cpus=1.0, node_seconds=600.0,
    )  # fmt: skip
    current = Storm(folder, random.Random(seed))
    Leaderboard(current.directory, tournament.header()).close()
    (current.directory / "hold").touch()
    try:
        current.start_cluster()
        current.start_driver()
        wait_until(lambda: current.count(Started))
        yield current
    finally:
        if current.driver is not None:
            current.driver.kill()
            current.driver.wait()
        current.end_cluster()


@pytest.mark.figure(13)
@pytest.mark.parametrize("seed", range(5))
def test_faults_of_a_cluster_lose_nothing_and_blame_no_pod(
    seed: int, tmp_path: Path, cases
) -> None:
    kinds = list(KINDS)
    if os.geteuid() or not shutil.which("unshare"):
        kinds.remove("no directory")  # it needs a mount of its own
    random.Random(seed).shuffle(kinds)
    with storm(tmp_path, seed) as current:
        for kind in kinds:
            wait_until(lambda: current.pod_processes() or current.driver.poll() is not None)
            assert current.driver.poll() is None, (tmp_path / "driver.txt").read_text()
            current.hit(kind)
        wait_until(current.pod_processes)
        (current.directory / "hold").unlink()
        code = current.driver.wait(600.0)
        output = (tmp_path / "driver.txt").read_text()
        print(output)
    events = read_events(current.directory)
    accounts = Counter((e.pod, e.round) for e in events if isinstance(e, Submitted))
    expected = dict.fromkeys([(p, r) for p in range(PODS) for r in range(ROUNDS)], 1)
    scores = {e.score for e in events if isinstance(e, Submitted)}
    failed = Counter((e.fault, e.reason[:60]) for e in events if isinstance(e, Failed))
    print(
        f"seed {seed}: {dict(current.faults)}; attempts {current.count(Started)}; failed {failed}"
    )
    is_whole = code == 0 and accounts == expected and scores == {BEST}
    cases.add(len(kinds) * is_whole, len(kinds))
    assert accounts == expected, output
    assert scores == {BEST}
    assert not [n for n, pod in state_after(events).pods.items() if pod.status == "quarantined"]
    assert code == 0, output
    assert "its code of podracer is" in output
