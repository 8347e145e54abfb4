"""Convolutions for any recipe, and the sentence on images that it would flatten."""

import dataclasses
import json

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.agent import Blueprint, Context
from podracer.cli.main import main
from podracer.cli.recipe_flags import parse_experiment
from podracer.cli.sentences import in_flags
from podracer.cli.train import TrainOptions
from podracer.run.warnings import flattened_images
from podracer.types import ArraySpec, Continuous, EnvironmentSpec

SIZE = 16
SENTENCE = "are 768 numbers side by side to this network of fully connected layers"
SMALL = ("--channels", "4", "--blocks", "1", "--hidden", "8")


class Pictures(gymnasium.Env):
    """Pays for an action near the brightness of the picture."""

    observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        reward = -abs(self.brightness / 255 - float(action[0]))
        self.time += 1
        return self.observe(), reward, False, self.time == 8, {}

    def observe(self):
        self.brightness = int(self.np_random.integers(256))
        return np.full((SIZE, SIZE, 3), self.brightness, np.uint8)


gymnasium.register("Pictures-v0", Pictures)


@dataclasses.dataclass(frozen=True)
class DevicePictures:
    """The same in JAX, without the episodes' length."""

    shape: tuple = (SIZE, SIZE, 3)
    dtype: type = np.uint8

    @property
    def spec(self):
        space = Continuous((-1.0,), (1.0,))
        return EnvironmentSpec("pictures", ArraySpec(self.shape, self.dtype), space)

    def reset(self, key):
        brightness = jax.random.randint(key, (), 0, 256)
        return brightness, podracer.restart(jnp.full(self.shape, brightness, self.dtype))

    def step(self, key, state, action):
        brightness, timestep = self.reset(key)
        reward = -jnp.abs(state / 255 - action[0])
        ended = brightness < 32
        return brightness, podracer.transition(timestep.observation, reward, terminal=ended)


def pictures_ppo() -> podracer.Experiment:
    """A recipe for vectors, in an environment of pictures."""
    return dataclasses.replace(
        recipes.find("pendulum_ppo"),
        environment=podracer.auto_reset(DevicePictures()),
        driver=podracer.AnakinConfig(num_envs=8, rollout_length=8, updates_per_chunk=1),
    )


@pytest.fixture(autouse=True)
def devices_are_there(monkeypatch):
    monkeypatch.setattr("podracer.cli.train.initialize_devices", lambda *_: None)


def run(directory, *arguments):
    """Train one update from the command line; the network in the run's configuration."""
    flags = ("--frames", "64", "--evaluations", "0", "--devices", "1", "--run-dir", str(directory))
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments, *flags])
    assert stop.value.code == 0
    config = json.loads((directory / "config.json").read_text())
    return config["experiment"]["agent"]["network"]["torso"]


ON_HOST = ("pendulum_ppo", "--environment", "gymnasium:test_torso:Pictures-v0,workers=0",
           "--num-envs", "8", "--rollout-length", "8", "--num-epochs", "1")  # fmt: skip
ON_DEVICE = ("test_torso:pictures_ppo", "--num-epochs", "1")


@pytest.mark.parametrize("arguments", [ON_HOST, ON_DEVICE], ids=["sebulba", "anakin"])
def test_a_recipe_for_vectors_takes_convolutions_for_images(arguments, tmp_path, caplog):
    torso = run(tmp_path / "run", *arguments, "--torso", "resnet", *SMALL)
    assert torso["kind"] == "ResNet"
    assert torso["channels"] == [4]
    assert "side by side" not in caplog.text


def test_without_the_flag_a_sentence_names_it(tmp_path, caplog):
    assert run(tmp_path / "run", *ON_DEVICE)["kind"] == "MLP"
    assert f"Images [16, 16, 3] {SENTENCE}" in caplog.text
    assert caplog.text.count("side by side") == 1


def with_torso(experiment, kind):
    return parse_experiment("train", ["--torso", kind], experiment, TrainOptions())[1]


def spec_of(*shape):
    return DevicePictures(shape).spec


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((64, 64, 3), "cnn"),
        ((35, 64, 1), "resnet"),  # of which the default CNN leaves nothing
        ((10, 10, 4), None),  # MinAtar, which the peers' benchmarks flatten
        ((64, 64), None),
        ((3,), None),
    ],
)
def test_which_torso_the_sentence_names_can_be_built(shape, kind):
    fields = {"learning_rate": 1e-3, "network": {"torso": {"layer_norm": True}}}
    experiment = recipes.find("pendulum_ppo").with_fields({"agent": fields})
    spec = spec_of(*shape)
    sentences = list(flattened_images(Blueprint(experiment.agent, spec)))
    assert [f"--agent.network.torso {kind} gives" in in_flags(text) for text in sentences] == [
        True
    ] * (kind is not None)
    if kind is not None:
        changed = Blueprint(with_torso(experiment, kind).agent, spec, Context(8))
        assert not list(flattened_images(changed))
        assert changed.settings.network.torso.layer_norm
        podracer.check_agent(changed, num_envs=8)


def test_a_network_without_a_torso_has_no_such_flag(capsys):
    for recipe, words in (("lpg", "no flag --torso"), ("pendulum_ppo", "cannot be")):
        with pytest.raises(SystemExit) as stop:
            main(["train", recipe, "--torso", "transformer"])
        assert stop.value.code == 78
        assert words in capsys.readouterr().err
