"""Sizes of recipes: an accelerator's, and how a run gets one."""

import dataclasses
from types import SimpleNamespace

import pytest

import podracer
from podracer import recipes
from podracer.cli import train as train_command
from podracer.cli.main import main
from podracer.cli.recipe_flags import find_experiment, parse_experiment, with_size_for
from podracer.cli.train import TrainOptions
from podracer.config.serialization import read_config, read_experiment
from podracer.drivers.population import Pod
from podracer.errors import ConfigError
from podracer.run.warnings import idle_device

SIZED = [name for name in recipes.RECIPES if recipes.accelerator_changes(name)]
GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
SMALL = {"num_envs": 8, "rollout_length": 4, "updates_per_chunk": 2}


def sized(name):
    return recipes.with_size(recipes.find(name), name, "accelerator")


@pytest.mark.parametrize("name", SIZED)
def test_each_size_is_larger_and_is_named(name):
    laptop, larger = recipes.find(name), sized(name)
    larger.check()
    assert larger.driver.num_envs >= 2 * laptop.driver.num_envs
    assert larger.frames >= laptop.frames
    assert larger.recipe == f"{name}_accelerator"
    assert larger.environment == laptop.environment
    assert len(larger.evaluation_updates) == larger.evaluations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["catch_a2c", "memory_ppo"])
def test_a_size_learns(name, tmp_path):
    result = podracer.train(name, size="accelerator", run_dir=tmp_path / "run", target_return=0.95)
    assert result.reason == "target_return"


# --- on the command line --------------------------------------------------------------------------


def parsed(*arguments):
    _, experiment, flags = find_experiment(arguments)
    return parse_experiment("train", flags, experiment, TrainOptions())[1]


def test_flags_win_over_the_size():
    experiment = parsed("catch", "--size", "accelerator", "--num-envs", "64", "--frames", "4096")
    own = sized("catch")
    driver = dataclasses.replace(own.driver, num_envs=64)
    assert experiment == dataclasses.replace(own, driver=driver, frames=4096)


def test_a_recipe_of_one_size_takes_either():
    experiments = [parsed("pendulum_td3", "--size", x) for x in ("laptop", "accelerator")]
    assert experiments == [recipes.find("pendulum_td3")] * 2


@pytest.mark.parametrize(
    ("platform", "arguments", "size"),
    [
        ("gpu", "catch --seed 3", "accelerator"),
        ("cpu", "catch", "laptop"),
        ("gpu", "catch --size laptop", "laptop"),
        ("gpu", "catch --num-envs 64", "laptop"),
        ("gpu", "catch --frames 1e9", "accelerator"),
        ("gpu", "catch --arch sebulba", "laptop"),
        ("gpu", "cartpole_ppo --environment gymnasium:CartPole-v1", "laptop"),
    ],
)
def test_the_size_is_the_one_for_the_devices(platform, arguments, size):
    arguments = arguments.split()
    changed = with_size_for(platform, arguments, parsed(*arguments))
    assert changed == [*arguments, *["--size", "accelerator"] * (size == "accelerator")]


@pytest.mark.parametrize(("backend", "num_envs"), [("gpu", 8192), ("cpu", 128)])
def test_train_chooses_by_the_devices_that_are_there(backend, num_envs, monkeypatch):
    chosen = []

    def run(experiment, *arguments, for_platform, **options):
        chosen.append(for_platform(backend).driver.num_envs)
        return 0

    monkeypatch.setattr(train_command, "run", run)
    with pytest.raises(SystemExit):
        main(["train", "catch", "--seed", "1"])
    assert chosen == [num_envs]


# --- in Python ------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_size(tmp_path):
    run, options = tmp_path / "run", {"driver": SMALL, "evaluations": 0, "devices": 1}
    podracer.train("catch_a2c", size="accelerator", run_dir=run, frames=64, **options)
    assert read_config(run / "config.json")["recipe"] == "catch_a2c_accelerator"
    result = podracer.train("catch_a2c", run_dir=run, resume=True, frames=128, **options)
    assert result.reason == "frames"
    experiment = read_experiment(run)
    assert (experiment.recipe, experiment.frames) == ("catch_a2c_accelerator", 128)
    assert experiment.agent == sized("catch_a2c").agent


@pytest.mark.parametrize(
    ("experiment", "size", "message"),
    [
        ("catch", "pod", "size cannot be 'pod': it must be one of 'laptop', 'accel"),
        (recipes.find("catch"), "accelerator", "name the recipe as text"),
    ],
)
def test_other_sizes_are_refused(experiment, size, message):
    with pytest.raises(ConfigError, match=message):
        podracer.train(experiment, size=size)


def test_a_recipe_of_the_users_own_has_a_size(monkeypatch):
    @recipes.accelerator(driver={"num_envs": 4096})
    def mine():
        return recipes.find("catch")

    monkeypatch.setitem(recipes.RECIPES, "mine", mine)
    assert (recipes.find("mine").driver.num_envs, sized("mine").driver.num_envs) == (128, 4096)


# --- a device that is mostly idle -----------------------------------------------------------------


def test_a_run_says_that_it_leaves_an_accelerator_idle():
    experiment = dataclasses.replace(recipes.find("catch"), devices=2)
    (sentence,) = idle_device(experiment, GPU)
    assert sentence == (
        '128 environments leave 2 x NVIDIA H100 mostly idle; `size="accelerator"` uses 8,192.'
    )


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({}, SimpleNamespace(platform="cpu", device_kind="cpu")),
        ({"driver": {"num_envs": 4096}}, GPU),
        ({"pods": tuple(map(Pod, range(64)))}, GPU),
        ({"driver": {"num_envs": 8192}, "devices": 8}, GPU),  # the size is for one device
    ],
)
def test_other_runs_say_nothing(changes, device):
    experiment = recipes.find("catch").with_fields({"devices": 1, **changes})
    assert list(idle_device(experiment, device)) == []
