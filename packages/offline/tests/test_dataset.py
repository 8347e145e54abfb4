"""Data sets: their faults, their files, episodes that are recorded, and the replay of them."""

from __future__ import annotations

import dataclasses
import gc
import io
import sys
import tracemalloc
import types
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import Counters
from off_policy import agent_and_env
from walk import BOX, WALK, Walk, built, network

import podracer
from podracer.agents.a2c import A2C
from podracer.checks import check_environment
from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.drivers import population
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.environment import auto_reset
from podracer.envs import make
from podracer.envs.cartpole import CartPole
from podracer.envs.lifetimes import Lifetimes
from podracer.errors import ConfigError
from podracer.evaluate import ActingRule
from podracer.run.setup import build, make_driver
from podracer_offline import Cloning, Dataset, record_episodes, replay
from podracer_offline.records import replayed

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
        ({"observation": np.full((10, 2), "1")}, "observation .* has no numbers, its dtype is <U1"),
        ({"terminal": np.where(END, np.nan, 0)}, "terminal of .* must be true and false, or 1 and"),
        ({"timeout": np.zeros(10, bool), "final_observation": None}, "last transition .* ends no"),
        ({"reward": np.ones((10, 1))}, r"reward is \[N\]"),
        ({"observation": np.full((10, 2), 2**32 + 1)}, "observation .* do not fit in 32 bits"),
        ({"observation": (np.ones((10, 2)), np.ones(10))}, "an array, or a dictionary of arrays"),
        ({"distribution": np.ones((9, 3))}, r"distribution .* must lead with its 10 transitions"),
        ({"action": np.ones(10)}, r"action of .* float32\[10\], but .* give action\[:, None\]"),
        ({"final_observation": np.ones((2, 3))}, r"float32\[3\], not float32\[2\] as its observ"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataset(**changes)


@pytest.mark.parametrize(
    ("changes", "space", "message"),
    [
        ({"action": np.arange(10)}, None, "action 3 of the data set, 3, is none of walk: .* 0 to"),
        ({"action": np.ones((10, 1))}, None, r"action of .* float32\[1\], not int32\[\] as walk's"),
        (
            {"observation": np.ones((10, 3)), "final_observation": None},
            None,
            r"is float32\[3\], not float32\[2\] as walk's",
        ),
        ({"distribution": np.ones((10, 2))}, None, r"distribution of .*\[2\], not .*\[3\]"),
        ({"action": np.full((10, 2), 1.51)}, BOX, r"action 0 of the data set, \[1.51, 1.51\], is"),
        ({"action": np.full((10, 2), 1.5)}, BOX, r"action 0 .* lie in \[-1.0, 0.0\] to \[1.0, 2"),
    ],
)
def test_transitions_of_another_environment_are_refused(changes, space, message):
    with pytest.raises(ConfigError, match=message):
        replay(dataset(**changes), WALK if space is None else auto_reset(Walk(space)))


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.4, 0.7, 2.0])
def test_an_action_at_a_bound_is_at_it_in_any_precision(bound):
    """In float32 the nearest number may be outside of the bounds, or inside."""
    nearest = float(np.float32(bound))
    inward = podracer.Continuous.within(np.float64([-bound]), np.float64([bound]))
    for space in (inward, podracer.Continuous((-nearest,), (nearest,))):
        low, high = np.float32(space.low[0]), np.float32(space.high[0])
        step = np.spacing(high)
        for at_bound in (bound, np.float32(bound), high + step, high - step):
            action = np.tile([[at_bound], [-at_bound], [0.01], [at_bound], [0.0]], (2, 1))
            rows = replay(dataset(action=action), auto_reset(Walk(space))).rows
            expected = [high, low, np.float32(0.01), high, 0]
            assert rows.action[~rows.last][:5, 0].tolist() == expected
        action[3] = far = high + 3 * step
        text = rf"action 3 of the data set, \[{far!s}\], .* lie in \[-{bound}\] to \[{bound}\]"
        with pytest.raises(ConfigError, match=text):
            replay(dataset(action=action), auto_reset(Walk(space)))


def test_extremes_of_actions_are_rounded_as_bounds_are():
    """So a policy that is learned from them chooses no action beyond them."""
    low, high = np.sort(np.random.default_rng(0).uniform(-9, 9, (4_000, 2)).round(2)).T
    high += 0.01
    space = dataset(action=np.stack([low, high] * 5)).spec.action
    assert space == podracer.Continuous.within(low, high)
    assert (low <= space.low).all()
    assert (high >= space.high).all()
    np.testing.assert_allclose([space.low, space.high], [low, high], rtol=1.3e-7)


def test_games_of_two_players_are_refused():
    """Their values need to know whose turn it was, which no data set says."""

    class Turns(CartPole):
        @property
        def spec(self):
            return dataclasses.replace(super().spec, takes_turns=True)

    with pytest.raises(ConfigError, match="does not say whose turn it was"):
        replay(dataset(), Turns())


def test_a_data_set_has_the_returns_of_its_episodes_and_splits_by_episode():
    data = dataset(distribution=np.stack([np.arange(10)] * 3, axis=1))
    assert data.returns.tolist() == [6.0, 9.0, 6.0, 34.0]
    parts = data.split(0.5, seed=1)
    assert sorted(np.concatenate([part.returns for part in parts])) == [6.0, 6.0, 9.0, 34.0]
    assert [len(part.returns) for part in parts] == [2, 2]
    finals = {9.0: 50.0, 34.0: 100.0}
    for part in parts:
        expected = [finals[x] for x in part.returns if x in finals]
        assert part.final_observation[:, 0].tolist() == expected
        assert (part.distribution[:, 0] == part.observation[:, 0]).all()
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
    assert loaded.distribution is None

    logits = np.random.default_rng(0).normal(size=(10, 3))
    taught = dataclasses.replace(data, distribution=logits)
    (tmp_path / "taught.npz").write_bytes(taught.encode())
    loaded = Dataset.load(tmp_path / "taught.npz")
    assert loaded.digest == taught.digest != data.digest
    assert np.array_equal(loaded.distribution, logits.astype(np.float32))


def test_a_data_set_without_distributions_is_that_of_older_versions():
    """So runs that began with one are resumed."""
    env = replay(dataset())
    assert env.digest == ("b74ac356916e060d2d121c315616ce4e3524ce145fbc9ba4e137fbfac828ce6d")
    names = {"kind", "observation", "action", "reward", "terminal", "last", "starts"}
    assert to_json(env)["rows"].keys() == names


def test_a_file_of_d4rl_has_the_same_transitions(tmp_path):
    data = dataset()
    following = np.zeros((10, 2), np.float64)
    following[CUT] = data.final_observation
    arrays = {"observations": data.observation, "actions": data.action, "rewards": data.reward}
    arrays |= {"terminals": data.terminal, "timeouts": data.timeout, "next_observations": following}
    np.savez(tmp_path / "d4rl.npz", **arrays)
    assert Dataset.load(tmp_path / "d4rl.npz").digest == data.digest
    np.savez(tmp_path / "d4rl.npz", **arrays | {"next_observations": following[:-1]})
    with pytest.raises(ConfigError, match=r"next_observations of .* lead with its 10 transitions"):
        Dataset.load(tmp_path / "d4rl.npz")


def test_states_beyond_those_of_the_environment_are_refused():
    worlds = make("worlds:dense")
    indices = np.array([0, worlds.spec.observation.num_values])
    data = Dataset(
        observation=indices, action=np.zeros(2, int), reward=np.zeros(2), terminal=[1, 1],
        timeout=[0, 0],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="observation of the data set must lie in 0 to 1935"):
        replay(data, worlds)


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


def array_file(version, header):
    """An array's file with any header and no data."""
    size = len(header).to_bytes(2 * version, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode()


@pytest.mark.parametrize(
    "content",
    [
        array_file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 30 + ",)}"),
        array_file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (10,)}"),
        array_file(1, "{'descr': '|O', 'fortran_order': False, 'shape': (10,)}"),
        array_file(2, "(" * 9_000),
        array_file(2, "  1\n 2"),
        array_file(3, "{}"),
        b"",
    ],
)
def test_a_damaged_array_is_refused(content, tmp_path):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        with zipfile.ZipFile(io.BytesIO(dataset().encode())) as whole:
            for name in {*whole.namelist()} - {"reward.npy"}:
                archive.writestr(name, whole.read(name))
        archive.writestr("reward.npy", content)
    with pytest.raises(ConfigError, match=r"data.npz is no data set in an .npz file: numpy.savez"):
        Dataset.load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("observation", "observation of the data set must lead with its 10 transitions"),
        ("final_observation.x", "has more rows than 10 transitions"),
        ("environment", "environment of .* must be a name"),
        ("anything", "no array 'action'"),
    ],
)
def test_what_fits_no_data_set_is_not_unpacked(name, message, tmp_path):
    """A small archive may hold gigabytes of zeros."""
    path, content = tmp_path / "data.npz", dataset().encode()
    with np.load(io.BytesIO(content)) as file:
        arrays = {x: file[x] for x in file if x != "action" or name != "anything"}
    np.savez_compressed(path, **arrays | {name: np.zeros(2**23)})
    tracemalloc.start()
    with pytest.raises(ConfigError, match=message):
        Dataset.load(path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_file_decides_no_import(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(dataset(environment="gymnasium:mine:Maze-v0").encode())
    with pytest.raises(ConfigError, match="imports the module 'mine', and a file does not"):
        make(f"data:{path}")


@pytest.mark.parametrize("adapter", [auto_reset, Lifetimes])
def test_an_agent_that_acts_by_itself_is_refused_in_any_adapter_around_a_data_set(adapter):
    """It would learn from its own actions what the recorded ones led to."""
    driver = AnakinConfig(num_envs=64, rollout_length=1, updates_per_chunk=1)
    env = adapter(replay(dataset()))
    experiment = Experiment(environment=env, agent=A2C(), driver=driver, frames=64)
    with pytest.raises(ConfigError, match="A2C learns from its own actions, and not from a data"):
        build(experiment)


def test_actions_that_a_mask_forbids_are_refused():
    """The first action is the second one of three, and is not allowed in row 4."""
    masks = np.ones((10, 3), bool)
    masks[4, 1] = False
    observation = {"board": np.ones((10, 2)), "action_mask": masks}
    data = dataset(observation=observation, action=np.ones(10, int), final_observation=None)
    with pytest.raises(ConfigError, match="action 4 of the data set, 1, is not allowed by its ma"):
        replay(data)
    replay(dataclasses.replace(data, action=np.zeros(10, int), distribution=np.ones((10, 3))))

    several = dataclasses.replace(data, action=np.ones((10, 2), int))
    masks = np.ones((10, 4), bool)
    masks[4, 3] = False  # of the second component
    with pytest.raises(ConfigError, match=r"action 4 of the data set, \[1, 1\], is not allowed"):
        replay(dataclasses.replace(several, observation=observation | {"action_mask": masks}))


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_finals", [True, False])
def test_a_replay_has_the_transitions_of_the_data_set_and_no_others(has_finals):
    """The action is a data set's, so its transitions are found by it."""
    changes = {} if has_finals else {"final_observation": None}
    data = dataset(action=np.arange(10), distribution=np.eye(10), **changes)
    env = replay(data)
    check_environment(env)
    step = jax.jit(jax.vmap(env.step))
    state, before = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 64))
    counts = np.zeros(10, int)
    for t in range(200):
        action = before.observation.action
        assert (before.observation.distribution.argmax(axis=1) == action).all()
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), 64)
        state, after = jax.device_get(step(keys, state, action))
        for b in np.flatnonzero(~before.last):
            i = int(action[b])
            counts[i] += 1
            assert before.observation.observation[b].tolist() == data.observation[i].tolist()
            assert after.reward[b] == data.reward[i]
            assert after.discount[b] == 1.0 - data.terminal[i]
            assert after.first[b] == data.terminal[i]
            if not data.terminal[i]:
                following = {4: [50.0, 5.0], 9: [100.0, 10.0]} if has_finals else {}
                expected = following.get(i, data.observation[(i + 1) % 10].tolist())
                np.testing.assert_allclose(after.observation.observation[b], expected, rtol=1e-6)
                assert after.last[b] == (i in ((4, 9) if has_finals else (3, 8)))
        assert not after.reward[before.last].any()
        assert after.first[before.last].all()
        starts = after.observation.observation[after.first][:, 0]
        assert set(starts) <= {0.0, 3.0, 5.0, 6.0}
        before = after
    learned = counts > 0
    assert learned.all() if has_finals else (~learned == CUT).all()
    expected = counts.sum() / learned.sum()
    assert (abs(counts[learned] - expected) < 0.15 * expected).all()


def test_without_an_environment_the_spaces_are_those_of_the_numbers():
    spec = replay(dataset()).spec
    assert (spec.action, replayed(spec).observation.shape) == (podracer.Discrete(3), (2,))
    with pytest.raises(ConfigError, match="names no environment to evaluate in"):
        replay(dataset()).for_evaluation()
    assert replay(dataset(distribution=np.ones((10, 5)))).spec.action == podracer.Discrete(5)
    spec = replay(dataset(action=np.stack([np.arange(10.0), -np.arange(10.0)], axis=1))).spec
    assert spec.action == podracer.Continuous((0.0, -9.0), (9.0, 0.0))


@pytest.fixture
def few_constants():
    """Make constants of more than 2,000 bytes in a program an error."""
    name = "jax_captured_constants_warn_bytes"
    limit = getattr(jax.config, name)
    jax.config.update(name, 2_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    jax.config.update(name, limit)


@pytest.mark.parametrize("num_pods", [0, 2])
def test_a_data_set_is_compiled_into_no_program(num_pods, few_constants):
    """It is an argument, which pods share."""
    data = Dataset(
        observation=np.ones((400, 2)),
        action=np.arange(400) % 3,
        reward=np.ones(400),
        terminal=np.arange(400) == 399,
        timeout=np.zeros(400, bool),
    )
    pods = tuple(Pod(seed) for seed in range(num_pods))
    experiment = Experiment(
        environment=replay(data), agent=Cloning(network=network()), driver=AnakinConfig(2, 2, 1),
        frames=4, pods=pods, devices=1,
    )  # fmt: skip
    driver = make_driver(experiment)
    if pods:
        agents = population.stack_agents(driver.blueprint, pods)
        assert agents.environment.rows.reward.shape == (400,)
    states = driver.init(experiment.key)
    driver.lower()
    shown = states.actor.timestep.observation.observation
    assert shown.shape == ((num_pods, 2, 2) if pods else (2, 2))


# --- recording ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["greedy", "sampled"])
def test_recorded_episodes_are_those_of_the_environment(policy):
    """A slow walk: the rewards follow from the observations, as do the ends."""
    agent = built(A2C(network=network()))
    state = agent.init(jax.random.key(0), 1)
    params = agent.actor_params(state)
    data = record_episodes(
        agent, WALK, params, jax.random.key(5), episodes=40, rule=ActingRule(policy), name="walk",
        with_distributions=True,
    )  # fmt: skip
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
    distribution, _ = agent.distribution(
        params, (), jax.vmap(podracer.restart)(jnp.asarray(data.observation))
    )
    np.testing.assert_allclose(data.distribution, distribution.logits, rtol=1e-4, atol=1e-6)
    if policy == "greedy":
        assert (np.asarray(distribution.mode()) == data.action).all()


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_who_has_no_distribution_that_a_file_holds_is_refused(name):
    """Values of DQN, and a Gaussian of SAC that tanh squashes."""
    agent, env = agent_and_env(name)
    params = agent.actor_params(agent.init(jax.random.key(0), 4))
    with pytest.raises(ConfigError, match="no distribution of logits or of a Gaussian"):
        record_episodes(
            agent, env, params, jax.random.key(5), episodes=4, rule=ActingRule(),
            with_distributions=True,
        )  # fmt: skip


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

    def lose_last(batch, timestep):
        if batch.steps == 5:  # of row 3, whose episode has six
            timestep.first[3], timestep.discount[3] = True, 1.0
        return timestep

    lost = record_episodes(
        agent,
        Counters(lose_last),
        agent.actor_params(state),
        jax.random.key(5),
        episodes=4,
        rule=ActingRule("sampled"),
        max_steps=5,
    )
    assert np.diff(lost.ends, prepend=-1).tolist() == [3, 4, 5]


def test_equal_numbers_have_equal_digests():
    data = dataset()
    assert dataclasses.replace(data, reward=data.reward.astype(np.float64)).digest == data.digest
    assert dataclasses.replace(data, action=data.action.astype(np.uint8)).digest == data.digest
    assert dataclasses.replace(data, terminal=data.terminal.astype(float)).digest == data.digest
    assert dataclasses.replace(data, reward=data.reward + 1).digest != data.digest


# --- Minari ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Episodes:
    """What a `minari.MinariDataset` has, without the package."""

    episodes: list
    action_space: object = None
    env_spec: object = None

    def iterate_episodes(self):
        return iter(self.episodes)


def minari_episode(first, length, terminal, wrap=lambda x: x, action_start=0):
    rows = np.arange(first, first + length + 1, dtype=np.float64)
    flags = np.zeros(length, bool)
    terminations, truncations = flags.copy(), flags.copy()
    (terminations if terminal else truncations)[-1] = True
    return types.SimpleNamespace(
        observations=wrap(np.stack([rows, rows / 10], axis=1)),
        actions=np.arange(length) % 3 + action_start,
        rewards=rows[:-1] + 1,
        terminations=terminations,
        truncations=truncations,
    )


def test_the_episodes_of_minari_have_final_observations_after_time_outs():
    start = 5
    parts = [(0, 3, True), (10, 2, False), (20, 1, False), (30, 2, True)]
    episodes = [minari_episode(*part, action_start=start) for part in parts]
    episodes[2].truncations[-1] = False  # where the collection ended
    source = Episodes(episodes, types.SimpleNamespace(start=start))
    data = Dataset.from_minari(source)
    assert data.observation[:, 0].tolist() == [0, 1, 2, 10, 11, 20, 30, 31]
    assert data.final_observation[:, 0].tolist() == [12, 21]
    assert data.action.tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert data.reward.tolist() == [1, 2, 3, 11, 12, 21, 31, 32]
    assert np.flatnonzero(data.terminal).tolist() == [2, 7]
    assert np.flatnonzero(data.timeout).tolist() == [4, 5]
    assert data.environment == ""

    source.observation_space = types.SimpleNamespace(start=1)
    from_one = Dataset.from_minari(source)
    assert from_one.observation[:, 0].tolist() == [-1, 0, 1, 9, 10, 19, 29, 30]
    assert from_one.final_observation[:, 0].tolist() == [11, 20]

    pairs = Episodes([minari_episode(0, 3, True, lambda x: {"x": x, "y": x[:, :1]})])
    pairs.env_spec = types.SimpleNamespace(id="CartPole-v1")
    data = Dataset.from_minari(pairs)
    assert data.observation["y"].shape == (3, 1)
    assert data.environment == "gymnasium:CartPole-v1"
    assert Dataset.from_minari(pairs, "cartpole").environment == "cartpole"
    with pytest.raises(ConfigError, match="a dictionary of arrays, but they have a tuple"):
        Dataset.from_minari(Episodes([minari_episode(0, 3, True, lambda x: (x, x))]))
    with pytest.raises(ConfigError, match="the Minari data set has no episodes"):
        Dataset.from_minari(Episodes([]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.zeros(0)}, "episode 1 of the Minari data set has no steps"),
        ({"rewards": None}, "rewards of a Minari data set must be arrays, but they have a None"),
        ({"rewards": np.zeros((3, 1))}, r"rewards of episode 1 .* rows of shape {'': \(1,\)}, not"),
        ({"terminations": np.zeros(2)}, r"terminations of episode 1 of .* its 3 trans.* \(2,\)"),
        ({"actions": np.full(3, "x")}, "actions of a Minari data set must be arrays, .* a <U1"),
        ({"observations": np.zeros((4, 3))}, r"{'': \(3,\)}, not {'': \(2,\)} as those of episode"),
        ({"observations": np.float64(1)}, "observations of a Minari data set must be arrays or a"),
    ],
)
def test_episodes_of_minari_that_do_not_fit_are_refused(changes, message):
    episodes = [minari_episode(0, 3, True), minari_episode(5, 3, False)]
    vars(episodes[1]).update(changes)
    with pytest.raises(ConfigError, match=message):
        Dataset.from_minari(Episodes(episodes, types.SimpleNamespace(start=0)))


def test_a_data_set_of_minari_is_named_by_its_id(monkeypatch):
    def load_dataset(name):
        if name != "walk/random-v0":
            raise FileNotFoundError(f"Dataset {name} not found locally")
        return Episodes([minari_episode(0, 3, True), minari_episode(5, 2, False)])

    monkeypatch.setitem(sys.modules, "minari", types.SimpleNamespace(load_dataset=load_dataset))
    env = make("data:minari:walk/random-v0")
    assert env.spec.action == podracer.Discrete(3)
    with pytest.raises(ConfigError, match=r"Minari has no data set walk/other-v0 .* not found loc"):
        make("data:minari:walk/other-v0")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigError, match="needs the package minari: `pip install"):
        make("data:minari:walk/random-v0")


def test_data_sets_that_minari_collected(tmp_path, monkeypatch):
    """CartPole of Gymnasium, in both formats, beside the collected episodes themselves."""
    minari = pytest.importorskip("minari")
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    for format in ("hdf5", "arrow"):
        env = gymnasium.make("CartPole-v1", max_episode_steps=12)
        env = minari.DataCollector(env, data_format=format)
        collected = []
        for seed in range(6):
            observation, _ = env.reset(seed=seed)
            env.action_space.seed(seed)
            done = False
            while not done:
                action = env.action_space.sample()
                following, reward, terminal, timeout, _ = env.step(action)
                collected.append((observation, action, reward, terminal, timeout, following))
                observation, done = following, terminal or timeout
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env.create_dataset(f"cartpole/{format}-v0", algorithm_name="random")
            env.close()
            del env
            gc.collect()  # its temporary folder warns
        data = Dataset.from_minari(minari.load_dataset(f"cartpole/{format}-v0"))
        columns = [np.asarray(x) for x in zip(*collected, strict=True)]
        assert np.array_equal(data.observation, columns[0])
        assert np.array_equal(data.action, columns[1])
        assert np.array_equal(data.terminal, columns[3])
        assert np.array_equal(data.timeout, columns[4] & ~columns[3])
        assert np.array_equal(data.final_observation, columns[5][data.timeout])
        replayed = make(f"data:minari:cartpole/{format}-v0,environment=cartpole")
        assert replayed.digest == dataclasses.replace(data, environment=data.environment).digest
        assert make(f"data:minari:cartpole/{format}-v0").source == "gymnasium:CartPole-v1"
