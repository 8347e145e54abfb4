"""The trained agents are the golden runs of version 0.2.0: each later change has to read them.

Their scores stand in the table of the package's page.
"""

import json
import re
from pathlib import Path

import pytest
from child import exit_code

import podracer
from podracer.envs import catalog
from podracer.envs.catalog import has_name
from podracer.io.addresses import local_run
from podracer.io.checkpoint import stored_fingerprint
from podracer.run.loading import reopen
from podracer_trained.addresses import FOLDER, NAMES

PACKAGE = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \|.*\| (-?[\d.]+) \| ([\d.]+) \| `podracer train", re.M)
SCORES = {
    name: (float(mean), float(deviation))
    for name, mean, deviation in ROW.findall((PACKAGE / "README.md").read_text())
}
EPISODES = 32


def test_the_package_holds_five_small_runs_of_version_0_2_0():
    assert set(NAMES) == SCORES.keys() == {"breakout", "cartpole", "catch", "pendulum", "world"}
    assert sum(path.stat().st_size for path in PACKAGE.rglob("*") if path.is_file()) < 5e6
    for name in NAMES:
        config = json.loads((FOLDER / name / "config.json").read_text())
        assert config["versions"]["podracer"] == "0.2.0"


def needs_its_game(name):
    is_there = name != "breakout" or has_name("gymnax:Breakout-MinAtar")
    reason = "podracer-environments is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(not is_there, reason=reason))


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # gymnax
@pytest.mark.parametrize("name", [needs_its_game(name) for name in SCORES])
def test_a_run_of_version_0_2_0_opens_and_plays_to_its_score(name, capsys):
    """The mean of other episodes lies within four standard errors of both means."""
    mean, deviation = SCORES[name]
    address = f"trained://{name}"
    assert exit_code("eval", address, "--episodes", EPISODES, "--seed", 2, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["unfinished"] == 0
    assert abs(figures["return_mean"] - mean) <= 0.05 + 4 * deviation / EPISODES**0.5


def test_a_run_whose_environment_is_not_installed_names_the_package(monkeypatch, capsys):
    monkeypatch.setattr(catalog, "installed", lambda kind: {})
    assert exit_code("eval", "trained://breakout", "--episodes", EPISODES) == 78
    expected = "gymnax:Breakout-MinAtar is in podracer-environments: `pip install -e "
    assert expected in capsys.readouterr().err


def test_a_run_of_version_0_2_0_goes_on_elsewhere(tmp_path):
    directory, before = tmp_path / "cartpole", stored_fingerprint(FOLDER / "cartpole")
    assert local_run("trained://cartpole", directory=directory) == directory
    assert stored_fingerprint(directory) == before
    frames = 512_000 + 10 * 32 * 32
    changes = {"frames": frames, "evaluations": 0, "devices": 1}
    result = podracer.train(reopen(directory), run_dir=directory, resume=True, **changes)
    after = stored_fingerprint(directory)
    assert result.metrics["frames"] >= frames
    assert after[0] > before[0]
    assert local_run("trained://cartpole", directory=directory) == directory
    assert stored_fingerprint(directory) == after  # it stays as far as it is
    assert stored_fingerprint(FOLDER / "cartpole") == before
