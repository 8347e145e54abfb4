"""The queue between actors and learner, and the protocol on it under every order of events."""

import concurrent.futures
import contextlib
import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import variants

from podracer.drivers.sebulba import queue as queue_module
from podracer.drivers.sebulba import supervisor as supervisor_module
from podracer.drivers.sebulba.queue import ClosableQueue, Closed
from podracer.drivers.sebulba.supervisor import StageTimer, Supervisor

PATIENCE = 60  # seconds, after which a wait counts as a hang


@pytest.fixture(autouse=True)
def _nobody_looks_up_by_itself(monkeypatch):
    """Without the regular look-up, a wake-up that was forgotten is a hang."""
    monkeypatch.setattr(queue_module, "WAKE_SECONDS", 3600.0)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def until_waiting(monkeypatch):
    """A function that waits until so many more waits have begun on queues of the test."""
    begun = threading.Semaphore(0)

    class Condition(threading.Condition):
        def wait(self, timeout=None):
            begun.release()  # the lock is held until the wait
            return super().wait(timeout)

    def until(number):
        for _ in range(number):
            assert begun.acquire(timeout=PATIENCE), "nobody waits"

    monkeypatch.setattr(queue_module, "threading", SimpleNamespace(Condition=Condition))
    return until


def test_put_waits_for_room(pool, until_waiting):
    with contextlib.closing(ClosableQueue(1)) as queue:  # which ends the wait if the test fails
        queue.put("a")
        later = pool.submit(queue.put, "b")
        until_waiting(1)
        assert not later.done()
        assert len(queue) == 1
        assert queue.get() == "a"
        later.result(PATIENCE)
        assert queue.get() == "b"


def test_get_waits_for_an_item(pool, until_waiting):
    queue = ClosableQueue(1)
    later = pool.submit(queue.get)
    until_waiting(1)
    queue.put("a")
    assert later.result(PATIENCE) == "a"


def test_taking_the_newest_makes_room(pool, until_waiting):
    queue = ClosableQueue(2)
    queue.put("a")
    queue.put("b")
    later = [pool.submit(queue.put, item) for item in "cd"]
    until_waiting(2)
    assert queue.get_newest() == "b"
    for put in later:
        put.result(PATIENCE)
    assert {queue.get(), queue.get()} == {"c", "d"}
    assert queue.get_newest() is None


def test_a_full_queue_loses_its_oldest_to_the_newest(pool, until_waiting):
    queue = ClosableQueue(2)
    for item in "abc":
        queue.put_newest(item)
    assert [queue.get(), queue.get()] == ["b", "c"]
    later = pool.submit(queue.get)
    until_waiting(1)
    queue.put_newest("d")
    assert later.result(PATIENCE) == "d"


@pytest.mark.parametrize("operation", ["get", "put"])
def test_closing_ends_every_wait(operation, pool, until_waiting):
    queue = ClosableQueue(1)
    wait = queue.get
    if operation == "put":
        queue.put(0)
        wait = lambda: queue.put(1)  # noqa: E731
    waits = [pool.submit(wait) for _ in range(8)]
    until_waiting(8)
    queue.close()
    for waiting in waits:
        with pytest.raises(Closed):
            waiting.result(PATIENCE)
    assert len(queue) == 0


def test_after_closing_everything_is_closed():
    queue = ClosableQueue(2)
    queue.put("lost")
    queue.close()
    queue.close()
    for call in (queue.get, queue.get_newest, lambda: queue.get(0)):
        with pytest.raises(Closed):
            call()
    for call in (queue.put, queue.put_newest):
        with pytest.raises(Closed):
            call("a")
    assert len(queue) == 0


def test_a_wait_for_an_item_can_end_by_time():
    queue = ClosableQueue(1)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        queue.get(0.05)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(TimeoutError):
        queue.get(0)
    queue.put("a")
    assert queue.get(0) == "a"


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 4),
    producers=st.integers(1, 4),
    consumers=st.integers(1, 4),
    items=st.integers(0, 20),
    newest=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_schedule_keeps_order_bound_and_items(depth, producers, consumers, items, newest, seed):
    """Items of a producer come in order, once, and all unless newer ones took their place."""
    queue = ClosableQueue(depth)
    sizes, lock = [], threading.Lock()

    def pause(dice):
        if dice.random() < 0.2:
            time.sleep(dice.random() * 1e-4)
        with lock:
            sizes.append(len(queue))

    def produce(number):
        dice = random.Random(seed + number)
        for item in range(items):
            (queue.put_newest if newest else queue.put)((number, item))
            pause(dice)

    def consume(number):
        dice, got = random.Random(seed - number - 1), []
        with contextlib.suppress(Closed):
            while True:
                got.append(queue.get())
                pause(dice)
        return got

    with concurrent.futures.ThreadPoolExecutor(producers + consumers) as pool:
        consuming = [pool.submit(consume, number) for number in range(consumers)]
        for producing in [pool.submit(produce, number) for number in range(producers)]:
            producing.result(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while len(queue):
            assert time.monotonic() < deadline, "nobody takes what is there"
            time.sleep(1e-4)
        queue.close()
        got = [future.result(PATIENCE) for future in consuming]
    everything = sorted(itertools.chain(*got))
    wanted = [(number, item) for number in range(producers) for item in range(items)]
    assert len(set(everything)) == len(everything)
    assert set(everything) <= set(wanted) if newest else everything == wanted
    assert max(sizes, default=0) <= depth
    for taken, number in itertools.product(got, range(producers)):
        own = [item for producer, item in taken if producer == number]
        assert own == sorted(own)


# --- every order of events -----------------------------------------------------------------------


class Deadlock(AssertionError):
    """Somebody waits and nobody can go on."""


def taken_lock():
    """A lock that another thread releases, as often as it is taken: cheaper than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Scheduler:
    """Runs real code in threads of which one goes on at a time; it says which, wherever one takes
    a lock, waits or joins. Waits never end by time. `threading`, for the code that is looked at."""

    def __init__(self, choices):
        self.choices, self.steps = choices, []  # steps: (number of options, current could go on)
        self.tasks, self.current = [], None
        self.turn = taken_lock()
        owner = self

        class Lock:
            def __init__(self):
                self.holder, self.sleepers = None, []

            def __enter__(self):
                owner.switch(lambda: self.holder is None)
                self.holder = owner.current

            def __exit__(self, *_):
                self.holder = None

            def wait(self, seconds):
                sleeper = object()
                self.holder = None
                self.sleepers.append(sleeper)
                owner.switch(lambda: self.holder is None and sleeper not in self.sleepers)
                self.holder = owner.current

            def notify_all(self):
                self.sleepers.clear()

        class Thread:
            def __init__(self, target, name, daemon=True):
                self.target, self.name = target, name
                self.go, self.ready, self.done = taken_lock(), lambda: True, False

            def start(self):
                owner.tasks.append(self)
                threading.Thread(target=self.body, daemon=True).start()

            def body(self):
                self.go.acquire()
                self.target()
                self.done = True
                owner.turn.release()

            def join(self, seconds):
                owner.switch(lambda: self.done)

            def is_alive(self):
                return not self.done

        self.Lock = self.Condition = Lock
        self.Thread = Thread

    def switch(self, ready):
        """The current thread comes to a point where another may go on; it goes on when ready."""
        me = self.current
        me.ready = ready
        self.turn.release()
        me.go.acquire()

    def run(self, main):
        """Run `main` and all that it starts to their end. Raises `Deadlock`."""
        task = self.Thread(main, "learner")
        task.start()
        self.current = task
        while not all(task.done for task in self.tasks):
            options = [task for task in self.tasks if not task.done and task.ready()]
            if not options:
                raise Deadlock([task.name for task in self.tasks if not task.done])
            options.sort(key=lambda task: task is not self.current)
            number = len(self.steps)
            choice = self.choices[number] if number < len(self.choices) else 0
            self.steps.append((len(options), options[0] is self.current))
            self.current = options[choice]
            self.current.go.release()
            self.turn.acquire()


def all_schedules(attempt, preemptions):
    """Call `attempt(choices) -> steps` for every schedule that takes the processor away from a
    thread that could go on at most so many times; the number of schedules."""
    count, stack = 0, [([], 0)]
    while stack:
        prefix, used = stack.pop()
        steps = attempt(prefix)
        count += 1
        for at in range(len(prefix), len(steps)):
            options, preempts = steps[at]
            if used + preempts <= preemptions:
                zeros = [0] * (at - len(prefix))
                stack += [(prefix + zeros + [c], used + preempts) for c in range(1, options)]
    return count


class Injected(Exception):
    pass


def protocol(component, at, updates, result):
    """Two actors, one learner, queues of one, as in `driver.py`; `component` fails, or the learner
    stops, at its point number `at`."""
    points = {}

    def point(who):
        points[who] = points.get(who, -1) + 1
        if (who, points[who]) == (component, at):
            raise Injected(who)
        return (who, points[who]) == (component.removeprefix("stop "), at)

    def actor(name, parameters, rollouts):
        while True:
            point(name)
            version = parameters.get()
            point(name)
            rollouts.put(version)

    def learner():
        with Supervisor(float("inf")) as supervisor:
            actors = {name: (ClosableQueue(1), ClosableQueue(1)) for name in ("one", "two")}

            def publish(version):
                for parameters, _ in actors.values():
                    with contextlib.suppress(Closed):
                        parameters.put_newest(version)

            for name, queues in actors.items():
                for queue in queues:
                    supervisor.register(queue)

                def run(name=name, queues=queues):
                    actor(name, *queues)

                supervisor.start(
                    name, StageTimer("acting"), run, lambda name=name: point(f"{name}'s end")
                )
            publish(0)
            for version in range(updates):
                for _, rollouts in actors.values():
                    if point("learner"):
                        return
                    while True:
                        supervisor.check()
                        with contextlib.suppress(Closed):
                            assert rollouts.get() == version
                            break
                if point("learner"):
                    return
                publish(version + 1)

    try:
        learner()
        result.append(None)
    except BaseException as error:
        result.append(error)


PLACES = [
    *((name, at) for name in ("one", "two", "learner") for at in range(3)),
    *(("stop learner", at) for at in range(4)),
    ("one's end", 0),
]


def explore(component, at, preemptions, monkeypatch):
    outcomes = set()

    def attempt(choices):
        scheduler = Scheduler(choices)
        monkeypatch.setattr(queue_module, "threading", scheduler)
        monkeypatch.setattr(supervisor_module, "threading", scheduler)
        result = []
        scheduler.run(lambda: protocol(component, at, 1, result))
        (error,) = result
        assert error is None or isinstance(error, Injected), (choices, error)
        assert error is None or error.component == component, (choices, error)
        outcomes.add(type(error))
        return scheduler.steps

    return all_schedules(attempt, preemptions), outcomes


@pytest.mark.figure(22)
@variants(
    ("preemptions", "places"),
    [(1, [("one", 1), ("learner", 1), ("stop learner", 2), ("one's end", 0)])],
    [(1, PLACES), (2, PLACES)],
    ids=["1, some", "1", "2"],
)
def test_no_order_of_events_hangs(preemptions, places, monkeypatch, cases):
    """The first fault comes out, or none where the run had ended before it."""
    for component, at in places:
        count, outcomes = explore(component, at, preemptions, monkeypatch)
        if component.startswith("stop") or component.endswith("end"):
            assert outcomes == {type(None)}
        elif component == "learner":
            assert outcomes == {Injected}
        else:
            assert Injected in outcomes
        cases.add(count, count)
    cases.note(f"{len(places)} places")
