"""Recipes that fit the observations and actions of a task: the agents themselves are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from podracer import recipes
from podracer.agent import Settings
from podracer.config.experiment import Experiment
from podracer.config.torso import torso_kind, with_torso
from podracer.envs.catalog import ENVIRONMENTS, Spaces, spaces_of, spaces_of_spec
from podracer.types import ArraySpec, Continuous, Discrete, EnvironmentSpec, MultiDiscrete

_IMAGE = ArraySpec((64, 64, 3), np.uint8)
_OBSERVATIONS: dict[str, Any] = {  # one of each kind
    "vector": ArraySpec((8,)),
    "image": _IMAGE,
    "index": ArraySpec((), np.int32, num_values=16),
    "dict": {"image": _IMAGE, "vector": ArraySpec((8,))},
}
_ACTIONS = {
    "discrete": Discrete(4),
    "multidiscrete": MultiDiscrete((3, 2)),
    "continuous": Continuous((-1.0, -1.0), (1.0, 1.0)),
}


class Fit(NamedTuple):
    """A recipe for a task."""

    name: str
    agent: str
    environment: str
    spaces: Spaces
    """Kinds of its own environment's observations and actions."""
    torso: str | None
    """Torso that the task needs in place of the recipe's, None for the recipe's own."""
    elsewhere: bool
    """Whether the task is of another kind than the recipe's own environment."""


def intersect(spaces: Spaces, observation: str | None, action: str | None) -> bool:
    """Return whether spaces have these kinds; None stands for any."""
    observations, actions = spaces
    return (observation or observations[0]) in observations and (action or actions[0]) in actions


def can_build(agent: Settings, observation: str, action: str) -> bool:
    """Return whether an agent can be built for observations and actions of these kinds."""
    spec = EnvironmentSpec("task", _OBSERVATIONS[observation], _ACTIONS[action])
    with contextlib.suppress(Exception):  # also of an agent that is not the library's
        agent.build(spec)
        return True
    return False


def fitting(names: Iterable[str], observation: str | None, action: str | None) -> list[Fit]:
    """Return the recipes for observations and actions of these kinds; None stands for any.

    First come all those whose own environment is of this kind. After them come those whose agent
    can be built for it, one for each algorithm: from the most similar task that needs no package.
    """
    fits = list(_fits(names, observation, action))
    direct, indirect = ([x for x in fits if x.elsewhere == flag] for flag in (False, True))

    def distance(fit: Fit) -> tuple[Any, ...]:
        needs_package = fit.environment not in ENVIRONMENTS
        kinds = (intersect(fit.spaces, None, action), intersect(fit.spaces, observation, None))
        return (not kinds[0], not kinds[1], needs_package, len(fit.name), fit.name)

    own_algorithms, by_algorithm = {_algorithm(fit) for fit in direct}, dict[Any, Fit]()
    for fit in sorted(indirect, key=distance):
        if _algorithm(fit) not in own_algorithms:
            by_algorithm.setdefault(_algorithm(fit), fit)
    return [*sorted(direct), *by_algorithm.values()]


def _algorithm(fit: Fit) -> tuple[str, str]:
    return fit.agent, fit.name.rpartition("_")[2]


def _fits(names: Iterable[str], observation: str | None, action: str | None) -> Iterator[Fit]:
    for name in names:
        with contextlib.suppress(Exception):  # a recipe of a package that is broken
            experiment = recipes.find(name)
            spaces = spaces_of_experiment(experiment)
            label = experiment.environment
            fit = Fit(
                name,
                type(experiment.agent).__name__,
                label if isinstance(label, str) else "",
                spaces,
                None,
                elsewhere=False,
            )
            if intersect(spaces, observation, action):
                yield fit
                continue
            torso, agent = None, experiment.agent
            if observation == "image" and torso_kind(experiment) == "mlp":
                torso, agent = "cnn", with_torso(experiment, "cnn").agent
            kinds = (observation or spaces.observation[0], action or spaces.action[0])
            if can_build(agent, *kinds):
                yield fit._replace(torso=torso, elsewhere=True)


def spaces_of_experiment(experiment: Experiment) -> Spaces:
    """Return the kinds of observations and actions of an experiment's environment."""
    environment = experiment.environment
    if isinstance(environment, str):
        return spaces_of(environment)
    return spaces_of_spec(environment.spec)
