"""SAC and TD3 with memory: their losses, one step at a time, and what they see."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import blueprint
from walk import (
    BOX,
    B,
    Walk,
    advance,
    begin,
    built,
    close,
    enter,
    fresh,
    learn,
    methods_of,
    network,
    slow,
)

from podracer.agent import Context, with_last_action
from podracer.agents.common import recurrent
from podracer.agents.common.recurrent import Recurrence
from podracer.agents.ddpg import td3
from podracer.agents.sac import SAC
from podracer.checks import check_agent
from podracer.environment import auto_reset
from podracer.errors import ConfigError
from podracer.networks import LAST_STEP, MLP, TorsoNetwork
from podracer.replay import Replay

ENV = auto_reset(Walk(BOX))
COMMON = {
    "network": TorsoNetwork(MLP((8,), "tanh"), memory="gru", memory_size=5),
    "replay": Replay(B * 40, batch_size=24, warmup=0),
    "random_frames": 0,
    "n_step": 2,
    "recurrence": Recurrence(burn_in_length=2, unroll_length=5, head_size=6),
}
SETTINGS = {
    "sac": SAC(**COMMON),
    "td3": td3(**COMMON, policy_delay=1),
    "sac-lstm": SAC(
        **COMMON | {"network": dataclasses.replace(COMMON["network"], memory="lstm")},
        normalize_observations=True,
    ),
    "sac-gtrxl": SAC(
        **COMMON
        | {
            "network": dataclasses.replace(
                COMMON["network"], memory="gtrxl", memory_heads=1, memory_window=4
            )
        }
    ),
}
AGENTS = {name: built(settings, ENV) for name, settings in SETTINGS.items()}
GAMMA = 0.99


def sequences(agent, num=3):
    """A fresh learner's state, and replayed sequences with importance weights."""
    state, trajectory = begin(agent, ENV)
    buffer = methods_of(agent).learner.buffer

    @jax.jit
    def draw(replay):
        for _ in range(2):
            replay = buffer.add(replay, trajectory.steps, trajectory.carry)
        return buffer.sample(replay, jax.random.key(0), num)

    sample = draw(state.local)
    weights = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1.0, num), jnp.float32)
    sample = dataclasses.replace(sample, weights=weights)
    timesteps = sample.trajectory.timesteps()
    assert timesteps.first[1:].any()
    assert (timesteps.discount == 0).any()
    assert not sample.trajectory.valid().all()
    return state.shared, sample


@functools.cache
def _step(network):
    return jax.jit(network.apply)


@functools.cache
def _value(networks):
    return jax.jit(networks.q_values)


class Steps:
    """Sequences, one timestep of one of them after another, as plain numbers."""

    def __init__(self, agent, sample):
        self.networks, self.trajectory = agent.networks, sample.trajectory
        self.timesteps = jax.tree.map(np.asarray, sample.trajectory.timesteps())
        self.num = sample.rows.size
        settings = agent.settings.recurrence
        self.n_step = agent.settings.n_step
        self.learned = range(
            settings.burn_in_length, settings.burn_in_length + settings.unroll_length
        )

    def outputs(self, network, params, head, memory):
        """Outputs `[N, n]` of a head at each timestep, None during the burn-in."""
        step, about, results = _step(network), self.timesteps, []
        empty, acted = network.carry(self.num), self.trajectory.carry.last_action
        low, high = (np.array([x]) for x in (BOX.low, BOX.high))
        for t in range(len(about.reward)):
            first = about.first[t]
            memory = jax.tree.map(partial(jnp.where, first[:, None]), empty, memory)
            if t == self.learned[0]:
                memory = jax.lax.stop_gradient(memory)
            last_action = np.asarray(self.trajectory.steps.action[t - 1] if t else acted)
            action = 2 * (last_action - low) / (high - low) - 1
            last_step = {
                "action": np.where(first[:, None], 0, action).astype(np.float32),
                "reward": np.where(first, 0, np.tanh(about.reward[t])),
            }
            inputs = {"observation": about.observation[t], LAST_STEP: last_step}
            inputs = jax.tree.map(lambda x: x[None], inputs)
            heads, memory = step(params, memory, inputs, np.zeros((1, self.num), bool))
            results.append(heads[head][0] if t >= self.learned[0] else None)
        return results

    def policy(self, params):
        memory = self.trajectory.carry.memory
        return self.outputs(self.networks.actor, params, "action", memory)

    def histories(self, params):
        """By critic and timestep."""
        history = self.networks.history
        empty = history.carry(self.num)
        return [self.outputs(history, p["history"], "history", empty) for p in params]

    def q(self, params, histories, n, t, action):
        """Values of the critics for an action `[1, size]`."""
        return [
            _value(self.networks)((p["value"],), each[t][n : n + 1], action)[0, 0]
            for p, each in zip(params, histories, strict=True)
        ]

    def transitions(self):
        """Yield index, sequence, timestep, mask, return, discount and next timestep of each."""
        about, n_step = self.timesteps, self.n_step
        for u, t in enumerate(self.learned):
            for n in range(self.num):
                total, discount, k = 0.0, 1.0, 0
                while k < n_step and not self.trajectory.steps.timestep.last[t + k, n]:
                    total += discount * about.reward[t + k + 1, n]
                    discount *= GAMMA * about.discount[t + k + 1, n]
                    k += 1
                yield u * self.num + n, n, t, float(k > 0), total, discount, t + k


def next_values(agent, shared, steps, key):
    """A function of index, sequence and next timestep -> what a target bootstraps from."""
    count = agent.settings.recurrence.unroll_length * steps.num
    if isinstance(agent.settings, SAC):
        outputs, histories = (
            steps.policy(shared.params.actor.policy), steps.histories(shared.target_params)
        )  # fmt: skip
        keys, alpha = jax.random.split(key, count), jnp.exp(shared.params.actor.log_temperature)

        def value(i, n, t):
            action, log_prob = agent.describe(outputs[t][n : n + 1]).sample(keys[i : i + 1])
            q = steps.q(shared.target_params, histories, n, t, action)
            return min(q) - alpha * log_prob[0]

        return value
    target = shared.target_params
    outputs, histories = steps.policy(target.actor), steps.histories(target.critics)
    noise = jnp.clip(0.2 * jax.random.normal(key, (count, BOX.size)), -0.5, 0.5)

    def value(i, n, t):
        action = jnp.clip(jnp.tanh(outputs[t][n : n + 1]) + noise[i : i + 1], -1, 1)
        return min(steps.q(target.critics, histories, n, t, action))

    return value


def critic_loss(critics, agent, shared, sample, key):
    """The loss, and absolute errors by timestep and sequence."""
    steps = Steps(agent, sample)
    bootstrap, histories = next_values(agent, shared, steps, key), steps.histories(critics)
    action = jnp.asarray(sample.trajectory.steps.action - np.array([[BOX.low]]) - 1, jnp.float32)
    losses, errors, masks = [], [], []
    for i, n, t, mask, total, discount, next_t in steps.transitions():
        target = jax.lax.stop_gradient(total + discount * bootstrap(i, n, next_t))
        error = [target - q for q in steps.q(critics, histories, n, t, action[t, n][None])]
        losses.append(mask * sample.weights[n] * sum(0.5 * e**2 for e in error))
        errors.append(mask * sum(map(abs, error)) / len(error))
        masks.append(mask)
    return sum(losses) / sum(masks), jnp.stack(errors).reshape(-1, steps.num)


def actor_loss(actor, agent, shared, sample, key):
    steps, critics = Steps(agent, sample), shared.params.critics
    is_sac = isinstance(agent.settings, SAC)
    outputs = steps.policy(actor.policy if is_sac else actor)
    histories, losses, masks = steps.histories(critics), [], []
    keys = jax.random.split(key, len(steps.learned) * steps.num)
    for i, n, t, mask, *_ in steps.transitions():
        masks.append(mask)
        if not is_sac:
            losses.append(
                -mask * steps.q(critics, histories, n, t, jnp.tanh(outputs[t][n : n + 1]))[0]
            )
            continue
        action, log_prob = agent.describe(outputs[t][n : n + 1]).sample(keys[i : i + 1])
        alpha = jnp.exp(jax.lax.stop_gradient(actor.log_temperature))
        policy_loss = alpha * log_prob[0] - min(steps.q(critics, histories, n, t, action))
        excess = jax.lax.stop_gradient(-log_prob[0]) - agent.settings.target_entropy * BOX.size
        losses.append(mask * (policy_loss + actor.log_temperature * excess))
    return sum(losses) / sum(masks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_losses_are_those_of_single_steps(name):
    """One timestep of one sequence after another: stored and empty memories, the burn-in without a
    gradient, ends of both kinds within a sequence."""
    agent, key = AGENTS[name], jax.random.key(5)
    shared, sample = sequences(agent)
    agent = methods_of(agent)
    # Other than the targets are, and with a policy that differs from state to state.
    params = jax.tree.map(lambda x: 1.1 * x + 0.01, shared.params)
    shared = dataclasses.replace(shared, params=params)
    transition = jax.jit(agent.learner.transition)(sample, None)

    for part, loss, slow_loss, keys in (
        ("critics", agent.critic_loss, critic_loss, (key,)),
        ("actor", agent.actor_loss, actor_loss, (key,) if name == "sac" else ()),
    ):

        def mean(*args, loss=loss):
            value, aux = loss(*args)
            return value.value, aux

        fast = jax.jit(jax.value_and_grad(mean, has_aux=True))
        (value, aux), gradient = fast(getattr(params, part), shared, transition, *keys)
        slow = jax.value_and_grad(slow_loss, has_aux=part == "critics")
        expected, slow_gradient = slow(getattr(params, part), agent, shared, sample, key)
        if part == "critics":
            expected, errors = expected
            close(aux[1].reshape(errors.shape), errors, 1e-5)
        close(value, expected, 1e-5)
        close(gradient, slow_gradient, 1e-6, 1e-3)
        sizes = [float(np.abs(x).max()) for x in jax.tree.leaves(slow_gradient)]
        assert min(sizes) > 1e-5, sizes


@pytest.mark.parametrize("name", ["sac", *map(slow, ["td3", "sac-lstm", "sac-gtrxl"])])
def test_they_keep_the_contract(name):
    check_agent(blueprint(SETTINGS[name], ENV.spec), num_envs=4)
    state, trajectory = begin(AGENTS[name], ENV)
    agent = SETTINGS[name].build(ENV.spec, Context(rollout_length=3))
    with pytest.raises(ConfigError, match="rollout_length is 3, but a rollout has 8 steps"):
        agent.learn(state, trajectory, jax.random.key(0), None)


@pytest.mark.parametrize("memory", ["gru", "lstm", "gtrxl"])
def test_critics_remember_only_where_the_policy_does(memory):
    settings = SAC(network=network(), critic_network=network(memory))
    with pytest.raises(ConfigError, match="the critics' network has a memory, but the policy's"):
        settings.build(ENV.spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_every_parameter_receives_a_gradient(name):
    state, trajectory = begin(AGENTS[name], ENV)
    first, _ = learn(AGENTS[name], state, trajectory)
    assert not any(x.any() for x in jax.tree.leaves(first.shared.optimizer_states.critics.mu))
    moved, _ = learn(AGENTS[name], first, trajectory)  # sequences are longer than a rollout
    moments = [part.mu for part in moved.shared.optimizer_states]
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(moments))


@pytest.mark.parametrize("name", ["sac", slow("sac-lstm"), slow("sac-gtrxl")])
def test_stored_memories_are_those_of_acting(name):
    """The policy's outputs for a sequence, from the memory with it, are those it acted by."""
    settings = dataclasses.replace(
        SETTINGS[name], recurrence=Recurrence(0, 6, head_size=6), normalize_observations=False
    )
    agent = built(settings, ENV)
    networks, learner = methods_of(agent).networks, methods_of(agent).learner
    state = fresh(agent)
    # A policy whose actions differ from step to step.
    actor = jax.tree.map(lambda x: 3 * x, state.shared.params.actor)
    params = dataclasses.replace(agent.actor_params(state), actor=actor)
    begun, _ = advance(agent, ENV, params, enter(agent, ENV), 1)
    _, trajectory = advance(agent, ENV, params, begun, 2)
    assert np.abs(jax.tree.leaves(trajectory.carry.memory)[0]).max() > 0.01
    assert np.asarray(trajectory.carry.last_action).any()

    @jax.jit
    def policy_outputs(replay):
        replay = learner.buffer.add(replay, trajectory.steps, trajectory.carry)
        sample = learner.buffer.sample(replay, jax.random.key(0), 8)
        history = learner.transition(sample, None).timestep.observation
        return networks.policy(actor.policy, history), sample.rows

    got, rows = policy_outputs(state.local)

    carry, outputs = begun.carry, []
    step = jax.jit(networks.policy_step)
    for t in range(6):
        timestep, action = (
            jax.tree.map(lambda x, t=t: x[t], x)
            for x in (trajectory.steps.timestep, trajectory.steps.action)
        )
        output, carry = step(actor.policy, carry, timestep)
        carry = with_last_action(carry, action)
        outputs.append(output)
    close(got.reshape(6, 8, -1), jnp.stack(outputs)[:, rows], 1e-5)


def test_the_last_step_is_seen_within_an_episode_only():
    agent = AGENTS["sac"]
    _, trajectory = begin(agent, ENV)
    timesteps, actions = trajectory.steps.timestep, trajectory.steps.action
    seen = methods_of(agent).networks.recurrent_inputs(timesteps, actions)[LAST_STEP]
    first = np.asarray(timesteps.first)
    seen = jax.tree.map(np.asarray, seen)
    assert not seen["action"][first].any()
    assert not seen["reward"][first].any()
    np.testing.assert_allclose(
        seen["reward"][~first], np.tanh(np.asarray(timesteps.reward)[~first]), 1e-6
    )
    middle = (np.array(BOX.low) + np.array(BOX.high)) / 2  # of ranges of 2
    expected = np.asarray(actions)[~first] - middle[None]
    np.testing.assert_allclose(seen["action"][~first], expected, atol=1e-6)


def test_priorities_of_sequences():
    errors, mask = jnp.array([[1.0, 0.0], [3.0, 2.0], [0.0, 0.0]]), jnp.ones((3, 2)).at[2].set(0)
    got = recurrent.sequence_priorities(errors, mask)
    np.testing.assert_allclose(got, [0.9 * 3 + 0.1 * 2, 0.9 * 2 + 0.1 * 1], rtol=1e-6)
