"""R2D2: stored memories, and the last action and reward as inputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import agent_and_env
from walk import begin, close, learn, methods_of, network

from podracer.agents import r2d2


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["gru", "gtrxl"])
def test_stored_memories_are_those_of_acting(memory):
    """R2D2's values from a stored memory are those that acting had."""
    layer = network(memory)
    agent, env = agent_and_env("r2d2", network=layer)
    state, trajectory = begin(agent, env)
    stored = r2d2.stored_carry(trajectory.carry)
    assert np.abs(jax.tree.leaves(stored[0])[0]).max() > 0.01
    assert np.asarray(stored[1]).any()
    buffer = methods_of(agent).buffer
    memory = buffer.add(state.local, trajectory.steps, stored)
    sample = buffer.sample(memory, jax.random.key(0), 32)
    params = state.shared.params

    q, carry = [], trajectory.carry  # one step at a time, as in acting
    step = jax.jit(methods_of(agent).q_values)
    for t in range(8):
        timestep = jax.tree.map(lambda x, t=t: x[t : t + 1], trajectory.steps.timestep)
        values, after = step(params, carry.memory, timestep, carry.last_action[None])
        q.append(values[0])
        action = trajectory.steps.action[t]
        carry = dataclasses.replace(carry, memory=after, last_action=action)
    agent, _ = agent_and_env("r2d2", network=layer, burn_in_length=0)
    got = jax.jit(methods_of(agent).unroll)(params, sample.trajectory)
    close(got, jnp.stack(q)[:, sample.rows], 1e-5)


def test_r2d2_sees_the_last_action_and_reward_of_its_episode_only():
    agent, env = agent_and_env("r2d2")
    state, trajectory = begin(agent, env)
    params, carry = state.shared.params, trajectory.carry
    timesteps, first = trajectory.steps.timestep, trajectory.steps.timestep.first
    last_actions = jnp.concatenate([carry.last_action[None], trajectory.steps.action[:-1]])

    def values(agent, actions, rewards):
        other = dataclasses.replace(timesteps, reward=rewards)
        memory = jax.tree.map(jnp.zeros_like, carry.memory)
        # Of single timesteps, so that only their own inputs can matter.
        one = lambda x, a: methods_of(agent).q_values(params, memory, _add_axis(x), a[None])[0][0]  # noqa: E731
        return np.asarray(jax.jit(jax.vmap(one))(other, actions))

    q = values(agent, last_actions, timesteps.reward)
    for actions, rewards in (
        ((last_actions + 1) % 3, timesteps.reward),
        (last_actions, timesteps.reward + 1),
    ):
        changed = np.abs(values(agent, actions, rewards) - q).max(-1)
        assert (changed[~first] > 0).all()
        assert not changed[first].any()
    blind, _ = agent_and_env("r2d2", action_reward_inputs=False)
    assert jax.eval_shape(learn, blind, *begin(blind, env))
    for other, inputs in ((agent, 8 + 3 + 1), (blind, 8)):
        trunk = jax.eval_shape(methods_of(other).network.init, jax.random.key(0))["shared"]
        assert trunk.layers[-1][0].weight.shape == (2, 8)  # they go past the torso
        assert trunk.cell.weight_ih.shape[1] == inputs


def _add_axis(tree):
    return jax.tree.map(lambda x: x[None], tree)
