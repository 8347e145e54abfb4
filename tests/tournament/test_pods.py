"""Pods that really train: what a round begins with, scores computed again, real processes."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from child import command, wait_until

import podracer
from podracer.agents.a2c import A2C
from podracer.agents.dqn import DQN
from podracer.config.experiment import Experiment
from podracer.config.serialization import from_json, to_json
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Hyperparameter, Pod
from podracer.drivers.sebulba import SebulbaConfig
from podracer.errors import CheckpointError, EnvironmentFault, StorageError
from podracer.evaluate import Evaluation
from podracer.io import checkpoint, run_directory
from podracer.io.checkpoint import stored_fingerprint
from podracer.io.signals import StopSignals
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.rollout import Purpose, purpose_key
from podracer.run import callbacks
from podracer.run.resume import Totals
from podracer.run.setup import make_driver
from podracer.tournament import pod as pods
from podracer.tournament import selection
from podracer.tournament.config import Tournament
from podracer.tournament.engine import InlineEngine, LocalEngine
from podracer.tournament.events import Submitted, accepted_entries
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer.tournament.orchestrator import MACHINE_CODES, Orchestrator
from podracer.tournament.report import REPORT, reason_of_failure

SMALL = TorsoNetwork(MLP((16,)))
STEPS = 16 * 8
ROUND = 10 * STEPS
EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=A2C(network=SMALL),
    driver=AnakinConfig(16, 8, 5),
    frames=ROUND,
    devices=1,
)
TOURNAMENT = Tournament(
    (EXPERIMENT,), selection.Independent(), pods=2, rounds=2, round_frames=ROUND, episodes=8
)


def play(directory: Path, tournament: Tournament, engine: Any = None) -> dict[str, Any]:
    engine = engine or InlineEngine()
    with Leaderboard(directory, tournament.header()) as board:
        loop = Orchestrator(tournament, board, engine, StopSignals(), lambda state: None)
        assert loop.run() == 0
    return accepted_entries(read_events(directory))


def learned(directory: Path, entry: Any) -> Any:
    """What an entry's checkpoint holds, on the host."""
    experiment = from_json(entry.experiment)
    path = directory / entry.checkpoint
    state = checkpoint.load(
        path.parents[1], make_driver(experiment).abstract_state, int(path.name)
    ).state
    key = jax.random.key_data(state.key)
    return jax.device_get(state.learner), np.asarray(key), int(np.max(state.update))


DRIVERS = {
    "anakin": EXPERIMENT,
    "replay": dataclasses.replace(
        EXPERIMENT, agent=DQN(network=SMALL, replay=Replay(16 * 40, batch_size=16, warmup=STEPS))
    ),
    "population": dataclasses.replace(
        EXPERIMENT, pods=(Pod(0), Pod(1, (Hyperparameter("learning_rate", 1e-2),)))
    ),
    "sebulba": dataclasses.replace(
        EXPERIMENT, driver=SebulbaConfig(16, 8, 5, threads_per_actor=1, policy_lag=0)
    ),
}


@pytest.mark.figure(15)
@pytest.mark.parametrize(
    ("name", "rounds"),
    [("anakin", 2), *(pytest.param(name, 3, marks=pytest.mark.slow) for name in DRIVERS)],
)
def test_a_pod_continues_its_entry_to_the_bit(name, rounds, tmp_path, cases):
    """Rounds end where one run of all their frames does; and scores come again."""
    tournament = dataclasses.replace(
        TOURNAMENT, experiments=(DRIVERS[name],), pods=1, rounds=rounds
    )
    entries = play(tmp_path / "tournament", tournament)
    frames = rounds * ROUND
    experiment = dataclasses.replace(tournament.experiment_of(0), frames=frames, evaluations=0)
    podracer.train(experiment, run_dir=tmp_path / "whole")
    last = (tmp_path / "tournament" / entries[f"p0r{rounds - 1}"].checkpoint).parents[1]
    assert stored_fingerprint(last) == stored_fingerprint(tmp_path / "whole")
    for entry in cases(entries.values()):
        path = tmp_path / "tournament" / entry.checkpoint
        returns, _ = pods.score(path, from_json(entry.experiment), tournament.evaluation_seed, 8)
        assert float(returns.mean()) == entry.score
        assert pods.digest(path) == entry.digest


class Lower(podracer.Callback):
    """Lowers the learning rate after the first chunk, and counts chunks."""

    def __init__(self, argument: str = "") -> None:
        self.chunks = 0

    def on_record(self, run, record):
        self.chunks += 1
        if self.chunks == 1:
            run.change({"agent": {"learning_rate": 1e-5}})

    def saved(self):
        return {"chunks": self.chunks}

    def restore(self, run, saved):
        self.chunks = saved["chunks"]


def test_a_pod_continues_what_callbacks_changed_and_saved(tmp_path, monkeypatch):
    entry = SimpleNamespace(load=lambda: Lower)
    monkeypatch.setattr(callbacks, "installed", lambda kind: {"lower": entry})
    experiment = dataclasses.replace(EXPERIMENT, callbacks=("lower:",))
    tournament = dataclasses.replace(TOURNAMENT, experiments=(experiment,), pods=1)
    entries = play(tmp_path / "tournament", tournament)
    whole = dataclasses.replace(tournament.experiment_of(0), frames=2 * ROUND, evaluations=0)
    podracer.train(whole, run_dir=tmp_path / "whole")
    runs = [tmp_path / "whole", (tmp_path / "tournament" / entries["p0r1"].checkpoint).parents[1]]
    assert stored_fingerprint(runs[0]) == stored_fingerprint(runs[1])
    saved = [checkpoint.load_part(run, ".learner.shared").metadata for run in runs]
    assert [x["chunks"] for x in saved] == [4, 4]
    assert saved[0]["changes"] == saved[1]["changes"]


def test_a_perturbed_number_wins_over_an_earlier_change_of_a_callback():
    """The round would train with another number than the leaderboard has."""
    changes = {"agent": {"learning_rate": 1e-5, "discount": 0.5}, "environment": {"wind": 1.0}}
    metadata = {"experiment": to_json(EXPERIMENT), "changes": changes}
    assert pods.kept_changes(metadata, EXPERIMENT.agent) == changes
    perturbed = EXPERIMENT.with_fields({"agent": {"learning_rate": 2e-3}})
    del changes["agent"]["learning_rate"]
    assert pods.kept_changes(metadata, perturbed.agent) == changes
    metadata["changes"] = {"agent": {"learning_rate": 1e-5}}
    assert pods.kept_changes(metadata, perturbed.agent) == {}
    assert pods.kept_changes({**metadata, "changes": None}, perturbed.agent) == {}


@dataclasses.dataclass
class EpisodeKey:
    """The part of a state that an evaluation begins with."""

    key: jax.Array


@dataclasses.dataclass
class FaultyPods(EpisodeKey):
    """The part of a population's state that says which pods met a fault."""

    fault: np.ndarray


def test_episodes_that_faults_kept_from_ending_give_no_score(monkeypatch, capsys):
    def score(unfinished, broken):
        returns = np.array([1.0, 9.0])
        played = Evaluation(returns, returns, np.array(unfinished), np.array(2), broken)
        monkeypatch.setattr(pods, "make_evaluator", lambda *_: lambda _: played)
        return pods.score(Path("run/checkpoints/10"), EXPERIMENT, 0, 2)[0].tolist()

    state = EpisodeKey(jax.random.key(0))
    monkeypatch.setattr(checkpoint, "load", lambda *_: SimpleNamespace(state=state))
    assert score(0, 0) == score(0, 3) == [1.0, 9.0]
    assert not capsys.readouterr().out
    assert score(1, 0) == [1.0, 9.0]
    text = "1 of 2 held-out episodes did not end within 30,000 steps: they count with"
    assert text in capsys.readouterr().out
    with pytest.raises(EnvironmentFault, match=r"30,000 steps, where faults broke 60: no score\.$"):
        score(1, 60)


def test_a_score_leaves_out_learners_that_met_a_fault_and_counts_what_was_cut(monkeypatch, capsys):
    returns = np.array([[1.0, 3.0], [500.0, 500.0], [5.0, 7.0]])
    played = Evaluation(returns, returns, np.array([0, 2, 1]), np.array([2, 2, 2]), 0)
    monkeypatch.setattr(pods, "make_evaluator", lambda *_: lambda _: played)
    state = FaultyPods(jax.random.split(jax.random.key(0), 3), np.array([[0, 0], [2, 9], [0, 0]]))
    monkeypatch.setattr(checkpoint, "load", lambda *_: SimpleNamespace(state=state))
    sweep = dataclasses.replace(EXPERIMENT, pods=tuple(Pod(seed) for seed in range(3)))
    sound, unfinished = pods.score(Path("run/checkpoints/10"), sweep, 0, 2)
    assert (sound.tolist(), unfinished) == ([[1.0, 3.0], [5.0, 7.0]], 1)
    assert "1 of 4 held-out episodes" in capsys.readouterr().out


def test_the_error_of_a_score_is_that_over_independent_episodes():
    returns = np.array([1.0, 2.0, 6.0])
    error = np.sqrt(14 / 2 / 3)  # squares of the deviations, ddof 1, of the mean
    np.testing.assert_allclose(pods.statistics(returns), (3.0, error, 3))
    population = np.stack([returns, returns + 1.0])  # in the same episodes
    np.testing.assert_allclose(pods.statistics(population), (3.5, error, 3))
    assert pods.statistics(np.array([[4.0], [6.0]])) == (5.0, 0.0, 1)


@pytest.mark.figure(15)
@pytest.mark.slow
def test_20_scores_come_again_to_the_bit(tmp_path, cases):
    """Each from the checkpoint that its entry names, which is the one that was submitted."""
    tournament = dataclasses.replace(
        TOURNAMENT, selection=selection.KTournament(), pods=4, rounds=5, size=20, episodes=64
    )
    entries = play(tmp_path, tournament)
    assert len(entries) == 20
    assert len({entry.score for entry in entries.values()}) > 3
    for entry in cases(entries.values()):
        path = tmp_path / entry.checkpoint
        assert pods.digest(path) == entry.digest
        returns, _ = pods.score(path, from_json(entry.experiment), tournament.evaluation_seed, 64)
        error = float(returns.std(ddof=1) / np.sqrt(returns.size))
        assert (float(returns.mean()), error) == (entry.score, entry.standard_error)


@pytest.mark.slow
def test_who_takes_over_another_draws_its_own_random_numbers(tmp_path):
    """All starts are the best entry's: its weights to the bit, and then each pod goes its way."""
    tournament = dataclasses.replace(
        TOURNAMENT, selection=selection.KTournament(k=8), pods=3, rounds=3, episodes=64
    )
    entries = play(tmp_path, tournament)
    adopted = [e for e in entries.values() if e.parents and e.parents[0][:2] != e.id[:2]]
    assert adopted
    for entry in adopted:
        parent = entries[entry.parents[0]]
        experiment = from_json(entry.experiment)
        path = tmp_path / parent.checkpoint
        driver = make_driver(experiment)
        beginning = pods.begin([path], entry.round, experiment.agent, driver, experiment.key)
        state, totals, _ = beginning
        before, key, updates = learned(tmp_path, parent)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.learner), before)
        assert not np.array_equal(jax.random.key_data(state.key), key)
        assert totals.updates == updates == 10 * (parent.round + 1)
        assert entry.frames > parent.frames
        assert learned(tmp_path, entry)[2] == updates + 10
        assert np.array_equal(learned(tmp_path, entry)[1], jax.random.key_data(state.key))


@pytest.mark.slow
def test_a_pod_that_returns_to_an_older_entry_does_not_repeat_its_next_round(tmp_path):
    tournament = dataclasses.replace(TOURNAMENT, selection=selection.Uniform(), pods=1, rounds=4)
    entries = play(tmp_path, tournament)
    parents = [entry.parents[0] for entry in entries.values() if entry.parents]
    again = [parent for parent in parents if parents.count(parent) > 1]
    assert again, parents
    children = [entry for entry in entries.values() if entry.parents == (again[0],)]
    one, two = (learned(tmp_path, entry) for entry in children[:2])
    assert not np.array_equal(one[1], two[1])
    weights = [jax.tree.leaves(state[0].shared.params) for state in (one, two)]
    assert not all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_key_of_a_round_is_no_other_key_of_its_run():
    """Selection inside the round's sweep folds numbers into a purpose's key, too: of updates."""
    own = jax.random.key(3)

    def words(key: jax.Array) -> tuple[int, ...]:
        return tuple(jax.random.key_data(key).tolist())

    others = [purpose_key(own, purpose) for purpose in Purpose if purpose != Purpose.START_ROUND]
    used = {words(jax.random.fold_in(key, number)) for key in others for number in range(20)}
    used |= {words(purpose_key(own, purpose)) for purpose in Purpose}
    rounds = {words(pods.round_key(number, own)) for number in range(20)}
    assert len(rounds) == 20
    assert not rounds & used


@pytest.mark.slow
def test_fusion_is_the_mean_of_weights_and_moments(tmp_path):
    rule = selection.Generational(group_size=2, parents=1)
    entries = play(tmp_path, dataclasses.replace(TOURNAMENT, selection=rule, pods=2))
    assert entries["p1r1"].parents == ("p0r0", "p1r0")
    experiment = from_json(entries["p1r1"].experiment)
    paths = [tmp_path / entries[parent].checkpoint for parent in entries["p1r1"].parents]
    fused, *_ = pods.begin(paths, 1, experiment.agent, make_driver(experiment), experiment.key)
    one, other = (learned(tmp_path, entries[parent])[0] for parent in ("p0r0", "p1r0"))
    moments = jax.tree.leaves(one.shared.optimizer_state)
    assert any(np.abs(leaf).max() > 0 for leaf in moments)

    def check(mean, a, b):
        expected = (a + b) / 2 if np.issubdtype(a.dtype, np.floating) else a
        np.testing.assert_array_equal(mean, expected)

    jax.tree.map(check, jax.device_get(fused.learner.shared), one.shared, other.shared)
    weights = jax.tree.leaves(one.shared.params)[0], jax.tree.leaves(other.shared.params)[0]
    assert not np.array_equal(*weights)


def test_a_checkpoint_that_is_not_the_recorded_one_is_refused(tmp_path):
    entries = play(tmp_path, dataclasses.replace(TOURNAMENT, pods=1, rounds=1))
    entry = entries["p0r0"]
    directory = tmp_path / "pods" / "p0r1"
    parent = pods.Reference(entry.id, entry.checkpoint, "0" * 64)
    experiment = from_json(entry.experiment)
    task = pods.Task(0, 1, 9, experiment, (parent,), ROUND, None, 1, 8)
    pods.write_task(directory, task)
    assert pods.read_task(directory) == task
    with pytest.raises(CheckpointError, match="not the checkpoint on the leaderboard"):
        pods.run(directory)


def test_an_attempt_that_was_replaced_overwrites_no_report(tmp_path, monkeypatch):
    """It runs on a machine that is cut off, while a later one has the round's directory."""
    directory = tmp_path / "pods" / "p0r0"
    directory.mkdir(parents=True)
    task = pods.Task(0, 0, 9, EXPERIMENT, (), ROUND, None, 1, 8)
    pods.write_task(directory, task)

    def score(*_):
        pods.write_task(directory, dataclasses.replace(task, token=10))
        (directory / REPORT).write_text("the later one's")
        return np.zeros(8), 0

    monkeypatch.setattr(pods, "score", score)
    monkeypatch.setattr(pods, "train", lambda *_, **__: SimpleNamespace(exit_code=0))
    monkeypatch.setattr(pods, "_totals", lambda _: Totals())
    monkeypatch.setattr(pods, "digest", lambda _: "0" * 64)
    with pytest.raises(pods.StillInUse, match="a later attempt"):
        pods.run(directory)
    assert (directory / REPORT).read_text() == "the later one's"


@pytest.mark.figure(13)
def test_a_disk_without_room_for_a_round_is_no_fault_of_the_pod(tmp_path, monkeypatch):
    directory = tmp_path / "pods" / "p0r0"
    directory.mkdir(parents=True)
    pods.write_task(directory, pods.Task(0, 0, 9, EXPERIMENT, (), ROUND, None, 1, 8))
    usage = run_directory.shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(run_directory.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"has 0\.0 MiB free, and a checkpoint with its records"):
        pods.run(directory)
    assert StorageError.exit_code in MACHINE_CODES


def test_a_process_that_cannot_be_started_is_no_fault_of_the_pod(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    engine = LocalEngine()
    engine.start(3, tmp_path)
    assert engine.poll() == {3: 77}
    assert engine.poll() == {}
    assert 77 in MACHINE_CODES
    reason = "exit code 77: no process can be started: Resource temporarily unavailable."
    assert reason_of_failure(tmp_path, 77) == reason


# --- real processes -------------------------------------------------------------------------------


def children(directory: Path) -> list[int]:
    """Processes of pods of this tournament."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            line = (each / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
        if "podracer.tournament.process" in line and str(directory) in " ".join(line):
            found.append(int(each.name))
    return found


@pytest.mark.figure(13)
@pytest.mark.slow
def test_pods_and_driver_killed_for_real(tmp_path):
    """A pod is killed, then the driver while its pods are stopped, so that they cannot notice: no
    process is left, and `resume` loses nothing."""
    directory = tmp_path / "t"
    flags = ("--pods", 2, "--rounds", 3, "--round-frames", 40960, "--selection", "Independent")
    driver = subprocess.Popen(command("tournament", "--run-dir", directory, *flags))
    wait_until(lambda: any(directory.glob("pods/*r1/metrics.jsonl")))
    os.kill(children(directory)[0], signal.SIGKILL)
    log = directory / "leaderboard.jsonl"
    wait_until(lambda: '"event": "failed"' in log.read_text())
    for pid in children(directory):  # once it watches its engine, in a thread
        wait_until(lambda pid=pid: len(os.listdir(f"/proc/{pid}/task")) > 1)
        os.kill(pid, signal.SIGSTOP)
    driver.kill()
    driver.wait()
    wait_until(lambda: not children(directory), 60.0)
    before = {e.id: e for e in accepted_entries(read_events(directory)).values()}
    assert subprocess.run(command("resume", directory), check=False).returncode == 0
    events = read_events(directory)
    entries = accepted_entries(events)
    assert set(entries) == {f"p{p}r{r}" for p in range(2) for r in range(3)}
    assert sum(isinstance(event, Submitted) for event in events) == 6
    assert all(entries[name] == entry for name, entry in before.items())
    assert not children(directory)


@pytest.mark.slow
def test_ctrl_c_saves_all_pods_and_resume_goes_on(tmp_path):
    directory = tmp_path / "t"
    flags = ("--pods", 2, "--rounds", 2, "--round-frames", 409600, "--selection", "Independent")
    driver = subprocess.Popen(command("tournament", "--run-dir", directory, *flags))
    wait_until(lambda: all((directory / f"pods/p{p}r0/metrics.jsonl").exists() for p in (0, 1)))
    driver.send_signal(signal.SIGINT)
    assert driver.wait(90) == 130
    assert not children(directory)
    saved = [list(directory.glob(f"pods/p{p}r0/checkpoints/*/manifest.json")) for p in (0, 1)]
    assert all(saved)
    assert subprocess.run(command("resume", directory), check=False).returncode == 0
    events = read_events(directory)
    assert len(accepted_entries(events)) == 4
    assert not any(type(event).__name__ == "Failed" for event in events)
