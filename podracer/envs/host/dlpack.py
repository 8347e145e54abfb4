"""Batches of environments whose arrays lie on a device, exchanged by DLPack.

An array that is taken is a view of the simulator's memory, which the next step may overwrite. So a
program that reads it must have ended by then: callers wait for the action that it computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from podracer import environment
from podracer.errors import EnvironmentFault
from podracer.types import EnvironmentSpec, PyTree, TimeStep


def take_timestep(name: str, timestep: TimeStep) -> TimeStep:
    """Return a timestep of a device with arrays of JAX, see `from_device`."""
    environment.expect_timestep(name, timestep)
    return from_device(name, timestep)


def from_device(name: str, tree: PyTree) -> PyTree:
    """Return arrays of any library as arrays of JAX, on the same devices and without a copy.

    JAX makes 32-bit numbers of 64-bit ones, by a copy. `name` is that of the environment. Raises
    `EnvironmentFault` for what is no compact array.
    """

    def take(path: Any, array: Any) -> jax.Array:
        try:
            return array if isinstance(array, jax.Array) else jax.dlpack.from_dlpack(array)
        except Exception as error:
            leaf, reason = jax.tree_util.keystr(path).lstrip(".") or "it", str(error).rstrip(".")
            raise EnvironmentFault(
                f"{name}: {leaf} cannot be taken by DLPack: {reason}. It must be an array on a "
                "device of JAX, compact in memory and without gradients, such as a torch tensor "
                "after `.detach().contiguous()`."
            ) from error

    return jax.tree_util.tree_map_with_path(take, tree)


def on_host(env: environment.HostEnvironments) -> environment.HostEnvironments:
    """Return a factory of the same environments whose batches take and return NumPy arrays."""
    return _OnHost(env) if environment.features(env).on_device else env


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """Environments of a device whose arrays are copied to the host, for plays that count there."""

    environments: environment.HostEnvironments

    @property
    def spec(self) -> EnvironmentSpec:
        return self.environments.spec

    def make(self, num_envs: int, num_threads: int) -> _BatchOnHost:
        return _BatchOnHost(self.spec.name, self.environments.make(num_envs, num_threads))


class _BatchOnHost:
    """A batch of a device, as a `HostEnvironment`."""

    def __init__(self, name: str, batch: environment.HostEnvironment) -> None:
        self._name, self._batch = name, batch
        self._device: Any = None  # the simulator's
        environment.wrap_features(self, batch, "snapshot", "restore", "faults", "first_faults")

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        return self._fetch(self._batch.reset(seed, indices, start))

    def step(self, action: np.ndarray) -> TimeStep:
        return self._fetch(self._batch.step(jax.device_put(action, self._device)))

    def close(self) -> None:
        self._batch.close()

    def _fetch(self, timestep: TimeStep) -> TimeStep:
        timestep = take_timestep(self._name, timestep)
        self._device = timestep.reward.device
        return jax.device_get(timestep)
