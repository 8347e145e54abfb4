"""`--torso`: the layers of any recipe's network, and what to say of images without convolutions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax

from podracer.agent import Blueprint
from podracer.config.experiment import Experiment
from podracer.networks import CNN, MLP, ResNet, TorsoNetwork

TorsoKind = Literal["mlp", "cnn", "resnet"]
_KINDS = dict(zip(get_args(TorsoKind), (MLP, CNN, ResNet), strict=True))
_SMALLEST_IMAGE = 16  # pixels in height and width; smaller ones may be boards and maps
_SMALLEST_OF_CNN = 36  # pixels, of which the default CNN leaves one


def torso_kind(experiment: Experiment) -> TorsoKind | None:
    """Return the kind of the torso of the agent's network, None for a network without one."""
    network = _find_network(experiment.agent)
    torso = None if network is None else network.torso
    return next((name for name, kind in _KINDS.items() if isinstance(torso, kind)), None)


def with_torso(experiment: Experiment, kind: TorsoKind) -> Experiment:
    """Return the experiment with a torso of another kind, of whose settings it keeps `layer_norm`.

    The agent must have a `TorsoNetwork`; one that has the kind stays as it is.
    """
    network = _find_network(experiment.agent)
    if network is None or torso_kind(experiment) == kind:
        return experiment
    torso = _KINDS[kind](layer_norm=network.torso.layer_norm)
    changed = dataclasses.replace(network, torso=torso)
    return dataclasses.replace(experiment, agent=_replaced(experiment.agent, network, changed))


def _find_network(settings: Any) -> TorsoNetwork | None:
    """Return the first `TorsoNetwork` in settings, at any depth."""
    if isinstance(settings, TorsoNetwork) or not dataclasses.is_dataclass(settings):
        return settings if isinstance(settings, TorsoNetwork) else None
    parts = (getattr(settings, field.name) for field in dataclasses.fields(settings))
    return next((network for network in map(_find_network, parts) if network), None)


def _replaced(settings: Any, old: Any, new: Any) -> Any:
    """Return settings with one object in the place of another, at any depth."""
    if settings is old:
        return new
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return settings
    parts = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    changes = {name: _replaced(part, old, new) for name, part in parts.items()}
    changes = {name: part for name, part in changes.items() if part is not parts[name]}
    return dataclasses.replace(settings, **changes) if changes else settings


def flattened_images(blueprint: Blueprint) -> list[str]:
    """Return a sentence on images that the agent's network flattens, none where it has none."""
    network = _find_network(blueprint.settings)
    if network is None or not isinstance(network.torso, MLP):
        return []
    shapes = [leaf.shape for leaf in jax.tree.leaves(blueprint.spec.observation)]
    images = [x for x in shapes if len(x) == 3 and min(x[:2]) >= _SMALLEST_IMAGE]
    if not images:
        return []
    kind = "cnn" if min(images[0][:2]) >= _SMALLEST_OF_CNN else "resnet"
    return [
        f"Images {list(images[0])} are {math.prod(images[0]):,} numbers side by side to this "
        "network of fully connected layers: `agent.network=podracer.TorsoNetwork("
        f"podracer.networks.{_KINDS[kind].__name__}())` gives it convolutions."
    ]
