"""Gymnasium environments in the process of the run: other processes may not find their class."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from podracer.envs.host.gymnasium_faults import FaultLog, timestep_of
from podracer.envs.host.gymnasium_protocol import (
    OK,
    WorkerSetup,
    anonymous_file,
    map_shared_memory,
)
from podracer.envs.host.gymnasium_worker import Worker
from podracer.errors import EnvironmentFault
from podracer.types import TimeStep

if TYPE_CHECKING:
    from gymnasium import Env


class LocalBatch:
    """A batch of environments that the calling thread steps, as a `HostEnvironment`.

    An environment that raises or returns bad data loses its episode, as in a process of its own.
    One that hangs is only noticed by the driver, and one that crashes ends the process. The rest is
    as in `GymnasiumBatch`.
    """

    def __init__(
        self, name: str, setup: WorkerSetup, make: Callable[[], Env], max_restarts: int
    ) -> None:
        self.name = name
        memory = anonymous_file()
        try:
            self._shared = map_shared_memory(memory, setup)
        finally:
            os.close(memory)
        self._worker = Worker(0, setup, make, self._shared)
        self._log = FaultLog(name, setup, self._shared, max_restarts)
        self.faults, self.first_faults = self._log.faults, self._log.first_faults
        self._timestep = timestep_of(setup, self._shared)
        self._closed = self._is_reset = False

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Start again, in new environments. Raises `EnvironmentFault`, also after `close`."""
        self._check_open()
        self._shared.begin(seed, indices, start)
        with np.errstate(over="ignore"):  # a fault, as infinity is, and no warning
            for row in range(len(indices)):
                self._worker.remake(row)
        self._is_reset = True
        return self._checked()

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every row. Raises `EnvironmentFault` where too many restarts were needed."""
        self._check_open()
        if not self._is_reset:
            self._fail("`reset` must come before `step`.")
        np.copyto(self._shared.action, action, casting="same_kind")
        with np.errstate(over="ignore"):
            self._worker.step()
        self._log.count_step()
        return self._checked()

    def close(self) -> None:
        """Close all environments and free the memory."""
        if not self._closed:
            self._closed = True
            for row in list(self._worker.envs):
                self._worker.close_env(row)
            del self._shared, self._timestep, self._log, self._worker

    def _checked(self) -> TimeStep:
        """Return the timestep. Raises `EnvironmentFault` where there are too many faults."""
        if self._worker.reply != OK and (reason := self._log.check()):
            self._fail(reason)
        self._worker.reply = OK
        return self._timestep

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFault(f"{self.name}: the environments are closed.")

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFault(f"{self.name}: {reason}")
