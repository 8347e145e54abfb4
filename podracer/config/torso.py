"""What to say of images that a network without convolutions flattens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from podracer.agent import Blueprint
from podracer.networks import MLP, TorsoNetwork

_SMALLEST_IMAGE = 16  # pixels in height and width; smaller ones may be boards and maps
_SMALLEST_OF_CNN = 36  # pixels, of which the default CNN leaves one


def _find_network(settings: Any) -> TorsoNetwork | None:
    """Return the first `TorsoNetwork` in settings, at any depth."""
    if isinstance(settings, TorsoNetwork) or not dataclasses.is_dataclass(settings):
        return settings if isinstance(settings, TorsoNetwork) else None
    parts = (getattr(settings, field.name) for field in dataclasses.fields(settings))
    return next((network for network in map(_find_network, parts) if network), None)


def flattened_images(blueprint: Blueprint) -> list[str]:
    """Return a sentence on images that the agent's network flattens, none where it has none."""
    network = _find_network(blueprint.settings)
    if network is None or not isinstance(network.torso, MLP):
        return []
    shapes = [leaf.shape for leaf in jax.tree.leaves(blueprint.spec.observation)]
    images = [x for x in shapes if len(x) == 3 and min(x[:2]) >= _SMALLEST_IMAGE]
    if not images:
        return []
    kind = "CNN" if min(images[0][:2]) >= _SMALLEST_OF_CNN else "ResNet"
    return [
        f"Images {list(images[0])} are {math.prod(images[0]):,} numbers side by side to this "
        f"network of fully connected layers: `agent.network.torso=podracer.networks.{kind}()` "
        "gives it convolutions."
    ]
