"""Models that are no longer what was promoted."""

import shutil

import pytest
from models import promote
from runs import small_catch

import podracer
from podracer.errors import CheckpointError
from podracer.io.seal import seal

EXPERIMENT = small_catch(5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [podracer.train(EXPERIMENT, seed=s, run_dir=root / f"s{s}").run_dir for s in (0, 1)]


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
    shutil.copytree(model, tmp_path / "run")  # a run again: no record names it
    podracer.load(tmp_path / "run")
