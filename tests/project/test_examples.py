"""The programs in `examples/` are a user's first ones: each must run, learn and stay short."""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import podracer
from podracer.errors import NonFiniteError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "frames", "least"),
    [
        ("own_agent", 307_200, 60.0),  # an untrained policy balances for 10 to 30 steps
        ("own_environment", 81_920, 0.9),  # one that walks at random earns less than 0.3
        ("own_network", 81_920, 150.0),
    ],
)
@pytest.mark.slow
def test_an_example_learns(
    name: str, frames: int, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module(name)
    assert example.main(frames=frames, evaluations=1, devices=1) >= least


@pytest.mark.parametrize(
    "name",
    [
        "own_environment",
        "reward_shaping",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("own_agent", "own_network")),
    ],
)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two updates or three, too few to learn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module(name)
    assert math.isfinite(example.main(frames=4_096, evaluations=1, devices=1))


def test_the_search_scores_no_pod_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(recipe: str, **settings: object) -> SimpleNamespace:
        if len(settings["pods"]) == 1:
            raise NonFiniteError("all pods diverged")
        (tmp_path / "pods.jsonl").write_text('{"episodes": [3, null]}\n')
        returns = np.array([[1.0, 3.0], [9.0, 9.0]])
        return SimpleNamespace(run_dir=tmp_path, evaluation=SimpleNamespace(returns=returns))

    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace())
    monkeypatch.setattr(podracer, "train", train, raising=False)
    search = importlib.import_module("optuna_search")
    assert search.scores((None, None), 1) == [2.0, None]
    assert search.scores((None,), 1) == [None]
