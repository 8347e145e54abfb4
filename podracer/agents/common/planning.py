"""What agents that plan share: Gumbel search by mctx, for each environment by itself.

Source: Danihelka et al. 2022, "Policy improvement by planning with Gumbel".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mctx

from podracer.agents.common.actor_critic import has_action_mask
from podracer.types import ACTION_MASK, Params, PyTree


def search(
    params: Params,
    key: jax.Array,
    root: mctx.RootFnOutput,
    recurrent: Any,
    observation: PyTree,
    *,
    simulations: int,
    considered: int,
    explore: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Action i32, improved policy `[A]` and value of one environment, from a root over `[1, ...]`.

    `recurrent` is mctx's; the observation `[1, ...]` may say which actions are possible.
    """
    found = mctx.gumbel_muzero_policy(
        params,
        key,
        root,
        recurrent,
        simulations,
        invalid_actions=~observation[ACTION_MASK] if has_action_mask(observation) else None,
        max_num_considered_actions=considered,
        gumbel_scale=1.0 if explore else 0.0,
    )
    value = found.search_tree.summary().value
    action, policy, value = jax.tree.map(
        lambda x: x[0], (found.action, found.action_weights, value)
    )
    return action.astype(jnp.int32), policy, value
