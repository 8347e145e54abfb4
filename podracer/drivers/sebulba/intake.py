"""Two ways to take a timestep of the environments into the actor's programs.

`HostIntake` takes NumPy arrays, and validates them on the host. `DeviceIntake` takes arrays of a
device: shapes and dtypes are checked here, and values by a program, whose faults the host gets once
a rollout. Bad rows are treated alike.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from podracer.devices.mesh import Device
from podracer.drivers.sebulba.layout import Packed, TimestepLayout
from podracer.drivers.sebulba.validator import KINDS, TimestepValidator, find_faults, mask_rows
from podracer.envs.host.dlpack import take_timestep
from podracer.fields import struct
from podracer.types import EnvironmentSpec, PyTree, TimeStep


class HostIntake:
    """Intake of NumPy arrays `[b, ...]`, from the given step of the run on.

    Rows that are `masked` then stay so until their environments begin an episode.
    """

    def __init__(
        self, spec: EnvironmentSpec, masked: Bool[np.ndarray, " b"], step: int, device: Device
    ) -> None:
        self.validator = TimestepValidator(spec, masked)
        self._layout, self._num_envs = TimestepLayout(spec), len(masked)
        self._step = step

    def take(self, timestep: TimeStep) -> Packed:
        """Return the programs' inputs for the next timestep."""
        validated, step = self.validator.validate(timestep), self._step
        self._step += 1
        return self._layout.pack(np, validated, timestep, step)

    def zeros(self) -> Packed:
        """Return a packed timestep of zeros, to compile with."""
        return self._layout.zeros(self._num_envs)

    def action(self, action: PyTree) -> Any:
        """Return actions for the environments, once the program that chose them has ended."""
        return np.asarray(action)

    def count_faults(self) -> None:
        """Bring the validator's count of faults up to date."""


class DeviceIntake:
    """Intake of arrays on a device, with the methods of `HostIntake`."""

    def __init__(
        self, spec: EnvironmentSpec, masked: Bool[np.ndarray, " b"], step: int, device: Device
    ) -> None:
        self.validator = TimestepValidator(spec, masked)
        self._name, self._device = spec.name, device
        self._home = device  # the simulator's
        faults = np.zeros((len(KINDS), 3), np.int32)
        state = IntakeState(np.uint32(step), masked, faults)  # type: ignore[arg-type]
        self._state = jax.device_put(state, device)
        self._pack = pack_program(spec)
        self._zeros = TimestepLayout(spec).zeros(len(masked))

    def take(self, timestep: TimeStep) -> Packed:
        timestep = take_timestep(self._name, timestep)
        self.validator.check(timestep)
        self._home = timestep.reward.device
        if {leaf.device for leaf in jax.tree.leaves(timestep)} != {self._device}:
            timestep = jax.device_put(timestep, self._device)
        self._state, packed = self._pack(self._state, timestep)
        return packed

    def zeros(self) -> Packed:
        return jax.device_put(self._zeros, self._device)

    def action(self, action: PyTree) -> Any:
        jax.block_until_ready(action)  # the timestep's memory was read until then
        return action if self._home == self._device else jax.device_put(action, self._home)

    def count_faults(self) -> None:
        faults = np.asarray(self._state.faults).tolist()
        for kind, (total, row, part) in zip(KINDS, faults, strict=True):
            if total:
                self.validator.faults[kind] = total
                self.validator.describe(kind, row, part)


@struct
class IntakeState:
    """State of an intake on the actor's device."""

    step: UInt32[Array, ""]  # number of the next timestep
    masked: Bool[Array, " b"]  # rows that are masked until their environments begin an episode
    faults: Int32[Array, "2 3"]  # by kind: number of rows, row and part of the first fault


@functools.cache
def pack_program(spec: EnvironmentSpec) -> Any:
    """Return the program `(state, timestep) -> (state, packed)`, which masks bad rows.

    `TimestepValidator` does the same on the host.
    """

    def pack(state: IntakeState, timestep: TimeStep) -> tuple[IntakeState, Packed]:
        bad_rows, finite = find_faults(jnp, spec, timestep, state.masked)
        row = jnp.argmax(bad_rows, axis=1)
        part = jnp.argmin(finite[:, row], axis=0)
        totals = state.faults[:, 0] + bad_rows.sum(axis=1)
        is_first = (state.faults[:, 0] == 0)[:, None]
        places = jnp.where(is_first, jnp.stack([row, part], axis=1), state.faults[:, 1:])
        faults = jnp.concatenate([totals[:, None], places], axis=1).astype(jnp.int32)
        masked = (state.masked & ~timestep.first) | bad_rows.any(axis=0)
        validated = mask_rows(jnp, timestep, masked)
        packed = TimestepLayout(spec).pack(jnp, validated, timestep, state.step)
        return IntakeState(state.step + 1, masked, faults), packed

    return jax.jit(pack)
