"""Agents with a replay: the contract, what they learn from, and each one's own arithmetic."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agents import blueprint
from walk import (
    ACTIONS,
    BOX,
    B,
    Walk,
    begin,
    built,
    close,
    enter,
    fresh,
    learn,
    methods_of,
    with_rewards,
)

from podracer import recipes
from podracer.agent import Context
from podracer.agents import r2d2
from podracer.agents.common import off_policy, value_based
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.ddpg import DDPG, td3
from podracer.agents.dqn import DQN, btr
from podracer.agents.muzero import MuZero
from podracer.agents.planning.model import Model
from podracer.agents.qt_opt import QTOpt
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.checks import check_agent
from podracer.devices.mesh import DATA, REPLICATED, SHARDED, find_devices, make_mesh
from podracer.devices.reductions import global_grad
from podracer.environment import auto_reset
from podracer.errors import ConfigError
from podracer.fields import check_ranges
from podracer.io.schema import leaves_by_path
from podracer.networks import MLP, ResNet, TorsoNetwork
from podracer.ops.action_masks import epsilon_greedy
from podracer.ops.action_values import Atoms, ImplicitQuantiles, Quantiles
from podracer.replay import Replay, Sample
from podracer.schedules import Linear
from podracer.types import (
    ArraySpec,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    Step,
    TimeStep,
    Trajectory,
)

NETWORK = TorsoNetwork(MLP((8,), "tanh"))
MEMORY = TorsoNetwork(MLP((8,), "tanh"), memory="gru", memory_size=5)
REPLAY = Replay(B * 40, batch_size=64, warmup=0)
PRIORITIZED = dataclasses.replace(REPLAY, prioritized=True)
DISCRETE, BOXED = auto_reset(Walk(ACTIONS)), auto_reset(Walk(BOX))
AGENTS = {
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
    "btr": btr(
        network=NETWORK,
        replay=PRIORITIZED,
        stream_hidden=(6,),
        value=ImplicitQuantiles(3, 4, 5, cosines=6),
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
AGENTS["qt_opt"] = QTOpt(network=NETWORK, replay=PRIORITIZED, random_frames=0, n_step=2)
AGENTS["muzero-sampled"] = dataclasses.replace(AGENTS["muzero"], max_considered_actions=5)
CONTINUOUS = ("ddpg", "td3", "td3-c51", "sac", "sac-c51", "sac-qr", "qt_opt", "muzero-sampled")
VARIANTS = ("td3-c51", "sac-c51", "sac-qr", "muzero-sampled")
SOME = [pytest.param(name, marks=() if name == "sac" else pytest.mark.slow) for name in AGENTS]


def agent_and_env(name, **settings):
    env = BOXED if name in CONTINUOUS else DISCRETE
    return built(dataclasses.replace(AGENTS[name], **settings), env), env


def first_moments(state):
    """Adam's means, which after one update are a tenth of the gradient."""
    shared = state.shared
    adam = (
        shared.optimizer_states if hasattr(shared, "optimizer_states") else shared.optimizer_state
    )
    nodes = jax.tree.leaves(adam, is_leaf=lambda x: hasattr(x, "mu"))
    return [x.mu for x in nodes if hasattr(x, "mu")]


# --- every agent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in VARIANTS else ()) for x in AGENTS],
)
def test_every_agent_keeps_the_contract(name):
    env, other = (BOXED, DISCRETE) if name in CONTINUOUS else (DISCRETE, BOXED)
    check_agent(blueprint(AGENTS[name], env.spec), num_envs=4)
    if name.startswith("muzero"):
        return  # takes both kinds of actions
    with pytest.raises(ConfigError, match=r"needs (discrete|continuous) actions; walk has"):
        AGENTS[name].build(other.spec)


@pytest.mark.parametrize("name", SOME)
def test_every_parameter_receives_a_gradient(name):
    agent, env = agent_and_env(name, **({"policy_delay": 1} if name.startswith("td3") else {}))
    state, _ = learn(agent, *begin(agent, env))
    for path, leaf in jax.tree_util.tree_leaves_with_path(first_moments(state)):
        assert np.abs(leaf).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


@pytest.mark.parametrize("name", SOME)
def test_what_happens_at_a_time_out_teaches_nothing(name):
    """The action there is ignored and what follows is a reset: neither may matter."""
    agent, env = agent_and_env(name)
    state, trajectory = begin(agent, env)
    cut = ~trajectory.valid()
    after_cut = jnp.concatenate([jnp.zeros((1, B), bool), cut])
    other = with_rewards(trajectory, lambda reward: jnp.where(after_cut, 1e3, reward))
    action = trajectory.steps.action
    shape = (*cut.shape, *(1,) * (action.ndim - 2))
    changed = jnp.where(cut.reshape(shape), 1 - action if action.ndim == 2 else -action, action)
    other = dataclasses.replace(
        other, steps=dataclasses.replace(other.steps, action=changed.astype(action.dtype))
    )
    got, expected = (first_moments(learn(agent, state, x)[0]) for x in (other, trajectory))
    close(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_without_exploring_the_keys_do_not_matter(name):
    agent, env = agent_and_env(name)
    state = jax.jit(fresh, static_argnums=0)(agent)
    params, timestep = agent.actor_params(state), enter(agent, env).timestep
    choose = jax.jit(agent.act, static_argnums=4)

    def act(seed, explore):
        keys = jax.random.split(jax.random.key(seed), B)
        return np.asarray(choose(params, agent.carry(B), timestep, keys, explore)[0])

    np.testing.assert_array_equal(act(0, False), act(1, False))
    assert any((act(0, True) != act(seed, True)).any() for seed in range(1, 9))


@pytest.mark.parametrize("name", ["dqn", pytest.param("sac", marks=pytest.mark.slow)])
def test_nothing_is_learned_before_the_warm_up_is_over(name):
    num_frames = int(begin(*agent_and_env(name))[1].valid().sum())
    replay = dataclasses.replace(REPLAY, warmup=2 * num_frames)
    agent, env = agent_and_env(name, replay=replay)
    state, trajectory = begin(agent, env)
    once, metrics = learn(agent, state, trajectory)
    jax.tree.map(np.testing.assert_array_equal, once.shared.params, state.shared.params)
    assert float(metrics["loss"]) == 0
    twice, metrics = learn(agent, once, trajectory)
    assert float(metrics["loss"]) != 0
    assert first_moments(twice)


def test_the_warm_up_counts_the_frames_of_all_parts_of_a_batch():
    """Each part learns with the replay of its own environments (`updates_per_batch`)."""
    num_frames = int(begin(*agent_and_env("dqn"))[1].valid().sum())
    replay = dataclasses.replace(REPLAY, warmup=2 * num_frames)
    agent, env = agent_and_env("dqn", replay=replay)
    state, trajectory = begin(agent, env)
    one, _ = learn(agent, state, trajectory)
    other, metrics = learn(agent, LearnerState(one.shared, state.local), trajectory)
    assert float(metrics["loss"]) != 0
    assert first_moments(other)


@pytest.mark.parametrize("num_added", [2**29, 2**30 - 8])
def test_learning_goes_on_however_many_timesteps_there_have_been(num_added):
    """All environments together have more of them than an int32 counts."""
    agent, env = agent_and_env("sac")
    state, trajectory = begin(agent, env)
    state, _ = learn(agent, state, trajectory)
    added = state.local.num_added
    assert added.shape[0] * num_added >= 2**31
    local = dataclasses.replace(state.local, num_added=added * 0 + num_added)
    state, metrics = learn(agent, LearnerState(state.shared, local), trajectory)
    assert float(metrics["loss"]) != 0
    assert int(state.local.num_added[0]) < 2**30


def test_refuses_a_network_with_memory():
    with pytest.raises(ConfigError, match="needs a feed-forward network"):
        agent_and_env("dqn", network=MEMORY)


def test_refuses_rollouts_of_another_length_than_its_memories_have():
    state, trajectory = begin(*agent_and_env("r2d2"))
    agent = AGENTS["r2d2"].build(DISCRETE.spec, Context(rollout_length=3))
    with pytest.raises(ConfigError, match="rollout_length is 3, but a rollout has 8 steps"):
        agent.learn(state, trajectory, jax.random.key(0), None)


# --- what they learn from ------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("discount", "last", "returns", "bootstrap", "end", "mask"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], 1 + 0.5 * 2 + 0.25 * 3, 0.125, 3, 1),
        ([1, 1, 0, 1], [0, 0, 0, 0], 1 + 0.5 * 2, 0.0, 3, 1),
        ([1, 1, 1, 1], [0, 0, 1, 0], 1 + 0.5 * 2, 0.25, 2, 1),
        ([1, 1, 1, 1], [0, 1, 0, 0], 1.0, 0.5, 1, 1),
        ([1, 1, 1, 1], [1, 0, 0, 0], 0.0, 1.0, 0, 0),
    ],
    ids=["whole", "terminal", "late time-out", "early time-out", "at a time-out"],
)
def test_transitions_end_where_the_episode_does(discount, last, returns, bootstrap, end, mask):
    transition = off_policy.n_step_transition(sample_of([9, 1, 2, 3], discount, last), 0.5)
    assert float(transition.n_step_return[0]) == returns
    assert float(transition.bootstrap_discount[0]) == bootstrap
    assert float(transition.mask[0]) == mask
    if bootstrap and mask:
        assert float(transition.next_timestep.observation[0, 0]) == end
    assert float(transition.timestep.observation[0, 0]) == 0


def test_each_environment_has_an_epsilon_as_in_ape_x():
    epsilons = value_based.apex_epsilon(jnp.float32(0.4), 7.0, value_based.environment_ranks(8))
    np.testing.assert_allclose(epsilons, [0.4 ** (1 + 7 * i / 7) for i in range(8)], rtol=1e-5)
    alone = value_based.apex_epsilon(jnp.float32(0.4), 7.0, value_based.environment_ranks(1))
    assert alone.tolist() == [np.float32(0.4)]


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_changed_exponent_holds_for_what_environments_carry_already(name):
    """A population's selection changes the number, and keeps the carry."""
    old, _ = agent_and_env(name, epsilon=0.5, apex_alpha=0.0)
    new, _ = agent_and_env(name, epsilon=0.5, apex_alpha=30.0)
    params, actor = old.actor_params(fresh(old)), enter(old, DISCRETE)
    keys = jax.random.split(jax.random.key(0), (64, B))

    def actions(agent: Any, carry: Any) -> np.ndarray:
        act = jax.vmap(lambda keys: agent.act(params, carry, actor.timestep, keys, True)[0])
        return np.asarray(act(keys))

    changed = actions(new, actor.carry)
    np.testing.assert_array_equal(changed, actions(new, new.carry(B)))
    assert (changed[:, -1] == changed[0, -1]).all()  # greedy: epsilon is 0.5 to the power of 31
    assert (changed != actions(old, actor.carry)).any()


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_rank_has_another_path_than_the_exponent_of_older_checkpoints(name):
    """Both have one shape and dtype: at one path, a run would go on with other epsilons."""
    assert ".rank" in leaves_by_path(agent_and_env(name)[0].carry(B))


def test_epsilon_greedy_explores_as_often_as_it_says():
    values = jnp.tile(jnp.asarray([[0.0, 3.0, 1.0, 2.0]]), (40_000, 1))
    keys = jax.random.split(jax.random.key(0), 40_000)
    for epsilon in (0.0, 0.1, 1.0):
        action = epsilon_greedy(values, None, keys, jnp.full(40_000, epsilon))
        share = np.bincount(np.asarray(action), minlength=4) / 40_000
        expected = np.full(4, epsilon / 4) + (1 - epsilon) * np.eye(4)[1]
        np.testing.assert_allclose(share, expected, atol=0.01)


@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_epsilon_greedy_keeps_to_the_mask_however_bad_its_values_are(scale):
    values = jnp.tile(jnp.asarray([[0.0, -3.0, -1.0, -2.0]]) * scale, (4000, 1))
    mask = jnp.tile(jnp.asarray([False, True, False, True]), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)
    best, drawn = (epsilon_greedy(values, mask, keys, jnp.float32(e)) for e in (0.0, 1.0))
    assert set(np.asarray(best)) == {3}
    np.testing.assert_allclose(np.bincount(np.asarray(drawn)), [0, 2000, 0, 2000], atol=200)


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


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_epsilon_decays_with_the_frames(name):
    agent, env = agent_and_env(name, epsilon=Linear(1.0, 0.1, frames=4 * 8 * B))
    state, _ = begin(agent, env)
    epsilons = []
    for rollouts in range(6):
        counted = dataclasses.replace(state.shared, frames=jnp.uint32(rollouts * 8 * B))
        epsilons.append(float(agent.actor_params(LearnerState(counted)).epsilon))
    np.testing.assert_allclose(epsilons, [1.0, 0.775, 0.55, 0.325, 0.1, 0.1], rtol=1e-5)


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


def test_td3_moves_policy_and_targets_every_second_time():
    agent, env = agent_and_env("td3")
    state, trajectory = begin(agent, env)
    moved = []
    for _ in range(4):
        new, _ = learn(agent, state, trajectory)
        before, after = (
            (shared.params.actor, shared.target_params, shared.params.critics)
            for shared in (state.shared, new.shared)
        )
        equal = jax.tree.map(np.array_equal, before, after)
        moved.append([not all(jax.tree.leaves(part)) for part in equal])
        state = new
    assert moved == [[False, False, True], [True, True, True]] * 2


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
    return shared, dataclasses.replace(draw(state.local), weight=weight)


WITHOUT_NOISE = {"target_noise_std": 0.0, "policy_delay": 1, "optimizer": Optimizer(epsilon=0.01)}


@pytest.mark.parametrize("name", [pytest.param("td3-c51", marks=pytest.mark.slow), "sac-c51"])
def test_categorical_critics_learn_the_smaller_target_distribution(name):
    """One sample and one atom after another, by algorithm 1 of Bellemare et al. 2017."""
    agent, env = agent_and_env(name, **(WITHOUT_NOISE if name == "td3-c51" else {}))
    shared, transition = drawn(agent, env)
    mask = np.random.default_rng(1).integers(2, size=32).astype(np.float32)
    transition = dataclasses.replace(transition, mask=jnp.asarray(mask))
    agent, key = methods_of(agent), jax.random.key(5)
    networks = agent.networks
    next_obs, penalty = transition.next_timestep.observation, np.zeros(32)
    if name == "sac-c51":
        actor, targets = shared.params.actor, shared.target_params
        policy = agent.policy(actor, next_obs)
        next_action, log_prob = policy.sample(jax.random.split(key, (32,)))
        penalty = np.exp(actor.log_temperature) * np.asarray(log_prob)
    else:
        targets = shared.target_params.critics
        next_action = agent.policy(shared.target_params.actor, next_obs)
    probabilities = np.asarray(
        jax.nn.softmax(networks.q_outputs(targets, next_obs, next_action)), np.float64
    )
    observation, action = transition.timestep.observation, transition.action
    outputs = networks.q_outputs(shared.params.critics, observation, action)
    log_probabilities = np.asarray(jax.nn.log_softmax(outputs), np.float64)

    support, losses, chosen = np.linspace(-3.0, 2.0, 11), np.zeros((2, 32)), set()
    for n in range(32):
        smaller = int(np.argmin(probabilities[:, n] @ support))
        chosen.add(smaller)
        target = np.zeros(11)
        for atom, probability in zip(support, probabilities[smaller, n], strict=True):
            discount = float(transition.bootstrap_discount[n])
            value = float(transition.n_step_return[n]) + discount * (atom - penalty[n])
            position = (np.clip(value, -3.0, 2.0) + 3.0) / 0.5
            below = min(int(position), 9)
            target[below] += probability * (below + 1 - position)
            target[below + 1] += probability * (position - below)
        losses[:, n] = -log_probabilities[:, n] @ target
    assert chosen == {0, 1}

    loss, (metrics, priorities) = jax.jit(agent.critic_loss)(
        shared.params.critics, shared, transition, key
    )
    weight = np.asarray(transition.weight)
    np.testing.assert_allclose(loss.value, np.sum(mask * weight * losses.sum(0)) / mask.sum(), 1e-4)
    np.testing.assert_allclose(priorities, mask * losses.mean(0), rtol=1e-4)
    q = (np.exp(log_probabilities) @ support)[:, mask > 0]
    np.testing.assert_allclose(metrics["q"].value, np.mean(q), 1e-4)


@pytest.mark.slow
def test_two_devices_update_as_one_does():
    """A fresh learner with all settings of FastTD3, but for noise, which each shard draws."""
    agent, env = agent_and_env("td3-c51", **WITHOUT_NOISE)
    shared, transition = drawn(agent, env)

    def update(devices):
        return jax.jit(
            jax.shard_map(
                lambda *args: methods_of(agent).update(*args, jax.random.key(0), DATA)[::2],
                mesh=make_mesh(find_devices(devices)),
                in_specs=(REPLICATED, SHARDED),
                out_specs=(REPLICATED, SHARDED),
                check_vma=False,
            )
        )(shared, transition)

    close(update(2), update(1), atol=1e-6)


@pytest.mark.slow
def test_matrices_decay_and_nothing_else_does():
    """Without a gradient Adam moves nothing, so what is left is the decay, before the rate."""
    settings = dataclasses.replace(AGENTS["sac"], weight_decay=0.5)
    agent = built(settings, BOXED)
    shared = jax.eval_shape(lambda: fresh(agent)).shared
    params = jax.tree.map(lambda x: jnp.full(x.shape, 3.0), shared.params)
    optimizer = methods_of(agent).learner.optimizer.optimizer
    for part in params:
        updates, _ = optimizer.update(
            jax.tree.map(jnp.zeros_like, part), optimizer.init(part), part
        )
        for update in jax.tree.leaves(updates):
            np.testing.assert_array_equal(update, 1.5 if update.ndim > 1 else 0.0)
    assert params.actor.log_temperature.shape == ()

    stacked = TorsoNetwork(ResNet(channels=(4,), blocks=3, hidden=8, layer_norm=True))
    spec = EnvironmentSpec("images", ArraySpec((4, 4, 1), jnp.uint8), BOX)
    agent = methods_of(dataclasses.replace(settings, network=stacked).build(spec))
    critic = agent.networks.init(jax.random.key(0), 1)[1][0]
    zeros = jax.tree.map(jnp.zeros_like, critic)
    updates, _ = optimizer.update(zeros, optimizer.init(critic), critic)
    decayed = {path[-1].name for path, x in jax.tree.leaves_with_path(updates) if x.any()}
    assert decayed == {"weight"}
    with pytest.raises(ConfigError, match="weight_decay must be at least 0"):
        check_ranges(dataclasses.replace(settings, weight_decay=-0.1), "agent")


@pytest.mark.slow
def test_fast_td3_is_that_of_its_paper():
    """Settings of its code for MuJoCo Playground, but for the range of returns and the network."""
    experiment = recipes.find("pendulum_fast_td3")
    agent, replay = experiment.agent, experiment.agent.replay
    assert (experiment.driver.num_envs, replay.batch_size) == (1024, 32_768)
    assert agent.return_distribution == Atoms(-250.0, 250.0, 101)
    assert (agent.weight_decay, agent.target_update_rate, agent.discount) == (0.1, 0.1, 0.97)
    assert (agent.num_critics, agent.policy_delay, agent.normalize_observations) == (2, 2, True)
    check_agent(blueprint(agent, BOXED.spec, 1), num_envs=1024)


@pytest.mark.parametrize("name", [pytest.param("ddpg", marks=pytest.mark.slow), "sac"])
def test_the_policy_follows_the_updated_critics(name):
    """Its gradient is that of its loss under the critics that this update leaves, and they move
    first: a policy updated by the old critics would be another."""
    agent, env = agent_and_env(name, random_frames=0)
    shared, transition = drawn(agent, env)
    key = jax.random.key(5)
    agent = methods_of(agent)
    new, _, _ = jax.jit(agent.update, static_argnums=3)(shared, transition, key, None)
    actor_key = (jax.random.split(key)[1],) if name == "sac" else ()

    @jax.jit
    def gradient(critics):
        params = shared.params._replace(critics=critics)
        at = dataclasses.replace(shared, params=params)
        arguments = (params.actor, at, transition, *actor_key)
        return global_grad(agent.actor_loss, *arguments, axis=None)[0]

    moment = jax.tree.map(lambda x: 10 * x, new.optimizer_states.actor.mu)
    close(moment, gradient(new.params.critics), atol=1e-6)
    with pytest.raises(AssertionError):
        close(moment, gradient(shared.params.critics), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "begins_randomly"),
    [
        ("ddpg", True),
        ("sac", False),
        pytest.param("ddpg", False, marks=pytest.mark.slow),
        pytest.param("sac", True, marks=pytest.mark.slow),
    ],
)
def test_only_the_first_frames_are_random(name, begins_randomly):
    """And none where `random_frames` is 0."""
    agent, env = agent_and_env(name, random_frames=int(begins_randomly))
    state, trajectory = begin(agent, env)
    timestep, keys = enter(agent, env).timestep, jax.random.split(jax.random.key(0), B)
    policy = dataclasses.replace(state.shared, frames=jnp.uint32(10**6))

    def act(shared):
        params = agent.actor_params(LearnerState(shared))
        return np.asarray(agent.act(params, (), timestep, keys, True)[0])

    assert (act(state.shared) == act(policy)).all() != begins_randomly
    shared = learn(agent, state, trajectory)[0].shared
    assert int(shared.frames) == trajectory.valid().sum()
    learned = dataclasses.replace(shared, frames=jnp.uint32(10**6))
    np.testing.assert_array_equal(act(shared), act(learned))


@pytest.mark.slow
def test_sac_stops_where_its_learning_rate_ends():
    """After the frames of one rollout, temperature included."""
    num_frames = int(begin(*agent_and_env("sac"))[1].valid().sum())
    agent, env = agent_and_env("sac", learning_rate=Linear(1e-3, 0.0, frames=num_frames))
    state, trajectory = begin(agent, env)
    once, _ = learn(agent, state, trajectory)
    twice, _ = learn(agent, once, trajectory)
    before, after, later = (jax.tree.leaves(x.shared.params) for x in (state, once, twice))
    assert not any(map(np.array_equal, before, after))
    assert all(map(np.array_equal, after, later))


@pytest.mark.parametrize(
    ("target", "sign"), [(-50.0, -1), pytest.param(50.0, 1, marks=pytest.mark.slow)]
)
def test_sac_pays_for_entropy_until_there_is_as_much_as_wanted(target, sign):
    """The temperature falls while the entropy is above the target, and rises below it."""
    agent, env = agent_and_env("sac", target_entropy=target)
    state, trajectory = begin(agent, env)
    new, _ = learn(agent, state, trajectory)
    before, after = (x.shared.params.actor.log_temperature for x in (state, new))
    change = after - before
    assert np.sign(change) == sign


@pytest.mark.slow
def test_stored_memories_are_those_of_acting():
    """R2D2's values from a stored memory are those that acting had."""
    agent, env = agent_and_env("r2d2")
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
    agent, _ = agent_and_env("r2d2", burn_in_length=0)
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


# --- MuZero --------------------------------------------------------------------------------------


def test_search_finds_the_better_action_of_a_model_that_is_known(monkeypatch):
    """Where the model says that action 2 is worth most, the search chooses it and says so."""
    agent, env = agent_and_env("muzero", num_simulations=16)

    def dynamics(self, params, state, action):
        reward = jax.nn.one_hot(jnp.where(action == 2, 8, 5), 11) * 50.0
        return state, reward

    monkeypatch.setattr(Model, "dynamics", dynamics)
    params, timestep = agent.actor_params(fresh(agent)), enter(agent, env).timestep
    keys = jax.random.split(jax.random.key(0), B)
    act = jax.jit(agent.act, static_argnums=4)
    action, extras, _ = act(params, (), timestep, keys, False)
    assert (np.asarray(action) == 2).all()
    assert (np.asarray(extras["policy"]).argmax(-1) == 2).all()
    np.testing.assert_allclose(extras["policy"].sum(-1), 1.0, rtol=1e-5)


def test_what_comes_after_an_end_is_nothing_and_after_a_cut_unknown():
    """Of samples that end, only what is known teaches: other rewards, actions and policies after
    an end or a cut change no gradient."""
    agent, _ = agent_and_env("muzero", n_step=1, unroll_steps=3)
    state = jax.jit(fresh, static_argnums=0)(agent)
    loss = jax.jit(partial(global_grad, methods_of(agent).loss, axis=None))

    def sample(discount, last, reward, policy):
        drawn = sample_of(reward, discount, last)
        steps = drawn.trajectory.steps
        extras = {"policy": jnp.asarray(policy)[:-1, None], "value": jnp.zeros((5, 1))}
        steps = dataclasses.replace(steps, extras=extras)
        trajectory = dataclasses.replace(drawn.trajectory, steps=steps)
        return dataclasses.replace(drawn, trajectory=trajectory)

    def gradient(*about):
        params, target_params = state.shared.params, state.shared.target_params
        return loss(params, target_params, sample(*about), jax.random.key(0))[0]

    policy = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 0]]
    other = np.eye(3, dtype=np.float32)[[0, 1, 0, 1, 2, 0]]
    rewards, others = [9, 1.0, 2.0, 3.0, 4.0, 5.0], [9, 1.0, 2.0, -3.0, -4.0, 5.0]
    for discount, last in (([1, 1, 0, 1, 1, 1], [0] * 6), ([1] * 6, [0, 0, 1, 0, 0, 0])):
        ended = discount[2] == 0
        changed = other if ended else np.where(np.arange(6)[:, None] >= 2, other, policy)
        close(gradient(discount, last, rewards, policy), gradient(discount, last, others, changed))
    quiet = [1] * 6, [0] * 6
    with pytest.raises(AssertionError):
        close(gradient(*quiet, rewards, policy), gradient(*quiet, others, other))
    for discount in (0, 1):
        grads = gradient([discount, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], rewards, policy)
        assert optax.tree.norm(grads) == 0


@pytest.mark.parametrize(
    "bootstrap", ["search", pytest.param("target_network", marks=pytest.mark.slow)]
)
def test_value_targets_bootstrap_from_the_search_or_the_target_network(bootstrap):
    """Rewards 1, 2, 4, ...: the targets of the first two timesteps by hand, n = 2, K = 1."""
    agent, _ = agent_and_env("muzero", n_step=2, unroll_steps=1, discount=0.5, bootstrap=bootstrap)
    methods = methods_of(agent)
    length = methods.buffer.length
    assert length == (5 if bootstrap == "search" else 4)
    drawn = sample_of([9, 1, 2, 4, 8][:length], [1] * length, [0] * length).trajectory
    searched = 10 * jnp.arange(1.0, length)[:, None]
    steps = dataclasses.replace(drawn.steps, extras={"value": searched})
    params = jax.jit(fresh, static_argnums=0)(agent).shared.params
    got = jax.jit(methods.value_targets)(params, dataclasses.replace(drawn, steps=steps))
    observation = drawn.timesteps().observation
    network = jax.jit(jax.vmap(partial(methods.model.value, params)))(observation)
    values = searched if bootstrap == "search" else network
    expected = [1 + 0.5 * 2 + 0.25 * values[2], 2 + 0.5 * 4 + 0.25 * values[3]]
    close(got, jnp.stack(expected))
