"""Runs that are copied to a store while they train, continued from there and read there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from child import call, environment, exit_code, finish, start, wait_for_lines
from killing import killed
from runs import small_catch
from stores import copied, files_of, hurry

import podracer
from podracer.errors import ConfigError
from podracer.io.addresses import local_run
from podracer.io.checkpoint import stored_fingerprint
from podracer.io.sinks import read_metrics
from podracer.tournament.config import Tournament
from podracer.tournament.events import accepted_entries
from podracer.tournament.leaderboard import read_events
from podracer.tournament.orchestrator import run_tournament
from podracer.tournament.selection import Independent
from podracer_cloud.addresses import restore

EXPERIMENT = small_catch(20, evaluations=2, evaluation_episodes=4)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store' / 'run'}"


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
    assert exit_code("resume", address, "--run-dir", tmp_path / "second") == 0
    output = capsys.readouterr()
    assert f"Mirror    {address}" in output.err
    entries = accepted_entries(read_events(tmp_path / "second"))
    assert set(entries) == {"p0r0", "p1r0", "p0r1", "p1r1"}
    assert exit_code("leaderboard", address, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["id"] for row in rows} == set(entries)
    assert exit_code("report", address) == 0
    assert exit_code("fingerprint", f"{address}/pods/p1r1") == 0
    assert exit_code("fingerprint", tmp_path / "second" / "pods" / "p1r1") == 0
    digests = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert digests[0] == digests[1]
    for arguments, words in {
        ("eval", address): f"is a tournament: name a run of it, such as {address}/pods/p",
        ("leaderboard", address, "--release", 0): f"podracer resume {address} --run-dir DIR",
        ("train", "catch", "--attach", f"mirror:{address}"): "holds another tournament",
    }.items():
        assert exit_code(*arguments) == 78
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
