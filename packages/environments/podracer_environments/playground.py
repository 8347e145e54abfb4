"""The tasks of MuJoCo Playground (Zakka et al. 2025), simulated by JAX."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart
from podracer.envs.common import array_specs, check_known, strongly_typed
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.types import EnvironmentSpec, PyTree, TimeStep
from podracer_environments.brax import TimedState, timed_transition
from podracer_environments.suites import (
    Adapted,
    check_time_limit,
    continuous_actions,
    import_suite,
    refusing,
)

PARTS = {"privileged_state", "state"}  # the second for policies, the first for critics


@struct
class TaskState(TimedState):
    """State of a task, with the numbers of its model that the episode has drawn."""

    parameters: dict[str, jax.Array]  # by their places among the leaves of the model


def playground(
    name: str, *, observe: str = "", randomize: bool = False, **config: Any
) -> AutoReset:
    """Return a task of MuJoCo Playground, such as `playground:CartpoleBalance`.

    It restarts by itself. Actions are in [-1, 1]. A time-out cuts an episode after the task's own
    `episode_length`. `config` overrides its settings, but `action_repeat`, which is one of its
    trainer. Where observations are dictionaries, policies see `state` and critics see
    `privileged_state`, if there is one; or both see the entries that `observe` joins by `+`. With
    `randomize` each episode draws frictions, masses and the like by the task's own randomizer,
    where Playground draws them once for each environment. Tasks of the DeepMind control suite come
    with the package, others download their robots when they are made. Raises `ConfigError` where
    the package is not installed, for an unknown task and for one that cannot be made or randomized.
    """
    return auto_reset(load_simulator(name, tuple(sorted(config.items())), observe, randomize))


@functools.cache
def load_simulator(
    name: str, config: tuple[tuple[str, Any], ...], observe: str, randomize: bool = False
) -> Adapted:
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
    randomizer = registry.get_domain_randomizer(name) if randomize else None
    if randomize and randomizer is None:
        raise ConfigError(f"Playground has no randomizer for {name!r}: leave randomize out.")
    limit = env._config.episode_length
    check_time_limit(f"playground:{name}", "episode_length", limit)

    def reset(key: jax.Array) -> tuple[TaskState, TimeStep]:
        parameters = draw_model(env, randomizer, jax.random.fold_in(key, 1)) if randomizer else {}
        state = _without_rng(strongly_typed(with_model(env, parameters).reset(key)))
        return TaskState(state, jnp.int32(0), parameters), restart(_observed(state.obs, observe))

    def step(key: jax.Array, state: TaskState, action: jax.Array) -> tuple[TaskState, TimeStep]:
        inner = state.inner.replace(info={**state.inner.info, "rng": key})
        inner = with_model(env, state.parameters).step(inner, action)
        inner = _without_rng(strongly_typed(inner))
        timed, timestep = timed_transition(inner, _observed(inner.obs, observe), state.time, limit)
        return TaskState(timed.inner, timed.time, state.parameters), timestep

    observation = array_specs(_observed(initial.obs, observe))
    has_groups = not observe and isinstance(observation, dict) and observation.keys() == PARTS
    groups = {"actor": ("state",), "critic": ("privileged_state",)} if has_groups else {}
    action = continuous_actions(f"playground:{name}", -1.0, 1.0, (env.action_size,))
    spec = EnvironmentSpec(f"playground:{name}", observation, action, groups=groups)
    return Adapted(spec, reset, step)


def draw_model(env: Any, randomizer: Any, key: jax.Array) -> dict[str, jax.Array]:
    """Return the numbers of a task's model that its randomizer draws."""
    models, _ = randomizer(env.mjx_model, key[None])  # a batch of one, where they differ
    leaves = zip(jax.tree.leaves(models), jax.tree.leaves(env.mjx_model), strict=True)
    pairs = [(str(i), x) for i, (x, old) in enumerate(leaves) if jnp.ndim(x) > jnp.ndim(old)]
    return {place: x[0] for place, x in pairs}


def with_model(env: Any, parameters: dict[str, jax.Array]) -> Any:
    """Return a task with other numbers in its model, or the task itself where there are none."""
    if not parameters:
        return env
    leaves, tree = jax.tree.flatten(env.mjx_model)
    leaves = [parameters.get(str(i), x) for i, x in enumerate(leaves)]
    env = copy.copy(env)
    env._mjx_model = jax.tree.unflatten(tree, leaves)
    return env


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
