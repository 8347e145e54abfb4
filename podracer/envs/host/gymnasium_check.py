"""One Gymnasium environment in this process, under Gymnasium's own checks, for `podracer check`."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from podracer.checks.errors import describe_error
from podracer.envs.host import gymnasium_spec
from podracer.envs.host.gymnasium import Gymnasium, timestep_of
from podracer.envs.host.gymnasium_worker import Fault, Worker, map_shared_memory, parts_by_leaf
from podracer.errors import ConfigError
from podracer.types import ACTION_MASK, TimeStep, action_mask

MASK_NAMES = {ACTION_MASK, "action_masks"}  # keys of `info`
LOST_SHARE = 0.1  # share of the changes of an observation that float32 may lose
_STYLE = re.compile(r"\x1b\[[0-9;]*m|WARN: ")  # in texts of Gymnasium


class Watched:
    """A factory of one environment, as `HostEnvironments`, and the batch of it that is open.

    A fault is no reason to restart here: `reset` and `step` raise it as a `ConfigError`. Gymnasium
    looks at the first reset and step of each batch.
    """

    def __init__(self, environment: Gymnasium) -> None:
        self.spec, setup = dataclasses.replace(environment, workers=0).inspect()
        setup = dataclasses.replace(setup, row_ranges=((0, 1),))
        shared = map_shared_memory(-1, setup)
        self._worker = Worker(0, setup, setup.factory, shared)
        self._timestep = timestep_of(setup, shared)
        self._masks, self._told = set[str](), dict[str, None]()
        self._previous: list[tuple[np.ndarray, np.ndarray]] = []
        self._changes = self._lost = 0

    def make(self, num_envs: int, num_threads: int) -> Watched:
        """Return the batch, for one environment."""
        return self

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Make the environment and reset it with the seed."""
        from gymnasium.wrappers import PassiveEnvChecker

        env = self._worker.make()
        self._told |= dict.fromkeys(gymnasium_spec.running_statistics(env))
        if any(hasattr(layer, "action_masks") for layer in gymnasium_spec.layers(env)):
            self._masks.add("action_masks()")
        self._worker.envs[0] = env = PassiveEnvChecker(env)
        return self._call("reset(seed=seed)", env.reset, self._worker.write_reset, seed=seed)

    def step(self, action: np.ndarray) -> TimeStep:
        """Step the environment, or after an episode's end reset it."""
        worker, env = self._worker, self._worker.envs[0]
        if worker.episode_ended[0]:
            return self._call("reset", env.reset, worker.write_reset)
        worker.shared.action[:] = action
        return self._call("step", env.step, worker.write_step, *worker.read_actions())

    def close(self) -> None:
        self._worker.close_env(0)

    def _call(
        self, name: str, function: Callable, write: Callable, *args: Any, **settings: Any
    ) -> TimeStep:
        """Call the environment, and look at what it returns and at what agents get of it."""
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = function(*args, **settings)
            with np.errstate(over="ignore"):  # a fault, as infinity is, and no warning
                write(0, result)
            for fault in self._worker.find_faults(0, 1):
                raise fault
        except Fault as fault:
            raise ConfigError(f"`{name}` returned bad data ({fault.kind}): {fault}.") from fault
        except (Exception, SystemExit) as error:
            raise ConfigError(f"`{name}` raised {describe_error(error)}") from error
        self._told |= {_STYLE.sub("", str(warning.message)): None for warning in caught}
        if isinstance(result[-1], Mapping):
            self._masks |= {f'info["{key}"]' for key in MASK_NAMES & result[-1].keys()}
        # Numbers that changed since the last call, and those of them that agents see equal.
        wide = parts_by_leaf(self._worker.setup.observation, result[0])
        narrow = self._worker.shared.observation.values()
        leaves = [(np.array(x), y[0].copy()) for x, y in zip(wide, narrow, strict=True)]
        for (x, y), (old_x, old_y) in zip(leaves, self._previous, strict=False):
            self._changes += np.sum(x != old_x)
            self._lost += np.sum((x != old_x) & (y == old_y))
        self._previous = leaves
        return self._timestep

    def warnings(self) -> Iterator[str]:
        """Yield what an agent would bear, but should know."""
        yield from self._told
        if self._lost > LOST_SHARE * self._changes:
            yield (
                f"observations of 64 bits arrive as 32, which loses {self._lost:,} of "
                f"{self._changes:,} changes from step to step: subtract an offset or scale them."
            )
        if self._masks and action_mask(self.spec.observation) is None:
            yield (
                f"{', '.join(sorted(self._masks))} says which actions are possible, and agents do "
                f"not see it: a wrapper can put it into the observation, as {ACTION_MASK!r} of a "
                "dictionary."
            )
