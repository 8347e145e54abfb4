"""Where attempts may run: the process that holds Ray, with a Ray that only pretends."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from podracer import recipes
from podracer.errors import ConfigError
from podracer.tournament.config import Tournament
from podracer_cloud import ray_cluster as cluster
from podracer_cloud.code import code_and_versions
from podracer_cloud.ray_cluster import Attempt, Cluster
from podracer_cloud.ray_engine import NONCE, parse_resources, ray_options

HEAD, FIRST, SECOND = "head" * 8, "first" * 8, "second" * 8


def node(name: str, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name, "Alive": True, "NodeManagerHostname": name[:6],
        "NodeManagerAddress": "10.0.0.1", "Resources": resources,
    }  # fmt: skip


class Actor:
    """An actor whose calls end when the test says so."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.replies = options, dict[str, concurrent.futures.Future[Any]]()
        self.asked: list[str] = []
        self.is_dead = False

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.asked.append(method)
            self.replies[method] = future = concurrent.futures.Future()
            return types.SimpleNamespace(future=lambda: future)

        return types.SimpleNamespace(remote=remote)

    @property
    def excluded(self) -> str:
        return self.options.get("label_selector", {}).get("ray.io/node-id", "")


class Ray:
    """As much of the module `ray` as a cluster calls."""

    class exceptions:
        class OutOfMemoryError(Exception): ...

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.live, self.actors = [node(HEAD), *nodes], list[Actor]()

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: HEAD)

    def remote(self, **_: Any) -> Any:
        def create(**options: Any) -> Any:
            def start() -> Actor:
                self.actors.append(Actor(options))
                return self.actors[-1]

            return types.SimpleNamespace(remote=start)

        return lambda _: types.SimpleNamespace(options=create)

    def nodes(self) -> list[dict[str, Any]]:
        return self.live

    def kill(self, actor: Actor) -> None:
        actor.is_dead = True


class Room:
    """A cluster, what it says, and its clock."""

    def __init__(self, ray: Ray, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.ray, self.said, self.time = ray, list[list[Any]](), 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.time, sleep=lambda _: None)
        monkeypatch.setattr(cluster, "time", clock)
        defaults = {"options": {"num_cpus": 1.0}, "recipes": [], "node_seconds": 0.0, "nonce": "n"}
        self.cluster = Cluster(ray, defaults | settings, lambda *value: self.said.append([*value]))
        self.cluster.beat()

    def start(self, token: int, directory: Path) -> Actor:
        self.cluster.start(token, str(directory))
        self.cluster.poll()
        return self.ray.actors[-1]

    def reply(self, actor: Actor, method: str, value: Any) -> None:
        self.cluster.poll()
        if isinstance(value, Exception):
            actor.replies[method].set_exception(value)
        else:
            actor.replies[method].set_result(value)
        self.cluster.poll()

    def notices(self) -> list[str]:
        return [value[1] for value in self.said if value[0] in ("notice", "refused", "lost")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "pods" / "p0r0"
    path.mkdir(parents=True)
    return path


def two_nodes() -> Ray:
    return Ray(node(FIRST, CPU=2.0), node(SECOND, CPU=3.0))


@pytest.mark.figure(13)
def test_a_node_that_differs_is_named_once_and_not_used_again(directory, monkeypatch) -> None:
    room = Room(two_nodes(), monkeypatch)
    first, second = room.start(1, directory), room.start(2, directory.with_name("p1r0"))
    assert room.said == [["ready"]]
    for actor in (first, second):
        room.reply(actor, "begin", (FIRST, "its jax is 1, the driver's is 2"))
        assert actor.is_dead
    assert room.notices() == [
        "node firstf (10.0.0.1, firstfir) is not used: its jax is 1, the driver's is 2."
    ]
    assert len(room.ray.actors) == 4
    assert {actor.excluded for actor in room.ray.actors[2:]} == {f"!in({FIRST})"}
    assert not [value for value in room.said if value[0] == "ended"], "it is no end of an attempt"
    room.reply(room.ray.actors[-1], "begin", (SECOND, ""))
    assert room.said[-1][0] == "begun"


@pytest.mark.figure(13)
@pytest.mark.parametrize("end", ["loss", "failure", "memory"])
def test_an_attempt_after_a_bad_end_gets_another_node(end, directory, monkeypatch) -> None:
    room = Room(two_nodes(), monkeypatch)
    actor = room.start(1, directory)
    room.reply(actor, "begin", (FIRST, ""))
    memory = Ray.exceptions.OutOfMemoryError("killed")
    outcomes = {
        "loss": (OSError("socket\nclosed"), 77),
        "failure": (70, 70),
        "memory": (memory, -9),
    }
    reply, code = outcomes[end]
    room.reply(actor, "run", reply)
    assert room.said[-1] == ["ended", 1, code]
    if end == "loss":
        log = (directory / "log.txt").read_text()
        assert log == "node firstf (10.0.0.1, firstfir) was lost: OSError: socket\n"
    again = room.start(2, directory)
    assert again.excluded == f"!in({FIRST})"
    room.ray.live = room.ray.live[:2]  # the other node leaves, and this one is better than none
    room.cluster.beat()
    room.cluster.poll()
    assert again.is_dead
    assert room.ray.actors[-1].excluded == ""


def test_what_no_node_can_hold_is_refused_with_their_sizes(monkeypatch) -> None:
    options = {"num_cpus": 2.0, "memory": 8 * 2**30, "resources": {"TPU": 4.0}}
    room = Room(Ray(node(FIRST, CPU=2.0, memory=2**34)), monkeypatch, options=options)
    room.cluster.beat()
    (text,) = room.notices()
    assert room.said[0][0] == "refused"
    assert "a pod takes 2 CPU, 8 GiB memory, 4 TPU" in text
    assert "firstfir) has 2 CPU, 16 GiB memory, 0 TPU" in text


def test_a_node_that_may_join_is_waited_for(directory, monkeypatch) -> None:
    room = Room(Ray(), monkeypatch, node_seconds=300.0)
    assert room.said[0] == ["ready"], "an autoscaler needs the demand of attempts"
    assert "wait for a node" in room.notices()[0]
    actor = room.start(1, directory)
    room.time = 299.0
    room.cluster.beat()
    assert not [value for value in room.said if value[0] == "lost"]
    room.ray.live.append(node(FIRST, CPU=1.0))
    room.cluster.beat()
    room.reply(actor, "begin", (FIRST, ""))
    room.time = 1e6
    room.cluster.beat()
    assert not [value for value in room.said if value[0] == "lost"]


def test_without_a_usable_node_the_engine_is_lost(directory, monkeypatch) -> None:
    room = Room(Ray(node(FIRST, CPU=1.0)), monkeypatch)
    room.reply(room.start(1, directory), "begin", (FIRST, "it does not have the directory"))
    room.cluster.beat()
    assert room.said[-1][0] == "lost"
    assert "is not used: it does not have the directory" in room.said[-1][1]


def test_what_waits_ends_at_once_when_it_is_told_to(directory, monkeypatch) -> None:
    room = Room(two_nodes(), monkeypatch)
    actor = room.start(1, directory)
    room.cluster.start(2, str(directory))
    room.cluster.stop(1)
    room.cluster.kill(2)
    assert actor.is_dead
    assert room.said[1:] == [["ended", 1, 75], ["ended", 2, -9]]
    running = room.start(3, directory)
    room.reply(running, "begin", (FIRST, ""))
    room.cluster.stop(3)
    assert running.asked == ["begin", "run", "stop"]


def test_a_node_looks_at_code_versions_and_directory(tmp_path, monkeypatch) -> None:
    ray = types.SimpleNamespace(get_runtime_context=two_nodes().get_runtime_context)
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    (tmp_path / NONCE).write_text("n")
    expected = code_and_versions(["podracer.recipes:find"])
    assert {"code of podracer", "jax", "code of podracer.recipes"} <= expected.keys()
    begin = Attempt().begin
    assert begin(str(tmp_path), "n", ["podracer.recipes:find"], expected) == (HEAD, "")
    _, reason = begin(str(tmp_path), "n", [], {**expected, "jax": "0.1"})
    assert reason.startswith("its jax is ")
    _, reason = begin(str(tmp_path), "n", ["no_such_module:mine"], {"code of no_such_module": "1"})
    assert "code of no_such_module" in reason
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    for root, nonce in ((tmp_path, "another"), (tmp_path / "nothing", "n")):
        _, reason = begin(str(root), nonce, [], {})
        assert reason == f"it does not have the tournament's directory {root}"


def test_resources_of_pods() -> None:
    assert parse_resources("TPU=4,memory=8GiB") == {"TPU": 4.0, "memory": 8.0 * 2**30}
    assert parse_resources("") == {}
    for text in ("TPU", "TPU=", "TPU=-1", "TPU=4GiB", "=4", "TPU=1,TPU=2", "memory=8GB"):
        with pytest.raises(ConfigError, match=r"such as TPU=4,memory=8GiB, not "):
            parse_resources(text)
    with pytest.raises(ConfigError, match=r"GPU has a setting of its own: `pod_gpus`"):
        parse_resources("GPU=1")
    with pytest.raises(ConfigError, match="must not be a fraction above 1"):
        ray_options(Tournament((recipes.find("catch_a2c"),), engine="ray", pod_gpus=1.5))
    experiments = (recipes.find("catch_a2c"),)
    chosen = Tournament(
        experiments, engine="ray", pod_gpus=0.25, pod_resources="TPU=4", pod_placement="spread"
    )
    chosen.check()
    assert ray_options(chosen) == {
        "num_cpus": 1.0, "num_gpus": 0.25, "resources": {"TPU": 4.0},
        "scheduling_strategy": "SPREAD",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="`pod_resources` is for Ray clusters"):
        Tournament(experiments, pod_resources="TPU=4").check()


def test_the_process_that_holds_ray_imports_no_jax():
    code = "import sys, podracer_cloud.ray_cluster; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
