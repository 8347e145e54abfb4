"""Gymnasium's environments in processes, against a plain loop and against every kind of fault.

Workers import this module for its environments, so nothing here imports JAX at the top.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import typing
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from variants import variants

from podracer.envs.host.gymnasium_worker import FAULT_KINDS

GENEROUS = 60.0  # seconds; nothing here should come near it


def library(name="envs.host.gymnasium"):
    return importlib.import_module(f"podracer.{name}")


# --- environments --------------------------------------------------------------------------------


class Walk(gymnasium.Env):
    """Random ends of both sorts, and an observation of every sort."""

    observation_space = spaces.Dict(
        {
            "z": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
            "a": spaces.Tuple([spaces.Discrete(5, start=-2), spaces.Box(0, 255, (4,), np.uint8)]),
            "b": spaces.Box(-1, 1, (), np.float32),
        }
    )
    action_space = spaces.Discrete(3, start=7)

    def observe(self):
        draw = self.np_random
        return {
            "a": (draw.integers(-2, 3), draw.integers(0, 256, 4, dtype=np.uint8)),
            "b": np.float32(draw.uniform(-1, 1)),
            "z": self.position + draw.normal(size=(2, 3)),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0.0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.position += action - 8
        terminated, truncated = self.np_random.random(2) < 0.15
        return self.observe(), self.position / 3, terminated, truncated, {}


class Push(gymnasium.Env):
    """Insists on its action space, whose bounds have no equal in 32 bits."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(np.array([-0.1, -0.7]), np.array([0.1, 0.3]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return action.astype(np.float32), 0.0, False, False, {}


class Switches(gymnasium.Env):
    """Insists on its action space of several actions; an episode pays for each that is on."""

    observation_space = spaces.Box(0, 3, (3,), np.float32)
    action_space = spaces.MultiBinary(3)
    on = (1, 1, 1)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.time += 1
        reward = float(np.sum(action == np.array(self.on))) / 12
        return action.astype(np.float32), reward, self.time == 4, False, {}


class Dials(Switches):
    """The same with more values, which do not begin at 0."""

    observation_space = spaces.Box(-9, 9, (3,), np.float32)
    action_space = spaces.MultiDiscrete([3, 2, 4], start=[0, 5, -2])
    on = (2, 5, 1)


class Lamps(Switches):
    """Shows what is on in numbers of a MultiDiscrete space, which begin at 4."""

    observation_space = spaces.MultiDiscrete([2, 3, 2], start=[4, 4, 4])

    def reset(self, *, seed=None, options=None):
        super().reset()
        return np.array([4, 5, 4]), {}

    def step(self, action):
        return action + np.array([4, 4, 4 + self.time]), *super().step(action)[1:]


class Platform(Push):
    """Shows whether JAX would use the CPU in this process."""

    def reset(self, *, seed=None, options=None):
        return np.full(2, os.environ.get("JAX_PLATFORMS") == "cpu", np.float32), {}


SEEN = spaces.Box(-10, 10, (3,), np.float64)
BAD_ROWS = {  # what a row's step may do wrong, and what it counts as
    "raise": "raised",
    "sys_exit": "raised",
    "nan_reward": "not_finite",
    "infinite": "not_finite",
    "overflow": "not_finite",
    "strings": "wrong_dtype",
    "complex": "wrong_dtype",
    "dictionary": "wrong_dtype",
    "shape": "wrong_shape",
    "ragged": "wrong_shape",
    "reward_shape": "wrong_shape",
    "none": "malformed",
    "reward_none": "malformed",
    "flag_none": "malformed",
    "four": "malformed",
}
LOST_WORKERS = {"exit": "died", "kill": "died", "segfault": "died", "hang": "hung"}
DEEDS = ["good", *BAD_ROWS, *LOST_WORKERS]
# By default one of each kind, and what only a guard of its own finds.
ROWS = ("raise", "nan_reward", "infinite", "strings", "shape", "none")


class Naughty(gymnasium.Env):
    """Does what its action says; counts its steps up to 9."""

    observation_space = SEEN
    action_space = spaces.Discrete(len(DEEDS))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.array([self.time, *self.np_random.uniform(-1, 1, 2)]), {}

    def step(self, action):
        self.time += 1
        seen = np.array([self.time, *self.np_random.uniform(-1, 1, 2)])
        good = (seen, 1.0, self.time == 9, False, {})
        match DEEDS[action]:
            case "raise":
                raise RuntimeError("the wheel came off")
            case "sys_exit":
                sys.exit(3)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                threading.Event().wait(GENEROUS)
            case "four":
                return good[:4]
            case "nan_reward":
                return seen, np.nan, *good[2:]
            case "reward_shape":
                return seen, np.ones(2), *good[2:]
            case "reward_none":
                return seen, None, *good[2:]
            case "flag_none":
                return seen, 1.0, None, *good[3:]
        observations = {
            "infinite": [np.inf, 0, 0],
            "overflow": [1e300, 0, 0],
            "strings": ["1", "2", "3"],
            "complex": seen + 0j,
            "dictionary": {"x": seen},
            "shape": seen[:2],
            "ragged": [[1, 2], [3]],
            "none": None,
        }
        return observations.get(DEEDS[action], seen), *good[1:]


class Broken(gymnasium.Env):
    """In a worker only, `reset` does what `deed` says."""

    observation_space = SEEN
    action_space = spaces.Discrete(2)

    def __init__(self, deed):
        self.deed = deed

    def reset(self, *, seed=None, options=None):
        if self.deed == "raise":
            raise RuntimeError("no wheel")
        if self.deed == "pair":
            return np.zeros(3)
        return np.zeros(3), {}

    def step(self, action):
        return np.zeros(4), 0.0, False, False, {}  # not the shape of the space, ever


class Inside(gymnasium.Env):
    """Observes its own process: (JAX is imported, its pid)."""

    observation_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2**31 - 1)])
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return (int("jax" in sys.modules), os.getpid()), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


class Closing(Inside):
    """Leaves a line in a file when it is closed."""

    def __init__(self, path):
        self.path = path

    def close(self):
        with open(self.path, "a") as file:
            print(os.getpid(), file=file)


class Odd(gymnasium.Env):
    """Whatever spaces it is given; or it cannot be made."""

    def __init__(self, observation_space=SEEN, action_space=Walk.action_space, error=None):
        self.observation_space, self.action_space = observation_space, action_space
        if error:
            raise RuntimeError(error)


class Spaceless(gymnasium.Env):
    observation_space = SEEN


class Objectives(gymnasium.Env):
    observation_space = SEEN
    action_space = spaces.Discrete(2)
    reward_space = spaces.Box(0, 1, (2,))


MOST = float(np.finfo(np.float32).max)


# --- the reference -------------------------------------------------------------------------------


class Reference:
    """One environment after the other in this process; the semantics of `HostEnvironment`."""

    def __init__(self, make, seed, indices, start):
        self.make, self.seed, self.start = make, seed, start
        self.rows = [self.begin(index, 0) for index in indices]

    def begin(self, index, generation):
        words = np.random.SeedSequence([self.seed, index, self.start, generation])
        env = self.make()
        observation, _ = env.reset(seed=int(words.generate_state(1)[0]) >> 1)
        return SimpleNamespace(
            env=env, index=index, generation=generation, shown=(observation, 0, 1, True, False)
        )

    def step(self, actions, lost=()):
        for number, (row, action) in enumerate(zip(self.rows, actions, strict=True)):
            if number in lost:
                self.rows[number] = self.begin(row.index, row.generation + 1)
            elif row.shown[4]:
                row.shown = (row.env.reset()[0], 0, 1, True, False)
            else:
                seen, reward, terminated, truncated, _ = row.env.step(action)
                row.shown = (seen, reward, 1 - terminated, False, terminated or truncated)

    def agrees(self, timestep):
        """Every field of every row is equal, in dtype too."""
        for number, row in enumerate(self.rows):
            shown = row.shown[0]
            if isinstance(shown, dict):  # a Discrete space that begins at -2 arrives from 0 on
                shown = shown | {"a": (shown["a"][0] + 2, shown["a"][1])}
            _same(timestep.observation, shown, number)
            fields = (timestep.reward, timestep.discount, timestep.first, timestep.last)
            for field, value in zip(fields, row.shown[1:], strict=True):
                assert field.dtype == (np.bool_ if isinstance(value, bool) else np.float32) or (
                    field.dtype == np.bool_ and isinstance(value, np.bool_)
                )
                assert field[number] == field.dtype.type(value)


def _same(got, want, row):
    if isinstance(got, dict):
        assert list(got) == sorted(want)
        for key in got:
            _same(got[key], want[key], row)
    elif isinstance(got, tuple):
        for one, other in zip(got, want, strict=True):
            _same(one, other, row)
    else:
        want = np.asarray(want)
        narrow = {"float64": np.float32, "int64": np.int32}.get(want.dtype.name, want.dtype)
        assert got.dtype == narrow
        np.testing.assert_array_equal(got[row], want.astype(narrow))


@pytest.fixture
def batches():
    """Makes batches, and closes them at the end."""
    made = []

    def make(environment, num_envs, workers, **settings):
        if workers == 0:
            settings["workers"] = 0
        batch = library().Gymnasium(environment, **settings).make(num_envs, max(workers, 1))
        made.append(batch)
        return batch

    yield make
    for batch in made:
        batch.close()


def good(rows):
    return np.zeros(rows, np.int32)


# --- semantics -----------------------------------------------------------------------------------


@variants(("workers", "seed", "start"), [(3, 2**40, 7), (0, 2**40, 7)], [(1, 0, 0)])
def test_equals_a_plain_loop(batches, workers, seed, start):
    indices = np.array([4, 0, 9, 2, 3])
    batch = batches(Walk, 5, workers)
    draw = np.random.default_rng(seed)
    for again in range(2):  # the second `reset` forgets everything
        reference = Reference(Walk, seed, indices.tolist(), start + again)
        reference.agrees(batch.reset(seed, indices, start + again))
        ends = set()
        for _ in range(80):
            actions = draw.integers(0, 3, 5).astype(np.int32)
            reference.step([int(action) + 7 for action in actions])
            timestep = batch.step(actions)
            reference.agrees(timestep)
            ends |= set(zip(timestep.last.tolist(), timestep.discount.tolist(), strict=True))
        assert ends == {(False, 1.0), (True, 1.0), (True, 0.0)}
    assert not any(batch.faults.values())


class Loud(Walk):
    def reset(self, *, seed=None, options=None):
        print("loud", flush=True)
        return super().reset(seed=seed)


def test_what_a_worker_prints_does_not_reach_stdout(batches, capfd):
    batches(Loud, 1, 1).reset(0, np.arange(1), 0)
    out, error = capfd.readouterr()
    assert (out, error.count("loud")) == ("", 1)


def test_rows_do_not_depend_on_the_others(batches):
    wide, narrow = batches("CartPole-v1", 4, 1), batches("CartPole-v1", 2, 2)
    wide.reset(3, np.arange(4), 0)
    narrow.reset(3, np.array([3, 1]), 0)
    for step in range(60):
        actions = (np.arange(4) + step // 7) % 2
        one, two = (
            wide.step(actions.astype(np.int32)),
            narrow.step(actions[[3, 1]].astype(np.int32)),
        )
        np.testing.assert_array_equal(one.observation[[3, 1]], two.observation)
        np.testing.assert_array_equal(one.last[[3, 1]], two.last)
    assert len(np.unique(one.observation[:, 0])) == 4
    wide.reset(4, np.arange(4), 0)
    narrow.reset(4, np.arange(2), 5)
    assert (wide.step(good(4)).observation[:2] != narrow.step(good(2)).observation).any()


def test_a_timestep_lasts_until_the_next_step(batches):
    batch = batches("CartPole-v1", 4, 2)
    timestep = batch.reset(0, np.arange(4), 0)
    before = timestep.observation.copy()
    threading.Event().wait(0.1)
    np.testing.assert_array_equal(timestep.observation, before)


def test_actions_fit_the_environments_own_space(batches):
    batch = batches(Push, 2, 1)
    batch.reset(0, np.arange(2), 0)
    action = library().Gymnasium(Push).spec.action
    for bound in (action.low, action.high):
        bounds = np.array([bound, bound], np.float32)
        np.testing.assert_array_equal(batch.step(bounds).observation, bounds)
    assert not any(batch.faults.values())


def test_several_actions_at_once_fit_the_environments_own_space(batches):
    spec = library("types").MultiDiscrete
    for kind, sizes, start in ((Switches, (2, 2, 2), 0), (Dials, (3, 2, 4), (0, 5, -2))):
        batch = batches(kind, 2, 2)
        action = library().Gymnasium(kind).spec.action
        assert action == spec(sizes, start or ())
        batch.reset(0, np.arange(2), 0)
        actions = np.array([(0, 0, 0), np.array(sizes) - 1], np.int32)
        np.testing.assert_array_equal(batch.step(actions).observation, actions + start)
        assert not any(batch.faults.values())


@pytest.mark.parametrize(
    ("dtype", "n", "largest"), [(np.int8, 127, 126), (np.int64, 2**31 + 1, 2**31 - 1)]
)
def test_several_discrete_numbers_end_at_the_largest_of_int32(dtype, n, largest):
    space = spaces.MultiDiscrete([n, 3], dtype=dtype)
    leaf = library().Gymnasium(functools.partial(Odd, space)).inspect()[1].observation
    np.testing.assert_array_equal(leaf.high, np.array([largest, 2], np.int32), strict=True)


def test_observations_of_several_discrete_numbers(batches):
    spec = library().Gymnasium(Lamps).spec.observation
    assert spec == library("types").ArraySpec((3,), np.int32, num_values=3, start=4)
    batch = batches(Lamps, 2, 1)
    shown = batch.reset(0, np.arange(2), 0).observation
    assert shown.dtype == np.int32
    np.testing.assert_array_equal(shown, [[0, 1, 0], [0, 1, 0]])
    actions = np.array([(0, 1, 0), (1, 0, 0)], np.int32)
    np.testing.assert_array_equal(batch.step(actions).observation, actions)
    assert not any(batch.faults.values())
    batch.step(np.array([(0, 0, 1), (0, 0, 0)], np.int32))  # a third lamp of 2 in one row
    assert {kind: n for kind, n in batch.faults.items() if n} == {"out_of_space": 1}


def test_the_specification():
    types, make = library("types"), library().gymnasium
    spec = library().Gymnasium(Walk).spec
    assert spec.name == "gymnasium:Walk"
    assert spec.action == types.Discrete(3, start=7)
    assert spec.observation == {
        "z": types.ArraySpec((2, 3), np.float32),
        "a": (
            types.ArraySpec((), np.int32, num_values=5, start=-2),
            types.ArraySpec((4,), np.uint8, scaled=True),
        ),
        "b": types.ArraySpec((), np.float32),
    }
    assert make("CartPole-v1").spec.observation == types.ArraySpec((4,), np.float32)
    assert make("Pendulum-v1").spec.action == types.Continuous((-2.0,), (2.0,))
    states = [types.ArraySpec((), np.int32, num_values=n) for n in (32, 11, 2)]
    assert make("Blackjack-v1").spec.observation == tuple(states)
    lake = functools.partial(gymnasium.make, "FrozenLake-v1", is_slippery=False)
    assert library().Gymnasium(lake).spec.name == (
        "gymnasium:make('FrozenLake-v1', is_slippery=False)"
    )
    assert list(library().Gymnasium(Walk, observe=("b",)).spec.observation) == ["b"]
    assert (
        make("CartPole-v1")
        == make("CartPole-v1", max_restarts=100)
        != make("CartPole-v1", max_restarts=1)
    )
    assert isinstance(make("CartPole-v1"), library("environment").HostEnvironments)


REGISTERING = """
    import gymnasium
    from test_gymnasium import Walk
    gymnasium.register("Own/Walk-v0", lambda: Walk())  # found by name nowhere
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module that registers an environment."""
    (tmp_path / "registers_walk.py").write_text(textwrap.dedent(REGISTERING))
    monkeypatch.syspath_prepend(tmp_path)
    yield "registers_walk"
    sys.modules.pop("registers_walk", None)
    gymnasium.registry.pop("Own/Walk-v0", None)


def test_a_module_registers_its_environments_in_every_process(batches, module):
    batch = batches(f"{module}:Own/Walk-v0", 2, 2)
    timestep = batch.reset(0, np.arange(2), 0)
    assert timestep.observation["b"].shape == (2,)
    assert not any(batch.faults.values())


def test_no_file_has_a_module_imported(module, tmp_path):
    serialization, errors = library("config.serialization"), library("errors")
    recipes, reopen = library("recipes"), library("run.loading").reopen
    name = f"gymnasium:{module}:Own/Walk-v0"
    for hidden in (name, f"lifetimes:{name}", f"gymnasium:GymV21Environment-v0,env_id={module}:X"):
        experiment = recipes.find("cartpole_sebulba").with_fields({"environment": hidden})
        library("io.seal").seal_json(
            tmp_path / "config.json", {"experiment": serialization.to_json(experiment)}
        )
        with pytest.raises(errors.ConfigError, match=f"module '{module}'.*add `environment="):
            reopen(tmp_path)
        with pytest.raises(errors.ConfigError, match="add `environment="):
            recipes.find(str(tmp_path / "config.json"))
    assert module not in sys.modules
    for repeated in (
        reopen(tmp_path, environment=name),
        recipes.find(str(tmp_path / "config.json"), environment=name),
        reopen(tmp_path, recipe=experiment),
    ):
        assert repeated.environment in (name, hidden)


def local():
    return lambda: Walk()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("CartPole-v9", "did you mean CartPole-v"),
        ("Nowhere/Land-v0", "Gymnasium has no environment 'Nowhere/Land-v0'"),
        ("no_such_module:Land-v0", "No module named 'no_such_module'"),
        ("ALE/SpaceInvaders-v5", "write atari:space_invaders instead"),
        (functools.partial(Odd, spaces.Dict({"x": SEEN, "y": spaces.Text(4)})), "observe=NAME"),
        (functools.partial(Odd, error="the tank is empty"), "the tank is empty"),
        (local(), "define it at the top of a module"),
        (7, "neither a registered id nor something to call"),
        (Spaceless, "has no action_space: set one of gymnasium.spaces"),
        (
            Objectives,
            "has rewards of the shape [2], not a number: a reward is one number",
        ),
        (
            functools.partial(Odd, SEEN, spaces.Box(-MOST, MOST, (2,))),
            "finite bounds, low < high in each coordinate",
        ),
        (functools.partial(Odd, spaces.Text(4)), "must be a Box of numbers, Discrete"),
        (
            functools.partial(Odd, spaces.MultiDiscrete([2, 2], start=[0, 1])),
            "MultiDiscrete with one `start` for all",
        ),
        (functools.partial(Odd, SEEN, spaces.Box(-np.inf, 1, (2,))), "finite bounds"),
        (functools.partial(Odd, SEEN, spaces.Dict({"x": SEEN})), "TransformAction"),
    ],
)
def test_what_cannot_be_is_one_sentence(environment, words, monkeypatch):
    for name in [name for name in gymnasium.registry if name.startswith("ALE/")]:
        monkeypatch.delitem(gymnasium.registry, name)  # which importing ale_py has added
    with pytest.raises(library("errors").ConfigError) as caught:
        library().Gymnasium(environment)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- from Python ---------------------------------------------------------------------------------


def test_a_class_of_ones_own_trains_in_one_line(tmp_path):
    podracer = importlib.import_module("podracer")
    result = podracer.train(
        "cartpole_sebulba",
        environment=podracer.Gymnasium(Walk),
        driver=podracer.SebulbaConfig(
            num_envs=4, rollout_length=8, updates_per_chunk=1, threads_per_actor=1, env_threads=2
        ),
        frames=96,
        evaluations=1,
        evaluation_episodes=1,
        target_return=None,
        run_dir=tmp_path / "run",
    )
    assert 96 <= result.metrics["frames"] < 96 + 4 * 8


@pytest.mark.parametrize("name", ["podracer", "podracer.envs.host.gymnasium_worker"])
def test_imports_of_a_worker_leave_jax_out(name):
    code = f"import sys, {name}; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GENEROUS, check=True
    )
    assert done.stdout.strip() == "False"


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.figure(8)
@variants("deed", ROWS, BAD_ROWS)
def test_a_row_at_fault_begins_anew_alone(batches, deed):
    run_deed(batches(Naughty, 4, 2), deed, lost={2})


@pytest.mark.figure(8)
@pytest.mark.parametrize("deed", BAD_ROWS)
def test_a_row_at_fault_in_this_process_begins_anew_alone(batches, deed):
    run_deed(batches(Naughty, 4, 0), deed, lost={2})


@pytest.mark.figure(7)
@pytest.mark.parametrize("deed", LOST_WORKERS)
def test_a_lost_worker_is_replaced(batches, deed):
    run_deed(batches(Naughty, 4, 2, step_seconds=1.0), deed, lost={2, 3})


def run_deed(batch, deed, lost):
    """Row 2 does it, twice with a good step between; all rows go on as the reference does."""
    reference = Reference(Naughty, 1, range(4), 0)
    reference.agrees(batch.reset(1, np.arange(4), 0))
    pids = list(getattr(batch, "pids", ()))  # of none in this process
    for step in range(25):
        actions = good(4)
        if step in (4, 6):
            actions[2] = DEEDS.index(deed)
        reference.step(np.zeros(4, int), lost if step in (4, 6) else ())
        timestep = batch.step(actions)
        reference.agrees(timestep)
        assert set(np.flatnonzero(timestep.first)) >= (lost if step in (4, 6) else set())
    kind = (BAD_ROWS | LOST_WORKERS)[deed]
    assert batch.faults == dict.fromkeys(FAULT_KINDS, 0) | {kind: 2}
    assert batch.first_faults.keys() == {kind}
    assert batch.first_faults[kind].startswith("environment 2: ")
    assert "\n" not in batch.first_faults[kind]
    assert deed != "raise" or batch.first_faults[kind].endswith(
        "2: RuntimeError: the wheel came off"
    )
    if pids:
        assert batch.pids[0] == pids[0]
        assert (batch.pids[1] == pids[1]) == (deed in BAD_ROWS)


@pytest.mark.figure(7)
@pytest.mark.slow
def test_faults_in_several_workers_at_once(batches):
    batch = batches(Naughty, 4, 4, step_seconds=1.0)
    reference = Reference(Naughty, 0, range(4), 0)
    batch.reset(0, np.arange(4), 0)
    reference.step(good(4), lost={0, 1, 3})
    deeds = ["hang", "kill", "good", "raise"]
    reference.agrees(batch.step(np.array([DEEDS.index(deed) for deed in deeds], np.int32)))
    assert {k: n for k, n in batch.faults.items() if n} == {"raised": 1, "died": 1, "hung": 1}


@pytest.mark.parametrize(
    ("environment", "settings", "words"),
    [
        (Naughty, {}, ("3 times without one good step", "`raised`", "the wheel came off")),
        (
            Naughty,
            {"max_restarts": 1},
            (
                "beyond the 1 that",
                "`raised`",
                "the wheel came off",
                ",max_restarts=20 or",
            ),
        ),
        (Naughty, {"workers": 0}, ("3 times without one good step", "the wheel came off")),
        (
            Naughty,
            {"deed": "kill"},
            ("3 times", "`died`", "SIGKILL, as where memory has run out"),
        ),
        (functools.partial(Broken, "shape"), {}, ("`wrong_shape`", "(3,), but has (4,)")),
        (functools.partial(Broken, "pair"), {}, ("`malformed`", "the pair")),
    ],
)
def test_too_many_faults_end_the_run(batches, environment, settings, words):
    action = DEEDS.index(settings.pop("deed", "raise")) if environment is Naughty else 0
    workers = settings.pop("workers", 2)
    batch = batches(environment, 3, workers, **settings)

    def run():
        batch.reset(0, np.arange(3) + 10, 0)
        for _ in range(3):
            batch.step(np.array([0, 0, action], np.int32))

    fault = library("errors").EnvironmentFault
    with pytest.raises(fault) as caught:
        run()
    sentence, _, text = str(caught.value).partition("\n")
    assert sentence.startswith(batch.name)
    assert sentence.endswith(".")
    assert text
    for word in words:
        assert word in str(caught.value)
    if environment is Naughty:
        assert f"row 2 of worker {max(workers - 1, 0)} (environment 12 of the run)" in sentence
    assert caught.value.exit_code == 72
    with pytest.raises(fault, match="closed"):
        batch.step(good(3))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_needs_a_reset(batches, workers):
    with pytest.raises(library("errors").EnvironmentFault, match="`reset` must come before"):
        batches("CartPole-v1", 2, workers).step(good(2))


@pytest.mark.figure(7)
@variants("kills", [20], [100])
def test_kills_at_random_moments_are_replaced(batches, cases, kills):
    """A step may be under way. Noted are the seconds until all rows are back."""
    batch, draw, seconds = batches("CartPole-v1", 8, 4), np.random.default_rng(kills), []
    batch.reset(0, np.arange(8), 0)
    for _ in cases(range(kills)):
        victim = batch.pids[draw.integers(len(batch.pids))]
        timer = threading.Timer(draw.uniform(0, 0.003), os.kill, (victim, signal.SIGKILL))
        timer.start()
        died = batch.faults["died"]
        began = time.monotonic()
        while batch.faults["died"] == died:
            now = time.monotonic()
            assert now < began + GENEROUS
            batch.step(good(8))
        seconds.append(time.monotonic() - now)  # of the step that found and replaced it
        timer.join()
        batch.step(good(8))
        assert victim not in batch.pids
    assert batch.faults == dict.fromkeys(FAULT_KINDS, 0) | {"died": kills}
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    cases.note(f"full again after p50 {p50:.0f} ms, p99 {p99:.0f} ms")


def fork_server():
    """Ids of the only batch's fork server and of its guard, the child of this process."""
    [guard] = children(os.getpid())
    [server] = children(guard)
    return {"server": server, "guard": guard}


@pytest.mark.figure(7)
@pytest.mark.parametrize("killed", ["server", "guard"])
def test_the_fork_server_is_replaced_too(killed, batches):
    batch = batches("CartPole-v1", 4, 2)
    batch.reset(0, np.arange(4), 0)
    os.kill(fork_server()[killed], signal.SIGKILL)
    while batch.faults["died"] < 2:  # its workers do not outlive it
        batch.step(good(4))
    for _ in range(50):
        timestep = batch.step(good(4))
    assert batch.faults["died"] == 2
    assert timestep.observation.any(axis=1).all()


@pytest.mark.figure(7)
@pytest.mark.slow
def test_a_fork_server_that_is_stopped_is_replaced(batches, monkeypatch):
    monkeypatch.setattr(library(), "FORK_SECONDS", 0.2)
    batch = batches("CartPole-v1", 2, 2)
    batch.reset(0, np.arange(2), 0)
    former = fork_server()
    os.kill(former["server"], signal.SIGSTOP)
    os.kill(batch.pids[0], signal.SIGKILL)
    while batch.faults["died"] < 2:  # the other worker ends with its fork server
        batch.step(good(2))
    assert not set(fork_server().values()) & set(former.values())
    assert batch.step(good(2)).observation.any(axis=1).all()


def test_the_limit_of_a_step_ends_before_the_drivers(batches):
    environments = library().Gymnasium("CartPole-v1", step_seconds=10.0)
    assert environments.with_deadline(10.5) is environments
    assert environments.with_deadline(5.0).step_seconds == 2.5


# --- processes -----------------------------------------------------------------------------------


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_workers_are_without_jax_and_deaf_to_signals(batches):
    batch = batches(Inside, 2, 2)
    timestep = batch.reset(0, np.arange(2), 0)
    imported, pids = timestep.observation
    assert imported.tolist() == [0, 0]
    assert pids.tolist() == batch.pids
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in (*batch.pids, *fork_server().values()):
            os.kill(pid, number)
        batch.step(good(2))
    assert not any(batch.faults.values())


def test_workers_leave_the_accelerator_to_the_run(batches):
    timestep = batches(Platform, 2, 1).reset(0, np.arange(2), 0)
    assert timestep.observation.all()


@pytest.mark.figure(12)
def test_environments_are_closed(batches, tmp_path):
    path = tmp_path / "closed"
    batch = batches(functools.partial(Closing, path), 3, 2)
    closed = [os.getpid()]  # the one that was made for its spaces
    for _ in range(2):
        batch.reset(0, np.arange(3), 0)
        closed += [batch.pids[0], batch.pids[0], batch.pids[1]]
    batch.close()
    assert sorted(map(int, path.read_text().split())) == sorted(closed)


class Leaving(Inside):
    """Starts a process, whose id it observes, and leaves it behind; its `close` hangs."""

    def __init__(self):
        self.child = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)

    def reset(self, *, seed=None, options=None):
        return (0, self.child), {}

    def close(self):
        threading.Event().wait(GENEROUS)


class Beside(Inside):
    """While it is made, another thread of the program starts a process."""

    started: typing.ClassVar[queue.SimpleQueue] = queue.SimpleQueue()
    done = threading.Event()
    pid = 0

    def __init__(self):
        threading.Thread(target=self.work, daemon=True).start()
        Beside.pid = self.started.get()

    @classmethod
    def work(cls):
        cls.started.put(os.posix_spawnp("sleep", ["sleep", "60"], os.environ))
        cls.done.wait(GENEROUS)


def test_processes_of_other_threads_are_left_alone():
    library().Gymnasium(Beside)
    assert is_running(Beside.pid)
    os.kill(Beside.pid, signal.SIGKILL)
    os.waitpid(Beside.pid, 0)
    Beside.done.set()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_what_an_environment_leaves_does_not_outlive_the_run(batches, caplog):
    before = children(os.getpid())
    library().Gymnasium(Leaving)
    assert children(os.getpid()) == before
    batch = batches(Leaving, 2, 2)
    assert "`close` has not returned after" in caplog.text
    pids = batch.reset(0, np.arange(2), 0).observation[1].tolist()
    assert all(map(is_running, pids))
    os.kill(batch.pids[0], signal.SIGKILL)
    batch.step(good(2))
    assert batch.faults["died"] == 1
    assert not is_running(pids[0])
    batch.close()
    assert not is_running(pids[1])


class Roaming(Inside):
    """Starts two processes in sessions of their own, a child and an orphan, and observes them."""

    observation_space = spaces.Tuple([spaces.Discrete(2**31 - 1)] * 2)
    orphan = "import os; x = os.fork(); print(x) if x else (os.setsid(), os.execlp('sleep', *{}))"

    def __init__(self):
        command = ["sleep", str(10 * GENEROUS)]
        self.child = subprocess.Popen(command, start_new_session=True).pid
        code = [sys.executable, "-S", "-c", self.orphan.format(command)]
        with subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            self.orphan_pid = int(process.stdout.readline())

    def reset(self, *, seed=None, options=None):
        return (self.orphan_pid, self.child), {}


ROAMING = """
import os, sys
import numpy as np
sys.path[:0] = {path!r}
from test_gymnasium import Roaming
from podracer.envs.host.gymnasium import Gymnasium
batch = Gymnasium(Roaming).make(2, 2)
roaming = batch.reset(0, np.arange(2), 0).observation
print(*np.ravel(roaming).tolist(), flush=True)
sys.stdin.readline()
batch.close()
sys.stdin.read()
"""


@pytest.mark.figure(12)
@variants("ends", ["killed"], ["closes", "server killed"])
def test_processes_in_sessions_of_their_own_end_with_the_run(ends, tmp_path):
    """Children and orphans, also where nothing but the kernel can tell that the run has ended."""
    script = ROAMING.format(path=sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdin is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 4
        watched = [os.pidfd_open(pid) for pid in pids]
        if ends == "closes":
            run.stdin.write("\n")
            run.stdin.flush()
        if ends == "server killed":
            (guard,) = children(run.pid)
            (server,) = [pid for pid in children(guard) if pid not in pids]
            os.kill(server, signal.SIGKILL)
        if ends == "killed":
            run.kill()
        for fd in watched:
            assert select.select([fd], [], [], GENEROUS)[0]
            os.close(fd)


def resources():
    """What a process can leak: its threads, children, files, and names in shared memory."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    names = [name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "podracer"))]
    return Counter([*threading.enumerate(), *children(os.getpid()), *files, *names])


@pytest.mark.figure(12)
@variants("cycles", [5], [100])
def test_nothing_leaks(batches, cases, cycles):
    def cycle(number):
        batch = batches(Naughty, 3, 2)
        if number % 5 != 1:
            batch.reset(0, np.arange(3), 0)
        if number % 5 == 2:
            batch.step(np.array([0, 0, DEEDS.index("kill")], np.int32))
        if number % 5 == 3:
            os.kill(batch.pids[0], signal.SIGKILL)
        if number % 5 == 4:
            raising = np.full(3, DEEDS.index("raise"), np.int32)
            batch.step(raising)
            batch.step(raising)
            with pytest.raises(library("errors").EnvironmentFault):
                batch.step(raising)
        batch.close()
        batch.close()

    cycle(0)
    before = resources()
    for number in cases(range(cycles)):
        cycle(number)
    assert not resources() - before


@pytest.mark.parametrize("failing", ["gymnasium_worker.map_shared_memory", "subprocess.Popen"])
def test_what_cannot_be_made_leaks_nothing(monkeypatch, failing):
    def fail(*_, **__):
        raise OSError("no more of it")

    module = library("envs.host.gymnasium")
    environments = library().Gymnasium(Naughty)
    before = resources()
    monkeypatch.setattr(f"{module.__name__}.{failing}", fail)
    with pytest.raises(OSError, match="no more of it"):
        environments.make(3, 2)
    assert not resources() - before


def test_a_fork_server_that_no_signal_ends_keeps_no_memory(batches, monkeypatch):
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:")

    before = mapped()
    batch = batches(Naughty, 1, 1)
    assert mapped() > before
    servers = []

    def wait(server, seconds):
        servers.append(server)
        raise subprocess.TimeoutExpired("it", seconds)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        batch.close()
    assert mapped() == before
    servers[0].wait(10)


SCRIPT = """
    import sys, threading
    import gymnasium, numpy as np

    class Here(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}
        def step(self, action):
            if action:
                threading.Event().wait(60)
            return np.ones(2, np.float32), 0.0, False, False, {}

    def main():
        from podracer.envs.host.gymnasium import Gymnasium
        batch = Gymnasium(Here).make(2, 2)
        batch.reset(0, np.arange(2), 0)
        print(*batch.pids, flush=True)
        batch.step(np.array([0, 1], np.int32))
"""


@pytest.mark.figure(12)
@variants("are_stopped", [True], [False])
def test_no_orphans_of_a_killed_parent(are_stopped, tmp_path):
    """A process that is stopped cannot find that its parent has ended, but the kernel wakes it."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + '\nif __name__ == "__main__":\n    main()\n')
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()] + children(parent.pid)
        assert len(pids) == 3
        watched = [os.pidfd_open(pid) for pid in pids]
        for pid in pids if are_stopped else ():
            os.kill(pid, signal.SIGSTOP)
        parent.kill()  # one of its workers hangs
    for fd in watched:
        assert select.select([fd], [], [], GENEROUS)[0]
        os.close(fd)


TRAINING_SCRIPT = """
import podracer
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass

podracer.train("cartpole_sebulba", environment=podracer.Gymnasium(Mine), run_dir="run", frames=1024)
"""


@variants(
    "code",
    [SCRIPT + "\n    main()\n", SCRIPT + "\n    if True:\n        main()\n"],
    [TRAINING_SCRIPT],
    ids=["make", "another if", "train"],
)
def test_a_script_without_a_guard_is_told_so(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=GENEROUS, check=False
    )
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`, or take workers=0.' in done.stderr
    assert len(done.stderr.splitlines()) < 18  # before anything is compiled, or a worker imports it
    assert not (tmp_path / "run").exists()


@variants("how", ["step"], ["script", "session"])
def test_a_class_without_a_module_runs_in_this_process(how, tmp_path):
    """Of a script without a guard, and of a session, which has no file, as a notebook's cells."""
    code = TRAINING_SCRIPT.replace("Mine)", "Mine, workers=0)")
    if how == "step":
        code = code[: code.index("podracer.train")] + (
            "import numpy\n"
            "batch = podracer.Gymnasium(Mine, workers=0).make(2, 1)\n"
            "batch.reset(0, numpy.arange(2), 0), batch.step(numpy.zeros(2, 'i')), batch.close()\n"
        )
    code += "print(__name__, 'went on')\n"
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, *([script] if how == "script" else ["-"])]
    done = subprocess.run(
        command, input=code, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("__main__ went on\n"), done.stderr


def test_ctrl_c_while_an_environment_steps_in_this_process_is_no_fault_of_it(batches):
    class Interrupted(Push):
        def step(self, action):
            raise KeyboardInterrupt

    batch = batches(Interrupted, 1, 0)
    batch.reset(0, np.arange(1), 0)
    with pytest.raises(KeyboardInterrupt):
        batch.step(np.zeros((1, 2), np.float32))
    assert not any(batch.faults.values())
