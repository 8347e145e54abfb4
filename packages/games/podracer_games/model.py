"""A wrapper whose observations include the state, for agents that plan in the environment."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podracer.checks import check_spec
from podracer.environment import Environment, wrap_features
from podracer.envs import make
from podracer.envs.common import array_specs
from podracer.errors import ConfigError
from podracer.types import EnvironmentSpec, EnvState, TimeStep


def model(name: str, **options: Any) -> WithModel:
    """Another device environment with its state in observations, to plan in: model:catch."""
    return WithModel(make(name, **options))


@dataclasses.dataclass(frozen=True)
class WithModel:
    """An environment that can be used as a model of itself.

    Observations are dictionaries of the inner environment's `observation` and its `state`;
    `spec.extension` is the inner environment.
    """

    environment: Environment

    def __post_init__(self) -> None:
        spec = check_spec(self.environment)
        if not isinstance(self.environment, Environment):
            raise ConfigError(f"{spec.name} is not in JAX, so an agent cannot plan in it.")
        features = {"for_evaluation": self._for_evaluation}
        wrap_features(self, self.environment, "check_agent", "render", **features)

    @property
    def spec(self) -> EnvironmentSpec:
        inner = self.environment
        state, _ = jax.eval_shape(inner.reset, jax.random.key(0))
        return dataclasses.replace(
            inner.spec,
            observation={"observation": inner.spec.observation, "state": array_specs(state)},
            extension=inner,
        )

    def _for_evaluation(self) -> WithModel:
        return WithModel(self.environment.for_evaluation())  # type: ignore[union-attr]

    def reset(self, key: jax.Array) -> tuple[EnvState, TimeStep]:
        return _with_state(*self.environment.reset(key))

    def step(self, key: jax.Array, state: EnvState, action: jax.Array) -> tuple[EnvState, TimeStep]:
        return _with_state(*self.environment.step(key, state, action))


def _with_state(state: EnvState, timestep: TimeStep) -> tuple[EnvState, TimeStep]:
    observation = {"observation": timestep.observation, "state": state}
    return state, dataclasses.replace(timestep, observation=observation)
