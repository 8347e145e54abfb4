"""Any environment of gymnax (Lange 2022), in its releases before 1 and since.

`Gymnax` uses `step_env`, which does not restart, so that `auto_reset` can tell time-outs from
terminals. Since gymnax 1 `step_env` reports true terminals and `is_truncated` the time limit.
Before, `done` merged the two; with the limit set to infinity it is the true terminal alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import (
    array_specs,
    cast_like,
    continuous_actions,
    import_optional,
    strongly_typed,
)
from podracer.errors import ConfigError
from podracer.io.names import nearest
from podracer.types import Continuous, Discrete, EnvironmentSpec, PyTree, TimeStep


def gymnax(name: str, **params: Any) -> AutoReset:
    """Return the gymnax environment `name`, restarting by itself.

    `params` replace fields of its `default_params`, such as `max_steps_in_episode`. Raises
    `ConfigError` where gymnax or `six` is not installed and for an unknown name or parameter.
    """
    return auto_reset(Gymnax(name, tuple(sorted(params.items()))))


@dataclasses.dataclass(frozen=True)
class Gymnax:
    """One environment of gymnax, without restarts. Observations are gymnax's own."""

    name: str
    params: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _load(self.name, self.params)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.params)[2]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, _ = _load(self.name, self.params)
        observation, state = strongly_typed(env.reset_env(key, params))
        return state, restart(observation)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, spec = _load(self.name, self.params)
        action = action.reshape(env.action_space(params).shape)
        observation, next_state, reward, terminal, _ = env.step_env(key, state, action, params)
        if hasattr(env, "is_truncated"):
            timeout = env.is_truncated(next_state, params)
        else:
            unlimited = params.replace(max_steps_in_episode=float("inf"))
            _, next_state, reward, terminal, _ = env.step_env(key, state, action, unlimited)
            timeout = next_state.time >= params.max_steps_in_episode
        observation = cast_like(observation, spec.observation)
        timestep = transition(observation, reward, terminal=terminal, timeout=timeout)
        return cast_like(next_state, state), timestep


@functools.cache
def _load(name: str, params: tuple[tuple[str, Any], ...]) -> tuple[Any, Any, EnvironmentSpec]:
    """Return environment, parameters and specification: made once, outside any trace."""
    library = import_optional("gymnax", f"gymnax:{name}", "gymnax")
    if name not in library.registered_envs:
        raise ConfigError(
            f"gymnax has no environment {name!r}: {nearest(name, library.registered_envs)}"
        )
    with jax.ensure_compile_time_eval():
        try:
            env, defaults = library.make(name)
        except OSError as error:  # some of them download their data
            raise ConfigError(f"gymnax cannot make {name!r}: {error}.") from error
        fields = [field.name for field in dataclasses.fields(defaults)]
        for key, _ in params:
            if key not in fields:
                raise ConfigError(f"gymnax:{name} has no parameter {key!r}: {nearest(key, fields)}")
        env_params = dataclasses.replace(defaults, **dict(params))
        return env, env_params, _spec(name, env, env_params)


def _spec(name: str, env: Any, params: Any) -> EnvironmentSpec:
    # The observation space of some environments has another dtype than their observations.
    observation, _ = jax.eval_shape(env.reset_env, jax.random.key(0), params)
    space = env.action_space(params)
    action: Discrete | Continuous
    if hasattr(space, "n"):
        action = Discrete(int(space.n))
    elif hasattr(space, "low"):
        action = continuous_actions(f"gymnax:{name}", space.low, space.high, space.shape)
    else:
        raise ConfigError(f"gymnax:{name} has actions of the kind {type(space).__name__}.")
    return EnvironmentSpec(f"gymnax:{name}", array_specs(observation), action)
