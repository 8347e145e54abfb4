"""Data sets: their faults, their files, episodes that are recorded, and the replay of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import Counters
from walk import BOX, WALK, Walk, built, network

import podracer
from podracer.agents.a2c import A2C
from podracer.checks import check_environment
from podracer.dataset import Dataset
from podracer.environment import auto_reset
from podracer.envs import make
from podracer.envs.data import replay
from podracer.errors import ConfigError
from podracer.evaluate import ActingRule
from podracer.run.episodes import record_episodes

END = np.array([0, 0, 1, 0, 1, 1, 0, 0, 0, 1], bool)  # lengths 3, 2, 1, 4
CUT = np.array([0, 0, 0, 0, 1, 0, 0, 0, 0, 1], bool)  # of the second and of the last one


def dataset(**changes):
    rows = np.arange(10, dtype=np.float32)
    fields = {
        "observation": np.stack([rows, rows / 10], axis=1),
        "action": np.arange(10) % 3,
        "reward": rows + 1,
        "terminal": END & ~CUT,
        "timeout": CUT,
        "final_observation": np.array([[50.0, 5.0], [100.0, 10.0]], np.float32),
    }
    return Dataset(**fields | changes)


def nan_in(array):
    return np.where(np.arange(len(array))[:, None] == 3, np.nan, array)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": np.ones(9)}, r"reward of the data set must lead with its 10 transitions, but"),
        ({"final_observation": np.ones((3, 2))}, "final_observation .* with its 2 time-outs"),
        ({"observation": nan_in(np.ones((10, 2)))}, "observation of .* numbers that are not fini"),
        ({"reward": np.full(10, 1e39)}, "reward of .* numbers that are not finite"),
        ({"timeout": np.zeros(10, bool), "final_observation": None}, "last transition .* ends no"),
        ({"terminal": np.zeros((0,), bool)}, r"must be bool\[N\]"),
        ({"reward": np.ones((10, 1))}, r"reward is \[N\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataset(**changes)


@pytest.mark.parametrize(
    ("changes", "space", "message"),
    [
        ({"action": np.arange(10)}, None, "action 3 of the data set, 3, is none of walk: .* 0 to"),
        ({"action": np.ones(10)}, None, r"action of the data set is float32\[\], but .* int32"),
        ({"observation": np.ones((10, 3))}, None, r"float32\[3\], but that of walk is float32\[2"),
        ({"observation": {"a": np.ones((10, 2))}}, None, r"is \['a'\], not an array as walk's"),
        ({"action": np.full((10, 2), 1.5)}, BOX, r"action 0 .* lie in \[-1.0, 0.0\] to \[1.0, 2"),
    ],
)
def test_transitions_of_another_environment_are_refused(changes, space, message):
    with pytest.raises(ConfigError, match=message):
        replay(dataset(**changes), WALK if space is None else auto_reset(Walk(space)))


def test_a_data_set_has_the_returns_of_its_episodes_and_splits_by_episode():
    data = dataset()
    assert data.returns.tolist() == [6.0, 9.0, 6.0, 34.0]
    parts = data.split(0.5, seed=1)
    assert sorted(np.concatenate([part.returns for part in parts])) == [6.0, 6.0, 9.0, 34.0]
    assert [len(part.returns) for part in parts] == [2, 2]
    finals = {9.0: 50.0, 34.0: 100.0}
    for part in parts:
        expected = [finals[x] for x in part.returns if x in finals]
        assert part.final_observation[:, 0].tolist() == expected
    with pytest.raises(ConfigError, match="leaves one part without any"):
        data.split(1.0)


def test_a_file_holds_the_data_set(tmp_path):
    pairs = {"x": np.ones((10, 2), np.float32), "y": np.zeros((10, 1), bool)}
    data = dataset(observation=pairs, final_observation=None, environment="walk")
    (tmp_path / "data.npz").write_bytes(data.encode())
    loaded = Dataset.load(tmp_path / "data.npz")
    assert loaded.digest == data.digest != dataset().digest
    assert loaded.environment == "walk"
    assert loaded.observation.keys() == pairs.keys()


def test_a_file_of_d4rl_has_the_same_transitions(tmp_path):
    data = dataset()
    following = np.zeros((10, 2), np.float64)
    following[CUT] = data.final_observation
    arrays = {"observations": data.observation, "actions": data.action, "rewards": data.reward}
    arrays |= {"terminals": data.terminal, "timeouts": data.timeout, "next_observations": following}
    np.savez(tmp_path / "d4rl.npz", **arrays)
    assert Dataset.load(tmp_path / "d4rl.npz").digest == data.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"PK", "no data set in an .npz"),
        ({"reward": 1}, "no array 'action"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused(content, message, tmp_path):
    path = tmp_path / "data.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        np.savez(path, **content)
    with pytest.raises(ConfigError, match=message):
        make(f"data:{path}")


def test_a_file_decides_no_import(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(dataset(environment="gymnasium:mine:Maze-v0").encode())
    with pytest.raises(ConfigError, match="imports the module 'mine', and a file does not"):
        make(f"data:{path}")


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_finals", [True, False])
def test_a_replay_has_the_transitions_of_the_data_set_and_no_others(has_finals):
    """The action is a data set's, so its transitions are found by it."""
    data = (
        dataset(action=np.arange(10))
        if has_finals
        else dataset(action=np.arange(10), final_observation=None)
    )
    env = replay(data)
    check_environment(env)
    step = jax.jit(jax.vmap(env.step))
    state, before = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 64))
    counts = np.zeros(10, int)
    for t in range(200):
        action = jax.vmap(env.recorded_action)(state)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), 64)
        state, after = jax.device_get(step(keys, state, action))
        for b in np.flatnonzero(~before.last):
            i = int(action[b])
            counts[i] += 1
            assert before.observation[b].tolist() == data.observation[i].tolist()
            assert after.reward[b] == data.reward[i]
            assert after.discount[b] == 1.0 - data.terminal[i]
            assert after.first[b] == data.terminal[i]
            if not data.terminal[i]:
                following = {4: [50.0, 5.0], 9: [100.0, 10.0]} if has_finals else {}
                expected = following.get(i, data.observation[(i + 1) % 10].tolist())
                np.testing.assert_allclose(after.observation[b], expected, rtol=1e-6)
                assert after.last[b] == (i in ((4, 9) if has_finals else (3, 8)))
        assert not after.reward[before.last].any()
        assert after.first[before.last].all()
        starts = after.observation[after.first][:, 0]
        assert set(starts) <= {0.0, 3.0, 5.0, 6.0}
        before = after
    learned = counts > 0
    assert learned.all() if has_finals else (~learned == CUT).all()
    expected = counts.sum() / learned.sum()
    assert (abs(counts[learned] - expected) < 0.15 * expected).all()


@pytest.mark.parametrize("has_finals", [True, False])
def test_samples_have_the_transitions_of_the_data_set_and_no_others(has_finals):
    """Sequences of three timesteps: each action is its transition's, behind an end begins the next
    episode, and a time-out's final observation has no action of its own."""
    changes = {"action": np.arange(10)} | ({} if has_finals else {"final_observation": None})
    data = dataset(**changes)
    rows = data.rows()
    sample = jax.device_get(jax.jit(lambda key: rows.sample(key, 3_000, 3))(jax.random.key(0)))
    timesteps, actions = jax.device_get(sample.timesteps()), sample.steps.action
    assert timesteps.reward.shape == (3, 3_000)
    counts = np.zeros(10, int)
    for t, n in np.argwhere(~timesteps.last[:-1]):
        i, before, after = int(actions[t, n]), timesteps.observation[t, n], t + 1
        counts[i] += t == 0
        assert before.tolist() == data.observation[i].tolist()
        assert timesteps.reward[after, n] == data.reward[i]
        assert timesteps.discount[after, n] == 1.0 - data.terminal[i]
        assert timesteps.first[after, n] == data.terminal[i]
        finals = {4: [50.0, 5.0], 9: [100.0, 10.0]} if has_finals else {}
        expected = finals.get(i, data.observation[(i + 1) % 10].tolist())
        np.testing.assert_allclose(timesteps.observation[after, n], expected, rtol=1e-6)
    for t, n in np.argwhere(timesteps.last[:-1]):
        assert timesteps.first[t + 1, n]
        assert timesteps.reward[t + 1, n] == 0
    learned = counts > 0
    assert (learned == (True if has_finals else ~CUT)).all()
    expected = 3_000 / len(rows.last)
    assert (abs(counts[learned] - expected) < 0.2 * expected).all()


def test_without_an_environment_the_spaces_are_those_of_the_numbers():
    spec = replay(dataset()).spec
    assert (spec.action, spec.observation.shape) == (podracer.Discrete(3), (2,))
    with pytest.raises(ConfigError, match="names no environment to evaluate in"):
        replay(dataset()).for_evaluation()
    spec = replay(dataset(action=np.stack([np.arange(10.0), -np.arange(10.0)], axis=1))).spec
    assert spec.action == podracer.Continuous((0.0, -9.0), (9.0, 0.0))


# --- recording ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["greedy", "sampled"])
def test_recorded_episodes_are_those_of_the_environment(policy):
    """A slow walk: the rewards follow from the observations, as do the ends."""
    agent = built(A2C(network=network()))
    state = agent.init(jax.random.key(0), 1)
    params = agent.actor_params(state)
    data = record_episodes(
        agent, WALK, params, jax.random.key(5), episodes=40, rule=ActingRule(policy), name="walk"
    )
    data.check(WALK.spec)
    starts = np.concatenate([[0], data.ends[:-1] + 1])
    lengths = data.ends - starts + 1
    assert len(data.ends) == 40
    assert lengths.max() == 4
    assert set(lengths[data.timeout[data.ends]]) == {4}
    assert data.terminal.any()
    following = np.concatenate([data.observation[1:], data.observation[:1]])
    following[data.timeout] = data.final_observation
    known = ~data.terminal
    np.testing.assert_allclose(data.reward[known], following[known, 0] + 0.5, rtol=1e-5)
    assert (abs(data.reward[data.terminal] - 0.5) > 1.5).all()
    if policy == "greedy":
        distribution, _ = agent.distribution(
            params, (), jax.vmap(podracer.restart)(jnp.asarray(data.observation))
        )
        assert (np.asarray(distribution.mode()) == data.action).all()


def test_episodes_of_the_host_are_recorded():
    env = Counters()
    agent = A2C(network=network()).build(env.spec)
    state = agent.init(jax.random.key(0), 1)
    data = record_episodes(
        agent,
        env,
        agent.actor_params(state),
        jax.random.key(5),
        episodes=8,
        rule=ActingRule("sampled"),
    )
    lengths = np.diff(data.ends, prepend=-1)
    assert lengths.tolist() == [3, 4, 5, 6, 3, 4, 5, 6]
    assert (data.observation[:, 0] == np.repeat(np.arange(8), lengths)).all()
    short = record_episodes(
        agent,
        env,
        agent.actor_params(state),
        jax.random.key(5),
        episodes=8,
        rule=ActingRule("sampled"),
        max_steps=4,
    )
    assert np.diff(short.ends, prepend=-1).tolist() == [3, 4, 4, 4, 3, 4, 4, 4]
    assert short.timeout[short.ends].sum() >= 4


def test_equal_numbers_have_equal_digests():
    data = dataset()
    assert dataclasses.replace(data, reward=data.reward.astype(np.float64)).digest == data.digest
    assert dataclasses.replace(data, reward=data.reward + 1).digest != data.digest
