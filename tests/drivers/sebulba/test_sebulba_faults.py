"""Faults in every component of Sebulba, at every place and moment: the run ends, and says why."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import CounterBatch, Counters
from runs import actor_threads, sebulba_setup
from variants import variants

from podracer import envs
from podracer.agents.impala import Impala
from podracer.config.experiment import Experiment
from podracer.drivers import driver as base_module
from podracer.drivers.progress import Orders, Request
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba import actor as actor_module
from podracer.drivers.sebulba import actor_pool as pool_module
from podracer.drivers.sebulba import driver as driver_module
from podracer.drivers.sebulba import learner as learner_module
from podracer.drivers.sebulba import supervisor as supervisor_module
from podracer.drivers.sebulba import update as update_module
from podracer.drivers.sebulba.queue import ClosableQueue, Closed
from podracer.drivers.sebulba.supervisor import StageTimer, Supervisor
from podracer.errors import EnvironmentFault
from podracer.io import checkpoint
from podracer.io.jsonl import JsonlSink
from podracer.io.sinks import TensorBoardSink
from podracer.networks import MLP, TorsoNetwork
from podracer.run import callbacks
from podracer.run.training import train

pytestmark = pytest.mark.timeout(120)  # what hangs fails
OWN_PROGRAMS = True  # of the fixture `once`

ENVIRONMENT = ("make", "reset", "step")
ACTOR = ("inference", "finish", "transfer", "waits for parameters", "waits for room")
LEARNER = ("on_mesh", "update", "publish", "fetch", "waits for trajectories")
PATIENCE = 30  # seconds, after which what hangs is let go
SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]
PLACES = (*ENVIRONMENT, *ACTOR, *LEARNER, "consumer", "close")


class Injected(Exception):
    """What a test made happen."""


class Injector:
    """Raises in a place when it is visited for the `visit`-th time, by whatever thread."""

    def __init__(self, place, visit=1, error=Injected):
        self.place, self.visit, self.error = place, visit, error
        self.moment = None  # perf_counter of the fault
        self.met = threading.Event()
        self.thread = None
        self._visits = 0
        self._lock = threading.Lock()

    def __call__(self, place):
        if place != self.place or (place in ACTOR and _in_main()):  # which compiles and places
            return
        with self._lock:
            self._visits += 1
            mine = self._visits == self.visit
        if mine:
            self.moment = time.perf_counter()
            self.thread = threading.current_thread().name
            self.met.set()
            raise self.error(place)


def _in_main():
    return threading.current_thread() is threading.main_thread()


NOTHING = Injector("nowhere")
now = NOTHING  # the injector that all hooks ask


class Condition(threading.Condition):
    """A wait is a place."""

    queue: ClosableQueue

    def wait(self, timeout=None):
        if _in_main():
            now("waits for trajectories")
        else:
            now("waits for room" if len(self.queue) else "waits for parameters")
        return super().wait(timeout)


class Queue(ClosableQueue):
    """The queue itself, its waits being places."""

    def __init__(self, depth):
        super().__init__(depth)
        self._changed = Condition()
        self._changed.queue = self


class ActorJax:
    """JAX as an actor's thread sees it; sending to another device is a place."""

    def __getattr__(self, name):
        return getattr(jax, name)

    def device_put(self, *args, **options):
        now("transfer")
        return jax.device_put(*args, **options)


def visited(place, function):
    @functools.wraps(function)
    def call(*args, **options):
        now(place)
        return function(*args, **options)

    return call


class Compiled:
    """Update programs that are compiled once for all runs of this file: one for each agent."""

    def __init__(self, program):
        self.program, self.programs = program, {}

    def lower(self, agent, *args):
        kind = jax.tree.structure(agent)
        if kind not in self.programs:
            self.programs[kind] = self.program.lower(agent, *args).compile()
        update = visited("update", self.programs[kind])
        update.memory_analysis = self.programs[kind].memory_analysis
        return types.SimpleNamespace(compile=lambda: update)


@pytest.fixture(scope="module")
def once():
    """Programs and states that all runs of this file share; `made(**config)` are a run's parts."""
    actor_programs = driver_module.ActorPrograms
    updates = functools.cache(lambda *args: Compiled(make_update(*args)))
    make_update = update_module.make_update

    def make_programs(*args):
        made = actor_programs(*args)
        made.infer = visited("inference", made.infer)
        made.finish = visited("finish", made.finish)
        return made

    @functools.cache
    def made(**config):
        return sebulba_setup(num_envs=8, rollout_length=4, updates_per_chunk=2, **config)

    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "ActorPrograms", make_programs)
        patch.setattr(update_module, "make_update", updates)
        patch.setattr(learner_module, "on_mesh", visited("on_mesh", learner_module.on_mesh))
        patch.setattr(base_module, "to_progress", visited("fetch", base_module.to_progress))
        pool = pool_module.ActorPool
        patch.setattr(pool, "publish", visited("publish", pool.publish))
        for module in (actor_module, pool_module):
            patch.setattr(module, "ClosableQueue", Queue)
        patch.setattr(actor_module, "jax", ActorJax())
        yield made
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    assert actor_threads() == []
    assert CounterBatch.open == 0


@dataclasses.dataclass
class Outcome:
    """How a run ended: what it raised, and how long after the fault nothing of it was left."""

    error: BaseException | None
    seconds: float | None
    updates: int
    left: list[str]  # threads, when the run had ended


def attempt(made, injector, *, num_updates=10**6, pace=(0.0, 0.0), devices=1, **config):
    """A run with a fault; `pace` are seconds that each step and each update take."""
    global now
    step_seconds, update_seconds = pace

    def at(place, batch):
        if place == "step":
            time.sleep(step_seconds)
        now(place)

    driver, state = made(devices=devices, **config)
    driver.host = Counters(at=at)
    state = jax.tree.map(jnp.copy, state)
    now, error, updates = injector, None, 0
    try:
        with contextlib.closing(driver.run(state, Orders(num_updates))) as progresses:
            for progress in progresses:
                updates = progress.updates
                time.sleep(update_seconds)
                injector("consumer")
    except BaseException as raised:
        error = raised
    ended = time.perf_counter()
    now = NOTHING
    moment = getattr(injector, "moment", None)
    return Outcome(error, moment and ended - moment, updates, actor_threads())


def check_root(outcome, injector):
    """The first fault came out, whole, naming who met it."""
    place, error = injector.place, outcome.error
    if place == "close":
        assert error is None, error
        return
    root = error
    if place in ENVIRONMENT:
        assert isinstance(error, EnvironmentFault), error
        assert error.exit_code == 72
        root = error.__cause__
    assert type(root) is injector.error, error
    assert not isinstance(error.__context__, Closed)
    assert traceback.extract_tb(root.__traceback__)[-1].name == "__call__"
    if place in LEARNER:
        assert error.component == "learner"
    elif place == "make":
        assert error.component == f"actor {injector.visit - 1}"
    elif place != "consumer":
        assert f"podracer-{error.component}" == injector.thread


# What is slow, so that others wait: nobody, environments, updates and what follows them.
PACES = {"even": (0.0, 0.0), "slow environments": (0.004, 0.0), "slow learner": (0.0, 0.02)}
WAITS = {
    "waits for parameters": {"policy_lag": 0},
    "waits for room": {"policy_lag": None, "pace": PACES["slow learner"]},
    "waits for trajectories": {"pace": PACES["slow environments"]},
}


@pytest.mark.figure(5)
@variants(
    ("place", "visit"),
    [("step", 5), *((place, 1) for place in PLACES)],
    [(place, 5) for place in PLACES],
)
def test_a_fault_ends_the_run_and_is_what_it_ends_with(place, visit, once, capfd):
    injector = Injector(place, min(visit, 2) if place in ("make", "reset", "close") else visit)
    options = {"num_updates": 6} if place == "close" else {}
    outcome = attempt(once, injector, **options, **WAITS.get(place, {}))
    assert injector.moment is not None, "the fault was not met"
    check_root(outcome, injector)
    if place == "close":
        assert "while stopping: EnvironmentFault: actor" in capfd.readouterr().err


@pytest.mark.figure(5)
def test_the_first_fault_counts_even_if_closing_fails_too(once, capfd):
    first = Injector("step", 7)

    class Both(Injector):
        def __call__(self, place):
            first(place)
            if place == "close":
                raise Injected("close")

    outcome = attempt(once, Both("nowhere"))
    check_root(outcome, first)
    assert capfd.readouterr().err.count("while stopping") == 2  # each closes its own


@pytest.mark.figure(5)
def test_an_actor_that_fails_during_an_update_is_the_root(once):
    """The learner then meets closed queues, which is no fault."""

    class Slow(Injector):
        def __call__(self, place):
            super().__call__(place)
            if place == "update":
                self.met.wait(10)
                time.sleep(0.05)  # until the fault has reached the supervisor

    injector = Slow("step", 14)
    check_root(attempt(once, injector), injector)


@pytest.mark.figure(5)
def test_an_environment_that_leaves_python_does_not_end_the_run_well(once):
    injector = Injector("step", 3, SystemExit)
    check_root(attempt(once, injector), injector)


def test_environments_are_closed_if_the_learner_cannot_be_made(once, monkeypatch):
    def fail(*args):
        raise Injected("compile")

    monkeypatch.setattr(driver_module, "Learner", fail)
    outcome = attempt(once, Injector("nowhere"))
    assert type(outcome.error) is Injected
    assert CounterBatch.open == 0


@pytest.mark.slow
def test_a_stop_that_is_not_followed_loses_nothing(once, monkeypatch):
    """One actor's trajectory has come and the other's not when the learner gives up waiting."""
    monkeypatch.setattr(pool_module, "POLL_SECONDS", 0.005)

    def at(place, batch):
        if place == "step" and batch.indices[0] != 0:
            time.sleep(0.01)

    class Impatient(Injector):
        """Wants to stop whenever the learner waits."""

        asked = 0

        def __call__(self, visited):
            self.asked = 0 if visited == "update" else self.asked

        def request(self):
            self.asked += 1
            return Request.UPDATE_END if self.asked > 1 else Request.NONE

    def run(request):
        driver, state = once(policy_lag=0)
        driver.host = Counters(at=at)
        state = jax.tree.map(jnp.copy, state)
        progresses = driver.run(state, Orders(6, request=request))
        with contextlib.closing(progresses):
            return [*progresses]

    *_, undisturbed = run(lambda: 0)
    impatient = Impatient("nowhere")
    monkeypatch.setattr(sys.modules[__name__], "now", impatient)
    *stops, ignored = run(impatient.request)
    assert Request.UPDATE_END in [progress.request for progress in stops]
    assert undisturbed.updates == ignored.updates == 6
    assert checkpoint.fingerprint(undisturbed.state) == checkpoint.fingerprint(ignored.state)


# --- environments that hang, and those that are only slow ----------------------------------------


@contextlib.contextmanager
def hanging(place, visit, seconds=PATIENCE):
    """An injector that hangs in a place; whoever hangs is let go in the end."""
    release = threading.Event()

    class Hang(Injector):
        def __call__(self, where):
            with contextlib.suppress(Injected):
                super().__call__(where)
                return
            release.wait(seconds)

    yield Hang(place, visit)
    release.set()
    for thread in threading.enumerate():
        if thread.name in actor_threads():
            thread.join(PATIENCE)


@pytest.mark.figure(6)
@variants("place", ["step"], ["reset"])
def test_an_environment_that_hangs_is_named_with_all_stacks(place, once, capfd):
    with hanging(place, 2) as injector:
        outcome = attempt(once, injector, env_timeout_seconds=0.3)
        assert isinstance(outcome.error, EnvironmentFault)
        assert f"podracer-{outcome.error.component}" == injector.thread
        assert f"{outcome.error.component}: the environment did not answer" in str(outcome.error)
        assert outcome.left == [injector.thread]
    text = capfd.readouterr().err
    assert f"podracer: {outcome.error.component} hangs; all stacks follow." in text
    assert text.count("Thread 0x") >= 2
    assert "in wait" in text
    assert f"left {outcome.error.component} behind in stage environment" in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.figure(6)
def test_random_hangs_are_named(once, cases):
    deadline, late = 0.3, []
    for number in cases(range(50)):
        dice = random.Random(number)
        place = dice.choice(["reset", "step"])
        visit = dice.randint(1, 2) if place == "reset" else dice.randint(1, 20)
        with hanging(place, visit) as injector:
            outcome = attempt(once, injector, env_timeout_seconds=deadline)
        assert isinstance(outcome.error, EnvironmentFault), number
        assert f"podracer-{outcome.error.component}" == injector.thread, number
        late.append(outcome.seconds - deadline)
    cases.note(f"{max(late):.2f} s after the deadline at most")


@pytest.mark.figure(6)
def test_closing_that_hangs_delays_no_fault(once, monkeypatch, capfd):
    monkeypatch.setattr(supervisor_module, "JOIN_SECONDS", 0.2)
    first = Injector("step", 7)
    with hanging("close", 1) as close:

        def both(place):
            first(place)
            close(place)

        outcome = attempt(once, both)
        check_root(outcome, first)
        assert len(outcome.left) == 1
    assert "behind in stage environment" in capfd.readouterr().err


@pytest.mark.figure(6)
@variants(
    "slow",
    [{"pace": (0.0, 0.4)}],
    [{"pace": (0.06, 0.0)}, {"pace": (0.0, 0.4), "policy_lag": None}],
    ids=["learner", "environments", "learner without a lag"],
)
def test_what_is_slow_but_alive_does_not_hang(slow, once, capfd):
    """The run takes much longer than the time-out, and each actor waits longer than that."""
    outcome = attempt(once, NOTHING, num_updates=6, env_timeout_seconds=0.2, **slow)
    assert outcome.error is None
    assert outcome.updates == 6
    assert "hangs" not in capfd.readouterr().err


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_a_step_and_not_for_a_rollout(once, monkeypatch, capfd):
    monkeypatch.setattr(supervisor_module, "JOIN_SECONDS", 0.5)
    outcome = attempt(once, NOTHING, num_updates=2, pace=(0.25, 0.0))  # 1 s for a rollout
    assert outcome.error is None
    assert outcome.left == []
    assert "behind" not in capfd.readouterr().err


@pytest.mark.figure(6)
def test_a_run_that_ends_well_says_which_closing_hangs(once, monkeypatch, capfd):
    monkeypatch.setattr(supervisor_module, "JOIN_SECONDS", 0.2)
    with hanging("close", 1) as close:
        outcome = attempt(once, close, num_updates=2)
        assert outcome.error is None
        assert len(outcome.left) == 1
    assert "behind in stage environment" in capfd.readouterr().err


def test_a_thread_that_leaves_python_is_a_fault():
    def run():
        with Supervisor(PATIENCE) as supervisor:
            supervisor.start("actor", StageTimer("acting"), sys.exit, lambda: None)

    with pytest.raises(SystemExit) as fault:
        run()
    assert fault.value.component == "actor"


def driver_with_a_failed_actor():
    """Yield once, after an actor has failed."""
    failed = threading.Event()

    def fail():
        raise Injected("at the last moment")

    with Supervisor(PATIENCE) as supervisor:
        supervisor.start("actor", StageTimer("acting"), fail, failed.set)
        assert failed.wait(PATIENCE)
        yield 1


def test_a_fault_before_a_clean_end_comes_out():
    with pytest.raises(Injected) as fault:
        list(driver_with_a_failed_actor())
    assert fault.value.component == "actor"


def test_a_fault_after_the_end_changes_no_result(capfd):
    """The consumer has its last update and leaves the driver."""
    updates = driver_with_a_failed_actor()
    assert next(updates) == 1
    updates.close()
    error = capfd.readouterr().err
    assert "podracer: actor, after the consumer left: Injected: at the last moment" in error


@pytest.fixture
def clock(monkeypatch):
    """A clock of the supervisor that goes on by `clock.seconds += 1`."""
    clock = types.SimpleNamespace(seconds=0.0)
    times = types.SimpleNamespace(perf_counter=lambda: clock.seconds, monotonic=time.monotonic)
    monkeypatch.setattr(supervisor_module, "time", times)
    return clock


def test_a_thread_that_cannot_start_is_the_fault(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        Supervisor(PATIENCE) as supervisor,
    ):
        supervisor.start("actor", StageTimer("environment"), lambda: None, lambda: None)


def test_a_suspended_process_that_goes_on_does_not_hang(clock):
    """Clocks go on while a process is stopped by Ctrl-Z."""
    go = threading.Event()
    timer = StageTimer("environment")
    long_ago = ("environment", -3600.0)

    def run():
        with Supervisor(0.2) as supervisor:
            supervisor.start("actor", timer, go.wait, lambda: None)
            timer.current = long_ago
            supervisor.check()
            clock.seconds += 0.25
            timer.restart()  # the next step
            supervisor.check()
            timer.current = long_ago
            supervisor.check()
            clock.seconds += 0.25
            go.set()
            supervisor.check()

    with pytest.raises(EnvironmentFault, match=r"did not answer for 360. s; if it may take as"):
        run()


def test_time_before_the_start_is_no_hang(clock):
    """Compiling comes between an actor's making and its start."""
    go = threading.Event()
    timer = StageTimer("environment")
    clock.seconds += 0.3
    with Supervisor(0.2) as supervisor:
        supervisor.start("actor", timer, go.wait, lambda: None)
        supervisor.check()
        go.set()


# --- through `train` -----------------------------------------------------------------------------

EXPERIMENT = Experiment(
    recipe="faults",
    environment="counter",
    agent=Impala(network=TorsoNetwork(MLP((16,)))),
    driver=SebulbaConfig(num_envs=8, rollout_length=4, updates_per_chunk=2),
    frames=8 * 4 * 12,
    devices=1,
    evaluations=2,
    evaluation_episodes=5,
    save_seconds=0,
)


def trained(directory, injector=NOTHING, at=lambda place, batch: now(place), **overrides):
    """What `train` returned and raised, and its `crash.json`."""
    global now
    now, result, error = injector, None, None
    try:
        result = train(
            EXPERIMENT, environment=Counters(at=at), run_dir=directory / "run", **overrides
        )
    except Exception as raised:
        error = raised
    now = NOTHING
    crash = directory / "run" / "crash.json"
    return result, error, json.loads(crash.read_text()) if crash.exists() else None


def nonsense(place, batch):
    if place == "step" and batch.steps == 9:
        batch.at = np.zeros(3)  # of the wrong length


@pytest.mark.figure(5)
# By default one of each component.
@variants("place", ["step", "inference", "update"], PLACES[: PLACES.index("consumer")])
def test_a_run_that_fails_leaves_what_failed(place, once, tmp_path):
    slow = {"waits for trajectories": ("step", 0.004), "waits for room": ("update", 0.02)}

    class Paced(Injector):
        def __call__(self, visited):
            time.sleep(slow[place][1] if slow.get(place, (None,))[0] == visited else 0)
            super().__call__(visited)

    injector = Paced(place, 2)
    lag = WAITS.get(place, {}).get("policy_lag", 1)
    driver = dataclasses.replace(EXPERIMENT.driver, policy_lag=lag)
    result, error, crash = trained(tmp_path, injector, driver=driver)
    assert result is None
    check_root(Outcome(error, None, 0, []), injector)
    assert crash["code"] == (72 if place in ENVIRONMENT else 70)
    assert crash["component"] == error.component
    assert crash["exception"] == type(error).__name__
    assert f"Injected: {place}" in crash["traceback"]


@pytest.mark.figure(5)
def test_nonsense_from_an_environment_leaves_72(once, tmp_path):
    _, error, crash = trained(tmp_path, at=nonsense)
    assert isinstance(error, EnvironmentFault)
    assert (crash["code"], crash["component"]) == (72, error.component)
    assert error.component.startswith("actor")


@pytest.mark.figure(6)
@pytest.mark.slow
def test_an_environment_that_hangs_leaves_72_and_the_stacks(once, tmp_path):
    driver = dataclasses.replace(EXPERIMENT.driver, env_timeout_seconds=0.3)
    with hanging("step", 9) as injector:
        _, error, crash = trained(tmp_path, injector, driver=driver)
    assert isinstance(error, EnvironmentFault)
    assert (crash["code"], crash["component"]) == (72, error.component)
    assert any("release.wait" in stack for stack in crash["threads"].values())


@pytest.mark.figure(5)
def test_an_environment_that_fails_in_an_evaluation_leaves_72(once, tmp_path):
    def at(place, batch):
        if place == "step" and batch.num_envs == EXPERIMENT.evaluation_episodes:
            raise Injected("evaluation")

    _, error, crash = trained(tmp_path, at=at)
    assert isinstance(error, EnvironmentFault)
    assert type(error.__cause__) is Injected
    assert (crash["code"], crash["component"]) == (72, "evaluator")


@pytest.mark.figure(5)
@pytest.mark.slow
def test_an_evaluator_that_fails_is_named(once, tmp_path, monkeypatch):
    class Failing:
        def lower(self, *args):
            return lambda: None

        def __call__(self, *args):
            raise Injected("evaluator")

    monkeypatch.setattr(callbacks, "make_evaluator", lambda *args: Failing())
    _, error, crash = trained(tmp_path)
    assert type(error) is Injected
    assert (crash["code"], crash["component"]) == (70, "evaluator")


def test_limits_in_seconds_hold_within_a_chunk(once, tmp_path):
    """A chunk that would take days, of slow environments, is cut by saves and by the end."""
    driver = dataclasses.replace(EXPERIMENT.driver, updates_per_chunk=10**6)
    limits = {"save_seconds": 0.2, "max_seconds": 2.0, "evaluations": 0, "frames": 32 * 10**6}
    result, error, _ = trained(
        tmp_path, at=lambda place, batch: time.sleep(0.005), driver=driver, **limits
    )
    assert error is None
    assert result.exit_code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [json.loads(line)["updates"] for line in lines]
    assert len(updates) >= 2
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")]
    assert set(saved) <= set(updates)
    assert max(saved) == updates[-1] < 10**6


@pytest.mark.figure(5)
@variants("place", ["seal"], ["write_bytes"])
def test_a_checkpoint_that_cannot_be_written_leaves_73(place, once, tmp_path, monkeypatch):
    """Writing goes on in another thread while actors act."""

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, place, fail)
    _, error, crash = trained(tmp_path)
    assert isinstance(error, checkpoint.StorageError)
    assert (crash["code"], crash["component"]) == (73, "checkpointer")


@pytest.mark.figure(24)
@variants("kind", [JsonlSink], [TensorBoardSink])
def test_a_sink_that_fails_costs_its_output_only(kind, once, tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise Injected("sink")

    monkeypatch.setattr(kind, "write", fail)
    result, error, crash = trained(tmp_path)
    assert (error, crash) == (None, None)
    assert result.exit_code == 0
    assert (result.reason, result.metrics["updates"] > 0) == ("frames", True)
    assert f"{kind.__name__} failed and gets no more records" in caplog.text


def resident_memory():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- nothing is left -----------------------------------------------------------------------------


def children_of(task):
    """Of one thread; none where it ended since it was listed."""
    try:
        return task.read_text().split()
    except OSError:
        return []


def belongings():
    """Threads, children, open files and shared memory of this process."""
    gc.collect()  # of tests before
    tasks = Path("/proc/self/task").glob("*/children")
    return {
        "threads": sorted(t.name for t in threading.enumerate()),
        "children": [child for task in tasks for child in children_of(task)],
        "files": len(os.listdir("/proc/self/fd")),
        "shared": [link for link in _maps() if "/dev/shm" in link or "memfd" in link],
    }


def _maps():
    return [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]


@pytest.mark.figure(12)
@variants("kind", ["counter"], ["gymnasium"])
@variants("times", [5], [100])
def test_starting_and_stopping_leaves_nothing(kind, times, once, cases):
    """Some runs end, some are stopped half way, some fail; environments in processes too."""
    if kind == "gymnasium":
        pytest.importorskip("gymnasium")
        env = envs.make("gymnasium:CartPole-v1")
        driver, state = sebulba_setup(env=env, num_envs=8, rollout_length=4)
    else:
        driver, state = once()

    def cycle(number):
        copy = jax.tree.map(jnp.copy, state)
        progresses = driver.run(copy, Orders(10))
        with contextlib.suppress(Injected), contextlib.closing(progresses):
            for _ in itertools.islice(progresses, 1 + number % 5):
                pass
            began = time.perf_counter()
            if number % 2:
                raise Injected("consumer")
        return time.perf_counter() - began

    cycle(2)
    before = belongings()
    seconds = [cycle(number) for number in cases(range(times))]
    assert belongings() == before
    p99 = np.quantile(seconds, 0.99) * 1000
    cases.note(f"p99 {p99:.0f} ms ({kind})")


@pytest.mark.figure(12)
@pytest.mark.parametrize("times", [200, pytest.param(10_000, marks=SLOW)])
def test_supervisors_that_start_and_stop_leave_nothing(times, cases, capfd):
    """Two threads and a queue between them: stopped at work, or by a fault in any of the three."""
    closed = []

    def cycle(number):
        queue = ClosableQueue(1 + number % 3)

        def work(action, faulty):
            for item in itertools.count():
                if faulty and item == number % 11:
                    raise Injected
                action(item)

        began = time.perf_counter()
        with contextlib.suppress(Injected), Supervisor(PATIENCE) as supervisor:
            supervisor.register(queue)
            for place, action in enumerate((queue.put, lambda _: queue.get())):
                run = functools.partial(work, action, number % 5 == place)
                name = f"thread {place}"
                supervisor.start(name, StageTimer(name), run, lambda: closed.append(number))
            if number % 3:
                time.sleep(0.001 * (number % 2))
                supervisor.check()
            began = time.perf_counter()
            if number % 7 == 0:
                raise Injected
        return time.perf_counter() - began

    for number in range(50):
        cycle(number)
    closed.clear()
    before, memory = belongings(), resident_memory()
    seconds = [cycle(number) for number in cases(range(times))]
    assert belongings() == before
    assert len(closed) == 2 * times
    grown = resident_memory() - memory
    assert grown < 32 * 2**20
    p99 = np.quantile(seconds, 0.99) * 1000
    cases.note(f"p99 {p99:.0f} ms (supervisor), memory {grown / 2**20:+.0f} MiB in {times} cycles")
    assert "left" not in capfd.readouterr().err


@pytest.mark.figure(11)
@pytest.mark.parametrize("times", [5, pytest.param(100, marks=SLOW)])
def test_workers_that_are_replaced_leave_the_accounts_exact(times, cases):
    """Killed at random moments: each counts as one fault, and no step is learned twice or lost."""
    gymnasium = pytest.importorskip("podracer.envs.host.gymnasium")
    batches = []

    class Watched:
        inner = gymnasium.Gymnasium("CartPole-v1", max_restarts=1000)
        spec = inner.spec

        def make(self, num_envs, num_threads):
            batches.append(self.inner.make(num_envs, 2))
            return batches[-1]

    driver, state = sebulba_setup(env=Watched(), num_envs=8, rollout_length=4, updates_per_chunk=1)
    dice, updates = random.Random(0), 0
    with contextlib.closing(driver.run(state, Orders(10**6))) as reports:

        def next_report():
            nonlocal updates
            report = next(reports)
            updates += 1
            assert report.updates == updates
            assert report.frames <= 32
            assert 0 <= report.collected - 32 * updates <= 2 * 32  # in flight, with a lag of 1

        for _ in cases(range(times)):
            next_report()
            batch = dice.choice(batches)
            victim = dice.choice(batch.pids)
            timer = threading.Timer(dice.uniform(0, 0.01), os.kill, (victim, signal.SIGKILL))
            timer.start()
            while victim in batch.pids:
                next_report()
            timer.join()
        next_report()
        faults = [batch.faults for batch in batches]
    assert sum(fault["died"] for fault in faults) == times
    assert sum(sum(fault.values()) for fault in faults) == times


# --- random faults -------------------------------------------------------------------------------


def random_fault(number, made):
    """One fault at a place, moment and pace that `number` draws; how long the run took to end."""
    dice = random.Random(number)
    place = dice.choice(PLACES)
    once_each = place in ("make", "reset", "close")
    injector = Injector(place, dice.randint(1, 2) if once_each else dice.randint(1, 40))
    options = {"policy_lag": dice.choice([0, 1, None]), "pace": PACES[dice.choice(list(PACES))]}
    options |= WAITS.get(place, {})
    if place == "close":
        options["num_updates"] = 2 * dice.randint(1, 4)
    outcome = attempt(made, injector, devices=dice.choice([1, 3]), **options)
    assert injector.moment is not None, "the fault was not met"
    check_root(outcome, injector)
    assert (outcome.left, CounterBatch.open) == ([], 0)
    return outcome.seconds


@pytest.mark.figure(5)
@pytest.mark.parametrize(
    ("times", "first"),
    [(3, 0), pytest.param(1000, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["3", "1000"],
)
def test_random_faults_end_clean(times, first, once, cases):
    seconds = []
    for number in cases(range(first, first + times)):
        try:
            seconds.append(random_fault(number, once))
        except BaseException as error:
            error.add_note(f"fault number {number}")
            raise
    p50, p99 = np.quantile(seconds, [0.5, 0.99]) * 1000
    cases.note(f"random places: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
