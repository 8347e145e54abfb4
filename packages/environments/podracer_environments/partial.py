"""Environments of the device without components of their observations, and agents with memory."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np

from podracer.agents import SAC
from podracer.agents.common.recurrent import Recurrence
from podracer.agents.ddpg import td3
from podracer.checks import check_spec
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.environment import Environment, wrap_features
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.types import ArraySpec, EnvironmentSpec, EnvState, TimeStep


def partial(name: str, hide: int | str, **options: Any) -> PartiallyObserved:
    """Return a device environment that hides parts of its observation: partial:pendulum,hide=2.

    `name` and `options` are those of `podracer.make`. `hide` has indices and ranges with both ends,
    joined by plus signs: `2`, `0+2`, `13-26`. Raises `ConfigError` where observations are not
    vectors, or have no such component, or no other one.
    """
    hidden: set[int] = set()
    for part in str(hide).split("+"):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = map(int, (bounds[1], bounds[2] or bounds[1])) if bounds else (0, -1)
        if last < first:
            raise ConfigError(f"hide has indices and ranges such as 2 or 0+4-6, not {part!r}.")
        hidden.update(range(first, last + 1))
    return PartiallyObserved(make(name, **options), tuple(sorted(hidden)))


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
        spec = check_spec(self.environment)
        if not isinstance(self.environment, Environment):
            raise ConfigError(f"{spec.name} is not in JAX: hide components in your environment.")
        observation = spec.observation
        is_vector = isinstance(observation, ArraySpec) and len(observation.shape) == 1
        if not is_vector or observation.frame_stack or observation.num_values is not None:
            raise ConfigError(f"the observations of {spec.name} are not vectors.")
        size = observation.shape[0]
        if not set(self.hidden) < set(range(size)):
            raise ConfigError(
                f"hide must be some of the components 0 to {size - 1} of {spec.name}, not all."
            )
        wrap_features(
            self,
            self.environment,
            *("check_agent", "kinds", "draw", "render", "num_agents"),
            enter=self._enter,
            for_evaluation=self._for_evaluation,
        )

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

    def _enter(self, key: jax.Array, world: Any) -> tuple[EnvState, TimeStep]:
        return self._partly(*self.environment.enter(key, world))  # type: ignore[attr-defined]

    def step(self, key: jax.Array, state: EnvState, action: jax.Array) -> tuple[EnvState, TimeStep]:
        return self._partly(*self.environment.step(key, state, action))

    def _partly(self, state: EnvState, timestep: TimeStep) -> tuple[EnvState, TimeStep]:
        observation = timestep.observation[self._shown]
        return state, dataclasses.replace(timestep, observation=observation)

    @property
    def _shown(self) -> np.ndarray:
        size = self.environment.spec.observation.shape[0]
        return np.setdiff1d(np.arange(size), self.hidden)


# --- recipes -------------------------------------------------------------------------------------

# Sequences of 17 timesteps, which begin 10 apart. A velocity takes two observations, so that little
# memory and burn-in are enough.
RECURRENT: dict[str, Any] = {
    "learning_rate": 1e-3,
    "discount": 0.9,
    "random_frames": 2_000,
    "recurrence": Recurrence(burn_in_length=4, unroll_length=12),
    "replay": Replay(capacity=100_000, batch_size=32, updates_per_rollout=128, warmup=2_000),
    "network": TorsoNetwork(MLP(()), memory="lstm", memory_size=32),
}


def pendulum_recurrent_sac() -> Experiment:
    """SAC with memory on Pendulum without its velocity."""
    return Experiment(
        environment="partial:pendulum,hide=2",
        agent=SAC(**RECURRENT),
        driver=AnakinConfig(num_envs=16, rollout_length=10, updates_per_chunk=10),
        frames=24_000,
    )


def pendulum_recurrent_td3() -> Experiment:
    """TD3 with memory on Pendulum without its velocity."""
    return dataclasses.replace(pendulum_recurrent_sac(), agent=td3(**RECURRENT))
