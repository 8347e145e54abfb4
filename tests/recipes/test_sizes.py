"""Sizes of recipes: an accelerator's, and how a run gets one."""

import dataclasses
from types import SimpleNamespace

import pytest

import podracer
from podracer import recipes
from podracer.cli.recipe_flags import find_experiment, parse_experiment
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


def test_a_flag_takes_a_size_and_others_change_it():
    flags = ["catch", "--size", "accelerator", "--rollout-length", "3"]
    _, experiment, flags = find_experiment(flags)
    _, experiment = parse_experiment("train", flags, experiment, TrainOptions())
    expected = dataclasses.replace(sized("catch").driver, rollout_length=3)
    assert (experiment.recipe, experiment.driver) == ("catch_accelerator", expected)


@pytest.mark.parametrize(
    ("name", "size"), [("catch_disco", "accelerator"), ("runs/large/best.json", "laptop")]
)
def test_a_size_that_a_recipe_has_not_is_refused(name, size):
    with pytest.raises(ConfigError, match=f"{name} has one size: leave `size` out"):
        recipes.with_size(recipes.find("catch"), name, size)


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


def test_a_recipe_of_one_size_has_no_other_to_name():
    assert not list(idle_device(recipes.find("catch_disco"), GPU))
