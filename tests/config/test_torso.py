"""Convolutions for any recipe, and the sentence on images that it would flatten."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import podracer
from podracer import recipes
from podracer.cli.recipe_flags import parse_experiment
from podracer.cli.train import TrainOptions
from podracer.run.setup import build
from podracer.run.warnings import run_warnings
from podracer.types import ArraySpec, Continuous, EnvironmentSpec


class Pictures:
    """Shows black pictures of 16 pixels by 16."""

    spec = EnvironmentSpec(
        "pictures", ArraySpec((16, 16, 3), np.uint8), Continuous((-1.0,), (1.0,))
    )

    def reset(self, key):
        return jnp.int32(0), podracer.restart(jnp.zeros((16, 16, 3), np.uint8))

    def step(self, key, state, action):
        picture = jnp.zeros((16, 16, 3), np.uint8)
        return state + 1, podracer.transition(picture, action[0], terminal=state >= 2)


def parsed(*flags):
    """Return the torso and the warnings of a recipe for vectors with an environment of pictures."""
    experiment = dataclasses.replace(
        recipes.find("pendulum_ppo"), environment=podracer.auto_reset(Pictures())
    )
    experiment = parse_experiment("train", flags, experiment, TrainOptions())[1]
    return experiment.agent.network.torso, run_warnings(experiment, build(experiment)[0])


def test_a_recipe_for_vectors_takes_convolutions_for_images():
    torso, warnings = parsed("--torso", "resnet", "--channels", "4", "--blocks", "1")
    assert isinstance(torso, podracer.networks.ResNet)
    assert torso.channels == (4,)
    assert not any("side by side" in text for text in warnings)


def test_without_the_flag_a_sentence_names_it():
    torso, warnings = parsed()
    assert isinstance(torso, podracer.MLP)
    (text,) = [text for text in warnings if "side by side" in text]
    assert text.startswith("Images [16, 16, 3] are 768 numbers side by side to this network of ")
