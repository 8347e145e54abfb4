"""Any environment of gymnax (Lange 2022), in its releases before 1 and since.

The adapter uses `step_env`, which does not restart, so that `auto_reset` can tell time-outs from
terminals. Since gymnax 1 `step_env` reports true terminals and `is_truncated` the time limit.
Before, `done` merged the two; with the limit set to infinity it is the true terminal alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, check_known, strongly_typed
from podracer.errors import ConfigError
from podracer.types import Continuous, Discrete, EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import (
    Adapted,
    cast_like,
    check_time_limit,
    continuous_actions,
    import_suite,
    refusing,
)


def gymnax(name: str, **params: Any) -> AutoReset:
    """Return an environment of gymnax, such as `gymnax:Breakout-MinAtar`, restarting by itself.

    Observations are gymnax's own. `params` replace fields of its `default_params`, such as
    `max_steps_in_episode`. Raises `ConfigError` where gymnax or `six` is not installed and for an
    unknown name or parameter.
    """
    return auto_reset(_load(name, tuple(sorted(params.items()))))


@functools.cache
def _load(name: str, changes: tuple[tuple[str, Any], ...]) -> Adapted:
    library = import_suite("gymnax", f"gymnax:{name}")
    check_known(name, library.registered_envs, "gymnax has no environment")
    with jax.ensure_compile_time_eval():
        with refusing(f"gymnax cannot make {name!r}", OSError):  # some download their data
            env, params = library.make(name)
        fields = [field.name for field in dataclasses.fields(params)]
        for key, value in changes:
            check_known(key, fields, f"gymnax:{name} has no parameter")
            if isinstance(getattr(params, key), int | float) and not isinstance(value, int | float):
                raise ConfigError(f"gymnax:{name}: {key} must be a number, not {value!r}.")
            if key == "max_steps_in_episode":
                check_time_limit(f"gymnax:{name}", key, value)
        params = dataclasses.replace(params, **dict(changes))
        # The observation space of some environments has another dtype than their observations.
        initial, _ = jax.eval_shape(env.reset_env, jax.random.key(0), params)
        space = env.action_space(params)
        spec = EnvironmentSpec(f"gymnax:{name}", array_specs(initial), _actions(name, space))

    def reset(key: jax.Array) -> tuple[PyTree, TimeStep]:
        observation, state = strongly_typed(env.reset_env(key, params))
        return state, restart(observation)

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        action = action.reshape(space.shape)
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

    return Adapted(spec, reset, step)


def _actions(name: str, space: Any) -> Discrete | Continuous:
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if hasattr(space, "low"):
        return continuous_actions(f"gymnax:{name}", space.low, space.high, space.shape)
    raise ConfigError(f"gymnax:{name} has actions of the kind {type(space).__name__}.")
