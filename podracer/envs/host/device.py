"""A device environment served as a host environment, for parity tests and fair comparisons.

It draws the same random numbers as under Anakin, so lock-step Sebulba computes what Anakin does.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import Environment
from podracer.rollout import Purpose, environment_keys, purpose_key
from podracer.types import EnvironmentSpec, EnvState, TimeStep


@dataclasses.dataclass(frozen=True)
class DeviceEnvironments:
    """Batches of a device environment for actors on the host."""

    environment: Environment

    @property
    def spec(self) -> EnvironmentSpec:
        return self.environment.spec

    def make(self, num_envs: int, num_threads: int) -> ServedBatch:
        return ServedBatch(self.environment)


class ServedBatch:
    """One batch, stepped by a compiled program on a CPU device."""

    def __init__(self, environment: Environment) -> None:
        self._device = jax.local_devices(backend="cpu")[0]
        self._reset = jax.jit(jax.vmap(environment.reset))
        self._step = jax.jit(partial(_step, environment))
        self._state: EnvState = ()
        self._keys: Any = None
        self._steps = 0

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """The first resets are Anakin's; those of a run that goes on (`start` > 0) are others."""
        with jax.default_device(self._device):
            self._seed(seed, indices, start)
            key = purpose_key(jax.random.key(seed), Purpose.RESET)
            moment = jnp.asarray([start], jnp.uint32)
            keys = environment_keys(key, jnp.asarray(indices), moment)[0]
            self._state, timestep = self._reset(keys)
        return jax.device_get(timestep)

    def step(self, action: np.ndarray) -> TimeStep:
        with jax.default_device(self._device):
            self._state, timestep = self._step(
                self._keys, np.uint32(self._steps), self._state, action
            )
        self._steps += 1
        return jax.device_get(timestep)

    def snapshot(self) -> EnvState:
        """Where the environments stand, as Anakin keeps it."""
        return self._state

    def restore(self, seed: int, indices: np.ndarray, start: int, state: EnvState) -> None:
        """Go on from a snapshot, `start` steps into the run."""
        with jax.default_device(self._device):
            self._seed(seed, indices, start)
            self._state = jax.device_put(state, self._device)

    def close(self) -> None:
        self._state = ()

    def _seed(self, seed: int, indices: np.ndarray, start: int) -> None:
        key = purpose_key(jax.random.key(seed), Purpose.STEP)
        self._keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.asarray(indices))
        self._steps = start


def _step(
    environment: Environment, keys: jax.Array, moment: jax.Array, state: EnvState, action: jax.Array
) -> tuple[EnvState, TimeStep]:
    now = jax.vmap(lambda key: jax.random.fold_in(key, moment))(keys)
    return jax.vmap(environment.step)(now, state, action)
