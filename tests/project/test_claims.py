"""What two environments of the documentation claim, they do; `test_docs.py` only runs them."""

import importlib
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import ROOT, run_page
from walk import close

import podracer


def test_the_corridor_of_the_host_is_that_of_the_device(monkeypatch, tmp_path):
    """The same ends, lengths and rewards from the same places: to the right, and never there."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "make_evaluator"):
        monkeypatch.setattr(podracer, name, MagicMock(), raising=False)
    monkeypatch.setattr(podracer, "load", lambda *_, **__: (MagicMock(),) * 2, raising=False)
    page = run_page(ROOT / "docs" / "add-an-environment.md", monkeypatch)
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
