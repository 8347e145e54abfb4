"""One batch of a simulator that exists once: training steps it, evaluations borrow it.

A loan lasts from its `reset` to its `close`, while the batch has no other user: training holds
its turn for each rollout. The state of training is set aside before a loan and restored after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from podracer.environment import (
    DescribesFaults,
    ExistsOnce,
    HostEnvironment,
    HostEnvironments,
    ReportsFaults,
    Resumable,
)
from podracer.envs.host.dlpack import lives_on_device
from podracer.types import EnvironmentSpec, EnvState, TimeStep

# Advice where a factory that declares nothing fails to make a batch beside another one.
IF_ONE = ". If only one simulator can be open, its factory has `shared = True`."
WAKE_SECONDS = 0.2  # a loan that waits for its turn looks this often whether training failed


def exists_once(env: HostEnvironments) -> bool:
    """Return whether a factory may have one open batch only."""
    return isinstance(env, ExistsOnce) and env.shared


class OneBatch:
    """Factory whose first batch is the simulator's, and later ones are loans of it."""

    def __init__(self, env: HostEnvironments, num_envs: int) -> None:
        self.num_envs, self.on_device = num_envs, lives_on_device(env)
        self.check: Callable[[], None] = lambda: None
        """Raises the fault of training, if it has one; a loan calls it while it waits."""
        self._env = env
        self._owner: SharedBatch | None = None

    @property
    def spec(self) -> EnvironmentSpec:
        return self._env.spec

    @property
    def can_be_lent(self) -> bool:
        """Whether an evaluation can have a batch: none is open, or its state can be set aside."""
        owner = self._owner
        return owner is None or owner.is_closed or isinstance(owner, Resumable)

    def make(self, num_envs: int, num_threads: int) -> HostEnvironment:
        """Return the simulator's batch if it is not open, else a loan of it."""
        assert num_envs == self.num_envs
        if self._owner is None or self._owner.is_closed:
            self._owner = SharedBatch(self._env.make(num_envs, num_threads))
            return self._owner
        return _Loan(self._owner, self.check)


class SharedBatch:
    """The batch of a simulator; whoever steps it has the turn, training as a context.

    What fails or is closed keeps the turn for good, so that nobody plays in it any more.
    """

    def __init__(self, batch: HostEnvironment) -> None:
        self.turn, self.is_over, self.is_closed = threading.Lock(), False, False
        self.batch = batch
        self._seeds, self._steps = (0, np.zeros(0, np.uint32), 0), 0
        # Optional features of the batch, set on the instance, where `isinstance` looks.
        if isinstance(batch, Resumable):
            self.snapshot, self.restore = batch.snapshot, self._restore
        if isinstance(batch, ReportsFaults):
            self.faults = batch.faults
        if isinstance(batch, DescribesFaults):
            self.first_faults = batch.first_faults

    def __enter__(self) -> None:
        self.turn.acquire()

    def __exit__(self, kind: object, *_: object) -> None:
        self.is_over = kind is not None
        if not self.is_over:
            self.turn.release()

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        self._seeds, self._steps = (seed, indices, start), 0
        return self.batch.reset(seed, indices, start)

    def step(self, action: np.ndarray) -> TimeStep:
        self._steps += 1
        return self.batch.step(action)

    def close(self) -> None:
        if not self.is_over:
            self.turn.acquire()
        self.is_over = self.is_closed = True
        self.batch.close()

    def _restore(self, seed: int, indices: np.ndarray, start: int, state: EnvState) -> None:
        assert isinstance(self.batch, Resumable)
        self._seeds, self._steps = (seed, indices, start), 0
        self.batch.restore(seed, indices, start, state)

    def give_back(self, state: EnvState) -> None:
        """Continue with training's snapshot `state` after a loan."""
        seed, indices, start = self._seeds
        self._restore(seed, indices, start + self._steps, state)


class _Loan:
    """A batch for one evaluation, in the rows of another one."""

    def __init__(self, owner: SharedBatch, check: Callable[[], None]) -> None:
        self._owner, self._check, self._state = owner, check, None

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        while not self._owner.turn.acquire(timeout=WAKE_SECONDS):
            self._check()
        try:
            self._state = (self._owner.snapshot(),)
        except BaseException:
            self._owner.turn.release()
            raise
        return self._owner.batch.reset(seed, indices, start)

    def step(self, action: np.ndarray) -> TimeStep:
        return self._owner.batch.step(action)

    def close(self) -> None:
        if self._state is not None:
            (state,), self._state = self._state, None
            try:
                self._owner.give_back(state)
            finally:
                self._owner.turn.release()
