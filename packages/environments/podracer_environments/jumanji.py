"""Any environment of jumanji (Bonnet et al. 2024) with discrete or bounded actions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, check_known, strongly_typed
from podracer.types import ACTION_MASK, Discrete, EnvironmentSpec, MultiDiscrete, PyTree, TimeStep
from podracer_environments.suites import (
    Adapted,
    as_dict,
    continuous_actions,
    import_suite,
    refusing,
    without_key,
)


def jumanji(name: str, **options: Any) -> AutoReset:
    """Return an environment of jumanji, such as `jumanji:Snake-v1`.

    It restarts by itself. Observations are dictionaries, with `action_mask` where jumanji has one.
    Several actions at once are `MultiDiscrete`, unless the mask is of their combinations: then
    those are the actions. `options` are those of its constructor. Raises `ConfigError` where
    jumanji is not installed, for an unknown name or option, and for actions of another kind.
    """
    return auto_reset(_load(name, tuple(sorted(options.items()))))


@functools.cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> Adapted:
    library = import_suite("jumanji", f"jumanji:{name}")
    registration = import_suite("jumanji.registration", f"jumanji:{name}")
    check_known(name, registration.registered_environments(), "jumanji has no environment")
    with jax.ensure_compile_time_eval():
        with refusing(f"jumanji cannot make {name!r}", OSError, TypeError, ValueError):
            env = library.make(name, **dict(options))
        space = env.action_spec
        _, initial = jax.eval_shape(env.reset, jax.random.key(0))
        mask = getattr(initial.observation, ACTION_MASK, None)
        observation = array_specs(jax.eval_shape(_observation, initial))
    if jnp.issubdtype(space.dtype, jnp.integer):
        sizes = _num_actions(space)
        is_joint = not space.shape or (mask is not None and mask.size != sum(sizes))
        actions = Discrete(math.prod(sizes)) if is_joint else MultiDiscrete(sizes)
    else:
        actions = continuous_actions(f"jumanji:{name}", space.minimum, space.maximum, space.shape)

    def reset(key: jax.Array) -> tuple[PyTree, TimeStep]:
        state, timestep = strongly_typed(env.reset(key))
        return without_key(state), restart(_observation(timestep))

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        if isinstance(actions, Discrete) and space.shape:  # one of all combinations
            action = jnp.stack(jnp.unravel_index(action, _num_actions(space)))
        elif not isinstance(actions, Discrete):
            action = action.reshape(space.shape)
        state = dataclasses.replace(state, key=key) if hasattr(state, "key") else state
        state, timestep = strongly_typed(env.step(state, action))
        last = timestep.last()
        return without_key(state), transition(
            _observation(timestep),
            timestep.reward,
            terminal=last & (timestep.discount == 0),
            timeout=last,
        )

    def render(state: PyTree) -> np.ndarray:
        viewer = env._viewer
        viewer._display = viewer._display_rgb_array  # not a window, whatever the environment chose
        return np.array(viewer.render(state)[::3, ::3, :3])

    spec = EnvironmentSpec(f"jumanji:{name}", observation, actions)
    return Adapted(spec, reset, step, render)


def _observation(timestep: Any) -> PyTree:
    """Return an observation as a dictionary, whose action mask has one axis."""
    observation = as_dict(timestep.observation)
    if isinstance(observation, dict) and ACTION_MASK in observation:
        observation[ACTION_MASK] = observation[ACTION_MASK].reshape(-1)
    return observation


def _num_actions(space: Any) -> tuple[int, ...]:
    """Return the number of values of each discrete action."""
    return tuple((np.broadcast_to(space.maximum, space.shape).ravel() + 1).tolist())
