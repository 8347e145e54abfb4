"""An environment that shows its state, for agents that plan in it."""

from __future__ import annotations

import dataclasses

import jax

from podracer.environment import Environment, Renderable
from podracer.envs.arrays import described
from podracer.types import ConfigError, EnvironmentSpec, EnvState, TimeStep


@dataclasses.dataclass(frozen=True)
class WithModel:
    """The same environment, observed as a dictionary: `seen`, what it shows, and `state`, what it
    is; `spec.extension` is the environment itself."""

    environment: Environment

    def __post_init__(self) -> None:
        if not isinstance(self.environment, Environment):
            kind = type(self.environment).__name__
            raise ConfigError(f"{kind} is no environment of the device, so nothing can plan in it.")
        if isinstance(self.environment, Renderable):
            object.__setattr__(self, "render", self.environment.render)

    @property
    def spec(self) -> EnvironmentSpec:
        inner = self.environment
        state, _ = jax.eval_shape(inner.reset, jax.random.key(0))
        return dataclasses.replace(
            inner.spec,
            observation={"seen": inner.spec.observation, "state": described(state)},
            extension=inner,
        )

    def reset(self, key: jax.Array) -> tuple[EnvState, TimeStep]:
        return _shown(*self.environment.reset(key))

    def step(self, key: jax.Array, state: EnvState, action: jax.Array) -> tuple[EnvState, TimeStep]:
        return _shown(*self.environment.step(key, state, action))


def _shown(state: EnvState, timestep: TimeStep) -> tuple[EnvState, TimeStep]:
    observation = {"seen": timestep.observation, "state": state}
    return state, dataclasses.replace(timestep, observation=observation)
