"""The tasks of MuJoCo Playground (Zakka et al. 2025), simulated by JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart
from podracer.envs.common import (
    Adapted,
    array_specs,
    check_known,
    continuous_actions,
    refusing,
    strongly_typed,
)
from podracer.errors import ConfigError
from podracer.types import EnvironmentSpec, PyTree, TimeStep
from podracer_environments.brax import TimedState, check_episode_length, timed_transition
from podracer_environments.suites import import_suite

PARTS = {"privileged_state", "state"}  # the second for policies, the first for critics


def playground(name: str, *, observe: str = "", **config: Any) -> AutoReset:
    """Return a task of MuJoCo Playground, such as `playground:CartpoleBalance` (needs playground).

    It restarts by itself. Actions are in [-1, 1]. A time-out cuts an episode after the task's own
    `episode_length`. `config` overrides its settings, but `action_repeat`, which is one of its
    trainer. Where observations are dictionaries, policies see `state` and critics see
    `privileged_state`, if there is one; or both see the entries that `observe` joins by `+`. Tasks
    of the DeepMind control suite come with the package, others download their robots when they are
    made. Raises `ConfigError` where the package is not installed, for an unknown task and for one
    that cannot be made.
    """
    return auto_reset(load_simulator(name, tuple(sorted(config.items())), observe))


@functools.cache
def load_simulator(name: str, config: tuple[tuple[str, Any], ...], observe: str) -> Adapted:
    """Return a task of Playground as reset and step, one object for equal arguments."""
    registry = import_suite("mujoco_playground", f"playground:{name}").registry
    check_known(name, registry.ALL_ENVS, "Playground has no task")
    if "action_repeat" in dict(config):
        raise ConfigError(
            "Playground's tasks have no action_repeat: set ctrl_dt, seconds of a step."
        )
    # Any error of a download or a wrong setting.
    with jax.ensure_compile_time_eval(), refusing(f"Playground cannot make {name!r}", Exception):
        env = registry.load(name, config_overrides={"impl": "jax", **dict(config)})
        initial = jax.eval_shape(env.reset, jax.random.key(0))
    limit = env._config.episode_length
    check_episode_length(f"playground:{name}", limit)

    def reset(key: jax.Array) -> tuple[TimedState, TimeStep]:
        state = _without_rng(strongly_typed(env.reset(key)))
        return TimedState(state, jnp.int32(0)), restart(_observed(state.obs, observe))

    def step(key: jax.Array, state: TimedState, action: jax.Array) -> tuple[TimedState, TimeStep]:
        info = {**state.inner.info, "rng": key}
        inner = _without_rng(strongly_typed(env.step(state.inner.replace(info=info), action)))
        return timed_transition(inner, _observed(inner.obs, observe), state.time, limit)

    observation = array_specs(_observed(initial.obs, observe))
    has_groups = not observe and isinstance(observation, dict) and observation.keys() == PARTS
    groups = {"actor": ("state",), "critic": ("privileged_state",)} if has_groups else {}
    action = continuous_actions(f"playground:{name}", -1.0, 1.0, (env.action_size,))
    spec = EnvironmentSpec(f"playground:{name}", observation, action, groups=groups)
    return Adapted(spec, reset, step)


def _without_rng(state: PyTree) -> PyTree:
    """Return the state without its `rng`, as each step gets one."""
    return state.replace(info={name: x for name, x in state.info.items() if name != "rng"})


def _observed(observation: PyTree, observe: str) -> PyTree:
    """Return the entries of a dictionary of observations that `observe` names, a single one bare.

    By default these are `PARTS`, or `state` without the other, or all. Raises `ConfigError` for
    other names.
    """
    entries = observation if isinstance(observation, dict) else {}
    if not observe and "state" not in entries:
        return observation
    names = observe.split("+") if observe else sorted(PARTS & entries.keys())
    for name in names:
        check_known(name, entries, "Playground's observation has no entry")
    return entries[names[0]] if len(names) == 1 else {name: entries[name] for name in names}
