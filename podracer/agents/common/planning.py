"""Shared parts of agents that plan: Gumbel search by mctx.

Source: Danihelka et al. 2022, "Policy improvement by planning with Gumbel".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import mctx

from podracer.agents.common.actor_critic import has_action_mask
from podracer.types import ACTION_MASK, Params, PyTree

# `chex.dataclass` hides the constructors of mctx's outputs from type checkers.
RootFnOutput: Any = mctx.RootFnOutput
RecurrentFnOutput: Any = mctx.RecurrentFnOutput


def gumbel_search(
    params: Params,
    key: jax.Array,
    root: mctx.RootFnOutput,
    recurrent_fn: Any,  # mctx.RecurrentFn
    observation: PyTree,
    *,
    num_simulations: int,
    max_considered_actions: int,
    min_value_range: float | jax.Array,
    explore: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search from the root of one environment, all leaves `[1, ...]`.

    Returns the action i32 [], the improved policy f32 `[A]` and the root's value f32 []. Actions
    that the observation's action mask excludes are never chosen. Without `explore` the search
    adds no Gumbel noise.

    A node rescales the values of its actions to [0, 1], from a range of at least `min_value_range`:
    with mctx's 1e-8 even the smallest differences are stretched to it.
    """
    policy_output = mctx.gumbel_muzero_policy(
        params,
        key,
        root,
        recurrent_fn,
        num_simulations,
        invalid_actions=~observation[ACTION_MASK] if has_action_mask(observation) else None,
        max_num_considered_actions=max_considered_actions,
        gumbel_scale=1.0 if explore else 0.0,
        qtransform=partial(mctx.qtransform_completed_by_mix_value, epsilon=min_value_range),
    )
    value = policy_output.search_tree.summary().value
    action, policy, value = jax.tree.map(
        lambda x: x[0], (policy_output.action, policy_output.action_weights, value)
    )
    return action.astype(jnp.int32), policy, value
