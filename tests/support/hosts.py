"""Host environments for tests: counting, timed, and made to fail where a test says."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np

from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep

SPEC = EnvironmentSpec("counter", ArraySpec((3,)), Discrete(2))


@dataclasses.dataclass(frozen=True)
class Counters:
    """Environment i's episodes last 3 + i % 4 steps; observations say index, episode and step.

    Every third episode ends by a time-out, the others by a terminal. `trouble(batch, steps)` is
    called before each step and may raise, hang or change the timestep that it gets. `at(place,
    batch)` is called in "make", "reset", "step" and "close" and may raise or hang.
    """

    trouble: object = None
    at: object = None
    spec: EnvironmentSpec = SPEC

    def make(self, num_envs, num_threads):
        if self.at:
            self.at("make", None)
        return CounterBatch(num_envs, self.trouble, self.at)


class CounterBatch:
    open = 0  # batches that were not closed
    lock = threading.Lock()

    def __init__(self, num_envs, trouble, at=None):
        self.num_envs, self.trouble, self.steps = num_envs, trouble, 0
        self.visit = at or (lambda place, batch: None)
        self.seeds = None
        self.closed = False
        with CounterBatch.lock:
            CounterBatch.open += 1

    def reset(self, seed, indices, start):
        self.visit("reset", self)
        self.seeds = (seed, tuple(int(i) for i in indices), start)
        self.indices = np.asarray(indices, np.int64)
        self.episode = np.zeros(self.num_envs, np.int64)
        self.at = np.zeros(self.num_envs, np.int64)
        self.ended = np.zeros(self.num_envs, bool)
        return self._show(np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool))

    def step(self, action):
        self.visit("step", self)
        assert action.shape == (self.num_envs,), action.shape
        assert action.dtype == np.int32, action.dtype
        first = self.ended
        self.episode = self.episode + first
        self.at = np.where(first, 0, self.at + 1)
        self.ended = ~first & (self.at >= 3 + self.indices % 4)
        self.steps += 1
        timestep = self._show(first, self.ended)
        return self.trouble(self, timestep) if self.trouble else timestep

    def _show(self, first, last):
        observation = np.stack([self.indices, self.episode, self.at], axis=1).astype(np.float32)
        terminal = last & (self.episode % 3 != 2)
        return TimeStep(
            observation=observation,
            reward=np.where(first, 0, 1).astype(np.float32),
            discount=1 - terminal.astype(np.float32),
            first=first.copy(),
            last=last.copy(),
        )

    def snapshot(self):
        raise AssertionError("checkpoints hold states of environments in JAX alone")

    def close(self):
        if not self.closed:
            self.closed = True
            with CounterBatch.lock:
                CounterBatch.open -= 1
            self.visit("close", self)


def slow(seconds):
    """Trouble: every step takes this long."""

    def trouble(batch, timestep):
        time.sleep(seconds)
        return timestep

    return trouble
