"""What adapters of device suites need: few restarts for many environments, and action masks."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.checks import check_environment
from podracer.environment import auto_reset, restart, transition
from podracer.fields import struct
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec


@struct
class Counting:
    """Episodes of three steps; where one began is told by its number."""

    number: jax.Array
    time: jax.Array


class Dear:
    spec = EnvironmentSpec("dear", ArraySpec((1,)), Discrete(2))

    def reset(self, key):
        number = jnp.sinh(jax.random.uniform(key))
        return Counting(number, jnp.int32(0)), restart(number[None])

    def step(self, key, state, action):
        state = Counting(state.number, state.time + 1)
        over = state.time >= jnp.where(action == 1, 3, 1000)
        return state, transition(state.number[None], 1.0, terminal=over)


def test_few_starts_serve_all_environments_that_end():
    env = auto_reset(Dear(), resets_per_step=2)
    check_environment(env)
    keys = jax.random.split(jax.random.key(0), 8)
    state, timestep = jax.vmap(env.reset)(keys)
    actions = jnp.asarray([1, 1, 1, 0, 0, 1, 0, 0])
    step = jax.jit(jax.vmap(env.step))
    begun = np.asarray(timestep.observation[:, 0])
    for t in range(3):
        keys = jax.random.split(jax.random.key(t + 1), 8)
        state, timestep = step(keys, state, actions)
    now = np.asarray(timestep.observation[:, 0])
    ended = np.asarray(actions) == 1
    np.testing.assert_array_equal(timestep.first, ended)
    np.testing.assert_array_equal(now[~ended], begun[~ended])
    fresh = now[ended]
    assert len(np.unique(fresh)) == 2
    np.testing.assert_array_equal(fresh[[0, 1]], fresh[[2, 3]])
    assert not np.isin(fresh, begun).any()


def test_only_the_few_starts_are_computed():
    """A step of 64 environments holds a reset of two rows, not of 64: seen by an operation that
    nothing but the reset has."""

    def rows_of_reset(env: Any) -> list[str]:
        keys = jax.random.split(jax.random.key(0), 64)
        state, _ = jax.vmap(env.reset)(keys)
        step = jax.make_jaxpr(jax.vmap(env.step))(keys, state, jnp.zeros(64, jnp.int32))
        return re.findall(r"f32\[(\d+)\] = sinh", str(step))

    assert rows_of_reset(auto_reset(Dear())) == ["64"]
    assert rows_of_reset(auto_reset(Dear(), resets_per_step=2)) == ["2"]


@pytest.mark.slow
def test_masks_keep_impossible_actions_from_being_chosen():
    """Every agent that knows masks chooses only what is possible, exploring or not."""
    from podracer.agent import Blueprint, Context
    from podracer.agents.a2c import A2C
    from podracer.agents.dqn import DQN
    from podracer.agents.muzero import MuZero
    from podracer.agents.q_lambda import QLambda
    from podracer.agents.r2d2 import R2D2
    from podracer.replay import Replay
    from podracer.types import TimeStep

    observation = {"x": ArraySpec((3,)), ACTION_MASK: ArraySpec((5,), np.bool_)}
    spec = EnvironmentSpec("masked", observation, Discrete(5))
    replay = Replay(64 * 100)
    agents = (
        A2C(),
        QLambda(),
        DQN(replay=replay, epsilon=0.7),
        R2D2(replay=replay, epsilon=0.9, apex_alpha=0.0),
        MuZero(replay=replay, num_simulations=6),
    )
    mask = jax.random.bernoulli(jax.random.key(5), 0.4, (64, 5)).at[:, 2].set(True)
    ones = jnp.ones(64)
    seen = {"x": jax.random.normal(jax.random.key(1), (64, 3)), ACTION_MASK: mask}
    timestep = TimeStep(seen, ones, ones, ones > 0, ones < 0)
    for settings in agents:
        agent = Blueprint(settings, spec, Context(20)).build()
        init = jax.jit(lambda key, agent=agent: agent.actor_params(agent.init(key, 64)))
        params = init(jax.random.key(0))
        for explore in (False, True):
            act = jax.jit(lambda keys, a=agent, p=params, e=explore: a.act(
                p, a.carry(64), timestep, keys, e)[0])  # fmt: skip
            chosen = [act(jax.random.split(jax.random.key(seed), 64)) for seed in range(8)]
            for action in chosen:
                assert np.take_along_axis(np.asarray(mask), np.asarray(action)[:, None], 1).all()
            if explore and not isinstance(settings, QLambda):
                assert len({tuple(np.asarray(action)) for action in chosen}) > 1
