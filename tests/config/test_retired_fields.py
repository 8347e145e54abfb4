"""Runs of earlier versions: fields that have left a class are read where they change nothing."""

import dataclasses
import json
import re

import pytest

import podracer
from podracer import recipes
from podracer.agents.a2c import A2C
from podracer.config.experiment import Experiment
from podracer.config.serialization import from_json, of_this_version, to_json
from podracer.drivers.anakin import AnakinConfig
from podracer.envs.catch import Catch
from podracer.errors import ConfigError
from podracer.io.seal import seal_json
from podracer.run.loading import reopen
from podracer.run.resume import check_same_environment, check_same_experiment

EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=A2C(),
    driver=AnakinConfig(4, 4, 2),
    frames=4 * 16,
    evaluations=0,
    devices=1,
)
RETIRED = {"records": "chunk"}


@dataclasses.dataclass(frozen=True)
class Windy(Catch):
    """An environment with a field that an earlier version had not."""

    wind: float = 0.0


@pytest.fixture
def run(tmp_path):
    """A run as version 0.2.0 wrote it: its configuration has the fields of that version."""
    podracer.train(EXPERIMENT, run_dir=tmp_path)
    return tmp_path


def configure(run, **fields):
    config = json.loads((run / "config.json").read_text())
    del config["sha256"]
    config["experiment"] |= fields
    seal_json(run / "config.json", config)


def test_a_run_of_an_earlier_version_is_read_and_goes_on(run):
    configure(run, **RETIRED)
    assert reopen(run) == EXPERIMENT
    result = podracer.train(reopen(run), run_dir=run, resume=True, frames=8 * 16)
    assert result.metrics["updates"] == 8


def test_fields_that_came_later_have_their_defaults(run):
    """In settings, and in the environment that the run began in."""
    current = to_json(EXPERIMENT)
    older = json.loads(json.dumps(current))
    del older["callbacks"], older["agent"]["gae_lambda"], older["agent"]["network"]["memory_size"]
    check_same_experiment(older, EXPERIMENT)
    windy = dataclasses.replace(EXPERIMENT, environment=Windy())
    check_same_experiment({**older, "environment": {"kind": "Windy"}}, windy)
    other = dataclasses.replace(EXPERIMENT, agent=A2C(gae_lambda=0.9))
    with pytest.raises(ConfigError, match=r"agent\.gae_lambda was 0\.95 and is 0\.9"):
        check_same_experiment(older, other)
    config = json.loads((run / "config.json").read_text())
    del config["sha256"]
    seal_json(run / "config.json", {**config, "environment": {"kind": "Windy"}})
    check_same_environment(run, Windy())
    with pytest.raises(ConfigError, match="wind changed since"):
        check_same_environment(run, Windy(wind=0.5))


def test_what_only_the_earlier_version_could_do_is_refused(run):
    configure(run, records="update")
    with pytest.raises(ConfigError, match=re.escape("records='update', which this version no")):
        reopen(run)


SAC_FIELDS = {"batch_norm": False, "batch_norm_targets": False, "policy_period": 1}


def test_fields_that_went_to_a_package_are_read_at_their_defaults_and_refused_by_its_name():
    agent = to_json(recipes.find("pendulum_sac").agent)
    agent["network"]["torso"]["spherical"] = False
    old = {**agent, **SAC_FIELDS, "squashed_scale": False}
    assert from_json(of_this_version(old)) == recipes.find("pendulum_sac").agent
    with pytest.raises(ConfigError, match=r"batch_norm=True.* batch_norm is in podracer-agents: "):
        of_this_version({**old, "batch_norm": True})


def test_a_class_of_a_package_that_is_not_installed_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr("podracer.io.entry_points.installed", lambda kind: {})
    with pytest.raises(ConfigError, match=r"^QTOpt is in podracer-agents: `pip install -e"):
        from_json({"kind": "QTOpt"})


def test_runs_of_dqn_open_unless_they_had_what_left_it():
    hard = {"kind": "Munchausen", "temperature": 0.0, "weight": 0.9, "clip": -1.0}
    agent = recipes.find("cartpole_dqn").agent
    earlier = {**to_json(agent), "munchausen": hard}
    assert from_json(of_this_version(earlier)) == agent
    soft = {**earlier, "munchausen": {**hard, "temperature": 0.03}}
    with pytest.raises(ConfigError, match=r"munchausen=.*packages/agents"):
        of_this_version(soft)
    with pytest.raises(ConfigError, match="ImplicitQuantiles"):
        from_json({**to_json(agent), "value": {"kind": "ImplicitQuantiles", "samples": 8}})
