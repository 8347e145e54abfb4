"""Sebulba in real processes: faults, signals, kills and several hosts, through the command line."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys

import jax
import pytest
from child import environment, finish, start, wait_for_lines

from podracer import envs, recipes
from podracer.drivers.progress import Progress
from podracer.io.checkpoint import stored_fingerprint
from podracer.run.records import Recorder, Stopwatch
from podracer.run.resume import Totals

pytestmark = pytest.mark.timeout(280)

NUM_ENVS, LENGTH, CHUNK = 16, 8, 5
STEPS = NUM_ENVS * LENGTH
RUN = (
    "train", "cartpole_ppo", "--arch", "sebulba", "--num-envs", NUM_ENVS,
    "--rollout-length", LENGTH, "--updates-per-chunk", CHUNK, "--hidden", 16,
    "--evaluations", 2, "--evaluation-episodes", 5,
    "--num-minibatches", 2, "--num-epochs", 2, "--devices", 1,
)  # fmt: skip


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def fingerprint(run):
    return stored_fingerprint(run)


def check_accounts(run, bound):
    """Every step that was collected is learned, in flight or dropped, and few are in flight."""
    previous = {"steps_collected": 0, "steps_dropped": 0, "updates": 0}
    for line in lines(run):
        learned, flying, dropped = (
            line[f"steps_{name}"] for name in ("learned", "in_flight", "dropped")
        )
        assert learned == line["updates"] * STEPS
        assert line["steps_collected"] == learned + flying + dropped
        assert 0 <= flying <= bound, line
        assert dropped >= previous["steps_dropped"]
        assert line["steps_collected"] >= previous["steps_collected"]
        assert line["updates"] > previous["updates"]
        previous = line


# With a lag of n rollouts are collected at most n ahead; without one, as many as there is room for.
BOUND = {0: 1, 1: 2, None: 3}


@pytest.mark.figure(11)
@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.parametrize(("lag", "devices"), [(0, 1), (1, 1), (None, 1), (1, 3)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_and_resume_go_on_with_exact_counters(number, lag, devices, tmp_path, cases):
    """Of three devices two are actors."""
    run = tmp_path / "run"
    split = ("--devices", devices, "--actors", devices // 2)
    arguments = (*RUN, *split, "--policy-lag", lag, "--save-seconds", 0, "--run-dir", run)
    process = start(*arguments, "--frames", STEPS * 400_000)
    for _ in cases(range(34)):  # 272 in all combinations
        before = len(lines(run)) if (run / "metrics.jsonl").exists() else 0
        wait_for_lines(process, run, before + 4)
        process.send_signal(number)
        code, _, error = finish(process)
        assert code == (75 if number == signal.SIGTERM else -signal.SIGKILL), error
        assert not (run / "crash.json").exists()
        if number == signal.SIGTERM:
            names = [step.name for step in (run / "checkpoints").glob("[0-9]*")]
            assert max(map(int, names)) == lines(run)[-1]["updates"]
        check_accounts(run, BOUND[lag] * STEPS)
        process = start("resume", run)
    before = len(lines(run))
    wait_for_lines(process, run, before + 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75
    check_accounts(run, BOUND[lag] * STEPS)
    updates = [line["updates"] for line in lines(run)]
    ends = [update for update in updates if update % CHUNK == 0]
    assert ends == list(range(CHUNK, updates[-1] + 1, CHUNK))  # none twice, none left out


@pytest.mark.figure(1, 4)
@pytest.mark.slow
def test_lock_step_killed_and_preempted_equals_an_uninterrupted_run(tmp_path, cases):
    arguments = (*RUN, "--policy-lag", 0, "--save-seconds", 0, "--frames", STEPS * 80)
    twin, run = tmp_path / "twin", tmp_path / "run"
    code, _, error = finish(start(*arguments, "--run-dir", twin))
    assert code == 0, error
    process = start(*arguments, "--run-dir", run)
    for number, expected in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        before = len(lines(run)) if (run / "metrics.jsonl").exists() else 0
        wait_for_lines(process, run, before + 3)
        process.send_signal(number)
        code, _, error = finish(process)
        assert code == expected, error
        assert lines(run)[-1]["updates"] < 80, "too late to interrupt anything"
        process = start("resume", run)
    code, _, error = finish(process)
    assert code == 0, error
    equal = fingerprint(run) == fingerprint(twin)
    cases.add(equal, 1, 1)
    cases.add(equal, 1, 4)
    assert equal


# --- children with faults or several hosts -------------------------------------------------------

CHILD = """
import dataclasses, hashlib, json, os, pathlib, sys, threading, time
import numpy as np
import podracer.envs
from hosts import Counters
from podracer.cli import main as cli

kind, *arguments = sys.argv[1:]
indices = {}

def at(place, batch):
    if place != "step":
        return
    if batch.num_envs == 4:  # not in an evaluation
        indices[id(batch)] = batch.seeds[1]
    if batch.steps == 100 and batch.indices[0] == 0:
        if kind == "raise":
            raise RuntimeError("a fault for the test")
        if kind == "leave":
            sys.exit(0)
        if kind == "hang":
            threading.Event().wait()

def trouble(batch, timestep):
    if kind == "nonsense" and batch.steps == 100:
        return dataclasses.replace(timestep, observation=timestep.observation[:3])
    return timestep

podracer.envs.make = lambda name: Counters(trouble, at)

if kind == "learner":
    from podracer.drivers.sebulba import learner
    on_mesh, calls = learner.on_mesh, []
    def failing(*args):
        calls.append(0)
        if len(calls) == 50:
            raise RuntimeError("a fault for the test")
        return on_mesh(*args)
    learner.on_mesh = failing

if kind == "hosts":
    import jax
    from podracer.run import training
    train = training.train
    def told(*args, **options):
        result = train(*args, **options)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(result.state.shared):
            digest.update(np.asarray(leaf.addressable_shards[0].data).tobytes())
        numbers = sorted(i for some in indices.values() for i in some)
        print(json.dumps({"shared": digest.hexdigest(), "numbers": numbers,
                          "updates": result.metrics["updates"]}), flush=True)
        return result
    training.train = told

code = 0
try:
    cli.main(arguments)
except SystemExit as leaving:
    code = leaving.code
tasks = pathlib.Path("/proc/self/task").glob("*/children")
maps = pathlib.Path("/proc/self/maps").read_text()
if kind != "hosts":
    print(json.dumps({
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("podracer-actor")],
        "children": [child for task in tasks for child in task.read_text().split()],
        "shared": "/dev/shm" in maps,
    }), flush=True)
sys.exit(code)
"""


def child(kind, *arguments):
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, *map(str, arguments)],
        env=environment(PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.figure(5)
@pytest.mark.parametrize(
    ("kind", "code", "component", "words"),
    [
        ("raise", 72, "actor 0", "the environment raised RuntimeError: a fault for the test"),
        ("hang", 72, "actor 0", "did not answer for"),
        ("learner", 70, "learner", "a fault for the test"),
        ("leave", 72, "actor 0", "raised SystemExit: 0"),
        ("nonsense", 72, r"actor \d", "observation must be"),
    ],
)
@pytest.mark.slow
def test_a_fault_ends_the_process_with_its_code(kind, code, component, words, tmp_path):
    run = tmp_path / "run"
    options = () if kind != "hang" else ("--env-timeout-seconds", 1)
    process = child(kind, *RUN, *options, "--frames", STEPS * 4000, "--run-dir", run)
    got, out, error = finish(process)
    assert got == code, error
    crash = json.loads((run / "crash.json").read_text())
    assert crash["code"] == code
    assert re.fullmatch(component, crash["component"])
    assert words in crash["message"]
    assert words in error
    left = json.loads(out.splitlines()[-1])
    behind = ["podracer-actor 0"] if kind == "hang" else []
    assert left == {"threads": behind, "children": [], "shared": False}
    assert ("all stacks follow" in error) == (kind == "hang")


def hosts(kind, *arguments, number=2):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    several = ("--coordinator", address, "--num-processes", number)
    return [child(kind, *arguments, *several, "--process-id", i) for i in range(number)]


def end(processes, expected):
    """All must leave with this code; what each said at last."""
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [expected] * len(processes), results
    said = [[x for x in out.splitlines() if x.startswith('{"shared"')] for _, out, _ in results]
    return [json.loads(x[-1]) for x in said]


HOSTS = (*RUN[:-1], 2)  # devices of all hosts


@pytest.mark.slow
def test_two_hosts_hold_the_same_parameters_and_other_environments(tmp_path):
    run = tmp_path / "run"
    one, two = end(hosts("hosts", *HOSTS, "--frames", STEPS * 20, "--run-dir", run), 0)
    assert one["shared"] == two["shared"]
    assert one["numbers"] == list(range(8))
    assert two["numbers"] == list(range(8, 16))
    device = json.loads((run / "config.json").read_text())["device"]
    assert (device["processes"], device["devices"]) == (2, 2)
    for line in lines(run):  # of the first host
        assert line["steps_learned"] == line["updates"] * STEPS // 2
        assert line["steps_collected"] == line["steps_learned"] + line["steps_in_flight"]


@pytest.mark.slow
@pytest.mark.figure(19)
def test_a_fault_of_one_host_ends_both_and_is_what_is_kept(tmp_path):
    run = tmp_path / "run"
    processes = hosts("raise", *HOSTS, "--frames", STEPS * 40_000, "--run-dir", run)
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [72, 77], results
    crash = json.loads((run / "crash.json").read_text())
    assert (crash["code"], crash["component"]) == (72, "actor 0")


@pytest.mark.figure(19)
@pytest.mark.slow
def test_a_signal_to_one_host_stops_both_at_one_update(tmp_path):
    run = tmp_path / "run"
    processes = hosts(
        "hosts", *HOSTS, "--frames", STEPS * 40_000, "--save-seconds", 0, "--run-dir", run
    )
    wait_for_lines(processes[0], run, 3)
    processes[1].send_signal(signal.SIGTERM)
    one, two = end(processes, 75)
    assert one["shared"] == two["shared"]
    assert one["updates"] == two["updates"] == lines(run)[-1]["updates"]
    saved = max(int(step.name) for step in (run / "checkpoints").glob("[0-9]*"))
    assert saved == one["updates"]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (2, 2)])
def test_accounts_go_on_with_another_number_of_processes(before, after, monkeypatch):
    """Of 10 updates of 128 steps, with 256 steps in flight at the save, which are lost."""
    experiment = recipes.find("cartpole_sebulba").with_fields(
        {"driver": {"num_envs": 16, "rollout_length": 8}}
    )

    def record(recorder, updates, collected):
        progress = Progress(updates, 0, {}, collected=collected)
        line = recorder.record(progress, Stopwatch())
        names = ("collected", "learned", "in_flight", "dropped")
        return tuple(line[f"steps_{name}"] for name in names)

    monkeypatch.setattr(jax, "process_count", lambda: before)
    saved = Recorder(experiment, envs.make("probe:action"))
    own = record(saved, 10, (10 * 128 + 256) // before)
    assert own == (1536 // before, 1280 // before, 256 // before, 0)
    assert saved.totals.collected == 1536
    monkeypatch.setattr(jax, "process_count", lambda: after)
    resumed = Recorder(experiment, envs.make("probe:action"))
    resumed.restore(saved.totals)
    assert resumed.totals == dataclasses.replace(saved.totals, dropped=256)
    own = record(resumed, 11, 128 // after)
    assert own == (1664 // after, 1408 // after, 0, 256 // after)


def test_a_resumed_run_counts_the_faults_of_environments_before_it():
    """Of its records, those after the checkpoint are gone."""
    names = ("environment_faults", "environment_faults_died", "environment_faults_hung")
    earlier = [{"updates": updates, names[0]: updates, names[1]: updates} for updates in (1, 2, 3)]
    recorder = Recorder(recipes.find("cartpole_sebulba"), envs.make("probe:action"))
    recorder.restore(Totals(updates=2), records=earlier)
    line = recorder.record(Progress(3, 0, {names[0]: 4, names[1]: 1, names[2]: 3}), Stopwatch())
    assert [line[name] for name in names] == [6, 3, 3]
