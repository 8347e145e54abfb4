"""A directory of models: its current model, and models that are no longer what was promoted."""

import shutil

import pytest
from models import promote, rollback

import podracer
from podracer.agents.a2c import A2C
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import CheckpointError
from podracer.io.models import current_model
from podracer.io.seal import seal
from podracer.networks import MLP, TorsoNetwork

EXPERIMENT = Experiment(
    recipe="catch_a2c",
    environment="catch",
    agent=A2C(network=TorsoNetwork(MLP((8,)))),
    driver=AnakinConfig(4, 4, 5),
    frames=80,
    evaluations=0,
    devices=1,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [podracer.train(EXPERIMENT, seed=s, run_dir=root / f"s{s}").run_dir for s in (0, 1)]


def test_the_newest_promotion_that_was_not_rolled_back_is_current(runs, tmp_path):
    models = [promote(tmp_path, run) for run in runs]
    assert current_model(tmp_path) == models[1]
    assert rollback(tmp_path) == current_model(tmp_path) == models[0]
    assert promote(tmp_path, runs[1]) == current_model(tmp_path) == tmp_path / "000003"


def test_nobody_reads_a_model_that_was_exchanged(runs, tmp_path):
    model = promote(tmp_path / "models", runs[0])
    podracer.load(model)
    shutil.rmtree(model)
    shutil.copytree(runs[1], model)
    seal(model / "checkpoints")  # valid as a run
    (tmp_path / "link").symlink_to(model)
    for path in (model, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="000001 is not the model that"):
            podracer.load(path)
    with pytest.raises(CheckpointError, match="000001 is not the model that"):
        current_model(tmp_path / "models")
    shutil.copytree(model, tmp_path / "run")  # a run again: no record names it
    podracer.load(tmp_path / "run")
