"""Two ways to take a timestep of the environments into the actor's programs.

`HostIntake` takes NumPy arrays: it validates them on the host, and packs the scalars into one.
`DeviceIntake` takes arrays of a device: shapes and dtypes are checked here, and values inside of
the programs, which send their faults to the host once a rollout. Bad rows are treated alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from podracer.agent import Agent
from podracer.devices.mesh import Device
from podracer.drivers.sebulba import trajectory
from podracer.drivers.sebulba.config import DeviceSplit, SebulbaConfig
from podracer.drivers.sebulba.validator import KINDS, TimestepValidator, mask_rows
from podracer.envs.host.dlpack import from_device, take_timestep
from podracer.fields import struct
from podracer.ops.action_masks import action_mask, allows_action
from podracer.types import EnvironmentSpec, Params, PyTree, TimeStep


class HostIntake:
    """Intake of NumPy arrays."""

    def __init__(self, spec: EnvironmentSpec, num_envs: int) -> None:
        self.validator = TimestepValidator(spec, num_envs)

    def begin(self, buffer: trajectory.TrajectoryBuffer, timestep: TimeStep | None) -> Any:
        """Return what `infer` updates; `timestep` is the one that a run goes on from."""
        if timestep is not None:
            self.validator.restore(timestep)
        return buffer

    def resume(self, timestep: TimeStep) -> tuple[Any, ...]:
        """Return the inputs of the programs for the timestep that a run goes on from."""
        return trajectory.pack_timestep(timestep)

    def take(self, timestep: TimeStep) -> tuple[Any, ...]:
        """Return the inputs of the programs for a new timestep."""
        return trajectory.pack_timestep(self.validator.validate(timestep))

    def action(self, action: jax.Array) -> Any:
        """Return actions for the environments, once the program that chose them has ended."""
        return np.asarray(action)

    def snapshot(self, state: PyTree) -> PyTree:
        """Return a state of the environments in arrays that a checkpoint can hold."""
        return state

    def count(self) -> None:
        """Count the faults that `finish` returns; `take` has counted those on the host."""


class DeviceIntake:
    """Intake of arrays on a device, with the methods of `HostIntake`."""

    def __init__(self, spec: EnvironmentSpec, num_envs: int, device: Device) -> None:
        self.validator = TimestepValidator(spec, num_envs)
        self._name, self._num_envs, self._device = spec.name, num_envs, device
        self._home = device  # the simulator's

    def begin(self, buffer: trajectory.TrajectoryBuffer, timestep: TimeStep | None) -> Any:
        validation = zero_validation(self._num_envs)
        if timestep is not None:
            masked = jnp.asarray(timestep.first & timestep.last)
            validation = Validation(masked, validation.faults)
        return buffer, validation

    def resume(self, timestep: TimeStep) -> tuple[Any, ...]:
        # A masked row would begin an episode, and so be valid again.
        first = timestep.first & ~timestep.last
        timestep = TimeStep(
            timestep.observation, timestep.reward, timestep.discount, first, timestep.last
        )
        return (jax.device_put(timestep, self._device),)

    def take(self, timestep: TimeStep) -> tuple[Any, ...]:
        timestep = take_timestep(self._name, timestep)
        self.validator.check(timestep)
        self._home = timestep.reward.device
        if {leaf.device for leaf in jax.tree.leaves(timestep)} != {self._device}:
            timestep = jax.device_put(timestep, self._device)
        return (timestep,)

    def action(self, action: jax.Array) -> Any:
        jax.block_until_ready(action)  # the timestep's memory was read until then
        return action if self._home == self._device else jax.device_put(action, self._home)

    def snapshot(self, state: PyTree) -> PyTree:
        return jax.block_until_ready(trajectory.copy_tree(from_device(self._name, state)))

    def count(self, faults: jax.Array) -> None:
        for kind, (total, row, part) in zip(KINDS, np.asarray(faults).tolist(), strict=True):
            if total:
                self.validator.faults[kind] = total
                self.validator.describe(kind, row, part)


# --- programs that validate ----------------------------------------------------------------------


@struct
class Validation:
    """State of the validation of a batch, on the actor's device."""

    masked: Bool[Array, " b"]  # rows that are masked until their environments begin an episode
    faults: Int32[Array, "2 3"]  # by kind: number of rows, row and part of the first fault


def zero_validation(num_envs: int) -> Validation:
    """Return the state before the first timestep."""
    return Validation(jnp.zeros(num_envs, bool), jnp.zeros((len(KINDS), 3), jnp.int32))


def validate(
    spec: EnvironmentSpec, validation: Validation, timestep: TimeStep
) -> tuple[Validation, TimeStep]:
    """Mask the bad rows of a timestep, as `TimestepValidator` does; may be traced."""
    leaves = jax.tree.leaves(timestep.observation)
    floats = [timestep.reward, timestep.discount]
    floats += [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = jnp.stack([jnp.isfinite(x).reshape(len(x), -1).all(axis=1) for x in floats])
    mask, no_action = action_mask(timestep.observation), jnp.zeros_like(validation.masked)
    if mask is not None:
        no_action = ~(allows_action(spec.action, mask) | timestep.last)
        no_action &= timestep.first | ~validation.masked  # a masked row is counted once
    bad_rows = jnp.stack([~finite.all(axis=0), no_action])
    row = jnp.argmax(bad_rows, axis=1)
    part = jnp.argmin(finite[:, row], axis=0)
    totals = validation.faults[:, 0] + bad_rows.sum(axis=1)
    is_first = (validation.faults[:, 0] == 0)[:, None]
    places = jnp.where(is_first, jnp.stack([row, part], axis=1), validation.faults[:, 1:])
    faults = jnp.concatenate([totals[:, None], places], axis=1).astype(jnp.int32)
    masked = (validation.masked & ~timestep.first) | bad_rows.any(axis=0)
    return Validation(masked, faults), mask_rows(jnp, timestep, masked)


def infer_on_device(
    agent: Agent,
    params: Params,
    state: tuple[trajectory.TrajectoryBuffer, Validation],
    keys: jax.Array,
    timestep: TimeStep,
) -> tuple[tuple[trajectory.TrajectoryBuffer, Validation], jax.Array]:
    """Validate a timestep and do what `infer` does with it."""
    buffer, validation = state
    validation, timestep = validate(agent.spec, validation, timestep)
    buffer, action = trajectory.infer(agent, params, buffer, keys, *_pack(timestep))
    return (buffer, validation), action


def finish_on_device(
    spec: EnvironmentSpec,
    num_learners: int,
    state: tuple[trajectory.TrajectoryBuffer, Validation],
    start: trajectory.RolloutStart,
    timestep: TimeStep,
) -> tuple[trajectory.RolloutStart, list[trajectory.TrajectoryShard], jax.Array]:
    """Validate the final timestep and do what `finish` does with it; return the faults too.

    The next `infer` validates it again, so its state is not kept.
    """
    buffer, validation = state
    validation, timestep = validate(spec, validation, timestep)
    start, shards = trajectory.finish(num_learners, buffer, start, *_pack(timestep))
    return start, shards, validation.faults


def _pack(timestep: TimeStep) -> tuple[PyTree, jax.Array]:
    rows = (timestep.reward, timestep.discount, timestep.first, timestep.last)
    return timestep.observation, jnp.stack([x.astype(jnp.float32) for x in rows])


def make_actor_programs(
    agent: Agent, split: DeviceSplit, config: SebulbaConfig, on_device: bool
) -> trajectory.ActorPrograms:
    """Return the programs of actors whose environments' arrays are on a device or not."""
    num_learners = len(split.learners)
    infer_program = partial(trajectory.infer, agent)
    finish_program = partial(trajectory.finish, num_learners)
    if on_device:
        infer_program = partial(infer_on_device, agent)
        finish_program = partial(finish_on_device, agent.spec, num_learners)
    make_buffer = partial(trajectory.empty_buffer, agent, agent.spec)
    make_buffer = partial(make_buffer, num_envs=split.envs_per_thread, length=config.rollout_length)
    return trajectory.ActorPrograms(
        jax.jit(lambda learner: jax.tree.map(jnp.copy, agent.actor_params(learner))),
        jax.jit(make_buffer),
        jax.jit(partial(agent.carry, config.num_envs)),
        jax.jit(infer_program, donate_argnums=1),
        jax.jit(finish_program, donate_argnums=1),
    )


def zero_inputs(
    buffer: trajectory.TrajectoryBuffer, spec: EnvironmentSpec, num_envs: int, on_device: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Return what `infer` updates, and inputs of zeros, to compile with."""
    packed = trajectory.zero_timestep(spec, num_envs)
    if not on_device:
        return buffer, packed
    return (buffer, zero_validation(num_envs)), (trajectory.unpack_timestep(*packed),)
