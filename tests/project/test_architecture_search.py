"""The example `examples/architecture_search`: its environment, its figures and one whole search."""

import contextlib
import importlib
import json
import sys
from pathlib import Path

import pytest

import podracer

FOLDER = Path(__file__).parents[2] / "examples" / "architecture_search"


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_an_episode_builds_a_network(load, tmp_path, monkeypatch):
    builder = load("builder")
    env = builder.Builder(log=str(tmp_path / "log.jsonl"))
    env.reset(seed=3)
    actions = [0, 4, 0, 7, 0]
    *_, (observation, reward, *_) = steps = [env.step(x) for x in actions]
    assert [x[1] for x in steps[:-1]] == [0.0] * 4
    assert [x[2] for x in steps] == [False] * 4 + [True]
    assert observation.reshape(5, -1).argmax(axis=1).tolist() == actions
    (record,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert record["layers"] == [[8, "tanh"], [32, "relu"]]
    assert record["score"] == reward != 0.0
    monkeypatch.setattr(builder, "STEPS", 1)
    report = podracer.check_environment(podracer.Gymnasium(builder.Builder, workers=0))
    assert report.findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asynchronous", "synchronous", "random"])
def test_a_search_builds_networks_and_is_drawn(name, load, tmp_path, monkeypatch, capsys):
    search = load("search")
    with contextlib.chdir(tmp_path):
        search.search(name, pods=2, rounds=2, round_frames=80, episodes=16)
    trained = search.networks(tmp_path / f"{name}.jsonl")
    assert len(trained) >= 2 * 2 * (80 // 5 + 16)  # of rounds, then of their evaluations
    assert len({x["process"] for x in trained}) == 4
    monkeypatch.setattr(search, "RULES", {name: search.RULES[name]})
    search.draw(tmp_path, 2, tmp_path / "search.png")
    assert (tmp_path / "search.png").stat().st_size > 1_000
    assert f"| {name} | {len(trained)} |" in capsys.readouterr().out
