"""DQN and Rainbow: settings of the papers, target network, schedules."""

from __future__ import annotations

import jax
import numpy as np
from off_policy import agent_and_env
from walk import begin, learn, methods_of

from podracer import recipes
from podracer.agents.common.optimizers import Optimizer
from podracer.ops.action_values import Atoms
from podracer.schedules import Linear
from podracer.types import ArraySpec, Discrete, EnvironmentSpec


def test_rainbow_on_atari_is_that_of_its_paper():
    """Hessel et al. 2018, table 1, in steps of four frames: noise instead of epsilon, two noisy
    layers in each stream behind the convolutions, priorities, distribution, Adam's epsilon."""
    agent = recipes.find("atari_rainbow").agent
    assert (agent.learning_rate, agent.optimizer) == (6.25e-5, Optimizer("adam", 1.5e-4))
    assert (agent.epsilon, agent.n_step, agent.double, agent.value) == (0.0, 3, True, Atoms())
    replay = agent.replay
    assert (replay.warmup, replay.capacity, replay.batch_size) == (20_000, 1_000_000, 32)
    assert (replay.priority_exponent, replay.importance_exponent) == (0.5, Linear(0.4, 1.0, 50e6))
    screens = ArraySpec((84, 84, 4), np.uint8, frame_stack=True)
    network = methods_of(agent.build(EnvironmentSpec("atari", screens, Discrete(6)))).network
    trunk = jax.eval_shape(network.init, jax.random.key(0))["shared"]
    convolutions, dense = trunk.layers
    assert (len(convolutions), len(dense)) == (3, 0)
    for stream, outputs in (("value", 51), ("advantage", 6 * 51)):
        scales = [layer.weight_scale.shape for layer in trunk.heads[stream].layers]
        assert scales == [(3136, 512), (512, outputs)]


def test_frames_are_counted_and_the_learning_rate_follows_them():
    num_frames = int(begin(*agent_and_env("dqn"))[1].valid().sum())
    agent, env = agent_and_env("dqn", learning_rate=Linear(1e-3, 0.0, frames=2 * num_frames))
    state, trajectory = begin(agent, env)
    moved = []
    for rollouts in range(4):
        assert int(state.shared.frames) == rollouts * num_frames
        new, _ = learn(agent, state, trajectory)
        pairs = zip(*map(jax.tree.leaves, (state.shared.params, new.shared.params)), strict=True)
        moved.append(max(float(np.abs(a - b).max()) for a, b in pairs))
        state = new
    assert moved[0] > moved[1] > 0 == moved[2] == moved[3]


def test_the_target_is_copied_when_it_is_due():
    agent, env = agent_and_env("dqn", target_update_period=3)
    state, trajectory = begin(agent, env)
    equal = []
    for _ in range(6):
        state, _ = learn(agent, state, trajectory)
        params = jax.tree.leaves(state.shared.params)
        target = jax.tree.leaves(state.shared.target_params)
        equal.append(all(map(np.array_equal, params, target)))
    assert equal == [False, False, True] * 2
