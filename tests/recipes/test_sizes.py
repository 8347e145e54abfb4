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
from podracer.errors import ConfigError
from podracer.run.warnings import idle_device

SIZED = [name for name in recipes.RECIPES if recipes.accelerator_changes(name)]
GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")


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


# --- on the command line --------------------------------------------------------------------------


def parsed(*arguments):
    _, experiment, flags = find_experiment(arguments)
    return parse_experiment("train", flags, experiment, TrainOptions())[1]


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


# --- a device that is mostly idle -----------------------------------------------------------------


def test_a_run_says_that_it_leaves_an_accelerator_idle():
    experiment = dataclasses.replace(recipes.find("catch"), devices=2)
    (sentence,) = idle_device(experiment, GPU)
    assert sentence == (
        '128 environments leave 2 x NVIDIA H100 mostly idle; `size="accelerator"` uses 8,192.'
    )
