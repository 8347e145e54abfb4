"""What packages attach to runs and tournaments, and the addresses that they read."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from runs import small_catch

import podracer
from podracer.cli.main import main
from podracer.errors import ConfigError
from podracer.io import addresses, entry_points
from podracer.io.addresses import local_run
from podracer.io.checkpoint import stored_fingerprint
from podracer.io.sinks import read_metrics
from podracer.run.callbacks import Attached
from podracer.run.loading import reopen
from podracer.tournament.config import Tournament
from podracer.tournament.orchestrator import run_tournament
from podracer.tournament.selection import Independent

EXPERIMENT = small_catch(10)
COPIES: dict[str, Path] = {}  # what the store of the tests has, by address

pytestmark = pytest.mark.usefixtures("shared")  # what is patched is not traced


class Diary:
    """Attachment that writes down what it is told, in `diary.json` of the directory."""

    def __init__(self, directory: Path, argument: str = "") -> None:
        self.path, self.lines = directory / "diary.json", [argument]

    def note(self, line: str) -> None:
        self.lines.append(line)
        self.path.write_text(json.dumps(self.lines))

    def __enter__(self) -> None:
        names = {path.name for path in self.path.parent.iterdir()}
        self.note(f"entered {'config.json' in names} {'lock' in names}")

    def __exit__(self, *error: object) -> None:
        self.note(f"left {len(list(self.path.parent.glob('checkpoints/*')))}")

    def sealed(self) -> None:
        self.note("sealed")

    def figures(self) -> dict[str, float]:
        return {"diary_lines": len(self.lines)}


def diary(argument: str):
    """Keep a diary."""
    return lambda info: Diary(getattr(info, "run_dir", None) or info.directory, argument)


def resolve(address, choice, directory):
    """Read the store of the tests."""
    if directory is None:
        return COPIES[address]
    COPIES[address].rename(directory)
    return directory


@pytest.fixture
def packages(monkeypatch):
    """Entry points of installed packages, by group and name."""
    entries: dict[tuple[str, str], object] = {}

    class Entry(EntryPoint):
        def load(self):
            return entries[self.group, self.name]

    def find(group):
        return [Entry(name, "", of) for of, name in entries if of == group]

    monkeypatch.setattr(entry_points, "entry_points", find)
    return entries


def lines(run: Path) -> list[str]:
    return json.loads((run / "diary.json").read_text())


def test_an_attachment_follows_each_seal_of_a_run(tmp_path):
    given = []

    def attach(info):
        given.append(info)
        return Diary(info.run_dir)

    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", callbacks=[Attached(attach)])
    assert given[0].experiment == EXPERIMENT
    # Under the lock, before anything is recorded; of `config.json`, and of the checkpoint; at last.
    assert lines(tmp_path / "run") == ["", "entered False True", "sealed", "sealed", "left 1"]
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["diary_lines"] for record in records] == [3, 3]


def test_a_run_goes_on_with_the_attachment_whose_file_it_has(tmp_path, packages):
    packages["podracer.attachments", "diary"] = diary
    run, half = tmp_path / "run", dataclasses.replace(EXPERIMENT, frames=80)
    podracer.train(half, run_dir=run, callbacks=["diary:a b:c"])
    assert lines(run)[0] == "a b:c"
    podracer.train(EXPERIMENT, run_dir=run, resume=True)
    assert lines(run) == ["", "entered True True", "sealed", "sealed", "left 2"]
    more = dataclasses.replace(EXPERIMENT, frames=240)
    podracer.train(more, run_dir=run, resume=True, callbacks=["diary:d"])
    assert lines(run)[:2] == ["d", "entered True True"]
    assert lines(run).count("sealed") == 2  # once for each seal, so it was attached once
    packages.clear()
    podracer.train(dataclasses.replace(EXPERIMENT, frames=320), run_dir=run, resume=True)
    (run / "mirror.json").write_text("{}")
    with pytest.raises(ConfigError, match="mirror is in podracer-cloud: `pip install"):
        podracer.train(dataclasses.replace(EXPERIMENT, frames=400), run_dir=run, resume=True)


class Lower(podracer.Callback):
    """Divides the learning rate at each evaluation."""

    def __init__(self, argument: str) -> None:
        self.factor = float(argument)

    def on_boundary(self, run):
        if run.is_due:
            rate = float(run.blueprint.settings.learning_rate) * self.factor
            run.change({"agent": {"learning_rate": rate}})


def test_callbacks_of_packages_are_part_of_an_experiment(tmp_path, packages):
    """A curriculum, say: they are written with it, and it is resumed with them."""
    packages["podracer.callbacks", "lower"] = Lower
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    experiment = dataclasses.replace(EXPERIMENT, evaluations=2, callbacks=("lower:0.5",))
    podracer.train(experiment, run_dir=whole)
    podracer.train(experiment, run_dir=cut, frames=80, evaluations=1)
    half = reopen(cut)  # as `podracer resume` does
    podracer.train(half, run_dir=cut, resume=True, frames=160, evaluations=2)
    assert stored_fingerprint(cut) == stored_fingerprint(whole)
    rates = [record.get("agent.learning_rate") for record in read_metrics(cut / "metrics.jsonl")]
    assert rates[0] is None
    assert rates[1] == pytest.approx(EXPERIMENT.agent.learning_rate / 2)
    packages.clear()
    with pytest.raises(ConfigError, match="has a callback or an attachment 'lower'"):
        podracer.train(experiment, run_dir=tmp_path / "other")


def test_a_function_of_a_package_is_called_at_each_boundary(tmp_path, packages):
    packages["podracer.callbacks", "early"] = lambda argument: lambda boundary: True
    result = podracer.train(
        EXPERIMENT, run_dir=tmp_path / "run", callbacks=["early"], evaluations=2
    )
    assert result.reason == "callback"


def test_a_tournament_of_an_unknown_callback_is_refused_before_it_starts(tmp_path, packages):
    experiment = dataclasses.replace(EXPERIMENT, callbacks=("lower:0.5",))
    settings = {"pods": 1, "rounds": 1, "round_frames": 80, "episodes": 2, "engine": "inline"}
    tournament = Tournament((experiment,), Independent(), **settings)
    with pytest.raises(ConfigError, match="has a callback or an attachment 'lower'"):
        run_tournament(tournament, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    packages["podracer.callbacks", "lower"] = Lower
    assert run_tournament(tournament, tmp_path / "t") == 0


def test_an_attachment_follows_the_events_of_a_tournament(tmp_path):
    tournament = Tournament(
        (EXPERIMENT,), Independent(), pods=1, rounds=1, round_frames=80, episodes=2, engine="inline"
    )
    events = []

    class Count(Diary):
        def sealed(self):
            events.append(self.info.snapshot()[0].events)

    def attach(info):
        assert not info.directory.exists()  # it may refuse before anything is there
        count = Count(info.directory)
        count.info = info
        return count

    run_tournament(tournament, tmp_path / "t", attach=[attach])
    assert lines(tmp_path / "t")[1:] == ["entered False True", "left 0"]
    assert events == sorted(events)
    assert events[-1] == len((tmp_path / "t" / "leaderboard.jsonl").read_text().splitlines())


def test_runs_at_addresses_are_read_and_resumed(tmp_path, packages, monkeypatch, capsys):
    packages["podracer.addresses", "box"] = resolve
    monkeypatch.setattr(addresses, "COPIES", {})
    monkeypatch.chdir(tmp_path)
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    expected = stored_fingerprint(tmp_path / "run")
    monkeypatch.setitem(COPIES, "box://a/b", tmp_path / "run")
    assert local_run("BOX:///a/b/", "best") == tmp_path / "run"
    assert podracer.load("box://a/b")[0].name == "A2C"

    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(x) for x in arguments])
        return left.value.code, capsys.readouterr()

    code, printed = command("fingerprint", "box://a/b")
    assert (code, printed.out) == (0, f"{expected[1]}  box://a/b at update 10\n")
    code, printed = command("report", "box://a/b")
    assert (code, Path("report.html").exists()) == (0, True)
    code, printed = command("play", "box://a/b", "--environment", "cartpole")
    assert (code, printed.err[:39]) == (78, "podracer: box://a/b was trained in 'cat")
    assert local_run("box://a/b", directory=tmp_path / "new") == tmp_path / "new"
    assert stored_fingerprint(tmp_path / "new") == expected
    assert tmp_path / "new" not in addresses.COPIES  # it stays, so it has a name of its own
    packages.clear()
    for address, words in {
        "s3://bucket/run": "podracer: s3:// is in podracer-cloud: `pip install -e packages/cloud`.",
        "box://a/b": "podracer: 'box://a/b' is no address that can hold a run.",
    }.items():
        for arguments in (("eval",), ("report",), ("resume",), ("leaderboard",)):
            code, printed = command(*arguments, address)
            assert (code, printed.err) == (78, f"{words}\n")
    with pytest.raises(ConfigError, match="s3:// is in podracer-cloud"):
        podracer.load("s3://bucket/run")
