"""The algebra of episodes: a rollout that crosses their ends, against each episode by hand.

A scripted environment plays a fixed list of episodes; everything expected is computed in numpy
from those episodes one at a time, which know nothing of rollouts, masks or restarts.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agent import Agent
from podracer.drivers.progress import reduce_metrics, to_progress
from podracer.fields import struct
from podracer.ops.returns import generalized_advantages, lambda_returns
from podracer.rollout import (
    ActorState,
    Purpose,
    environment_keys,
    init_actor,
    purpose_key,
    rollout,
    update_episode_stats,
    zero_episode_stats,
)
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep, Trajectory

DISCOUNT = 0.9
# (transitions, how it ends); environment b starts at episode b and goes round.
SCRIPT = (
    (3, "terminal"),
    (4, "timeout"),
    (1, "terminal"),
    (1, "timeout"),
    (1, "timeout"),
    (2, "terminal"),
    (5, "timeout"),
)
LENGTHS = jnp.array([length for length, _ in SCRIPT])
TERMINAL = jnp.array([kind == "terminal" for _, kind in SCRIPT])
B, T = len(SCRIPT), 8


def value_of(episode, time):
    """What the agent thinks of a state: arbitrary."""
    return ((37 * episode + 17 * time + 5) % 23) / 10 - 1


def reward_of(episode, time, action):
    """For the action taken at `time`."""
    return ((29 * episode + 13 * time) % 19) / 10 - 1 + 0.5 * action


@struct
class ScriptState:
    episode: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Observation [episode, time]; the first episode is the one that the reset key's seed names."""

    spec = EnvironmentSpec("scripted", ArraySpec((2,)), Discrete(2))

    def reset(self, key: jax.Array) -> tuple[ScriptState, TimeStep]:
        state = ScriptState(jax.random.key_data(key)[-1].astype(jnp.int32), jnp.int32(0))
        return state, self._show(state, 0.0, first=True)

    def step(self, key: jax.Array, state: ScriptState, action: jax.Array) -> Any:
        episode, time = state.episode, state.time
        timed_out = time == LENGTHS[episode]
        reward = jnp.where(timed_out, 0.0, reward_of(episode, time, action))
        terminal = (time + 1 == LENGTHS[episode]) & TERMINAL[episode]
        restarts = timed_out | terminal
        state = ScriptState(
            jnp.where(restarts, (episode + 1) % B, episode), jnp.where(restarts, 0, time + 1)
        )
        last = ~restarts & (state.time == LENGTHS[episode])
        return state, self._show(state, reward, first=restarts, last=last, terminal=terminal)

    def _show(self, state, reward, first, last=False, terminal=False) -> TimeStep:
        return TimeStep(
            observation=jnp.stack([state.episode, state.time]).astype(jnp.float32),
            reward=jnp.float32(reward),
            discount=1.0 - jnp.float32(terminal),
            first=jnp.bool_(first),
            last=jnp.bool_(last),
        )


def act(params, carry, timestep, keys, explore):
    count = jnp.where(timestep.first, 0, carry)
    action = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys)
    value = value_of(*timestep.observation.T)
    return action, {"value": value, "count": count}, count + 1


def no_learner(*args):
    raise NotImplementedError("a rollout does not learn")


# Random actions, values by `value_of`; its memory counts the steps since an episode began.
ACTOR = Agent(
    name="actor",
    spec=Scripted.spec,
    init=no_learner,
    act=act,
    learn=no_learner,
    carry=lambda num_envs: jnp.zeros(num_envs, jnp.int32),
)


class Expected(NamedTuple):
    """What one environment's rollout should hold, a row for each transition."""

    observation: np.ndarray
    valid: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray


def begin() -> ActorState:
    seeds = jnp.arange(B, dtype=jnp.uint32)
    keys = jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(seeds), seeds], axis=-1))
    return init_actor(ACTOR, Scripted(), keys)


@jax.jit
def play(actor: ActorState, start: jax.Array) -> tuple[ActorState, Trajectory]:
    """A rollout of T steps from global step `start`."""
    key, steps = jax.random.key(0), start + jnp.arange(T, dtype=jnp.uint32)
    indices = jnp.arange(B, dtype=jnp.uint32)
    keys = [
        environment_keys(purpose_key(key, p), indices, steps) for p in (Purpose.ACT, Purpose.STEP)
    ]
    return rollout(ACTOR, Scripted(), (), actor, *keys)


def rollouts(count: int) -> list[Trajectory]:
    actor, made = begin(), []
    for i in range(count):
        actor, trajectory = play(actor, jnp.uint32(i * T))
        made.append(jax.device_get(trajectory))
    return made


def episode_advantages(
    rewards: list[float], values: list[float], terminal: bool, lambda_: float
) -> list[float]:
    """GAE by its definition, within an episode whose state after n rewards has `values[n]`."""
    values = [*values[:-1], 0.0 if terminal else values[-1]]
    deltas = [r + DISCOUNT * values[i + 1] - values[i] for i, r in enumerate(rewards)]
    return [
        sum((DISCOUNT * lambda_) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def by_hand(actions: np.ndarray, episode: int, time: int, lambda_: float) -> Expected:
    """Play the script one episode after the other for as many actions as there are."""
    rows: list[tuple] = []
    while len(rows) < T:
        length, kind = SCRIPT[episode]
        start, played = time, actions[len(rows) : len(rows) + length - time]
        rewards = [reward_of(episode, start + i, a) for i, a in enumerate(played)]
        values = [value_of(episode, start + i) for i in range(len(rewards) + 1)]
        complete = start + len(rewards) == length
        advantages = episode_advantages(rewards, values, complete and kind == "terminal", lambda_)
        rows += [
            ((episode, start + i), True, reward, advantage)
            for i, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True))
        ]
        if kind == "timeout" and len(rows) < T:
            rows.append(((episode, length), False, 0.0, 0.0))
        episode, time = (episode + 1) % B, 0
    return Expected(*(np.array(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_advantages_across_boundaries_equal_those_of_single_episodes(lambda_):
    """Also from the middle of an episode, and from a time-out's own step."""
    beginnings = set()
    for trajectory in rollouts(3):
        observation = trajectory.steps.timestep.observation
        after, valid = trajectory.next_timesteps(), jnp.asarray(trajectory.valid())
        last = value_of(*trajectory.final.observation.T)
        values = jnp.concatenate([trajectory.steps.extras["value"], last[None]])
        args = (values[:-1], values[1:], after.reward, DISCOUNT * after.discount, valid, lambda_)
        advantages, returns = generalized_advantages(*args), lambda_returns(*args)
        for b in range(B):
            episode, time = (int(x) for x in observation[0, b])
            beginnings.add((time == 0, bool(valid[0, b])))
            expected = by_hand(trajectory.steps.action[:, b], episode, time, lambda_)
            np.testing.assert_array_equal(observation[:, b], expected.observation)
            np.testing.assert_array_equal(valid[:, b], expected.valid)
            np.testing.assert_allclose(after.reward[:, b], expected.reward, atol=1e-5)
            np.testing.assert_allclose(advantages[:, b], expected.advantage, atol=1e-5)
            targets = values[:-1, b] + expected.advantage
            np.testing.assert_allclose(returns[:, b], targets, atol=1e-5)
    assert beginnings == {(True, True), (False, True), (False, False)}


def test_timesteps_follow_each_other_and_rollouts_too():
    first, second = rollouts(2)
    timesteps = first.timesteps()
    assert timesteps.reward.shape == (T + 1, B)
    np.testing.assert_array_equal(first.next_timesteps().reward, timesteps.reward[1:])
    assert first.next_timesteps().observation == ()
    beginning = jax.tree.map(lambda x: x[0], second.steps.timestep)
    jax.tree.map(np.testing.assert_array_equal, first.final, beginning)
    np.testing.assert_array_equal(first.final_carry, second.carry)


def test_memory_is_what_the_agent_left():
    """`carry` belongs to the first step; a counting memory shows where every episode began."""
    for trajectory in rollouts(3):
        observation = trajectory.steps.timestep.observation
        np.testing.assert_array_equal(trajectory.steps.extras["count"], observation[..., 1])
        counted = np.where(trajectory.final.first, 0, trajectory.final_carry)
        np.testing.assert_array_equal(counted, trajectory.final.observation[:, 1])


def test_episode_statistics_equal_those_of_the_episodes():
    actor, trajectories = begin(), []
    for i in range(3):
        actor, trajectory = play(actor, jnp.uint32(i * T))
        trajectories.append(jax.device_get(trajectory))
    for b in range(B):
        returns, lengths, total, length = [], [], 0.0, 0
        for trajectory in trajectories:
            rows = trajectory.steps.timestep.observation[:, b].astype(int)
            for (episode, time), action in zip(rows, trajectory.steps.action[:, b], strict=True):
                if time == SCRIPT[episode][0]:
                    continue
                total, length = total + reward_of(episode, time, action), length + 1
                if length == SCRIPT[episode][0]:
                    returns, lengths = [*returns, total], [*lengths, length]
                    total, length = 0.0, 0
        got = jax.tree.map(lambda x, b=b: x[b], actor.episodes)
        assert (got.count, got.total_length) == (len(returns), sum(lengths))
        assert got.running_length == length
        np.testing.assert_allclose(got.total_return, sum(returns), atol=1e-4)
        np.testing.assert_allclose(got.running_return, total, atol=1e-4)


def test_keys_depend_on_the_environment_and_the_step_alone():
    key = purpose_key(jax.random.key(0), Purpose.ACT)

    def bits(indices, steps):
        keys = environment_keys(key, jnp.asarray(indices, jnp.uint32), jnp.asarray(steps))
        return np.asarray(jax.random.key_data(keys))

    whole = bits(range(6), np.arange(5, dtype=np.uint32))
    assert whole.shape == (5, 6, 2)
    assert len(np.unique(whole.reshape(-1, 2), axis=0)) == 30
    np.testing.assert_array_equal(bits([4, 5], np.array([3], np.uint32)), whole[3:4, 4:])


def test_purposes_never_share_a_key():
    run = jax.random.key(0)
    keys = {tuple(np.asarray(jax.random.key_data(purpose_key(run, p)))) for p in Purpose}
    assert len(keys) == len(Purpose)


def test_lengths_of_many_long_episodes_do_not_overflow():
    """131,072 environments whose episodes of 20,000 steps all end in one chunk."""
    episodes = zero_episode_stats(2**17)
    episodes = dataclasses.replace(
        episodes, count=episodes.count + 1, total_length=episodes.total_length + 20_000
    )
    sums = {"frames": jnp.int32(0)}
    values = reduce_metrics(episodes, jnp.zeros(2, jnp.uint32), sums, 1, jnp.int32(0), None)
    assert to_progress(1, values, Scripted.spec, ()).metrics["episode_length"] == 20_000


@pytest.mark.parametrize(("steps", "reward"), [(1_000_000, 0.1), (20_000_000, 1.0)])
def test_returns_of_long_episodes_are_exact(steps, reward):
    """Plain float32 sums stop at 16,777,216."""

    def timestep(last, reward):
        return TimeStep(
            observation=jnp.zeros((1, 1)),
            reward=jnp.full(1, reward, jnp.float32),
            discount=jnp.ones(1),
            first=jnp.zeros(1, bool),
            last=jnp.full(1, last),
        )

    def step(last, _, episodes):
        return update_episode_stats(episodes, timestep(False, 0.0), timestep(last, reward))

    @jax.jit
    def run():
        body = partial(step, False)
        return jax.lax.fori_loop(0, steps - 1, body, zero_episode_stats(1))

    expected = (steps - 1) * float(np.float32(reward))
    running = run()
    np.testing.assert_allclose(running.running_return, expected, rtol=1e-7)
    assert (running.running_length, running.count) == (steps - 1, 0)
    ended = step(True, 0, running)
    np.testing.assert_allclose(ended.total_return, steps * float(np.float32(reward)), rtol=1e-7)
    assert (ended.running_return, ended.running_error) == (0, 0)
    assert (ended.total_length, ended.count) == (steps, 1)


def test_returns_of_many_short_episodes_are_exact():
    """A plain float32 sum of a million returns of 0.1 is 1 % off."""
    true, false = jnp.ones(1, bool), jnp.zeros(1, bool)
    begin = TimeStep(jnp.zeros((1, 1)), jnp.zeros(1), jnp.ones(1), first=true, last=false)
    end = dataclasses.replace(begin, reward=jnp.full(1, 0.1), discount=jnp.zeros(1))

    @jax.jit
    def run(n):
        def body(_, episodes):
            return update_episode_stats(episodes, begin, end)

        return jax.lax.fori_loop(0, n, body, zero_episode_stats(1))

    for n in (10_000, 1_000_000):
        sums = {"frames": jnp.int32(0)}
        values = reduce_metrics(run(n), jnp.zeros(2, jnp.uint32), sums, 1, jnp.int32(0), None)
        metrics = to_progress(1, values, Scripted.spec, ()).metrics
        np.testing.assert_allclose(metrics["episode_return"], np.float32(0.1), rtol=2e-7)
        assert metrics["episodes"] == n


def test_means_over_many_episodes_are_exact():
    """2^17 environments, whose returns add up to more than float32 counts in ones."""
    num_envs = 2**17
    returns = np.float32(np.random.default_rng(0).uniform(900, 1100, num_envs))
    zeros = zero_episode_stats(num_envs)
    episodes = dataclasses.replace(
        zeros,
        count=zeros.count + 1,
        total_return=jnp.asarray(returns),
        total_length=zeros.count + 999,
    )
    sums = {"frames": jnp.int32(0)}
    values = reduce_metrics(episodes, jnp.zeros(2, jnp.uint32), sums, 1, jnp.int32(0), None)
    metrics = to_progress(1, values, Scripted.spec, ()).metrics
    np.testing.assert_allclose(metrics["episode_return"], returns.mean(dtype=np.float64), rtol=1e-7)
    assert metrics["episode_length"] == 999
