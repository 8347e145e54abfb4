"""Process that holds the connection to Ray for `RayEngine`; each attempt at a round is a Ray actor.

    stdin   ["start", 7, "DIRECTORY"], ["stop", 7], ["kill", 7]    one a line
    stdout  [7, 0], a token and its exit code; [] every second, while the cluster answers

Without RAY_ADDRESS it starts a cluster of this machine alone, for as long as it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer.io.processes import request_signal_at_parent_death
from podracer.tournament.engine import Lines, LocalEngine, open_log

SAVE_SECONDS = 60.0  # for pods whose orchestrator is gone


class Attempt:
    """Ray actor that owns the process of one attempt, which saves and ends when the actor does."""

    def __init__(self, directory: str, recipes: Sequence[str], gpus: float) -> None:
        self._engine = LocalEngine(recipes, gpu_share=gpus if 0.0 < gpus < 1.0 else 1.0)
        self._engine.start(0, Path(directory))

    def wait(self) -> int:
        """Return the exit code of the process."""
        while not (codes := self._engine.poll()):
            time.sleep(0.1)
        return codes[0]

    def stop(self) -> None:
        """Ask the process to save and end."""
        self._engine.stop(0)

    def kill(self) -> None:
        """Kill the process at once."""
        self._engine.kill(0)


class RayAttempt(NamedTuple):
    """A running attempt and its Ray futures."""

    actor: Any
    ready: Any  # ready once a machine had room
    code: Any  # ready at its end
    directory: Path


class Cluster:
    """Attempts by token on a connected Ray cluster."""

    def __init__(self, ray: Any, cpus: float, gpus: float, recipes: Sequence[str]) -> None:
        self._recipes, self._gpus = recipes, gpus
        self._ray, self._node = ray, ray.get_runtime_context().get_node_id()
        # One call waits, others stop and kill.
        self._actor = ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0, max_concurrency=4
        )(Attempt)
        self._running: dict[int, RayAttempt] = {}

    def start(self, token: int, directory: str) -> None:
        """Start an attempt as soon as a machine has room for it."""
        actor = self._actor.remote(directory, self._recipes, self._gpus)
        ready, code = actor.__ray_ready__.remote(), actor.wait.remote()
        self._running[token] = RayAttempt(actor, ready, code, Path(directory))

    def stop(self, token: int) -> None:
        """Ask an attempt to save and end."""
        self._call(token, "stop")

    def kill(self, token: int) -> None:
        """Kill an attempt at once."""
        self._call(token, "kill")

    def _call(self, token: int, method: str) -> None:
        attempt = self._running.get(token)
        if attempt is None:
            return
        if self._is_ready(attempt.ready):
            getattr(attempt.actor, method).remote()
        else:
            self._ray.kill(attempt.actor)

    def poll(self) -> dict[int, int]:
        """Return the exit codes, by token, of attempts that have ended since the last call."""
        finished = [
            token for token, attempt in self._running.items() if self._is_ready(attempt.code)
        ]
        return {token: self._code(self._running.pop(token)) for token in finished}

    def _code(self, attempt: RayAttempt) -> int:
        try:
            return self._ray.get(attempt.code)
        except self._ray.exceptions.RayError as error:  # the machine or Ray's worker is lost
            with contextlib.suppress(OSError), open_log(attempt.directory / "log.txt") as log:
                log.write(f"{str(error).strip().splitlines()[-1]}\n".encode())
            return 70

    def beat(self) -> None:
        """Check that the cluster answers, and let no attempt stall that waits for room."""
        if not any(node["Alive"] and node["NodeID"] == self._node for node in self._ray.nodes()):
            print("Ray has lost this machine", file=sys.stderr, flush=True)
            os._exit(1)  # Ray's regular exit might never end
        for attempt in self._running.values():
            if not self._is_ready(attempt.ready):
                (attempt.directory / "log.txt").touch()  # no machine yet, so it does not stall

    def leave(self) -> None:
        """Ask all running attempts to save and end, and wait for them up to a limit."""
        deadline = time.monotonic() + SAVE_SECONDS
        for token in self._running:
            self.stop(token)
        while self._running and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.05)
        self._ray.shutdown()

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])


def connect() -> Any:
    """Return the module `ray`, connected to RAY_ADDRESS or to a new cluster closed to others."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        # Ray listens on all interfaces unless this machine is not part of a cluster; other
        # users of this machine do not know the token.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    ray = importlib.import_module("ray")
    ray.init(address or "local", include_dashboard=False, log_to_driver=False)
    return ray


def _say(descriptor: int, value: list[int]) -> None:
    with contextlib.suppress(BrokenPipeError):  # then the commands end as well
        os.write(descriptor, json.dumps(value).encode() + b"\n")


def main(cpus: str, gpus: str, *recipes: str) -> None:
    """Execute commands from standard input until it ends."""
    request_signal_at_parent_death(signal.SIGCONT)
    stdout = os.dup(1)
    os.dup2(2, 1)  # Ray's output goes to the log
    cluster, commands = Cluster(connect(), float(cpus), float(gpus), recipes), Lines(0)
    last_beat = -math.inf
    while (lines := commands.read()) is not None:
        for verb, *arguments in lines:
            {"start": cluster.start, "stop": cluster.stop, "kill": cluster.kill}[verb](*arguments)
        for token, code in cluster.poll().items():
            _say(stdout, [token, code])
        if time.monotonic() - last_beat > 1.0:
            cluster.beat()  # hangs, as any call of Ray may, when the cluster is gone
            _say(stdout, [])
            last_beat = time.monotonic()
        time.sleep(0.05)
    cluster.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
