"""Engines that run pods. One attempt at a round is one process, except in `InlineEngine`.

An engine takes no decisions: it starts and stops attempts on request and reports which have ended.
All other data is in the files of a round, so an engine transfers no objects.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from podracer.errors import ConfigError, PodracerError
from podracer.io.entry_points import installed, package_of

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer.tournament.config import Tournament

GPU_MEMORY = 0.9  # share of a GPU for all pods together: each also holds programs and libraries


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

    def poll(self) -> dict[int, int]:
        """Return exit codes, by token, of attempts that ended since the last call; never wait."""
        ...

    def stop(self, token: int) -> None:
        """Ask an attempt to save and end; `poll` reports it later."""

    def kill(self, token: int) -> None:
        """Kill an attempt at once; `poll` reports it later."""

    def close(self) -> None:
        """End all remaining attempts. May be called twice."""


MakeEngine = Callable[[Path, Sequence[str]], Engine]
"""Function of a tournament's directory and of the recipes that its processes import."""


def find_engine(tournament: Tournament) -> MakeEngine:
    """Return what makes the engine that a tournament names, perhaps a package's.

    Raises `ConfigError` where the package is not installed, or settings of the engine are invalid.
    """
    match tournament.engine:
        case "inline":
            return lambda directory, recipes: InlineEngine(tournament.experiments)
        case "local":
            return lambda directory, recipes: LocalEngine(recipes, gpu_share=1 / tournament.pods)
    entry = installed("engines").get(tournament.engine)
    if entry is None:
        raise ConfigError(package_of(tournament.engine))
    return entry.load()(tournament)


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
        from podracer.tournament.pod import run  # slow to import

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
    """Open a file to append to; a link or a pipe in its place is removed, not followed."""
    if path.is_symlink() or path.is_fifo():
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
        self._lost: dict[int, int] = {}  # codes of attempts that could not be started

    def start(self, token: int, directory: Path) -> None:
        command = [sys.executable, "-m", "podracer.tournament.process", directory, *self._recipes]
        with open_log(directory / "log.txt") as log:
            # Each in a session of its own: Ctrl-C in a terminal is for the orchestrator alone.
            # Recipes may lie beside a script, where only this process would look for them.
            try:
                self._processes[token] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**self.variables, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            except OSError as error:  # the machine has no room for one more
                log.write(f"no process can be started: {error.strerror}.\n".encode())
                self._lost[token] = EngineLost.exit_code

    def poll(self) -> dict[int, int]:
        processes, codes, self._lost = self._processes.items(), self._lost, {}
        ended = {token: code for token, x in processes if (code := x.poll()) is not None}
        for token in ended:
            self._processes.pop(token).communicate()  # closes the pipe
        return {**codes, **ended}

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
    return {
        "XLA_CLIENT_MEM_FRACTION": f"{GPU_MEMORY * gpu_share:.4f}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
