"""A wrapper that hides components of observations, for agents with memory."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np

from podracer.environment import Environment, wrap_features
from podracer.errors import ConfigError
from podracer.types import ArraySpec, EnvironmentSpec, EnvState, TimeStep


def partial(environment: Environment, hide: int | str) -> PartiallyObserved:
    """Return a device environment without the components `hide` of its observation.

    `hide` has indices and ranges with both ends, joined by plus signs: `2`, `0+2`, `13-26`. Raises
    `ConfigError` where observations are not vectors, or have no such component, or no other one.
    """
    hidden: set[int] = set()
    for part in str(hide).split("+"):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = map(int, (bounds[1], bounds[2] or bounds[1])) if bounds else (0, -1)
        if last < first:
            raise ConfigError(f"hide has indices and ranges such as 2 or 0+4-6, not {part!r}.")
        hidden.update(range(first, last + 1))
    return PartiallyObserved(environment, tuple(sorted(hidden)))


@dataclasses.dataclass(frozen=True)
class PartiallyObserved:
    """A device environment whose observations, vectors, lack some components.

    Hiding velocities makes a task of control one that needs memory, as in Ni et al. 2022
    (arXiv 2110.05038) and before in Heess et al. 2015 (arXiv 1512.04455).
    """

    environment: Environment
    hidden: tuple[int, ...]
    """Indices of the components that are left out."""

    def __post_init__(self) -> None:
        if not isinstance(self.environment, Environment):
            kind = type(self.environment).__name__
            raise ConfigError(f"{kind} is not a device environment: hide components in your own.")
        spec = self.environment.spec
        observation = spec.observation
        is_vector = isinstance(observation, ArraySpec) and len(observation.shape) == 1
        if not is_vector or observation.frame_stack or observation.num_values is not None:
            raise ConfigError(f"the observations of {spec.name} are not vectors.")
        size = observation.shape[0]
        if not set(self.hidden) < set(range(size)):
            raise ConfigError(
                f"hide must be some of the components 0 to {size - 1} of {spec.name}, not all."
            )
        wrap_features(self, self.environment, "render", for_evaluation=self._for_evaluation)

    @property
    def spec(self) -> EnvironmentSpec:
        inner = self.environment.spec
        observation = dataclasses.replace(inner.observation, shape=(len(self._shown),))
        return dataclasses.replace(inner, observation=observation)

    def _for_evaluation(self) -> PartiallyObserved:
        environment = self.environment.for_evaluation()  # type: ignore[union-attr]
        return dataclasses.replace(self, environment=environment)

    def reset(self, key: jax.Array) -> tuple[EnvState, TimeStep]:
        return self._partly(*self.environment.reset(key))

    def step(self, key: jax.Array, state: EnvState, action: jax.Array) -> tuple[EnvState, TimeStep]:
        return self._partly(*self.environment.step(key, state, action))

    def _partly(self, state: EnvState, timestep: TimeStep) -> tuple[EnvState, TimeStep]:
        observation = timestep.observation[self._shown]
        return state, dataclasses.replace(timestep, observation=observation)

    @property
    def _shown(self) -> np.ndarray:
        size = self.environment.spec.observation.shape[0]
        return np.setdiff1d(np.arange(size), self.hidden)
