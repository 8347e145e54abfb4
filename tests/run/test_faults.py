"""Real signals on real processes: what a killed, preempted or stopped run loses (nothing)."""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from child import call, fingerprint, finish, records, start, wait_for_lines

from podracer.io.arrays import stored_array
from podracer.io.checkpoint import load_part

SMALL = (
    "--num-envs", 16, "--rollout-length", 8, "--updates-per-chunk", 20, "--hidden", 16,
    "--save-seconds", 0,
)  # fmt: skip
RUN = ("train", "catch_a2c", *SMALL, "--evaluations", 5)
REPLAY = ("--batch-size", 16, "--warmup", 256, "--capacity", 1280)
MUZERO = ("--num-simulations", 4, "--dynamics-hidden", 8, "--prediction-hidden", 8)
OTHERS = {
    "stacx": ("train", "catch_stacx", *SMALL),
    "muzero": ("train", "catch_muzero", *SMALL, *REPLAY, *MUZERO, "--reanalyze-fraction", 0.5),
    "replay": ("train", "cartpole_dqn", *SMALL, *REPLAY),
}
STEPS_PER_UPDATE = 16 * 8
CHUNK = STEPS_PER_UPDATE * 20
LONG = (*RUN, "--frames", CHUNK * 8000)
SLOW = [pytest.mark.slow, pytest.mark.timeout(7200)]
CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, signal.SIGHUP: 75}


def with_flags(arguments, *flags):
    """Arguments of a command with these flags, in the place of those of the same names."""
    name, recipe, *others = arguments
    pairs = (
        *zip(others[::2], others[1::2], strict=True),
        *zip(flags[::2], flags[1::2], strict=True),
    )
    return (name, recipe, *itertools.chain(*dict(pairs).items()))


def interrupt(process, run, signals):
    """Send these signals at random moments, resuming after each; at last stop and save.

    Returns how many signals fell into a save that was not sealed yet."""
    dice = random.Random(len(signals))
    mid_save = 0
    for number in signals:
        path = run / "metrics.jsonl"
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        wait_for_lines(process, run, lines + 1)
        time.sleep(dice.uniform(0, 0.3))
        process.send_signal(number)
        code, _, error = finish(process)
        assert code == CODES[number], error
        steps = (run / "checkpoints").glob("[0-9]*")
        mid_save += any(not (step / "manifest.json").exists() for step in steps)
        process = start("resume", run)
    lines = (run / "metrics.jsonl").read_bytes().count(b"\n")
    wait_for_lines(process, run, lines + 1)  # a signal to one that imports would end it
    process.terminate()
    code, _, error = finish(process)
    assert code == 75, error
    return mid_save


def bits(run):
    """The bytes of a run's newest state, of a replay wherever it is."""
    arrays = load_part(run, "").state.items()
    return {k.removesuffix(".arrays"): np.asarray(stored_array(x)).tobytes() for k, x in arrays}


def compare_with_twin(arguments, signals, directory):
    """Whether an interrupted run ends as one that was not, and how many signals fell into a save.

    Compared are the bits of the states, and the records."""
    run, twin = directory / "run", directory / "twin"
    arguments = with_flags(arguments, "--evaluations", 0)
    process = start(*arguments, "--frames", 10**10, "--run-dir", run)
    mid_save = interrupt(process, run, signals)
    end = ("--frames", (records(run)[-1]["updates"] + 40) * STEPS_PER_UPDATE)
    for command in (("resume", run, *end), (*arguments, *end, "--run-dir", twin)):
        code, _, error = finish(start(*command), timeout=1800)
        assert code == 0, error
    return (bits(run), records(run)) == (bits(twin), records(twin)), mid_save


@pytest.mark.figure(1, 4)
@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGKILL,),
        pytest.param((signal.SIGKILL, signal.SIGHUP), marks=SLOW),
        pytest.param(200 * (signal.SIGKILL,), marks=SLOW),
        pytest.param(50 * (signal.SIGTERM,), marks=SLOW),
    ],
    ids=["once", "both", "SIGKILL", "SIGTERM"],
)
def test_interrupted_and_resumed_equals_an_uninterrupted_run(signals, tmp_path, cases):
    """Killed, it goes on from what was saved; told to stop, it saves and exits with 75."""
    equal, mid_save = compare_with_twin(RUN, signals, tmp_path)
    kills = signals.count(signal.SIGKILL)
    for count, figure in ((kills, 1), (len(signals) - kills, 4)):
        cases.add(count * equal, count, figure)
    cases.note(f"{mid_save} during a save")
    assert equal


@pytest.mark.figure(1)
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", OTHERS)
def test_other_agents_killed_and_resumed_equal_an_uninterrupted_run(name, tmp_path, cases):
    """Metaparameters, searches in a replay, and a replay."""
    signals = 3 * (signal.SIGKILL,)
    equal, mid_save = compare_with_twin(OTHERS[name], signals, tmp_path)
    cases.add(len(signals) * equal, len(signals))
    cases.note(f"{mid_save} during a save")
    assert equal


@pytest.mark.figure(23)
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_every_20_seconds_for_ten_minutes(tmp_path, cases):
    """Nobody looks after it: every attempt starts as the page on reliability has it."""
    flags = ("--evaluations", 0, "--save-seconds", 1, "--updates-per-chunk", 400)
    arguments = with_flags(RUN, *flags)
    run, twin = tmp_path / "run", tmp_path / "twin"

    def attempt():
        if (run / "config.json").exists():
            return start("resume", run)
        return start(*arguments, "--frames", 10**10, "--run-dir", run)

    began, process = time.monotonic(), attempt()
    for _ in cases(range(30)):
        time.sleep(20)
        process.kill()
        code, _, error = finish(process)
        assert code == -signal.SIGKILL, error
        process = attempt()
    wait_for_lines(process, run, 1)
    time.sleep(20)
    process.send_signal(signal.SIGTERM)
    code, _, error = finish(process)
    seconds = time.monotonic() - began
    assert code == 75, error
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    frames = lines[-1]["updates"] * STEPS_PER_UPDATE
    code, _, error = finish(start(*arguments, "--frames", frames, "--run-dir", twin), timeout=1800)
    assert code == 0, error
    assert (fingerprint(run), records(run)) == (fingerprint(twin), records(twin))
    goodput = sum(line["time_step"] for line in lines) / seconds
    cases.note(f"goodput {goodput:.0%}")


@pytest.mark.figure(4)
def test_ctrl_c_saves_the_last_recorded_update(tmp_path):
    run = tmp_path / "run"
    process = start(*LONG, "--run-dir", run)
    wait_for_lines(process, run, 3)
    process.send_signal(signal.SIGINT)
    code, out, error = finish(process)
    assert code == 130, error
    assert error == (
        "podracer: Stopping at the end of this chunk and saving; interrupt again to stop at once.\n"
    )
    assert "Stopped, saved" in out
    assert f"podracer resume {run}" in out
    saved = max(int(step.name) for step in (run / "checkpoints").glob("[0-9]*"))
    assert saved == records(run)[-1]["updates"]
    assert not (run / "crash.json").exists()


@pytest.mark.figure(4)
@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    """Also while the main thread is deep inside a compiled chunk that takes minutes."""
    run = tmp_path / "run"
    process = start(
        "train", "catch_a2c", "--run-dir", run, "--updates-per-chunk", 400_000,
        "--frames", 10**10, "--evaluations", 0,
    )  # fmt: skip
    while not (run / "config.json").exists():
        time.sleep(0.05)
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, error = finish(process, timeout=5)
    assert code == 130
    assert "without saving" in error


@pytest.mark.figure(6)
@pytest.mark.slow
def test_a_chunk_that_never_ends_is_noticed(tmp_path):
    run = tmp_path / "run"
    code, _, error = call(
        "train", "catch_a2c", "--run-dir", run, "--updates-per-chunk", 400_000,
        "--frames", 10**10, "--evaluations", 0, "--stall-seconds", 4,
    )  # fmt: skip
    assert code == 76
    assert "no progress" in error
    crash = json.loads((run / "crash.json").read_text())
    assert crash["code"] == 76
    assert crash["component"] == "watchdog"


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_starts_again(tmp_path):
    run = tmp_path / "run"
    flags = ("--frames", CHUNK * 30, "--save-seconds", 1000, "--run-dir", run)
    process = start(*with_flags(RUN, *flags))
    wait_for_lines(process, run, 1)
    process.kill()
    finish(process)
    code, _, error = call("resume", run)
    assert code == 0, error
    updates = [record["updates"] for record in records(run)]
    assert updates == list(range(20, 601, 20))


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, and what an error of the disk does to it: it is read-only."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    image.touch()
    os.truncate(image, 64 * 2**20)
    mount = ["mount", "-o", "loop,errors=remount-ro", image, place]
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    source = subprocess.run(
        ["findmnt", "-no", "SOURCE", place], check=True, capture_output=True, text=True
    )
    trigger = Path("/sys/fs/ext4") / Path(source.stdout.strip()).name / "trigger_fs_error"

    def mount_again():
        subprocess.run(["umount", place], check=True)
        subprocess.run(mount, check=True)

    yield place, lambda: trigger.write_text("x"), mount_again
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_costs_what_came_after_the_last_save(disk, tmp_path):
    place, fail, mount_again = disk
    run, twin = place / "run", tmp_path / "twin"
    arguments = with_flags(RUN, "--evaluations", 0)
    process = start(*arguments, "--frames", 10**10, "--run-dir", run)
    wait_for_lines(process, run, 3)
    fail()
    code, _, error = finish(process)
    assert code == 73, error
    assert "could not be written" in error.splitlines()[-1]
    assert {line.partition(" ")[0] for line in error.splitlines()} == {"podracer:"}
    mount_again()
    end = ("--frames", (records(run)[-1]["updates"] + 40) * STEPS_PER_UPDATE)
    for command in (("resume", run, *end), (*arguments, *end, "--run-dir", twin)):
        code, _, error = finish(start(*command))
        assert code == 0, error
    assert (fingerprint(run), records(run)) == (fingerprint(twin), records(twin))
