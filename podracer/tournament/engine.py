"""Engines that run pods. One attempt at a round is one process, except in `InlineEngine`.

An engine takes no decisions: it starts and stops attempts on request and reports which have ended.
All other data is in the files of a round, so an engine transfers no objects.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Protocol

from podracer.errors import ConfigError, PodracerError
from podracer.io.run_directory import write_bytes
from podracer.tournament.report import last_line

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer.tournament.config import Tournament


_LOG = logging.getLogger("podracer")


class EngineLost(PodracerError):
    """The engine's cluster or helper process is gone; the tournament can be resumed."""

    exit_code = 77


class RoundStopped(Exception):
    """A round in this process was stopped by a signal and has saved, with this exit code."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Engine(Protocol):
    """Runner of `podracer.tournament.process`, each attempt at a round known by its token.

    Any method except `close` may raise `EngineLost`.
    """

    @property
    def is_ready(self) -> bool:
        """Whether attempts may be started."""
        ...

    @property
    def waiting(self) -> Set[int]:
        """Tokens of attempts that wait for a machine, so that nothing has begun."""
        ...

    def start(self, token: int, directory: Path) -> None:
        """Start an attempt; its output goes to `log.txt` in the directory."""
        ...

    def poll(self) -> dict[int, int]:
        """Return exit codes, by token, of attempts that ended since the last call; never wait."""
        ...

    def stop(self, token: int) -> None:
        """Ask an attempt to save and end; `poll` reports it later."""
        ...

    def kill(self, token: int) -> None:
        """Kill an attempt at once; `poll` reports it later."""
        ...

    def close(self) -> None:
        """End all remaining attempts. May be called twice."""
        ...


def make_engine(tournament: Tournament, directory: Path, recipes: Sequence[str]) -> Engine:
    """Return the engine that a tournament names; see `LocalEngine` for `recipes`."""
    match tournament.engine:
        case "inline":
            return InlineEngine(tournament.experiments)
        case "local":
            return LocalEngine(recipes, gpu_share=1 / tournament.pods)
        case "ray":
            options = tournament.ray_options()
            return RayEngine(directory, options, recipes, tournament.node_seconds)


class InlineEngine:
    """Engine that runs each round in this process when it is started, and raises its errors.

    Pods end in the order of their starts, so the same tournament gives the same entries: for
    experiments with tournaments, and for `user_experiments` that no other process can import, see
    `config.restore_experiment`. Nothing runs between two calls, so there is nothing to stop. Raises
    `RoundStopped` for a round that was stopped in its training, or what `train` raises then; one
    that is scored or plays ends first.
    """

    is_ready, waiting = True, frozenset[int]()

    def __init__(self, user_experiments: Sequence[Experiment] = ()) -> None:
        self._user_experiments = user_experiments
        self._finished: list[int] = []

    def start(self, token: int, directory: Path) -> None:
        from podracer.tournament.pod import run  # slow to import, and not needed by `cluster.py`

        if code := run(directory, self._user_experiments):
            raise RoundStopped(code)
        self._finished.append(token)

    def poll(self) -> dict[int, int]:
        finished, self._finished = self._finished, []
        return dict.fromkeys(finished, 0)

    def stop(self, token: int) -> None: ...
    def kill(self, token: int) -> None: ...
    def close(self) -> None: ...


def open_log(path: Path) -> IO[bytes]:
    """Open a file to append to; a link in its place is removed, not followed."""
    if path.is_symlink():
        path.unlink()
    return open(path, "ab", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o644))


class LocalEngine:
    """Engine of local processes, which save and end when this process ends, however it ends.

    They import the `recipes` of the user's own, which are named `MODULE:FUNCTION`. Each may take
    the share `gpu_share` of a GPU's memory, above 0 and at most 1.
    """

    is_ready, waiting = True, frozenset[int]()

    def __init__(self, recipes: Sequence[str] = (), gpu_share: float = 1.0) -> None:
        self._recipes = recipes
        self.variables = _memory_variables(gpu_share)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, token: int, directory: Path) -> None:
        with open_log(directory / "log.txt") as log:
            # Each in a session of its own: Ctrl-C in a terminal is for the orchestrator alone.
            # Recipes may lie beside a script, where only this process would look for them.
            self._processes[token] = subprocess.Popen(
                [sys.executable, "-m", "podracer.tournament.process", directory, *self._recipes],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.variables, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def poll(self) -> dict[int, int]:
        codes = {token: process.poll() for token, process in self._processes.items()}
        finished = {token: code for token, code in codes.items() if code is not None}
        for token in finished:
            self._processes.pop(token).communicate()  # closes the pipe
        return finished

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
            process.communicate()
        self._processes.clear()


def _memory_variables(gpu_share: float) -> dict[str, str]:
    """Return the variables with which JAX takes a share of each GPU's memory.

    By itself it takes three quarters at its start, and the second process on a GPU finds too
    little. Each takes what it needs, up to its share, so more pods than planned may still fit. What
    the user has set is left as it is; on a CPU the variables have no effect.
    """
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if gpu_share >= 1.0 or any(name in os.environ for name in names):
        return {}
    preallocate = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return {
        "XLA_CLIENT_MEM_FRACTION": f"{GPU_MEMORY * gpu_share:.4f}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": preallocate,
    }


GPU_MEMORY = 0.9  # share of a GPU for all pods together: each also holds programs and libraries
SILENCE_SECONDS = 15.0  # after which Ray counts as lost; it reports every second
START_SECONDS = 60.0  # for the first time
NONCE = ".nonce"  # file by which a machine sees that it has this tournament's directory
CLOSE_SECONDS = 5.0  # to disconnect from Ray


class RayEngine:
    """Engine that runs each attempt in a Ray actor, on any machine that shares the directory.

    `options` are Ray's for an actor: what each attempt reserves and how it is placed. `recipes` are
    those of `LocalEngine`, which all machines must be able to import. If no machine can hold an
    attempt, it is refused, unless `node_seconds` allows time for one to join. Ray retries nothing:
    only the orchestrator decides. Ray itself is held by a separate process,
    `podracer.tournament.cluster`, because Ray ends the process that holds it when the cluster is
    lost.
    """

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, Any] = MappingProxyType({"num_cpus": 1.0}),
        recipes: Sequence[str] = (),
        node_seconds: float = 0.0,
    ) -> None:
        self._directory, self._log = directory, directory / "ray.txt"
        self._recipes, self._nodeless = recipes, ""
        nonce = secrets.token_hex(16)
        write_bytes(directory / NONCE, nonce.encode())
        settings = {
            "options": dict(options),
            "recipes": list(recipes),
            "node_seconds": node_seconds,
            "nonce": nonce,
        }
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "podracer.tournament.cluster", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, Lines(self._process.stdout.fileno())
        self._deadline = time.monotonic() + START_SECONDS
        self._running, self.waiting, self.is_ready = set[int](), set[int](), False

    def start(self, token: int, directory: Path) -> None:
        self._running.add(token)
        self.waiting.add(token)
        self._tell("start", token, str(directory.absolute()))

    def poll(self) -> dict[int, int]:
        replies = self._replies.read()
        if replies is None:
            raise self._lost(last_line(self._log) or "it has ended")
        if replies:
            self._deadline = time.monotonic() + SILENCE_SECONDS
        if time.monotonic() > self._deadline:
            raise self._lost("Ray does not answer")
        finished: dict[int, int] = {}
        for reply in replies:
            match reply:
                case ["ready"]:
                    self.is_ready = True
                case ["begun", token]:
                    self.waiting.discard(token)
                case ["ended", token, code]:
                    finished[token] = code
                case ["notice", text]:
                    _LOG.warning("%s", text)
                case ["refused", text]:
                    raise ConfigError(text)
                case ["lost", text]:
                    raise self._lost(text)
        self._running -= finished.keys()
        self.waiting -= finished.keys()
        return finished

    def stop(self, token: int) -> None:
        self._tell("stop", token)

    def kill(self, token: int) -> None:
        self._tell("kill", token)

    def close(self) -> None:
        with contextlib.suppress(EngineLost):
            for token in self._running:
                self.kill(token)
        self._running.clear()
        self._commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also ends processes of Ray
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _tell(self, *command: str | int) -> None:
        try:
            self._commands.write(json.dumps(command).encode() + b"\n")
        except (BrokenPipeError, ValueError):
            raise self._lost(last_line(self._log) or "it has ended") from None

    def _lost(self, reason: str) -> EngineLost:
        flag = f" --recipe {','.join(self._recipes)}" if self._recipes else ""
        return EngineLost(
            f"the engine is lost ({reason}); continue with podracer resume {self._directory}{flag}"
        )


class Lines:
    """Reader of JSON values, one a line, from a pipe."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._partial_line = pipe, b""

    def read(self) -> list[Any] | None:
        """Return the values since the last call, or None at the end of the pipe; never wait."""
        try:
            read = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        return [json.loads(line) for line in lines] if read else None
