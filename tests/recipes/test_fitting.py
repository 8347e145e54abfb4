"""Which recipes and environments fit a task: what is declared is so, and what is listed trains."""

import importlib.util
import json

import pytest

from podracer import envs, recipes
from podracer.cli.main import main
from podracer.config.torso import torso_kind
from podracer.envs.catalog import ADAPTERS, spaces_of, spaces_of_spec
from podracer.recipes.fitting import fitting, intersect


def listed(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["list", *arguments])
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_an_image_with_continuous_actions_gets_convolutions(capsys):
    out = listed(capsys, "recipes", "--observation", "image", "--action", "continuous", "--json")
    rows = {row["name"]: row["note"] for row in json.loads(out)["recipes"]}
    assert rows["pendulum_sac"] == rows["pendulum_ppo"] == "--environment NAME --torso cnn"
    assert not any(name.endswith(("dqn", "pqn", "rainbow")) for name in rows)
    assert next(iter(rows)).startswith("pendulum")


def test_recipes_of_such_an_environment_come_first_and_need_no_flag():
    names = recipes.RECIPES
    fits = fitting(names, "vector", "continuous")
    own = [fit.name for fit in fits if not fit.elsewhere]
    assert own == sorted(own) == [fit.name for fit in fits][: len(own)]
    assert {"pendulum_sac", "pendulum_recurrent_td3", "halfcheetah_td3"} <= set(own)
    assert not any("sac" in fit.name for fit in fits[len(own) :])
    for fit in fits[:3]:
        assert intersect(fit.spaces, "vector", "continuous")


def test_a_recipe_for_images_keeps_its_convolutions():
    for fit in fitting(recipes.RECIPES, "image", "discrete"):
        kind = torso_kind(recipes.find(fit.name))
        assert fit.torso is None or (fit.elsewhere and kind == "mlp"), fit


def test_agents_and_environments_are_filtered_too(capsys):
    out = listed(capsys, "--action", "continuous")
    agents, environments = out.split("environments:")
    assert "SAC" in agents
    assert "DQN" not in agents
    assert "pendulum " in environments
    assert "cartpole " not in environments.split("recipes:")[0]
    assert "atari:NAME" not in environments


MUJOCO = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5")  # need a package beside Gymnasium
NAMES = (
    *(
        f"{prefix}:{name}"
        for prefix, adapter in ADAPTERS.items()
        for name in adapter.spaces_by_name
    ),
    "atari:pong",
    "lifetimes:worlds:dense",
    pytest.param("pgx:backgammon", marks=pytest.mark.slow),
    "worlds:dense",
)


@pytest.mark.parametrize("name", NAMES)
def test_declared_spaces_are_those_of_the_environment(name):
    packages = ADAPTERS[name.partition(":")[0]].packages
    if not all(map(importlib.util.find_spec, packages)) or name.endswith(MUJOCO):
        pytest.skip("its package is not installed")
    spaces, declared = spaces_of_spec(envs.make(name).spec), spaces_of(name)
    assert intersect(declared, spaces.observation[0], spaces.action[0])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--observation", "imgae"], "--observation is vector, image, index or dict, not 'imgae'."),
        (["--action", "real"], "--action is discrete, multidiscrete or continuous, not 'real'."),
    ],
)
def test_an_unknown_kind_is_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["list", "recipes", *flags])
    assert leaving.value.code == 78
    assert capsys.readouterr().err == f"podracer: {sentence}\n"


def test_agents_for_observations_are_those_of_any_actions(capsys):
    names = {row["name"] for row in listed_agents(capsys, "--observation", "vector")}
    assert {"DQN", "SAC"} <= names
    discrete = {row["name"] for row in listed_agents(capsys, "--action", "discrete")}
    assert "DQN" in discrete
    assert "SAC" not in discrete


def listed_agents(capsys, *flags):
    return json.loads(listed(capsys, "agents", *flags, "--json"))["agents"]
