"""TD3+BC: its loss in float64, the settings of its paper, and TD3 from its weights."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demonstrations import Recorded
from off_policy import BOXED, drawn
from walk import built, close, doubled, methods_of

from podracer.agents.ddpg import td3
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer_offline import td3_bc

SETTINGS = {"network": TorsoNetwork(MLP((8,))), "replay": Replay(600, batch_size=32, warmup=0)}


@pytest.mark.parametrize("alpha", [2.5, 0.0])
def test_the_policy_of_td3_bc_stays_near_the_actions_of_the_batch(alpha):
    """Sample by sample in float64: -λ Q(s, μ(s)) + (μ(s) - a)², where λ is alpha over the mean |Q|
    and has no gradient. Masked samples count nowhere."""
    agent = built(td3_bc(**SETTINGS, cloning_alpha=alpha), Recorded(BOXED))
    shared, transition = drawn(agent, BOXED)
    methods, mask = methods_of(agent), np.arange(32) % 3 > 0
    transition = dataclasses.replace(transition, mask=jnp.asarray(mask, jnp.float32))
    with jax.enable_x64(True):
        shared, transition = jax.tree.map(doubled, (shared, transition))
        obs, critic = transition.timestep.observation, shared.params.critics[:1]

        def values(actor, row):
            action = methods.policy(actor, obs[row][None])
            return action[0], methods.networks.q_values(critic, obs[row][None], action)[0, 0]

        rows = np.flatnonzero(mask)
        size = np.mean([abs(float(values(shared.params.actor, row)[1])) for row in rows])

        def expected(actor):
            total = 0.0
            for row in rows:
                action, q = values(actor, row)
                total += jnp.mean((action - transition.action[row]) ** 2) - alpha / size * q
            return total / len(rows)

        def loss(actor):
            return methods.actor_loss(actor, shared, transition)[0].value

        actor = shared.params.actor
        close(*(jax.value_and_grad(x)(actor) for x in (loss, expected)), atol=1e-12, rtol=1e-7)


def test_td3_takes_the_weights_of_td3_bc():
    """Their learners have the same leaves, with the clone's policy among them."""
    online = td3(**SETTINGS, normalize_observations=True)
    agents = [built(online, BOXED), built(td3_bc(**SETTINGS), Recorded(BOXED))]
    states = [jax.eval_shape(partial(x.init, num_envs=4), jax.random.key(0)) for x in agents]
    assert states[0].shared == states[1].shared
