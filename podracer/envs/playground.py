"""The tasks of MuJoCo Playground (Zakka et al. 2025), simulated by JAX."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.brax import TimedState
from podracer.envs.common import array_specs, continuous_actions, import_optional, strongly_typed
from podracer.errors import ConfigError
from podracer.io.names import nearest
from podracer.types import EnvironmentSpec, PyTree, TimeStep


def playground(name: str, *, observe: str = "", **config: Any) -> AutoReset:
    """Return the task `name`, such as `CartpoleBalance`, restarting by itself.

    A time-out cuts an episode after the task's own `episode_length`. `config` overrides its
    settings, but `action_repeat`, which is one of its trainer. Where observations are dictionaries,
    the policy gets `state`, without what only a critic is to know, or the entries that `observe`
    joins by `+`. Tasks of the DeepMind control suite come with the package, others download their
    robots when they are made. Raises `ConfigError` where the package is not installed, for an
    unknown task and for one that cannot be made.
    """
    return auto_reset(Playground(name, tuple(sorted(config.items())), observe))


@dataclasses.dataclass(frozen=True)
class Playground:
    """One task, without restarts. Actions are in [-1, 1]."""

    name: str
    config: tuple[tuple[str, Any], ...] = ()
    observe: str = ""

    def __post_init__(self) -> None:
        _load(self.name, self.config, self.observe)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.config, self.observe)[1]

    def reset(self, key: jax.Array) -> tuple[TimedState, TimeStep]:
        env, _ = _load(self.name, self.config, self.observe)
        state = _without_rng(strongly_typed(env.reset(key)))
        return TimedState(state, jnp.int32(0)), restart(_observed(state.obs, self.observe))

    def step(
        self, key: jax.Array, state: TimedState, action: jax.Array
    ) -> tuple[TimedState, TimeStep]:
        env, _ = _load(self.name, self.config, self.observe)
        info = {**state.inner.info, "rng": key}
        inner = _without_rng(strongly_typed(env.step(state.inner.replace(info=info), action)))
        time = state.time + 1
        timeout = time >= int(env._config.episode_length)
        observation = _observed(inner.obs, self.observe)
        timestep = transition(observation, inner.reward, terminal=inner.done > 0, timeout=timeout)
        return TimedState(inner, time), timestep


def _without_rng(state: PyTree) -> PyTree:
    """Return the state without its `rng`, as each step gets one."""
    return state.replace(info={name: x for name, x in state.info.items() if name != "rng"})


def _observed(observation: PyTree, observe: str) -> PyTree:
    """Return the entries of a dictionary of observations that `observe` names, a single one bare.

    By default that is `state` if there is one, else all. Raises `ConfigError` for other names.
    """
    names = observe.split("+") if observe else ["state"]
    entries = observation if isinstance(observation, dict) else {}
    if not observe and "state" not in entries:
        return observation
    for name in names:
        if name not in entries:
            raise ConfigError(
                f"Playground's observation has no entry {name!r}: {nearest(name, entries)}"
            )
    return entries[names[0]] if len(names) == 1 else {name: entries[name] for name in names}


@functools.cache
def _load(
    name: str, config: tuple[tuple[str, Any], ...], observe: str
) -> tuple[Any, EnvironmentSpec]:
    library = import_optional("mujoco_playground", f"playground:{name}", "playground")
    registry = library.registry
    if name not in registry.ALL_ENVS:
        raise ConfigError(f"Playground has no task {name!r}: {nearest(name, registry.ALL_ENVS)}")
    if "action_repeat" in dict(config):
        raise ConfigError(
            "Playground's tasks have no action_repeat: set ctrl_dt, seconds of a step."
        )
    with jax.ensure_compile_time_eval():
        try:
            env = registry.load(name, config_overrides={"impl": "jax", **dict(config)})
        except Exception as error:  # any error of a download or a wrong setting
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"Playground cannot make {name!r}: {reason}.") from error
        state = jax.eval_shape(env.reset, jax.random.key(0))
    observation = _observed(state.obs, observe)
    action = continuous_actions(f"playground:{name}", -1.0, 1.0, (env.action_size,))
    return env, EnvironmentSpec(f"playground:{name}", array_specs(observation), action)
