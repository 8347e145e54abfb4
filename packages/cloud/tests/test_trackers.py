"""Experiment trackers get every record, and a resumed run goes on in the run that it began."""

import dataclasses
import sys
import types

import pytest

from podracer import recipes
from podracer.io.seal import seal_json
from podracer.io.sinks import Sinks
from podracer.run.result import RunInfo
from podracer_cloud import trackers

RECORDS = [
    {"updates": n, "frames": 100 * n, "episode_return": n / 10, "time_step": 0.5, "loss": None}
    for n in (10, 20)
]


@pytest.fixture
def info(tmp_path):
    seal_json(tmp_path / "config.json", {"run": {"id": "abc", "experiment": "d"}})
    return RunInfo(recipes.find("catch_a2c"), tmp_path, "1 x cpu", 100)


def write(info, *names, records=RECORDS):
    made = [getattr(trackers, name)() for name in names]
    for sink in made:
        sink.open(info)
    with Sinks([Nothing(), *made]) as sinks:
        for record in records:
            sinks.write(record)


class Nothing:
    def write(self, record): ...

    def close(self): ...


class FakeRun:
    def __init__(self, settings):
        self.settings, self.logged, self.finished = settings, [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_tracker_gets_settings_and_records(library, info, monkeypatch):
    runs = []

    def init(**settings):
        runs.append(FakeRun(settings))
        return runs[-1]

    fake = types.ModuleType(library)
    fake.init, fake.__spec__ = init, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, library, fake)
    rented = "gymnasium:Maze-v0,api_key=k3y-value,size=3"
    experiment = dataclasses.replace(info.experiment, environment=rented)
    info = dataclasses.replace(info, experiment=experiment)
    write(info, library)
    write(info, library)  # as after a resume
    first, second = runs
    assert first.settings["config"]["agent.learning_rate"] > 0
    environment = first.settings["config"]["environment"]
    assert environment == "gymnasium:Maze-v0,api_key=[redacted],size=3"
    assert first.settings["project"] == "podracer"
    assert first.settings["resume"] == "allow"
    assert {**first.settings} == {**second.settings}
    if library == "wandb":
        assert first.settings["id"] == "abc"
    else:  # which has no other id than the name
        assert first.settings["name"] == f"{info.run_dir.name}-abc"
    assert first.finished
    assert first.logged == [
        (n, {"run/frames": 100 * n, "episode/return": n / 10, "time/step": 0.5}) for n in (10, 20)
    ]
