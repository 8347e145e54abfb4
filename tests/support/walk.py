"""Updates of agents in the walk of `podracer_testing.walk`, whose names are here, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from podracer.types import LearnerState, Trajectory
from podracer_testing.walk import *  # noqa: F403
from podracer_testing.walk import WALK, advance, enter, fresh, learn


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def gradient(state: LearnerState) -> Any:
    """The gradient of the first update: what Adam's mean holds of it."""
    return jax.tree.map(
        lambda x: 10 * x, optax.tree_utils.tree_get(state.shared.optimizer_state, "mu")
    )


# --- agents with metaparameters ------------------------------------------------------------------


def trained(agent: Any, updates: int) -> tuple[LearnerState, Trajectory]:
    """A few updates on, where the derivative of Adam is more than that of a sign; the optimizer of
    the metaparameters is fresh, so that its mean is a tenth of their next gradient."""
    state, actor = fresh(agent), enter(agent)
    for seed in range(updates + 1):
        acted, trajectory = advance(agent, WALK, agent.actor_params(state), actor, seed)
        if seed < updates:
            actor, (state, _) = acted, learn(agent, state, trajectory)
    meta_optimizer = fresh(agent).shared.meta_optimizer_state
    learner = dataclasses.replace(state.shared, meta_optimizer_state=meta_optimizer)
    return LearnerState(learner), trajectory


def meta_gradient(state: LearnerState) -> Any:
    """The next gradient of the metaparameters after `trained`."""
    means = optax.tree_utils.tree_get(state.shared.meta_optimizer_state, "mu")
    return jax.tree.map(lambda x: 10 * x, means)


def doubled(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
