"""Data sets: their faults, their files, episodes that are recorded, and the replay of them."""

from __future__ import annotations

import dataclasses
import io
import tracemalloc
import types
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import Counters
from walk import BOX, WALK, Walk, built, network

import podracer
from podracer.agents.a2c import A2C
from podracer.checks import check_environment
from podracer.config.experiment import Experiment
from podracer.drivers import population
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.environment import auto_reset
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.evaluate import ActingRule
from podracer.run.setup import make_driver
from podracer_offline import Cloning, DAgger, Dataset, record_episodes, replay

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


def test_a_log_has_all_actions_of_its_mask():
    """Also those that never occur."""
    seen = {"x": np.ones((10, 2)), "action_mask": np.ones((10, 5), bool)}
    log = dataset(observation=seen, final_observation=None)
    assert log.spec.action == podracer.Discrete(5)
    with pytest.raises(ConfigError, match="action 5 of the data set, 5, is none of data"):
        replay(dataclasses.replace(log, action=np.arange(10)))


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: replay(dataset(action=np.eye(10)[:, :2] * [1, 0])), "coordinate 1 of .* always 0"),
        (lambda: dataset(reward=None), "reward of the data set must be an array"),
        (lambda: dataset().split("0.5"), "fraction cannot be '0.5': it must be a number"),
        (lambda: dataset().split(float("nan")), "leaves one part without any"),
    ],
)
def test_what_is_no_log_or_share_of_one_is_refused(make_it, words):
    with pytest.raises(ConfigError, match=words):
        make_it()


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


def array_file(version, header):
    """An array's file with any header and no data."""
    size = len(header).to_bytes(2 * version, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode()


@pytest.mark.parametrize(
    "content",
    [
        array_file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 30 + ",)}"),
        array_file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (10,)}"),
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


def test_an_array_of_objects_is_named(tmp_path):
    """`np.savez` pickles a list of ragged arrays, and None."""
    path = tmp_path / "data.npz"
    with np.load(io.BytesIO(dataset().encode())) as file:
        np.savez(path, **{**file, "final_observation": None})
    with pytest.raises(ConfigError, match=r"final_observation .* has no numbers, its dtype is obj"):
        Dataset.load(path)


# --- replay ---------------------------------------------------------------------------------------


def test_a_data_set_refuses_an_agent_that_is_taught_where_it_goes():
    experiment = types.SimpleNamespace(agent=DAgger())
    env = replay(dataset())
    with pytest.raises(ConfigError, match="which no data set shows"):
        env.check_agent(experiment.agent.build(env.spec), experiment)


def test_a_file_decides_no_import(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(dataset(environment="gymnasium:mine:Maze-v0").encode())
    env = make(f"data:{path}")  # enough for a run without evaluations
    with pytest.raises(ConfigError, match="imports the module 'mine', and a file does not"):
        env.for_evaluation()
    with pytest.raises(ConfigError, match="with options: add `,environment=gymnasium:mine:Maze-v0"):
        make(f"data:{path},size=3")


def test_a_file_is_read_without_its_environment(tmp_path):
    """Which may not be installed."""
    (tmp_path / "data.npz").write_bytes(dataset(environment="nowhere:1").encode())
    env = make(f"data:{tmp_path}/data.npz,environment=")
    assert env.environment is None
    with pytest.raises(ConfigError, match="name it by `data:FILE,environment=NAME`, or train with"):
        env.for_evaluation()


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


def test_resets_show_all_timesteps_equally_often():
    """Also the last ones of time-outs, or the transitions before them would be shown twice."""
    env = replay(dataset())
    state, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 12_000))
    assert (abs(np.bincount(state, minlength=12) - 1_000) < 150).all()
    assert timestep.first.all()
    np.testing.assert_array_equal(timestep.last, env.rows.last[state])


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
