"""A device environment as a host environment, for parity tests and fair comparisons.

It draws the same random numbers as under Anakin, so lock-step Sebulba computes what Anakin does.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import Environment, HostEnvironments
from podracer.rollout import Purpose, environment_keys, purpose_key
from podracer.types import EnvironmentSpec, EnvState, TimeStep

Seed = int | jax.Array  # or a run's key, of which a number would be a part


@dataclasses.dataclass(frozen=True)
class DeviceEnvironments:
    """A device environment, as `HostEnvironments`."""

    environment: Environment

    @property
    def spec(self) -> EnvironmentSpec:
        return self.environment.spec

    def make(self, num_envs: int, num_threads: int) -> DeviceBatch:
        return DeviceBatch(self.environment)


def to_host_environments(env: Environment | HostEnvironments) -> HostEnvironments:
    """Return host environments as they are, and a device environment wrapped."""
    return env if isinstance(env, HostEnvironments) else DeviceEnvironments(env)


class DeviceBatch:
    """A batch of environments, stepped by a compiled program on a CPU device."""

    def __init__(self, environment: Environment) -> None:
        self._device = jax.local_devices(backend="cpu")[0]
        self._reset = jax.jit(jax.vmap(environment.reset))

        def step(
            keys: jax.Array, steps: jax.Array, state: EnvState, action: jax.Array
        ) -> tuple[EnvState, TimeStep]:
            step_keys = jax.vmap(lambda key: jax.random.fold_in(key, steps))(keys)
            return jax.vmap(environment.step)(step_keys, state, action)

        self._step = jax.jit(step)
        self._state: EnvState = ()
        self._steps = 0

    def reset(self, seed: Seed, indices: np.ndarray, start: int) -> TimeStep:
        """Reset all environments: as Anakin does at the start, with other keys when resumed."""
        with jax.default_device(self._device):
            self._seed(seed, indices, start)
            key = purpose_key(self._run_key, Purpose.RESET)
            steps = jnp.asarray([start], jnp.uint32)
            keys = environment_keys(key, jnp.asarray(indices), steps)[0]
            self._state, timestep = self._reset(keys)
        return jax.device_get(timestep)

    def step(self, action: np.ndarray) -> TimeStep:
        steps = np.uint32(self._steps)
        with jax.default_device(self._device):
            self._state, timestep = self._step(self._keys, steps, self._state, action)
        self._steps += 1
        return jax.device_get(timestep)

    def snapshot(self) -> EnvState:
        """Return the states of all environments, as Anakin keeps them."""
        return self._state

    def restore(self, seed: Seed, indices: np.ndarray, start: int, state: EnvState) -> None:
        """Continue from a snapshot, `start` steps into the run."""
        with jax.default_device(self._device):
            self._seed(seed, indices, start)
            self._state = jax.device_put(state, self._device)

    def close(self) -> None:
        self._state = ()

    def _seed(self, seed: Seed, indices: np.ndarray, start: int) -> None:
        is_key = isinstance(seed, jax.Array)
        self._run_key = jax.device_put(seed, self._device) if is_key else jax.random.key(seed)
        key = purpose_key(self._run_key, Purpose.STEP)
        self._keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.asarray(indices))
        self._steps = start
