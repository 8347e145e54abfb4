"""Runs that are copied to a store while they train, continued from there and read there."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from child import call, environment, finish, start, wait_for_lines
from killing import killed
from stores import copied, files_of, hurry

import podracer
from podracer.agents.a2c import A2C
from podracer.cli.main import main
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.io.addresses import local_run
from podracer.io.checkpoint import stored_fingerprint
from podracer.io.sinks import read_metrics
from podracer.networks import MLP, TorsoNetwork
from podracer.tournament.config import Tournament
from podracer.tournament.events import accepted_entries
from podracer.tournament.leaderboard import read_events
from podracer.tournament.orchestrator import run_tournament
from podracer.tournament.selection import Independent
from podracer_cloud import mirror
from podracer_cloud.addresses import restore

EXPERIMENT = Experiment(
    recipe="catch_a2c",
    environment="catch",
    agent=A2C(network=TorsoNetwork(MLP((8,)))),
    driver=AnakinConfig(4, 4, 5),
    frames=20 * 16,
    evaluations=2,
    evaluation_episodes=4,
    devices=1,
)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store' / 'run'}"


def command(*arguments) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    return int(left.value.code or 0)


def test_a_run_goes_on_elsewhere_from_its_copy_alone(address, tmp_path, capsys):
    podracer.train(EXPERIMENT, run_dir=tmp_path / "alone")
    ended = dataclasses.replace(EXPERIMENT, frames=10 * 16, evaluations=1)
    podracer.train(ended, run_dir=tmp_path / "first", callbacks=[f"mirror:{address}"])
    assert f"Mirror    {address}  update 10, copied within" in capsys.readouterr().err
    store, first = tmp_path / "store" / "run", files_of(tmp_path / "first")
    assert copied(store).items() <= first.items()
    assert {"config.json", "saved.json", "metrics.jsonl"} <= copied(store).keys()
    copy = local_run(address)
    assert {"mirror_lag", "mirror_faults"} <= read_metrics(copy / "metrics.jsonl")[-1].keys()
    shutil.rmtree(tmp_path / "first")

    second = tmp_path / "second"
    settings = ("--frames", EXPERIMENT.frames, "--evaluations", 2)
    code, _, error = call("resume", address, "--run-dir", second, *settings)
    assert code == 0, error
    assert f"Mirror    {address}  update 20" in error
    expected = stored_fingerprint(tmp_path / "alone")
    copy = local_run(address, "newest")
    assert stored_fingerprint(second) == stored_fingerprint(copy) == expected
    updates = [
        [record["updates"] for record in read_metrics(run / "metrics.jsonl")]
        for run in (copy, tmp_path / "alone")
    ]
    assert updates[0] == updates[1]


def test_a_stopped_run_leaves_its_last_checkpoint_in_the_store(address, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ("--frames", "1e9", "--evaluations", 0, "--devices", 1, "--save-seconds", 3600)
    process = start("train", "catch_a2c", "--run-dir", run, "--attach", f"mirror:{address}", *flags)
    wait_for_lines(process, run, 2)
    process.terminate()
    code, _, error = finish(process)
    assert code == 75, error
    step, digest = stored_fingerprint(run)
    assert step > 0
    assert f"Mirror    {address}  update {step}, copied within" in error
    shutil.rmtree(run)
    restore(address, other)
    assert stored_fingerprint(other) == (step, digest)


@pytest.mark.slow
def test_commands_read_a_run_at_its_address(address, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, callbacks=[f"mirror:{address}"])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = files_of(tmp_path / "store")
    figures = []
    for place in (run, address):
        assert command("eval", place, "--episodes", 3, "--seed", 1, "--json") == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1]
    assert command("fingerprint", address) == 0
    digest = stored_fingerprint(run)[1]
    assert capsys.readouterr().out == f"{digest}  {address} at update 20\n"
    assert command("report", address) == 0
    assert command("play", address, "--max-steps", 5) == 0
    names = {path.name for path in Path().iterdir()}
    assert names >= {"report.html", "play.gif"}
    agent, _ = podracer.load(address)
    assert agent.name == "A2C"
    assert files_of(tmp_path / "store") == before


def test_what_cannot_be_mirrored_or_brought_back_is_refused(address, tmp_path, capsys):
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", callbacks=[f"mirror:{address}"])
    other = tmp_path / "other"
    capsys.readouterr()
    refusals = {
        ("resume", address): "needs a directory to go on in: add --run-dir DIR",
        ("resume", tmp_path / "run", "--run-dir", other): "is for a run at an address",
        ("resume", f"{address}/nothing", "--run-dir", other): "is no store: there is no directory",
        ("play", address, "--environment", "cartpole"): f"podracer: {address} was trained in",
        ("leaderboard", address): f"podracer: {address} holds no tournament",
        ("eval", "http://host/run"): "is no address that can hold a run",
    }
    for arguments, words in refusals.items():
        assert command(*arguments) == 78
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1, error
        assert words in error[0]
    for place, words in {"folder": "a mirror needs an address", address: "another run"}.items():
        with pytest.raises(ConfigError, match=words):
            podracer.train(EXPERIMENT, run_dir=other, callbacks=[f"mirror:{place}"])
    assert not other.exists()


@pytest.mark.slow
def test_a_run_ends_as_it_would_where_its_store_is_gone(
    address, tmp_path, monkeypatch, caplog, capsys
):
    """Gone in the middle: the run's directory of copies becomes a file."""
    hurry(monkeypatch, 30.0)
    monkeypatch.setattr(mirror, "CLOSE_SECONDS", 0.5)
    store = tmp_path / "store" / "run"

    def lose(boundary):
        if boundary.metrics["updates"] == 10:
            # At once, or the lease is found to be missing; and a copy may make the directory anew.
            for number in itertools.count():
                with contextlib.suppress(OSError):
                    store.rename(tmp_path / f"gone{number}")
                    store.touch(exist_ok=False)
                    break

    with caplog.at_level(logging.WARNING, "podracer"):
        result = podracer.train(
            EXPERIMENT, run_dir=tmp_path / "run", callbacks=[f"mirror:{address}", lose]
        )
    assert result.exit_code == 0
    assert "behind the run" in capsys.readouterr().err
    assert "is behind: it has " in caplog.text
    podracer.train(EXPERIMENT, run_dir=tmp_path / "alone", callbacks=[lambda _: None])
    assert stored_fingerprint(tmp_path / "run") == stored_fingerprint(tmp_path / "alone")
    store.unlink()
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", resume=True)  # copies the rest
    restore(address, tmp_path / "again")
    assert stored_fingerprint(tmp_path / "again") == stored_fingerprint(tmp_path / "alone")


def test_a_run_whose_first_copy_was_not_finished_begins_again(address, tmp_path, caplog):
    """As earlier versions left one, whose records came first: checkpoints were saved."""
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    store = tmp_path / "store" / "run"
    ignored = shutil.ignore_patterns(
        "manifest.json", "saved.json", "lock", "log.txt", "tensorboard"
    )
    shutil.copytree(tmp_path / "run", store, ignore=ignored)
    restore(address, tmp_path / "second")
    assert files_of(tmp_path / "second").keys() == {"config.json"}
    podracer.train(EXPERIMENT, run_dir=tmp_path / "second", resume=True)
    assert "begins again" in caplog.text
    assert stored_fingerprint(tmp_path / "second") == stored_fingerprint(tmp_path / "run")
    assert copied(store)["saved.json"] == (tmp_path / "second" / "saved.json").read_bytes()


def test_a_tournament_goes_on_elsewhere_from_its_copy_alone(address, tmp_path, monkeypatch, capsys):
    experiment = dataclasses.replace(EXPERIMENT, evaluations=0)
    tournament = Tournament(
        (experiment,), Independent(), pods=2, rounds=2, round_frames=160, episodes=4,
        engine="inline",
    )  # fmt: skip
    with killed(monkeypatch, 6, after=True):
        run_tournament(tournament, tmp_path / "first", attach=[f"mirror:{address}"])
    shutil.rmtree(tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    assert command("resume", address, "--run-dir", tmp_path / "second") == 0
    output = capsys.readouterr()
    assert f"Mirror    {address}" in output.err
    entries = accepted_entries(read_events(tmp_path / "second"))
    assert set(entries) == {"p0r0", "p1r0", "p0r1", "p1r1"}
    assert command("leaderboard", address, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["id"] for row in rows} == set(entries)
    assert command("report", address) == 0
    assert command("fingerprint", f"{address}/pods/p1r1") == 0
    assert command("fingerprint", tmp_path / "second" / "pods" / "p1r1") == 0
    digests = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert digests[0] == digests[1]
    for arguments, words in {
        ("eval", address): f"is a tournament: name a run of it, such as {address}/pods/p",
        ("leaderboard", address, "--release", 0): f"podracer resume {address} --run-dir DIR",
        ("train", "catch", "--attach", f"mirror:{address}"): "holds another tournament",
    }.items():
        assert command(*arguments) == 78
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_copied_to_s3(tmp_path, monkeypatch, capsys):
    """Against moto's server, which `pip install "moto[server]"` brings."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    log = tmp_path / "moto.log"
    with open(log, "wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=file,
            stderr=file,
            env=environment(PYTHONUNBUFFERED="1"),
        )
    try:
        while "Running on " not in log.read_text():
            assert server.poll() is None, log.read_text()
        endpoint = log.read_text().partition("Running on ")[2].split()[0]
        values = [endpoint, "true", "us-east-1", "testing-only", "testing-only"]
        names = ("ENDPOINT_URL", "ALLOW_HTTP", "REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        for name, value in zip(names, values, strict=True):
            monkeypatch.setenv(f"AWS_{name}", value)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"))
        address = "s3://bucket/team/run"
        hurry(monkeypatch, 3.0)
        ended = dataclasses.replace(EXPERIMENT, frames=10 * 16)
        podracer.train(ended, run_dir=tmp_path / "first", callbacks=[f"mirror:{address}"])
        shutil.rmtree(tmp_path / "first")
        restore(address, tmp_path / "second")
        podracer.train(EXPERIMENT, run_dir=tmp_path / "second", resume=True)
        assert "update 20, copied within" in capsys.readouterr().err
        podracer.train(EXPERIMENT, run_dir=tmp_path / "alone")
        assert stored_fingerprint(tmp_path / "second") == stored_fingerprint(tmp_path / "alone")
        with pytest.raises(ConfigError, match="cannot be written"):
            podracer.train(
                EXPERIMENT, run_dir=tmp_path / "no", callbacks=["mirror:s3://nobucket/run"]
            )
    finally:
        server.terminate()
        server.wait()


def processes(*arguments):
    """Exit codes and errors of two processes that share a run of two devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", 2, "--process-id")
    started = [start(*arguments, *hosts, number) for number in range(2)]
    return [(code, error) for code, _, error in map(finish, started)]


@pytest.mark.slow
def test_two_processes_bring_a_run_into_the_directory_that_they_share(address, tmp_path):
    def train(run, frames, *flags):
        settings = ("--num-envs", 16, "--rollout-length", 8, "--updates-per-chunk", 10)
        flags = (*settings, "--hidden", 16, "--devices", 2, "--evaluations", 0, *flags)
        return processes("train", "catch_a2c", "--run-dir", run, "--frames", frames, *flags)

    assert [code for code, _ in train(tmp_path / "alone", 128 * 40)] == [0, 0]
    assert [
        code for code, _ in train(tmp_path / "first", 128 * 20, "--attach", f"mirror:{address}")
    ] == [0, 0]
    shutil.rmtree(tmp_path / "first")
    second = tmp_path / "second"
    ends = processes("resume", address, "--run-dir", second, "--frames", 128 * 40)
    assert [code for code, _ in ends] == [0, 0], ends
    assert stored_fingerprint(second) == stored_fingerprint(tmp_path / "alone")
    restore(address, tmp_path / "third")
    assert stored_fingerprint(tmp_path / "third") == stored_fingerprint(tmp_path / "alone")
