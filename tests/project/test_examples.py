"""The programs in `examples/` are a user's first ones: each must run, learn and stay short."""

import importlib
import math
from pathlib import Path

import pytest

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
