"""What the Python of the documentation claims to do, it does; `test_docs.py` only runs it.

The pages are run here without their trainings: what they define is tested.
"""

import dataclasses
import importlib
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import ROOT, run_page
from walk import B, T, close

import podracer
from podracer.replay import Replay
from podracer.rollout import init_actor, rollout

CATCH = podracer.make("catch")


@pytest.fixture
def page(monkeypatch, tmp_path, request):
    """The definitions of the page that a test is parametrized with, its trainings left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(podracer, "train", MagicMock(), raising=False)
    loaded = (MagicMock(), MagicMock())
    monkeypatch.setattr(podracer, "load", lambda *_, **__: loaded, raising=False)
    monkeypatch.setattr(podracer, "make_evaluator", MagicMock(), raising=False)
    return run_page(ROOT / "docs" / f"{request.param}.md", monkeypatch)


def of_page(name):
    return pytest.mark.parametrize("page", [name], indirect=True, ids=[name])


def rolled_out(settings, env, length):
    """A fresh state of an agent, and a rollout of this length."""
    agent = settings.build(env.spec, podracer.Context(length))
    state = agent.init(jax.random.key(0), B)
    actor = init_actor(agent, env, jax.random.split(jax.random.key(1), B))
    keys = jax.random.split(jax.random.key(2), (2, length, B))
    return state, rollout(agent, env, agent.actor_params(state), actor, *keys)[1]


def params_after(settings, state, trajectory, env=CATCH):
    return learn_once(settings, state, trajectory, env).shared.params


def learn_once(settings, state, trajectory, env=CATCH):
    def learn(settings, *args):
        context = podracer.Context(len(trajectory.steps.action))
        return settings.build(env.spec, context).learn(*args, None)[0]

    return jax.jit(learn)(settings, state, trajectory, jax.random.key(3))


def differ(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any((np.asarray(x) != np.asarray(y)).any() for x, y in leaves)


# --- add an agent --------------------------------------------------------------------------------


@of_page("add-an-agent")
def test_noise_reaches_the_rewards_that_an_agent_learns_from(page):
    """Also that of the last action of a rollout, which here is the only one."""
    noisy = page.NoisyA2C()
    state, trajectory = rolled_out(noisy, CATCH, length=1)
    quiet = params_after(dataclasses.replace(noisy, reward_noise=0.0), state, trajectory)
    close(quiet, params_after(podracer.A2C(), state, trajectory))
    assert differ(quiet, params_after(noisy, state, trajectory))


@of_page("add-an-agent")
def test_a_module_of_flax_is_a_network_that_learns(page):
    agent = podracer.A2C(network=page.FlaxNetwork())
    state, trajectory = rolled_out(agent, CATCH, length=T)
    before, after = state.shared.params, params_after(agent, state, trajectory)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


@of_page("add-an-agent")
def test_the_stop_rule_stops_at_its_return(page):
    for mean, stops in ((0.4, False), (0.6, True)):
        evaluation = MagicMock(returns=np.full(8, mean))
        assert page.stop_at(MagicMock(evaluation=evaluation)) == stops
    assert not page.stop_at(MagicMock(evaluation=None))


# --- add an environment --------------------------------------------------------------------------


@of_page("add-an-environment")
def test_the_corridor_of_the_host_is_that_of_the_device(page):
    """The same ends, lengths and rewards from the same places: to the right, and never there."""
    for action, length in ((1, page.LENGTH), (0, page.MAX_STEPS)):
        batch = page.HostCorridor().make(3, 1)
        timestep = batch.reset(0, np.arange(3), 0)
        places = timestep.observation.argmax(axis=1)
        device = page.Corridor()
        states = [page.CorridorState(jnp.int32(place), jnp.int32(0)) for place in places]
        ended = np.zeros(3, bool)
        for _ in range(length):
            timestep = batch.step(np.full(3, action, np.int32))
            for row in np.flatnonzero(~ended):
                states[row], expected = device.step(jax.random.key(0), states[row], action)
                for field in ("observation", "reward", "discount"):
                    close(getattr(timestep, field)[row], getattr(expected, field))
                ended[row] = expected.last | (expected.discount == 0)
                assert ended[row] == timestep.last[row]
        assert ended.all()


# --- reward shaping ------------------------------------------------------------------------------


def random_episodes(env, steps):
    """The first timestep, and the next ones `[steps]`, of random play in one environment."""

    def body(state, key):
        action = jax.random.randint(key, (), 0, 2)
        if isinstance(env.spec.action, podracer.Continuous):
            action = jax.random.uniform(key, (1,), minval=-2.0, maxval=2.0)
        return env.step(key, state, action)

    state, timestep = env.reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), steps)
    return timestep, jax.device_get(jax.jit(lambda s: jax.lax.scan(body, s, keys))(state)[1])


@pytest.fixture
def shaping(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("reward_shaping")


def test_a_wrapper_of_gymnasium_clips_rewards(shaping):
    batch = podracer.Gymnasium(shaping.clipped_pendulum, workers=0).make(1, 1)
    batch.reset(0, np.arange(1), 0)
    rewards = [float(batch.step(np.zeros((1, 1), np.float32)).reward[0]) for _ in range(20)]
    assert min(rewards) == -1.0


@pytest.mark.parametrize("name", ["pendulum", "cartpole"])  # time-outs, terminals
def test_a_potential_adds_the_same_to_every_return_of_a_start(shaping, name):
    """The discounted bonuses of an episode sum to the potential of its end minus its start's, so
    they favor no policy; after a terminal it is 0."""
    env, discount = podracer.make(name), 0.9
    shaped = shaping.Shaped(env, lambda observation: 3.0 + observation[0], discount)
    assert shaped.for_evaluation() is env
    (first, own), (_, got) = (random_episodes(world, steps=250) for world in (env, shaped))
    bonus, start = got.reward - own.reward, 3.0 + first.observation[0]
    total, factor, ends = 0.0, 1.0, 0
    for t in range(len(bonus)):
        if own.first[t] and own.discount[t] > 0:  # the reset after a time-out
            assert bonus[t] == 0
            start, total, factor = 3.0 + own.observation[t, 0], 0.0, 1.0
            continue
        total, factor = total + factor * bonus[t], factor * discount
        if own.discount[t] == 0 or own.last[t]:
            end = 0.0 if own.discount[t] == 0 else factor * (3.0 + own.observation[t, 0])
            close(total, end - start, atol=1e-4)
            start, total, factor, ends = 3.0 + own.observation[t, 0], 0.0, 1.0, ends + 1
    assert ends


def test_a_limit_of_zero_leaves_no_reward_in_the_replay(shaping):
    replay = Replay(capacity=100 * B, batch_size=8, warmup=10_000)
    agent = shaping.ClippedDQN(podracer.DQN(replay=replay))
    state, trajectory = rolled_out(agent, CATCH, length=20)
    assert np.abs(trajectory.timesteps().reward).max() == 1
    for limit in (0.0, 0.25):
        learner = learn_once(dataclasses.replace(agent, reward_limit=limit), state, trajectory)
        assert np.abs(learner.local.steps.timestep.reward).max() == limit


# --- an optimizer, and an example -----------------------------------------------------------------


@of_page("add-an-agent")
def test_the_optimizer_of_the_page_takes_its_decay(page):
    agent = page.catch_lion().agent
    state, trajectory = rolled_out(agent, CATCH, length=T)
    after = []
    for decay in (0.0, 0.99):
        lion = dataclasses.replace(agent, optimizer=page.Lion(decay))
        after.append(params_after(lion, learn_once(lion, state, trajectory), trajectory))
    assert differ(*after)


def test_the_research_loop_learns_twice_from_a_rollout(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("research_loop")
    once, twice = podracer.A2C(), example.TwoPassA2C()
    state, trajectory = rolled_out(once, CATCH, length=T)
    first = learn_once(once, state, trajectory)
    for share, expected in ((0.0, first), (1.0, learn_once(once, first, trajectory))):
        agent = dataclasses.replace(twice, second_step=share)
        close(params_after(agent, state, trajectory), expected.shared.params)
