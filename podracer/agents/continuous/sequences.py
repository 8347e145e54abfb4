"""Transitions within replayed sequences, for agents of continuous actions with a recurrent network.

See `agents.common.recurrent`, which has what R2D2 shares.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.common.recurrent import unroll
from podracer.fields import bounded, static, struct
from podracer.networks import Network
from podracer.replay import Sample
from podracer.types import Carry, Params, PyTree, Step, Trajectory


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Settings of SAC, DDPG and TD3 with a recurrent network, and of no use to others.

    Recurrent states are stored at the start of each rollout, so sequences begin `rollout_length`
    timesteps apart.
    """

    burn_in_length: int = bounded(10)
    """Timesteps of a sequence that only refresh the recurrent states."""
    unroll_length: int = bounded(20, low=1)
    """Timesteps of a sequence, after the burn-in, that are learned from; sequences begin where
    rollouts do, so a longer rollout would leave timesteps out."""
    head_size: int = bounded(64, low=1)
    """Units of the layer behind the recurrent one: of the policy, and of each critic, where the
    action joins."""


@struct
class History:
    """Sequences `[T, N, ...]` up to those M timesteps for which a network is asked."""

    inputs: PyTree  # for the network, [T, N, ...]
    first: jax.Array  # bool [T, N]
    memory: Carry  # at the first timestep, [N, ...], of the network that acted
    positions: jax.Array  # i32 [M], t N + n for the timestep t after the burn-in of sequence n
    burn_in_length: int = static()


def outputs(
    network: Network, params: Params, history: History, memory: Carry
) -> dict[str, jax.Array]:
    """Return each head's outputs `[M, n]`; `memory [N, ...]` is that at the first timestep."""

    def apply(memory: Carry, inputs: PyTree, first: jax.Array) -> tuple[Any, Carry]:
        return network.apply(params, memory, inputs, first)

    inputs = (history.inputs, history.first)
    heads = unroll(apply, memory, inputs, history.burn_in_length)
    return {name: x.reshape(-1, x.shape[-1])[history.positions] for name, x in heads.items()}


def windows(sample: Sample, recurrence: Recurrence, num_transitions: int) -> Sample:
    """Return a sample of `num_transitions` from each timestep that is learned from.

    N sequences have `unroll_length * N` of them, timestep by timestep. In place of observations
    they have the positions that a `History` takes.
    """
    trajectory, start = sample.trajectory, recurrence.burn_in_length
    offsets = jnp.arange(num_transitions + 1)[:, None]
    times = start + offsets + jnp.arange(recurrence.unroll_length)[None]

    def cut(x: jax.Array, times: jax.Array) -> jax.Array:
        """Return `[n, U * N, ...]` of `[T, N, ...]`."""
        return x[times].reshape(times.shape[0], -1, *x.shape[2:])

    timesteps = trajectory.timesteps()
    positions = jnp.arange(timesteps.reward.size).reshape(timesteps.reward.shape)
    positions -= start * positions.shape[1]
    timesteps = dataclasses.replace(timesteps, observation=positions)
    timesteps = jax.tree.map(lambda x: cut(x, times), timesteps)
    steps = Step(
        jax.tree.map(lambda x: x[:-1], timesteps), cut(trajectory.steps.action, times[:-1]), ()
    )
    final = jax.tree.map(lambda x: x[-1], timesteps)
    weights, rows, starts = (
        jnp.tile(x, recurrence.unroll_length) for x in (sample.weights, sample.rows, sample.starts)
    )
    return Sample(Trajectory(steps, final, (), ()), weights, rows, starts)
