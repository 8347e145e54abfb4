import pytest

import podracer

pytest_plugins = ["podracer_testing.plugin"]


@pytest.fixture(scope="session")
def experiment():
    """A small run of the recipe `catch_a2c`."""
    return podracer.Experiment(
        recipe="catch_a2c",
        environment="catch",
        agent=podracer.A2C(
            learning_rate=1e-5,  # the policy still takes all actions
            network=podracer.TorsoNetwork(podracer.MLP((8,))),
        ),
        driver=podracer.AnakinConfig(num_envs=16, rollout_length=8, updates_per_chunk=8),
        frames=2048,
        evaluations=0,
        devices=1,
    )


@pytest.fixture(scope="session")
def runs(experiment, tmp_path_factory):
    """Two runs by different seeds."""
    root = tmp_path_factory.mktemp("runs")
    return [podracer.train(experiment, seed=s, run_dir=root / f"s{s}").run_dir for s in (0, 1)]
