"""Sentences on what a run will lack, said once before it begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from podracer import recipes
from podracer.agent import Blueprint
from podracer.config.experiment import Experiment
from podracer.devices.mesh import Device
from podracer.io.entry_points import installed
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay

MOSTLY_IDLE = 4  # times fewer environments than at the size for an accelerator
_SMALLEST_IMAGE = 16  # pixels in height and width; smaller ones may be boards and maps
_SMALLEST_OF_CNN = 36  # pixels, of which the default CNN leaves one


def run_warnings(experiment: Experiment, blueprint: Blueprint) -> Iterator[str]:
    """Yield the sentences on an experiment and the blueprint of its agent."""
    settings: Any = blueprint.settings
    possible, chunk = len(experiment.evaluation_updates), experiment.run_driver.updates_per_chunk
    if possible != experiment.evaluations and _is_asked_for(experiment, "evaluations"):
        room = experiment.num_updates // experiment.evaluations
        reason = f"a run evaluates only at the end of a chunk (`driver.updates_per_chunk={chunk}`)."
        if not room:
            reason = f"the run may end with update {experiment.num_updates}, and {reason}"
        elif room < chunk:
            reason += f" `driver.updates_per_chunk={room}` would leave room for all."
        count = f"{possible} of the {experiment.evaluations}"
        yield f"Only {count} evaluations will run, because {reason}"
    replay = getattr(settings, "replay", None)
    if isinstance(replay, Replay) and replay.warmup > experiment.num_steps:
        yield (
            f"Nothing will be learned: the replay's warm-up takes {replay.warmup:,} frames "
            f"(`agent.replay.warmup`), and the run has {experiment.num_steps:,}."
        )
    length = experiment.driver.rollout_length
    learned = getattr(getattr(settings, "recurrence", settings), "unroll_length", length)
    if learned < length and jax.tree.leaves(blueprint.build().carry(1)):  # without memory all are
        yield (
            f"Of the {length} timesteps of a rollout {length - learned} are never learned, as "
            f"sequences begin with it and learn {learned} (its `unroll_length`)."
        )
    target = experiment.target_return if _is_asked_for(experiment, "target_return") else None
    if target is not None and not experiment.evaluations:
        yield f"`target_return={target:g}` ends no run without evaluations."
    yield from flattened_images(blueprint)
    yield from idle_device(experiment, jax.devices()[0])


def _is_asked_for(experiment: Experiment, field: str) -> bool:
    """Return whether a field has another value than its recipe, or any experiment, gives it.

    A recipe that is not the library's cannot be asked: what it has may be its own value.
    """
    name = experiment.recipe
    usual = Experiment if name == Experiment.recipe else experiment
    usual = recipes.find(name) if name in recipes.RECIPES else usual
    return getattr(experiment, field) != getattr(usual, field)


def idle_device(experiment: Experiment, device: Device) -> Iterator[str]:
    """Yield a sentence where a recipe with a larger size leaves most of an accelerator idle."""
    name = experiment.recipe
    if device.platform == "cpu" or name not in {*recipes.RECIPES, *installed("recipes")}:
        return
    larger = recipes.accelerator_changes(name).get("driver", {}).get("num_envs", 0)
    num_envs = experiment.driver.num_envs * max(1, len(experiment.pods))
    devices = experiment.devices or jax.device_count()
    if num_envs < larger and MOSTLY_IDLE * num_envs <= larger * devices:
        yield (
            f"{num_envs:,} environments leave {devices} x {device.device_kind} mostly idle; "
            f'`size="accelerator"` uses {larger:,}.'
        )


def flattened_images(blueprint: Blueprint) -> Iterator[str]:
    """Yield a sentence on images that the agent's network flattens."""
    network = _find_network(blueprint.settings)
    if network is None or not isinstance(network.torso, MLP):
        return
    shapes = [leaf.shape for leaf in jax.tree.leaves(blueprint.spec.observation)]
    images = [x for x in shapes if len(x) == 3 and min(x[:2]) >= _SMALLEST_IMAGE]
    if not images:
        return
    kind = "CNN" if min(images[0][:2]) >= _SMALLEST_OF_CNN else "ResNet"
    yield (
        f"Images {list(images[0])} are {math.prod(images[0]):,} numbers side by side to this "
        f"network of fully connected layers: `agent.network.torso=podracer.networks.{kind}()` "
        "gives it convolutions."
    )


def _find_network(settings: Any) -> TorsoNetwork | None:
    """Return the first `TorsoNetwork` in settings, at any depth."""
    if isinstance(settings, TorsoNetwork):
        return settings
    fields = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    parts = (getattr(settings, field.name) for field in fields)
    return next(filter(None, map(_find_network, parts)), None)
