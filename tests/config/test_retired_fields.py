"""Runs of earlier versions: fields that have left a class are read where they change nothing."""

import json
import re

import pytest

import podracer
from podracer.agents.a2c import A2C
from podracer.config.experiment import Experiment
from podracer.config.serialization import read_experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.io.seal import seal_json

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
    assert read_experiment(run) == EXPERIMENT
    result = podracer.train(read_experiment(run), run_dir=run, resume=True, frames=8 * 16)
    assert result.metrics["updates"] == 8


def test_what_only_the_earlier_version_could_do_is_refused(run):
    configure(run, records="update")
    with pytest.raises(ConfigError, match=re.escape("records='update', which this version no")):
        read_experiment(run)
