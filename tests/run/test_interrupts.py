"""Ctrl-C, preemptions and stalls where Python belongs to the user: scripts, notebooks, threads."""

import contextlib
import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import pytest
from child import records
from gate import GENEROUS, Gate

import podracer
from podracer import recipes
from podracer.devices.mesh import SHARDED, fetch, make_mesh
from podracer.drivers.sebulba import SebulbaConfig
from podracer.io.exits import own_process
from podracer.io.run_directory import RunLock
from podracer.io.signals import StopSignals, Watchdog
from podracer.run.errors import StallError
from podracer.tournament import pod as pods
from podracer.tournament.config import Tournament
from podracer.tournament.orchestrator import run_tournament

pytestmark = pytest.mark.usefixtures("shared")  # what is patched is not traced

ANAKIN = {"num_envs": 4, "rollout_length": 2, "updates_per_chunk": 2}
STEPS_PER_CHUNK = 4 * 2 * 2
SENTENCE = (
    "podracer: Stopping at the end of this chunk and saving; interrupt again to stop at once.\n"
)


def train(run, **changes):
    given = {"driver": ANAKIN, "frames": 10**9, "evaluations": 0, "save_seconds": 0, "devices": 1}
    return podracer.train("catch_a2c", run_dir=run, **given | changes)


def send(number, after=2):
    """A callback that sends this process a signal when it is called for the second time."""
    calls = []

    def callback(_):
        calls.append(None)
        if len(calls) == after:
            os.kill(os.getpid(), number)

    return callback


def handlers():
    return [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.figure(4)
@pytest.mark.parametrize("arch", ["anakin", pytest.param("sebulba", marks=pytest.mark.slow)])
def test_an_interrupt_saves_and_ends_a_loop_over_seeds(arch, tmp_path, capfd):
    driver = SebulbaConfig(**ANAKIN, threads_per_actor=1) if arch == "sebulba" else ANAKIN
    before, seeds = handlers(), iter(range(2))

    def loop():
        for seed in seeds:
            run = tmp_path / str(seed)
            train(run, seed=seed, callbacks=[send(signal.SIGINT)], driver=driver)

    with pytest.raises(KeyboardInterrupt, match=r"^Saved in .*; train with resume=True goes on\.$"):
        loop()
    assert list(seeds) == [1]
    assert handlers() == before
    assert capfd.readouterr().err == SENTENCE
    run = tmp_path / "0"
    saved = max(int(step.name) for step in (run / "checkpoints").glob("[0-9]*"))
    assert saved == records(run)[-1]["updates"]
    assert not (run / "crash.json").exists()
    again = train(run, resume=True, frames=(saved + 2) * 8, driver=driver)
    assert again.metrics["updates"] > saved


def test_an_interrupt_in_the_last_chunk_ends_the_loop_too(tmp_path):
    callback = send(signal.SIGINT, after=1)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", frames=STEPS_PER_CHUNK, callbacks=[callback])
    assert train(tmp_path / "run", frames=STEPS_PER_CHUNK, resume=True).reason == "frames"


@pytest.mark.figure(4)
def test_a_preemption_saves_and_ends_the_program_with_75(tmp_path, capfd):
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", callbacks=[send(signal.SIGTERM)])
    assert left.value.code == 75
    assert "Saved in" in capfd.readouterr().err
    assert list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))


def test_in_a_process_of_our_own_the_result_has_the_exit_code(tmp_path):
    with own_process():
        result = train(tmp_path / "run", callbacks=[send(signal.SIGINT)])
    assert (result.exit_code, result.reason) == (130, "signal")


def test_training_in_a_thread_leaves_the_signals_alone(tmp_path):
    results, before = [], handlers()

    def callback(_):
        assert handlers() == before

    run = threading.Thread(
        target=lambda: results.append(
            train(tmp_path / "run", frames=STEPS_PER_CHUNK, callbacks=[callback])
        )
    )
    run.start()
    run.join(GENEROUS)
    assert results[0].reason == "frames"


# --- while the device computes --------------------------------------------------------------------


@pytest.fixture
def gate():
    gate = Gate()
    gate.is_open.set()
    yield gate
    gate.is_open.set()  # the device ends what it has begun


@contextlib.contextmanager
def user(gate, monkeypatch, opens=False):
    """Interrupt twice once the device waits, the second time after an answer."""
    answered = threading.Event()
    monkeypatch.setattr("podracer.io.signals.print_stderr", lambda text: answered.set())

    def interrupt():
        assert gate.waits.wait(GENEROUS)
        os.kill(os.getpid(), signal.SIGINT)
        assert answered.wait(GENEROUS)
        os.kill(os.getpid(), signal.SIGINT)
        if opens:
            gate.is_open.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join(GENEROUS)


def close_after_a_chunk(gate):
    return lambda boundary: gate.is_open.clear()


def check_can_go_on(run, gate):
    """In this very process: the lock is free, and no thread is left but those of the device."""
    with RunLock(run):
        pass
    names = ("podracer-signals", "podracer-watch")
    left = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in left:  # told to end, it ends in a moment
        thread.join(GENEROUS)
    assert not [thread.name for thread in left if thread.is_alive()]
    gate.is_open.set()
    again = train(run, environment=gate, frames=2 * STEPS_PER_CHUNK, resume=True, devices=2)
    assert [record["updates"] for record in records(run)] == [2, 4]
    assert again.reason == "frames"


@pytest.mark.figure(4)
def test_a_second_interrupt_leaves_a_chunk_that_never_ends(gate, tmp_path, monkeypatch):
    run, callbacks = tmp_path / "run", [close_after_a_chunk(gate)]
    with pytest.raises(KeyboardInterrupt, match="at once"), user(gate, monkeypatch):
        train(run, environment=gate, callbacks=callbacks, devices=2)
    assert not (run / "crash.json").exists()
    check_can_go_on(run, gate)


def test_an_interrupt_during_a_call_of_jax_leaves_no_setting_behind(gate, tmp_path, monkeypatch):
    """On one device a program with a callback runs within the call, which Python cannot leave."""
    run, before = tmp_path / "run", jax.config.jax_transfer_guard_host_to_device
    with pytest.raises(KeyboardInterrupt) as kept, user(gate, monkeypatch, opens=True):
        train(run, environment=gate, callbacks=[close_after_a_chunk(gate)])
    assert jax.config.jax_transfer_guard_host_to_device == before
    assert train(run, environment=gate, frames=2 * STEPS_PER_CHUNK, resume=True).reason == "frames"
    assert kept.traceback  # whose frames are alive


@pytest.mark.figure(6)
@pytest.mark.slow
def test_a_stall_raises_and_the_process_lives_on(gate, tmp_path, monkeypatch):
    class Expiring:
        """A watchdog to which the program seems to hang once the device waits."""

        def __init__(self, seconds, on_expiry):
            self._thread = threading.Thread(target=self._expire, args=(on_expiry,))

        def _expire(self, on_expiry):
            assert gate.waits.wait(GENEROUS)
            on_expiry("no progress for 600 s")

        def alive(self): ...

        def __enter__(self):
            self._thread.start()
            return self

        def __exit__(self, *_):
            self._thread.join(GENEROUS)

    run, callbacks = tmp_path / "run", [close_after_a_chunk(gate)]
    with monkeypatch.context() as patch:
        patch.setattr("podracer.run.training.Watchdog", Expiring)
        with pytest.raises(StallError, match=r"no progress for 600 s: the run .* can be resumed"):
            train(run, environment=gate, callbacks=callbacks, devices=2)
    crash = json.loads((run / "crash.json").read_text())
    assert (crash["code"], crash["component"]) == (76, "watchdog")
    check_can_go_on(run, gate)


def test_a_watchdog_that_expires_ends_a_wait_of_the_main_thread(capfd):
    signals = StopSignals()
    watchdog = Watchdog(0.1, lambda message: signals.abort(StallError(message)))
    with pytest.raises(StallError, match="no progress"), signals.installed(), watchdog:
        threading.Event().wait(GENEROUS)
    assert "all stacks follow" in capfd.readouterr().err


def test_a_fetch_is_left_at_once(gate):
    """Without a run, as in an evaluation, there is nothing to save: one interrupt is enough."""
    mesh = make_mesh(jax.devices()[:2])
    program = jax.jit(jax.shard_map(
        lambda x: x + gate.zero(), mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=False
    ))  # fmt: skip
    gate.is_open.clear()

    numbers = program(jnp.arange(2))
    assert gate.waits.wait(GENEROUS)
    thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))

    def wait():
        thread.start()
        fetch(numbers)

    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join(GENEROUS)
    gate.is_open.set()
    assert fetch((numbers, 7))[0].tolist() == [0, 1]


# --- tournaments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [False, True])
def test_an_interrupt_ends_a_tournament_in_python(is_own, tmp_path, monkeypatch):
    rounds, sentences, answered = [], [], threading.Event()

    def answer(text):
        sentences.append(text)
        answered.set()

    def run(directory, user_experiments):
        rounds.append(directory.name)
        os.kill(os.getpid(), signal.SIGINT)
        assert answered.wait(GENEROUS)
        return 0

    monkeypatch.setattr("podracer.io.signals.print_stderr", answer)

    monkeypatch.setattr(pods, "run", run)
    tournament = Tournament(
        (recipes.find("catch_a2c"),),
        pods=2, rounds=2, round_frames=64, engine="inline",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if is_own:
            stack.enter_context(own_process())
        else:
            stack.enter_context(pytest.raises(KeyboardInterrupt, match="the pods have saved"))
        assert run_tournament(tournament, tmp_path / "cup") == 130
    assert rounds == ["p0r0"]
    assert sentences == [
        "Stopping once all pods have saved, within 60 s; interrupt again to stop at once."
    ]
