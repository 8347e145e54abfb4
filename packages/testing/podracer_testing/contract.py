"""What every agent must do, as functions of its settings: asserted in the walk of `walk`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent, Blueprint, Context
from podracer.checks import check_agent
from podracer_testing import walk

_RUNNING_MOMENTS = ("mean", "variance", "batches")  # fields of layers that get no gradient


def check_contract(settings: Any, env: Any = walk.WALK, *, explores: bool = True) -> None:
    """Assert all that this file checks; `env` is a walk with the actions that the agent takes."""
    check_agent(Blueprint(settings, env.spec, Context(walk.T)), num_envs=4)
    agent = walk.built(settings, env)
    check_gradients(agent, env)
    check_time_outs(agent, env)
    check_greedy(agent, env, explores=explores)


def check_gradients(agent: Agent, env: Any = walk.WALK) -> None:
    """Assert that the first update gives every parameter a gradient."""
    state, _ = walk.learn(agent, *walk.begin(agent, env))
    for path, leaf in jax.tree_util.tree_leaves_with_path(walk.first_moments(state)):
        if getattr(path[-1], "name", "") in _RUNNING_MOMENTS:
            assert not np.any(leaf)
            continue
        assert np.abs(leaf).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


def check_time_outs(agent: Agent, env: Any = walk.WALK) -> None:
    """Assert that the action at a time-out, which is ignored, and the reset teach nothing."""
    state, trajectory = walk.begin(agent, env)
    cut = ~trajectory.valid()
    after_cut = jnp.concatenate([jnp.zeros((1, walk.B), bool), cut])
    altered = walk.with_rewards(trajectory, lambda reward: jnp.where(after_cut, 1e3, reward))

    def changed(action: jax.Array) -> jax.Array:
        is_index = action.ndim == cut.ndim
        is_cut = cut if is_index else cut[..., None]
        return jnp.where(is_cut, 2 - action if is_index else -action, action)

    extras = trajectory.steps.extras
    if isinstance(extras, dict) and "sample" in extras:
        extras = extras | {"sample": changed(extras["sample"])}
    action = changed(trajectory.steps.action)
    altered = dataclasses.replace(
        altered,
        steps=dataclasses.replace(altered.steps, action=action, extras=extras),
    )
    got, expected = (
        walk.first_moments(walk.learn(agent, state, x)[0]) for x in (altered, trajectory)
    )
    walk.close(got, expected, atol=1e-7)


def check_greedy(agent: Agent, env: Any = walk.WALK, *, explores: bool = True) -> None:
    """Assert that keys matter to actions where the agent explores, and nowhere else."""
    params, timestep = agent.actor_params(walk.fresh(agent)), walk.enter(agent, env).timestep
    choose = jax.jit(agent.act, static_argnums=4)

    def act(seed: int, explore: bool) -> np.ndarray:
        keys = jax.random.split(jax.random.key(seed), walk.B)
        return np.asarray(choose(params, agent.carry(walk.B), timestep, keys, explore)[0])

    np.testing.assert_array_equal(act(0, False), act(1, False))
    assert any((act(0, True) != act(seed, True)).any() for seed in range(1, 9)) == explores
