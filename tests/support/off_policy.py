"""Small agents that learn from a replay, and samples for them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from walk import ACTIONS, BOX, B, Walk, begin, built, methods_of

from podracer.agents.ddpg import DDPG, td3
from podracer.agents.dqn import DQN
from podracer.agents.muzero import MuZero
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.environment import auto_reset
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.action_values import Atoms, Quantiles
from podracer.replay import Replay, Sample
from podracer.types import Step, TimeStep, Trajectory

NETWORK = TorsoNetwork(MLP((8,), "tanh"))
MEMORY = TorsoNetwork(MLP((8,), "tanh"), memory="gru", memory_size=5)
REPLAY = Replay(B * 40, batch_size=64, warmup=0)
PRIORITIZED = dataclasses.replace(REPLAY, prioritized=True)
DISCRETE, BOXED = auto_reset(Walk(ACTIONS)), auto_reset(Walk(BOX))
OFF_POLICY = {
    "dqn": DQN(network=NETWORK, replay=REPLAY),
    "n-step": DQN(network=NETWORK, replay=REPLAY, n_step=3, double=False),
    "c51": DQN(network=NETWORK, replay=PRIORITIZED, value=Atoms(-5.0, 5.0, 11), dueling=True),
    "qr": DQN(network=NETWORK, replay=PRIORITIZED, value=Quantiles(7)),
    "noisy": DQN(
        network=NETWORK,
        replay=REPLAY,
        dueling=True,
        noisy=True,
        stream_hidden=(6,),
        epsilon=0.0,
    ),
    "r2d2": R2D2(
        network=MEMORY,
        replay=PRIORITIZED,
        burn_in_length=2,
        unroll_length=4,
        n_step=2,
    ),
    "muzero": MuZero(
        network=NETWORK,
        replay=PRIORITIZED,
        latent_size=6,
        dynamics_hidden=(8,),
        prediction_hidden=(8,),
        support_size=11,
        support_max=3.0,
        num_simulations=4,
        unroll_steps=3,
        n_step=2,
    ),
    "ddpg": DDPG(network=NETWORK, replay=REPLAY, random_frames=0),
    "td3": td3(network=NETWORK, replay=PRIORITIZED, random_frames=0, n_step=2),
    "td3-c51": td3(
        network=TorsoNetwork(MLP((8,), "tanh", residual_blocks=1)),
        replay=PRIORITIZED,
        random_frames=0,
        n_step=2,
        normalize_observations=True,
        return_distribution=Atoms(-3.0, 2.0, 11),
        weight_decay=0.1,
    ),
    "sac": SAC(network=NETWORK, replay=REPLAY, random_frames=0, normalize_observations=True),
    "sac-c51": SAC(
        network=NETWORK,
        replay=REPLAY,
        random_frames=0,
        return_distribution=Atoms(-3.0, 2.0, 11),
    ),
    "sac-qr": SAC(
        network=NETWORK, replay=PRIORITIZED, random_frames=0, return_distribution=Quantiles(7)
    ),
}
OFF_POLICY["muzero-sampled"] = dataclasses.replace(OFF_POLICY["muzero"], max_considered_actions=5)
NEEDS_CONTINUOUS = (
    "ddpg",
    "td3",
    "td3-c51",
    "sac",
    "sac-c51",
    "sac-qr",
    "muzero-sampled",
)


def agent_and_env(name, **settings):
    env = BOXED if name in NEEDS_CONTINUOUS else DISCRETE
    return built(dataclasses.replace(OFF_POLICY[name], **settings), env), env


def sample_of(reward, discount, last, action=None):
    """One column of a sample whose observations count its timesteps."""
    length = len(reward)
    column = lambda x, dtype=jnp.float32: jnp.asarray(x, dtype)[:, None]  # noqa: E731
    first = jnp.zeros((length, 1), bool)
    observation = jnp.arange(length, dtype=jnp.float32)[:, None, None] * jnp.ones((1, 1, 2))
    whole = TimeStep(observation, column(reward), column(discount), first, column(last, bool))
    action = column(np.zeros(length) if action is None else action, jnp.int32)
    steps = Step(jax.tree.map(lambda x: x[:-1], whole), action[:-1], ())
    trajectory = Trajectory(steps, jax.tree.map(lambda x: x[-1], whole), (), ())
    nothing = jnp.zeros(1, jnp.int32)
    return Sample(trajectory, jnp.ones(1), nothing, nothing)


def drawn(agent, env):
    """A fresh learner's state, and transitions of a rollout with importance weights."""
    state, trajectory = begin(agent, env)
    shared, learner = state.shared, methods_of(agent).learner

    @jax.jit
    def draw(replay):
        replay = learner.buffer.add(replay, trajectory.steps)
        sample = learner.buffer.sample(replay, jax.random.key(4), 32)
        return learner.transition(sample, shared.obs_moments)

    weight = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1.0, 32), jnp.float32)
    replay = getattr(state.local, "replay", state.local)
    return shared, dataclasses.replace(draw(replay), weight=weight)
