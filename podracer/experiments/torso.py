"""`--torso`: the layers of any recipe's network, and what to say of images without convolutions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax

from podracer.experiments.experiment import Experiment
from podracer.networks import CNN, MLP, ResNet, TorsoNetwork

TorsoKind = Literal["mlp", "cnn", "resnet"]
_KINDS = dict(zip(get_args(TorsoKind), (MLP, CNN, ResNet), strict=True))
_SMALLEST_IMAGE = 16  # pixels in height and width; smaller ones may be boards and maps
_SMALLEST_OF_CNN = 36  # pixels, of which the default CNN leaves one


def torso_kind(experiment: Experiment) -> TorsoKind | None:
    """Return the kind of the torso of the agent's network, None for a network without one."""
    network = getattr(experiment.agent, "network", None)
    torso = getattr(network, "torso", None) if isinstance(network, TorsoNetwork) else None
    return next((name for name, kind in _KINDS.items() if isinstance(torso, kind)), None)


def with_torso(experiment: Experiment, kind: TorsoKind) -> Experiment:
    """Return the experiment with a torso of another kind, of whose settings it keeps `layer_norm`.

    The network must be a `TorsoNetwork`; one that has the kind stays as it is.
    """
    if torso_kind(experiment) == kind:
        return experiment
    agent: Any = experiment.agent
    torso = _KINDS[kind](layer_norm=agent.network.torso.layer_norm)
    network = dataclasses.replace(agent.network, torso=torso)
    return dataclasses.replace(experiment, agent=dataclasses.replace(agent, network=network))


def flattened_images(agent: Any) -> list[str]:
    """Return a sentence on images that the agent's network flattens, none where it has none."""
    network = getattr(agent, "network", None)
    if not isinstance(network, TorsoNetwork) or not isinstance(network.torso, MLP):
        return []
    shapes = [leaf.shape for leaf in jax.tree.leaves(agent.spec.observation)]
    images = [x for x in shapes if len(x) == 3 and min(x[:2]) >= _SMALLEST_IMAGE]
    if not images:
        return []
    kind = "cnn" if min(images[0][:2]) >= _SMALLEST_OF_CNN else "resnet"
    return [
        f"Images {list(images[0])} are {math.prod(images[0]):,} numbers side by side to this "
        "network of fully connected layers: "
        f"`agent.network=podracer.TorsoNetwork(podracer.{_KINDS[kind].__name__}())` gives it "
        "convolutions."
    ]
