"""Shared parts of agents that learn from replayed sequences with a recurrent network.

A sequence starts at the recurrent state in which it was acted. A burn-in refreshes the state with
the current parameters and gets no gradient; the timesteps after it are learned. Within a sequence
the state is reset where an episode begins. Source: Kapturowski et al. 2019, "Recurrent Experience
Replay in Distributed Reinforcement Learning" (R2D2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.networks import LAST_STEP, Network
from podracer.replay import Sample
from podracer.types import ArraySpec, Carry, Params, PyTree, Step, TimeStep, Trajectory

PRIORITY_ETA = 0.9  # R2D2, section 2.3


def check_rollout(rollout_length: int, trajectory: Trajectory) -> None:
    """Raise `ConfigError` where a rollout has another length than the stored states stand for."""
    length = trajectory.steps.action.shape[0]
    if length != rollout_length:
        raise ConfigError(
            f"rollout_length is {rollout_length}, but a rollout has {length} steps: make them "
            "equal."
        )


def stored_spec(carry: Carry) -> Carry:
    """Return the shapes and dtypes `[...]` of what the replay keeps of a carry `[1, ...]`."""
    return jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], carry))


def sequence_priorities(errors: jax.Array, mask: jax.Array, eta: float = PRIORITY_ETA) -> jax.Array:
    """Return the priorities `[N]` of sequences from their absolute errors `[T, N]`, masked.

    Section 2.3: p = η max |δ| + (1 - η) mean |δ|.
    """
    mean = jnp.sum(errors, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
    return eta * jnp.max(errors, axis=0) + (1 - eta) * mean


def last_step_spec(observation: PyTree, num_actions: int) -> PyTree:
    """Return the spec of `with_last_step`: `num_actions` numbers describe an action."""
    last_step = {"action": ArraySpec((num_actions,)), "reward": ArraySpec(())}
    return {"observation": observation, LAST_STEP: last_step}


def with_last_step(observation: PyTree, timesteps: TimeStep, last_actions: jax.Array) -> PyTree:
    """Return observations `[T, B, ...]` with the actions f32 `[T, B, n]` that led to them.

    The reward, through tanh, is there too; both are 0 where an episode begins.
    """
    is_within = ~timesteps.first  # otherwise action and reward are of another episode
    last_step = {
        "action": jnp.where(is_within[..., None], last_actions, 0.0),
        "reward": jnp.where(is_within, jnp.tanh(timesteps.reward), 0.0),
    }
    return {"observation": observation, LAST_STEP: last_step}


def unroll(
    apply: Callable[..., tuple[Any, Carry]], memory: Carry, inputs: Any, burn_in_length: int
) -> Any:
    """Return the outputs of `apply(memory, *inputs)` after the burn-in, which gets no gradient.

    Leaves of `inputs` are `[T, N, ...]`, of outputs `[T - burn_in_length, N, ...]`.
    """
    if burn_in_length:
        burn_in = jax.tree.map(lambda x: x[:burn_in_length], inputs)
        memory = jax.lax.stop_gradient(apply(memory, *burn_in)[1])
    learned = jax.tree.map(lambda x: x[burn_in_length:], inputs)
    return apply(memory, *learned)[0]


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
    action = cut(trajectory.steps.action, times[:-1])
    steps = Step(jax.tree.map(lambda x: x[:-1], timesteps), action, ())
    final = jax.tree.map(lambda x: x[-1], timesteps)
    weights, rows, starts = (
        jnp.tile(x, recurrence.unroll_length) for x in (sample.weights, sample.rows, sample.starts)
    )
    return Sample(Trajectory(steps, final, (), ()), weights, rows, starts)
