"""Actions among those that an observation's mask allows, see `types.Discrete`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from podracer.ops.random import random_uniform
from podracer.types import Continuous, EnvironmentSpec, PyTree, TimeStep, action_mask


def component_masks(spec: EnvironmentSpec, observation: PyTree) -> Iterator[Any]:
    """Yield the mask bool `[*b, n]` of each component of an action, None where it allows all.

    Each of several agents has masks of its own.
    """
    for name, part in spec.agents.items():
        yield from component_masks(part, observation[name])
    if spec.agents or isinstance(spec.action, Continuous):
        return
    mask, end = action_mask(observation), 0
    for size in spec.action.components:
        end += size
        yield None if mask is None else mask[..., end - size : end]


def joint_mask(spec: EnvironmentSpec, observation: PyTree) -> Any | None:
    """Return the mask bool `[*b, sum of n]` of all components, None where it allows all."""
    if not spec.agents or isinstance(spec.action, Continuous):
        return action_mask(observation)
    masks = list(component_masks(spec, observation))
    shapes = [mask.shape[:-1] for mask in masks if mask is not None]
    if not shapes:
        return None
    sizes = zip(masks, spec.action.components, strict=True)
    parts = [jnp.ones((*shapes[0], n), bool) if mask is None else mask for mask, n in sizes]
    return jnp.concatenate(parts, axis=-1)


def lacks_action(spec: EnvironmentSpec, timestep: TimeStep) -> Any:
    """Return where an action is needed and masks allow none, `[*b]`; for JAX and numpy."""
    masks = component_masks(spec, timestep.observation)
    allowed = (mask.any(axis=-1) for mask in masks if mask is not None)
    return ~(functools.reduce(operator.and_, allowed, True) | timestep.last)


def mask_logits(observation: PyTree, logits: jax.Array) -> jax.Array:
    """Return logits or values `[*b, A]`, -1e9 for actions that the observation masks.

    A mask that allows nothing counts for nothing: at the end of an episode there is no action, but
    at a time-out a value.
    """
    mask = action_mask(observation)
    return logits if mask is None else jnp.where(_allowed(mask), logits, -1e9)


def epsilon_greedy(
    values: Float[Array, "B A"], observation: PyTree, keys: jax.Array, epsilon: jax.Array
) -> Int32[Array, "B"]:
    """Choose actions by their values: random with probability epsilon `[]` or `[B]`, else greedy.

    Both are among the actions that the observation allows; random ones are uniform over them.
    """
    mask = action_mask(observation)
    allowed = jnp.full(values.shape, True) if mask is None else _allowed(mask)
    num_allowed = jnp.cumsum(allowed, axis=-1)  # among actions 0 to a
    uniform = random_uniform(keys)
    # Given that it is below epsilon it is uniform in [0, epsilon), so it also draws the action.
    rescaled = uniform / jnp.maximum(epsilon, 1e-6)
    index = jnp.minimum(jnp.int32(rescaled * num_allowed[:, -1]), num_allowed[:, -1] - 1)
    random_action = jnp.sum((num_allowed <= index[:, None]).astype(jnp.int32), axis=-1)
    greedy_action = jnp.argmax(jnp.where(allowed, values, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(uniform < epsilon, random_action, greedy_action)


def _allowed(mask: Any) -> jax.Array:
    return mask | ~jnp.any(mask, axis=-1, keepdims=True)
