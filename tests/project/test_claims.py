"""What an example of the documentation claims, it does; `test_docs.py` only runs it."""

import importlib

import jax
import pytest
from pages import ROOT
from walk import close

import podracer

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
