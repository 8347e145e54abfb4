"""One Gymnasium environment in this process, watched for what agents bear but should know."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from podracer.checks.errors import describe_error
from podracer.envs.host import gymnasium_spec
from podracer.envs.host.gymnasium import Gymnasium, timestep_of
from podracer.envs.host.gymnasium_worker import Fault, Leaf, Worker, map_shared_memory
from podracer.errors import ConfigError
from podracer.ops.action_masks import action_mask
from podracer.types import ACTION_MASK, TimeStep

MASK_NAMES = {ACTION_MASK, "action_masks"}  # keys of `info`
LOST_SHARE = 0.1  # share of the changes of a number that float32 may lose


class Watched:
    """A factory of one environment, as `HostEnvironments`, and the batch of it that is open.

    A fault is no reason to restart here: `reset` and `step` raise it as a `ConfigError`.
    """

    def __init__(self, environment: Gymnasium) -> None:
        self.spec, setup = dataclasses.replace(environment, workers=0).inspect()
        setup = dataclasses.replace(setup, row_ranges=((0, 1),))
        shared = map_shared_memory(-1, setup)
        self._worker = Worker(0, setup, setup.factory, shared)
        self._timestep = timestep_of(setup, shared)
        self._seconds: dict[str, list[float]] = {"reset": [], "step": []}
        self._numbers: dict[str, _Numbers] = {}
        self._reward_kinds, self._masks = set[str](), set[str]()  # masks that agents do not see
        self._statistics, self._draws_globally = list[str](), False

    def make(self, num_envs: int, num_threads: int) -> Watched:
        """Return the batch, for one environment."""
        self._generators = _global_generators()
        return self

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Make the environment and reset it with the seed."""
        env = self._worker.envs[0] = self._worker.make()
        self._statistics = list(gymnasium_spec.running_statistics(env))
        if any(hasattr(layer, "action_masks") for layer in gymnasium_spec.layers(env)):
            self._masks.add("action_masks()")
        return self._call("reset(seed=seed)", env.reset, self._worker.write_reset, seed=seed)

    def step(self, action: np.ndarray) -> TimeStep:
        """Step the environment, or after an episode's end reset it."""
        worker, env = self._worker, self._worker.envs[0]
        if worker.episode_ended[0]:
            return self._call("reset", env.reset, worker.write_reset)
        worker.shared.action[:] = action
        return self._call("step", env.step, worker.write_step, *worker.read_actions())

    def close(self) -> None:
        """Close the environment."""
        self._draws_globally |= _global_generators() != self._generators
        self._worker.close_env(0)

    def _call(
        self, name: str, function: Callable, write: Callable, *args: Any, **settings: Any
    ) -> TimeStep:
        """Call the environment, and look at what it returns and at what agents get of it."""
        worker, start = self._worker, time.perf_counter()
        try:
            result = function(*args, **settings)
            self._seconds[name.partition("(")[0]].append(time.perf_counter() - start)
            with np.errstate(over="ignore"):  # a fault, as infinity is, and no warning
                write(0, result)
            for fault in worker.find_faults(0, 1):
                raise fault
        except Fault as fault:
            raise ConfigError(f"`{name}` returned bad data ({fault.kind}): {fault}.") from fault
        except Exception as error:
            raise ConfigError(f"`{name}` raised {describe_error(error)}") from error
        if name == "step":
            self._reward_kinds.add(type(result[1]).__name__)
        if isinstance(result[-1], Mapping):
            self._masks |= {f'info["{key}"]' for key in MASK_NAMES & result[-1].keys()}
        self._note(worker.setup.observation, worker.envs[0].observation_space, result[0])
        return self._timestep

    def _note(self, tree: Any, space: Any, value: Any) -> None:
        if isinstance(tree, Leaf):
            numbers = self._numbers.setdefault(tree.name, _Numbers(tree, space))
            numbers.add(np.asarray(value))
            return
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            self._note(tree[key], space[key], value[key])

    def warnings(self) -> Iterator[str]:
        """Yield what an agent would bear, but should know."""
        for numbers in self._numbers.values():
            yield from numbers.warnings()
        yield from self._statistics
        if self._masks and action_mask(self.spec.observation) is None:
            yield (
                f"{', '.join(sorted(self._masks))} says which actions are possible, and agents do "
                f"not see it: a wrapper can put it into the observation, as {ACTION_MASK!r} of a "
                "dictionary."
            )
        if self._draws_globally:
            yield (
                "random numbers are drawn from the generators of `random` or NumPy that the whole "
                "process shares: they follow the run's seed only in processes of their own, not "
                "with workers=0. Draw from self.np_random."
            )
        if strange := self._reward_kinds - {"float", "float32", "float64", "int"}:
            yield f"rewards are of type {', '.join(sorted(strange))}: return a float."

    def figures(self) -> dict[str, float]:
        """Return what the environment's own methods take."""
        return {
            "steps a second of one environment": 1 / float(np.mean(self._seconds["step"])),
            "milliseconds of a reset": 1e3 * float(np.mean(self._seconds["reset"])),
        }


def _global_generators() -> tuple[Any, ...]:
    """Return the states of the generators that all code of a process shares."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


class _Numbers:
    """Extremes and changes of one array of the observations, as the environment returns it."""

    def __init__(self, leaf: Leaf, space: Any) -> None:
        self.leaf, self.space = leaf, space
        self.least, self.most, self.dtypes = np.inf, -np.inf, set[str]()
        self.is_outside = False
        self.previous: np.ndarray | None = None
        self.changes = self.lost = np.zeros(leaf.shape, np.int64)

    def add(self, value: np.ndarray) -> None:
        self.dtypes.add(str(value.dtype))
        if value.size and value.dtype.kind in "fiu":
            self.least, self.most = min(self.least, value.min()), max(self.most, value.max())
        # The worker checks the bounds of other arrays.
        if self.leaf.source.kind == "f" and value.dtype.kind in "fiu":
            self.is_outside |= bool(((value < self.space.low) | (value > self.space.high)).any())
        if self.previous is not None and value.dtype.itemsize == 8:
            changed = value != self.previous
            narrow = value.astype(self.leaf.dtype) == self.previous.astype(self.leaf.dtype)
            self.changes, self.lost = self.changes + changed, self.lost + (changed & narrow)
        self.previous = value.copy()

    def warnings(self) -> Iterator[str]:
        leaf = self.leaf
        if self.is_outside:
            low, high = np.min(self.space.low), np.max(self.space.high)
            yield (
                f"{leaf.name} reaches from {self.least:g} to {self.most:g}, outside of the bounds "
                f"that its space declares, {low:g} to {high:g}."
            )
        if undeclared := self.dtypes - {str(leaf.source)}:
            dtypes = ", ".join(sorted(undeclared))
            yield f"{leaf.name} is {dtypes}, but its space says {leaf.source}."
        if (self.lost > LOST_SHARE * self.changes).any():
            yield (
                f"{leaf.name} is {leaf.source} and arrives as {leaf.dtype}, which loses "
                f"{self.lost.sum():,} of {self.changes.sum():,} changes from step to step: "
                "subtract an offset or scale it."
            )
