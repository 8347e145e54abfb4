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
from podracer.envs.common import (
    array_specs,
    as_dict,
    continuous_actions,
    import_optional,
    strongly_typed,
    without_key,
)
from podracer.errors import ConfigError
from podracer.io.names import nearest
from podracer.types import ACTION_MASK, Discrete, EnvironmentSpec, MultiDiscrete, PyTree, TimeStep


def jumanji(name: str, **options: Any) -> AutoReset:
    """Return the jumanji environment `name`, such as `Snake-v1`, restarting by itself.

    `options` are those of its constructor. Raises `ConfigError` where jumanji is not installed,
    for an unknown name or option, and for actions of another kind.
    """
    return auto_reset(Jumanji(name, tuple(sorted(options.items()))))


@dataclasses.dataclass(frozen=True)
class Jumanji:
    """One environment, without restarts.

    Observations are dictionaries, with `action_mask` where jumanji has one. Several actions at once
    are `MultiDiscrete`, unless the mask is of their combinations: then those are the actions.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _load(self.name, self.options)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.options)[1]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = _load(self.name, self.options)
        state, timestep = strongly_typed(env.reset(key))
        return without_key(state), restart(_observation(timestep))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, spec = _load(self.name, self.options)
        if isinstance(spec.action, Discrete) and env.action_spec.shape:  # one of all combinations
            action = jnp.stack(jnp.unravel_index(action, _num_actions(env.action_spec)))
        elif not isinstance(spec.action, Discrete):
            action = action.reshape(env.action_spec.shape)
        state, timestep = strongly_typed(env.step(_with_key(state, key), action))
        last = timestep.last()
        return without_key(state), transition(
            _observation(timestep),
            timestep.reward,
            terminal=last & (timestep.discount == 0),
            timeout=last,
        )

    def render(self, state: PyTree) -> np.ndarray:
        """Return jumanji's own picture of a state, uint8 `[H, W, 3]`."""
        env, _ = _load(self.name, self.options)
        viewer = env._viewer
        viewer._display = viewer._display_rgb_array  # not a window, whatever the environment chose
        return np.array(viewer.render(state)[::3, ::3, :3])


def _observation(timestep: Any) -> PyTree:
    """Return an observation as a dictionary, whose action mask has one axis."""
    observation = as_dict(timestep.observation)
    if isinstance(observation, dict) and ACTION_MASK in observation:
        observation[ACTION_MASK] = observation[ACTION_MASK].reshape(-1)
    return observation


def _num_actions(space: Any) -> tuple[int, ...]:
    """Return the number of values of each discrete action."""
    return tuple((np.broadcast_to(space.maximum, space.shape).ravel() + 1).tolist())


def _with_key(state: Any, key: jax.Array) -> Any:
    return dataclasses.replace(state, key=key) if hasattr(state, "key") else state


@functools.cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[Any, EnvironmentSpec]:
    library = import_optional("jumanji", f"jumanji:{name}", "jumanji")
    registration = import_optional("jumanji.registration", f"jumanji:{name}", "jumanji")
    registered = registration.registered_environments()
    if name not in registered:
        raise ConfigError(f"jumanji has no environment {name!r}: {nearest(name, registered)}")
    with jax.ensure_compile_time_eval():
        try:
            env = library.make(name, **dict(options))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"jumanji cannot make {name!r}: {error}.") from error
        space = env.action_spec
        _, timestep = jax.eval_shape(env.reset, jax.random.key(0))
        mask = getattr(timestep.observation, ACTION_MASK, None)
        observation = array_specs(jax.eval_shape(_observation, timestep))
    if jnp.issubdtype(space.dtype, jnp.integer):
        sizes = _num_actions(space)
        is_joint = not space.shape or (mask is not None and mask.size != sum(sizes))
        action = Discrete(math.prod(sizes)) if is_joint else MultiDiscrete(sizes)
    else:
        action = continuous_actions(f"jumanji:{name}", space.minimum, space.maximum, space.shape)
    return env, EnvironmentSpec(f"jumanji:{name}", observation, action)
