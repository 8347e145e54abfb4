"""Shared parts of agents that learn from replayed sequences with a recurrent network.

A sequence starts at the recurrent state in which it was acted. A burn-in refreshes the state with
the current parameters and gets no gradient; the timesteps after it are learned. Within a sequence
the state is reset where an episode begins. Source: Kapturowski et al. 2019, "Recurrent Experience
Replay in Distributed Reinforcement Learning" (R2D2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.networks import LAST_STEP
from podracer.types import ArraySpec, Carry, PyTree, TimeStep, Trajectory

PRIORITY_ETA = 0.9  # R2D2, section 2.3


# --- replay --------------------------------------------------------------------------------------


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


# --- inputs --------------------------------------------------------------------------------------


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
