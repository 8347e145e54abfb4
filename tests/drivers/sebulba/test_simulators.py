"""Simulators of a device, by DLPack, and simulators that exist once."""

import contextlib
import dataclasses
import importlib
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import SMALL
from hosts import CounterBatch, Counters
from runs import sebulba_setup, train_sebulba
from variants import variants

import podracer
from podracer.agents.impala import Impala
from podracer.drivers.sebulba import SebulbaConfig
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError, EnvironmentFault
from podracer.tournament.config import Tournament
from podracer.tournament.orchestrator import run_tournament
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec

EXTENSIONS = Path(__file__).parents[3] / "examples" / "extensions"


class Foreign:
    """An array of another library: it has `__dlpack__`, and refuses to become NumPy's."""

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)

    @classmethod
    def empty_like(cls, array):
        """In memory that JAX takes without a copy: it begins at a multiple of 64 bytes."""
        memory = np.empty(array.nbytes + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][: array.nbytes]
        result = cls(memory.view(array.dtype).reshape(array.shape))
        pointer = jax.dlpack.from_dlpack(result).unsafe_buffer_pointer()
        assert pointer == result.array.ctypes.data
        return result

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array__(self, *args, **options):
        raise AssertionError("an array of a device became one of NumPy")


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """Environments of the host as those of a device, in memory that every step overwrites."""

    inner: object
    shared: bool = False
    guard: bool = False
    on_device = True

    @property
    def spec(self):
        return self.inner.spec

    def make(self, num_envs, num_threads):
        return OnDeviceBatch(self.inner.make(num_envs, num_threads), self.guard)


WATCHED = threading.local()  # whether this thread is between two steps of a guarded batch


@pytest.fixture
def conversions(monkeypatch):
    """Names of functions that turned an array of JAX into NumPy's in a watched thread.

    On a CPU that is no transfer, so that no guard of JAX notices it.
    """
    names = []

    def counted(name, function):
        def call(*args, **options):
            arrays = [x for x in jax.tree.leaves((args, options)) if isinstance(x, jax.Array)]
            if arrays and getattr(WATCHED, "thread", False):
                names.append(name)
            return function(*args, **options)

        return call

    for name in (
        "array",
        "asarray",
        "ascontiguousarray",
        "concatenate",
        "copy",
        "isfinite",
        "stack",
    ):
        monkeypatch.setattr(np, name, counted(name, getattr(np, name)))
    monkeypatch.setattr(jax, "device_get", counted("device_get", jax.device_get))
    return names


class OnDeviceBatch:
    open = most = 0  # batches that are open, and the most that ever were

    def __init__(self, inner, guard):
        self.inner, self.guard, self.memory = inner, guard, None
        self.is_guarded = False
        self.stack = contextlib.ExitStack()
        OnDeviceBatch.open += 1
        OnDeviceBatch.most = max(OnDeviceBatch.most, OnDeviceBatch.open)

    def reset(self, *seeds):
        return self.show(self.inner.reset(*seeds))

    def step(self, action):
        WATCHED.thread = False
        assert isinstance(action, jax.Array)
        if self.guard and not self.is_guarded:  # for the rest of this thread
            self.stack.enter_context(jax.transfer_guard_host_to_device("disallow_explicit"))
            self.is_guarded = True
        for leaf in jax.tree.leaves(self.memory):
            leaf.array.fill(1)  # before it reads the actions
        action = np.from_dlpack(action)
        with jax.transfer_guard("allow"):
            timestep = self.show(self.inner.step(action))
        WATCHED.thread = self.guard
        return timestep

    def show(self, timestep):
        timestep = jax.tree.map(np.asarray, timestep)
        if self.memory is None:
            self.memory = jax.tree.map(Foreign.empty_like, timestep)
        jax.tree.map(lambda leaf, x: np.copyto(leaf.array, x), self.memory, timestep)
        return self.memory

    def snapshot(self):
        return self.inner.snapshot()

    def restore(self, *args):
        self.inner.restore(*args)

    def close(self):
        OnDeviceBatch.open -= 1
        WATCHED.thread = False
        self.stack.close()
        self.inner.close()


def equal_trees(a, b):
    return all(map(np.array_equal, *map(jax.tree.leaves, (jax.device_get(a), jax.device_get(b)))))


@variants(("lag", "devices"), [(1, 1)], [(0, 1), (1, 3)])
def test_arrays_of_a_device_train_as_those_of_the_host(lag, devices, conversions):
    """To the bit, though the simulator overwrites its arrays in every step.

    The host reads one array in a rollout, the numbers of faults, and sends none. With three devices
    the simulator is on another one than the second actor.
    """
    env, config = DeviceEnvironments(make("catch")), {"policy_lag": lag, "devices": devices}
    config |= {"actors": 2} if devices > 1 else {}
    expected, _ = train_sebulba(*sebulba_setup(env=env, **config))
    driver, state = sebulba_setup(env=OnDevice(env, guard=True), **config)
    state, reports = train_sebulba(driver, state)
    assert set(conversions) == {"asarray"}
    threads = driver.split.threads
    assert 10 * threads <= len(conversions) <= (10 + lag + driver.config.queue_depth) * threads
    assert equal_trees(state.learner, expected.learner)
    assert all(report.metrics["environment_faults"] == 0 for report in reports)


def spoil(leaf, row, value):
    leaf = leaf.copy()
    leaf[row] = value
    return leaf


def not_finite(batch, timestep):
    if batch.steps == 11 and batch.indices[0] == 0:
        observation = spoil(timestep.observation, 2, np.nan)
        return dataclasses.replace(timestep, observation=observation)
    if batch.steps == 13 and batch.indices[0] == 0:
        return dataclasses.replace(timestep, reward=spoil(timestep.reward, 5, np.inf))
    return timestep


def test_bad_rows_are_masked_as_those_of_the_host():
    env = Counters(not_finite)
    expected, expected_reports = train_sebulba(*sebulba_setup(env=env))
    state, reports = train_sebulba(*sebulba_setup(env=OnDevice(env)))
    assert equal_trees(state.learner, expected.learner)
    faults = [report.metrics["environment_faults_not_finite"] for report in reports]
    assert faults == [2.0] * len(reports)
    assert [report.frames for report in reports] == [report.frames for report in expected_reports]


MASKED = EnvironmentSpec(
    "masked", {"x": ArraySpec((3,)), ACTION_MASK: ArraySpec((2,), np.bool_)}, Discrete(2)
)


@dataclasses.dataclass(frozen=True)
class Masked(Counters):
    """Counters with a mask of actions, which allows nothing in one row from a step on."""

    spec: EnvironmentSpec = MASKED

    def make(self, num_envs, num_threads):
        return MaskedBatch(num_envs, None)


class MaskedBatch(CounterBatch):
    def reset(self, *seeds):
        return self.with_mask(super().reset(*seeds))

    def step(self, action):
        return self.with_mask(super().step(action))

    def with_mask(self, timestep):
        mask = np.ones((self.num_envs, 2), bool)
        mask[3] = self.steps < 9
        observation = {"x": timestep.observation, ACTION_MASK: mask}
        return dataclasses.replace(timestep, observation=observation)


def test_a_mask_that_allows_nothing_is_a_fault_as_on_the_host(caplog):
    state, reports = train_sebulba(*sebulba_setup(env=OnDevice(Masked())))
    expected, expected_reports = train_sebulba(*sebulba_setup(env=Masked()))
    assert equal_trees(state.learner, expected.learner)
    name = "environment_faults_no_action"
    assert reports[-1].metrics[name] == expected_reports[-1].metrics[name] > 0
    assert "row 3 of the batch: its action mask was all False" in caplog.text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: {"reward": Foreign(t.reward.array[:4])}, r"reward must be float32\[8\]"),
        (lambda t: {"first": Foreign(t.first.array.astype(np.uint8))}, "first must be bool"),
        (
            lambda t: {"observation": {"x": t.observation}},
            "observation must be as the spec.s: observation changed from array to dict",
        ),
        (lambda t: {"observation": [1.0]}, r"observation\[0\] cannot be taken by DLPack"),
    ],
)
def test_what_breaks_the_contract_is_a_fault_with_its_name(change, text):
    class Broken(OnDeviceBatch):
        def show(self, timestep):
            timestep = super().show(timestep)
            return dataclasses.replace(timestep, **change(timestep))

    @dataclasses.dataclass(frozen=True)
    class BrokenFactory(OnDevice):
        def make(self, num_envs, num_threads):
            return Broken(self.inner.make(num_envs, num_threads), False)

    with pytest.raises(EnvironmentFault, match=text):
        train_sebulba(*sebulba_setup(env=BrokenFactory(Counters())), num_updates=1)


class CountersOnDevice(Counters):
    on_device = True


@pytest.mark.parametrize("kind", [Counters, CountersOnDevice])
def test_a_result_that_is_no_timestep_is_a_fault_with_its_type(kind):
    env = kind(lambda batch, timestep: (timestep.observation, timestep.reward))
    text = "must return a `podracer.TimeStep`, but the result is of type tuple"
    with pytest.raises(EnvironmentFault, match=text):
        train_sebulba(*sebulba_setup(env=env), num_updates=1)
    with pytest.raises(ConfigError, match=text):
        podracer.check_environment(env)


class Tensor(Foreign):
    """An array with a dtype of its own library."""

    dtype = types.SimpleNamespace()

    @property
    def shape(self):
        return self.array.shape


@pytest.mark.figure(7)
@pytest.mark.slow
def test_a_resumed_run_in_a_device_simulator_goes_on_exactly():
    """In lock-step, with a simulator that can be saved: masked rows included."""
    env = DeviceEnvironments(make("catch"))
    driver, state = sebulba_setup(env=env.environment, policy_lag=0)
    driver.host = OnDevice(env)
    again = jax.tree.map(jnp.copy, state)
    expected, _ = train_sebulba(driver, state, num_updates=10)
    halfway, _ = train_sebulba(driver, again, num_updates=5)
    resumed, _ = train_sebulba(driver, halfway, num_updates=10)
    assert equal_trees(resumed.learner, expected.learner)
    assert equal_trees(resumed.actor, expected.actor)


# --- simulators that exist once -------------------------------------------------------------------


def once(**config):
    """An experiment in a simulator of 8 environments that exists once."""
    driver = {"num_envs": 8, "rollout_length": 5, "updates_per_chunk": 2} | config
    return podracer.Experiment(
        recipe="once",
        environment=OnDevice(DeviceEnvironments(make("catch")), shared=True),
        agent=Impala(network=SMALL),
        driver=SebulbaConfig(**driver),
        frames=800,
        evaluations=0,
    )


@pytest.fixture
def counted():
    OnDeviceBatch.open = OnDeviceBatch.most = 0
    yield OnDeviceBatch
    assert OnDeviceBatch.open == 0


@variants("lag", [0], [1])
def test_one_simulator_trains_and_is_evaluated_afterwards(lag, counted, tmp_path):
    """What is learned is the same as in environments of the host."""
    experiment = once(policy_lag=lag)
    result = podracer.train(experiment, run_dir=tmp_path / "a", progress=False, devices=1)
    assert counted.most == 1
    on_host = dataclasses.replace(experiment, environment=DeviceEnvironments(make("catch")))
    on_host = podracer.train(
        on_host, driver={"threads_per_actor": 1}, run_dir=tmp_path / "c", progress=False, devices=1
    )
    assert equal_trees(result.state, on_host.state)
    agent, state = podracer.load(tmp_path / "a", recipe=experiment)
    evaluate = podracer.make_evaluator(agent, experiment.environment, 6)
    returns = evaluate(agent.actor_params(state), jax.random.key(0)).returns
    assert returns.shape == (6,)
    assert counted.most == 1


def test_pods_of_a_tournament_are_scored_in_a_simulator_that_exists_once(counted, tmp_path):
    """Its training has closed the one that it had."""
    tournament = Tournament(
        (once(),), pods=1, rounds=1, round_frames=400, episodes=6, engine="inline"
    )
    assert run_tournament(tournament, tmp_path) == 0
    assert counted.most == 1


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"driver": {"threads_per_actor": 2}}, "one thread steps all of its environments"),
        ({"driver": {"actors": 2}}, "one thread steps all of its environments"),
        ({"evaluations": 1}, "take `evaluations=0`, and `podracer eval` afterwards"),
    ],
)
def test_what_needs_a_second_simulator_is_refused_before_the_first(overrides, text, counted):
    with pytest.raises(ConfigError, match=text):
        podracer.train(once(), **overrides)
    assert counted.most == 0


# --- the example in PyTorch -----------------------------------------------------------------------


@pytest.fixture
def torch_simulators(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: `pip install torch`")
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXTENSIONS)
    yield importlib.import_module("batched_simulator")
    for name in ("batched_simulator", "manager_based"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["CartPoles", "PointMasses"])
def test_tensors_of_torch_never_pass_through_numpy(name, torch_simulators, monkeypatch):
    """Neither in training's steps nor by an implicit transfer of JAX; evaluations may."""
    torch = importlib.import_module("torch")
    batch, stack = torch_simulators.Batch, contextlib.ExitStack()
    step, copies, steps = batch.step, [], []
    monkeypatch.setattr(torch.Tensor, "__array__", lambda *args, **options: copies.append(args))
    monkeypatch.setattr(torch.Tensor, "numpy", lambda *args, **options: copies.append(args))

    def guarded_step(self, action):
        if not steps:
            stack.enter_context(jax.transfer_guard("disallow"))  # in this thread
        steps.append(action.unsafe_buffer_pointer())
        timestep = step(self, action)
        for leaf in jax.tree.leaves(timestep):
            assert jax.dlpack.from_dlpack(leaf).unsafe_buffer_pointer() == leaf.data_ptr()
        return timestep

    monkeypatch.setattr(batch, "step", guarded_step)
    env = getattr(torch_simulators, name)()
    experiment = dataclasses.replace(once(num_envs=32), environment=env, agent=podracer.PPO())
    podracer.train(experiment, evaluations=0, devices=1, progress=False)
    assert len(steps) >= 25
    assert copies == []


# --- the adapter of Isaac Lab and mjlab, with a stub of their environments ------------------------


class ManagerBasedStub:
    """A torch environment that resets by index the rows that end, and loses final observations.

    Row i falls after i + 2 steps if i is even, and has a limit of 4 steps. Observations are the
    row, its episode and its step, in a tensor that every step overwrites.
    """

    open = 0

    def __init__(self, num_envs):
        self.torch = importlib.import_module("torch")
        self.policy = self.torch.zeros(num_envs, 3)
        self.policy[:, 0] = self.torch.arange(num_envs)
        ManagerBasedStub.open += 1

    def reset(self, seed=None):
        self.policy[:, 1:] = 0
        return {"policy": self.policy}, {}

    def step(self, action):
        assert action.shape == (len(self.policy), 2)
        self.policy[:, 2] += 1
        row, step = self.policy[:, 0], self.policy[:, 2]
        terminated = (row % 2 == 0) & (step >= row + 2)
        truncated = step >= 4
        ids = (terminated | truncated).nonzero().squeeze(-1)
        reward = step.clone()
        self.policy[ids, 1] += 1
        self.policy[ids, 2] = 0
        return {"policy": self.policy}, reward, terminated, truncated, {}

    def close(self):
        ManagerBasedStub.open -= 1


def test_ends_of_a_manager_based_environment_are_shown_as_drivers_expect(torch_simulators):
    module = importlib.import_module("manager_based")
    env = module.ManagerBased("stub", ManagerBasedStub, 3, 2)
    batch = env.make(2, 1)
    timesteps = [batch.reset(0, np.arange(2, dtype=np.uint32), 0)]
    timesteps += [batch.step(jax.numpy.zeros((2, 2))) for _ in range(6)]
    rows = {
        field: [getattr(t, field).tolist() for t in timesteps]
        for field in ("reward", "discount", "first", "last")
    }
    # Row 0 falls every second step. Row 1 has a time-out in step 4 and begins again in step 5.
    assert [x[0] for x in rows["discount"]] == [1, 1, 0, 1, 0, 1, 0]
    assert [x[0] for x in rows["first"]] == [True, False, True, False, True, False, True]
    assert not any(x[0] for x in rows["last"])
    assert [x[1] for x in rows["reward"]] == [0, 1, 2, 3, 4, 0, 2]
    assert [x[1] for x in rows["last"]] == [False] * 4 + [True, False, False]
    assert [x[1] for x in rows["first"]] == [True, False, False, False, False, True, False]
    assert timesteps[4].observation[1].tolist() == [1, 0, 3]  # the one before the final one
    assert timesteps[5].observation[1].tolist() == [1, 1, 1]
    batch.close()
    batch.close()
    assert ManagerBasedStub.open == 0
    assert podracer.check_environment(env).usable
