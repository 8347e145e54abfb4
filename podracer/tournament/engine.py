"""Engines: where the processes of pods run. One attempt at a round is one process.

An engine decides nothing: it starts what it is told to, says what has ended, and stops what it is
told to. Everything else goes through the files of a round, so an engine carries no objects.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from podracer.types import ConfigError


class Engine(Protocol):
    """Runs `python -m podracer.tournament.pod DIRECTORY`, each known by its attempt's token."""

    def start(self, token: int, directory: Path) -> None:
        """Begin a process; its output goes to `log.txt` in the directory."""
        ...

    def ended(self) -> dict[int, int]:
        """Exit codes of what has ended since the last call, by token; never waits."""
        ...

    def stop(self, token: int) -> None:
        """Ask a process to save and end; it is `ended` later."""
        ...

    def kill(self, token: int) -> None:
        """End a process at once; it is `ended` later."""
        ...

    def close(self) -> None:
        """End everything that is left. May be called twice."""
        ...


COMMAND = (sys.executable, "-m", "podracer.tournament.pod")


class LocalEngine:
    """Processes on this machine. They end, saved, when this one does, however that ends."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, token: int, directory: Path) -> None:
        with (directory / "log.txt").open("ab") as log:
            # Each in a session of its own: Ctrl-C in a terminal is for the orchestrator alone.
            self._processes[token] = subprocess.Popen(
                [*COMMAND, str(directory)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> dict[int, int]:
        codes = {token: process.poll() for token, process in self._processes.items()}
        over = {token: code for token, code in codes.items() if code is not None}
        for token in over:
            self._close(self._processes.pop(token))
        return over

    def stop(self, token: int) -> None:
        if token in self._processes:
            self._processes[token].terminate()

    def kill(self, token: int) -> None:
        if token in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[token].pid, signal.SIGKILL)

    def close(self) -> None:
        for token in self._processes:
            self.kill(token)
        for process in self._processes.values():
            process.wait()
            self._close(process)
        self._processes.clear()

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()


class RayEngine:
    """The same processes as tasks of a Ray cluster, on whichever machine has room.

    All machines must share the tournament's directory. `resources` are what one pod needs, such as
    `{"num_gpus": 1}`. Ray retries nothing: one place decides, and that is the orchestrator.
    Raises `ConfigError` where Ray is not installed.
    """

    def __init__(self, resources: dict[str, Any] | None = None) -> None:
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise ConfigError(
                'the engine ray needs the package ray: pip install "podracer[tournament]"'
            ) from None
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            # Within this machine only, unless RAY_ADDRESS names a cluster; no dashboard listens.
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(_Attempt)
        self._resources = {"num_cpus": 1, **(resources or {})}
        self._running: dict[int, tuple[Any, Any]] = {}  # token to actor and what it will return

    def start(self, token: int, directory: Path) -> None:
        actor = self._actor.options(max_concurrency=2, **self._resources).remote()
        self._running[token] = (actor, actor.run.remote(str(directory)))

    def ended(self) -> dict[int, int]:
        waited = {result: token for token, (_, result) in self._running.items()}
        if not waited:
            return {}
        over, _ = self._ray.wait(list(waited), num_returns=len(waited), timeout=0)
        return {waited[result]: self._code(waited[result], result) for result in over}

    def _code(self, token: int, result: Any) -> int:
        self._running.pop(token)
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayError:
            return -signal.SIGKILL  # the machine or Ray's worker is gone

    def stop(self, token: int) -> None:
        if token in self._running:
            self._running[token][0].stop.remote()

    def kill(self, token: int) -> None:
        if token in self._running:
            self._ray.kill(self._running[token][0])

    def close(self) -> None:
        for token in list(self._running):
            self.kill(token)
        self._running.clear()
        if self._own:
            self._ray.shutdown()


class _Attempt:
    """One process on a machine of the cluster, held by an actor: when that goes, it goes."""

    def __init__(self) -> None:
        self._engine = LocalEngine()

    def run(self, directory: str) -> int:
        self._engine.start(0, Path(directory))
        while not (over := self._engine.ended()):
            time.sleep(0.1)
        return over[0]

    def stop(self) -> None:
        self._engine.stop(0)
