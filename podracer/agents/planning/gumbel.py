"""Shared parts of agents that plan: Gumbel search by mctx, and searching again in a replay.

Source: Danihelka et al. 2022, "Policy improvement by planning with Gumbel".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import mctx

from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.agents.common.settings import ClippedSettings
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.schedules import Schedule
from podracer.types import EnvironmentSpec, Params, PyTree, Trajectory, action_mask

# `chex.dataclass` hides the constructors of mctx's outputs from type checkers.
RootFnOutput: Any = mctx.RootFnOutput
RecurrentFnOutput: Any = mctx.RecurrentFnOutput


@struct
class PlanningSettings(ClippedSettings):
    """Settings of agents that search."""

    learning_rate: Schedule = bounded(1e-3)
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    value_cost: float = bounded(0.5)
    """Weight of the value loss; the other losses have weight 1."""
    min_value_range: float = bounded(1e-8, low=1e-12)
    """Smallest range of a node's action values that the search stretches to 1; mctx's epsilon."""
    num_simulations: int = static(default=16, low=1)
    """Number of simulations of the search for each decision; each takes one step of the model."""
    max_considered_actions: int = static(default=16, low=1)
    """Largest number of actions that the search compares at its root; of continuous actions the
    number of samples at each node."""


def next_discount(spec: EnvironmentSpec, discount: float | jax.Array) -> float | jax.Array:
    """Return the discount of a next state's value, negative where that is the other player's.

    Raises `ConfigError` where a learned model cannot know whose it is.
    """
    if not spec.takes_turns:
        return discount
    if not spec.turns_alternate:
        raise ConfigError(
            f"in {spec.name} a player may move twice in a row, which a learned model does not "
            "predict: take an opponent, such as opponent=random, or an agent without a learned "
            "model, such as PPO or AlphaZero."
        )
    return -discount


def gumbel_search(
    params: Params,
    key: jax.Array,
    root: mctx.RootFnOutput,
    recurrent_fn: Any,  # mctx.RecurrentFn
    observation: PyTree,
    settings: PlanningSettings,
    *,
    explore: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Search from the root of one environment, all leaves `[1, ...]`.

    Returns the action i32 [], the improved policy f32 `[A]` and the root's value f32 []. Actions
    that the observation's action mask excludes are never chosen, but one that excludes all counts
    for nothing. Without `explore` the search adds no Gumbel noise.

    A node rescales the values of its actions to [0, 1], from a range of at least `min_value_range`:
    with mctx's 1e-8 even the smallest differences are stretched to it.
    """
    mask = action_mask(observation)
    qtransform = partial(mctx.qtransform_completed_by_mix_value, epsilon=settings.min_value_range)
    policy_output: Any = mctx.gumbel_muzero_policy(
        params,
        key,
        root,
        recurrent_fn,
        settings.num_simulations,
        invalid_actions=None if mask is None else ~mask & jnp.any(mask, axis=-1, keepdims=True),
        max_num_considered_actions=settings.max_considered_actions,
        gumbel_scale=1.0 if explore else 0.0,
        qtransform=qtransform,
    )
    value = policy_output.search_tree.summary().value[0]
    return policy_output.action[0].astype(jnp.int32), policy_output.action_weights[0], value


def reanalyze(
    search: Callable[[PyTree, jax.Array], tuple[jax.Array, PyTree]],
    trajectory: Trajectory,
    key: jax.Array,
    *,
    fraction: float,
    num_timesteps: int,
) -> Trajectory:
    """Search anew the first timesteps of a random fraction of sampled sequences `[T, N, ...]`.

    `search(observation, key) -> (action, extras)` is for one observation. What it returns takes the
    place of the extras from acting; the actions stay those that were taken. Source: Schrittwieser
    et al. 2020, appendix H.
    """
    steps, num_sequences = trajectory.steps, trajectory.steps.timestep.reward.shape[1]
    if not fraction:
        return trajectory
    num_rows = max(1, round(fraction * num_sequences))
    row_key, search_key = jax.random.split(key)
    rows = jax.random.permutation(row_key, num_sequences)[:num_rows]

    def search_rows(timestep: tuple[PyTree, jax.Array]) -> PyTree:
        observation, key = timestep
        return jax.vmap(search)(observation, jax.random.split(key, num_rows))[1]

    # One timestep after the other: the trees of all at once would need much memory.
    observation = jax.tree.map(lambda x: x[:num_timesteps, rows], steps.timestep.observation)
    extras = jax.lax.map(search_rows, (observation, jax.random.split(search_key, num_timesteps)))
    extras = jax.tree.map(
        lambda old, new: old.at[:num_timesteps, rows].set(new), steps.extras, extras
    )
    return dataclasses.replace(trajectory, steps=dataclasses.replace(steps, extras=extras))
