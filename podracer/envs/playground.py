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
from podracer.io.names import nearest
from podracer.types import ConfigError, EnvironmentSpec, PyTree, TimeStep


def playground(name: str, **config: Any) -> AutoReset:
    """Return the task `name`, such as `CartpoleBalance`, restarting by itself.

    A time-out cuts an episode after the task's own `episode_length`. `config` overrides its
    settings. Tasks of the DeepMind control suite come with the package, others download their
    robots when they are made. Raises `ConfigError` where the package is not installed, for an
    unknown task and for one that cannot be made.
    """
    return auto_reset(Playground(name, tuple(sorted(config.items()))))


@dataclasses.dataclass(frozen=True)
class Playground:
    """One task, without restarts. Actions are in [-1, 1]."""

    name: str
    config: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _load(self.name, self.config)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.config)[1]

    def reset(self, key: jax.Array) -> tuple[TimedState, TimeStep]:
        env, _ = _load(self.name, self.config)
        state = _without_key(strongly_typed(env.reset(key)))
        return TimedState(state, jnp.int32(0)), restart(state.obs)

    def step(
        self, key: jax.Array, state: TimedState, action: jax.Array
    ) -> tuple[TimedState, TimeStep]:
        env, _ = _load(self.name, self.config)
        info = {**state.inner.info, "rng": key}
        inner = _without_key(strongly_typed(env.step(state.inner.replace(info=info), action)))
        time = state.time + 1
        timeout = time >= int(env._config.episode_length)
        timestep = transition(inner.obs, inner.reward, terminal=inner.done > 0, timeout=timeout)
        return TimedState(inner, time), timestep


def _without_key(state: PyTree) -> PyTree:
    """Return the state without its key, as each step gets one."""
    return state.replace(info={name: x for name, x in state.info.items() if name != "rng"})


@functools.cache
def _load(name: str, config: tuple[tuple[str, Any], ...]) -> tuple[Any, EnvironmentSpec]:
    library = import_optional("mujoco_playground", f"playground:{name}", "playground")
    registry = library.registry
    if name not in registry.ALL_ENVS:
        raise ConfigError(f"Playground has no task {name!r}: {nearest(name, registry.ALL_ENVS)}")
    with jax.ensure_compile_time_eval():
        try:
            env = registry.load(name, config_overrides={"impl": "jax", **dict(config)})
        except Exception as error:  # any error of a download or a wrong setting
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"Playground cannot make {name!r}: {reason}.") from error
        state = jax.eval_shape(env.reset, jax.random.key(0))
    action = continuous_actions(f"playground:{name}", -1.0, 1.0, (env.action_size,))
    return env, EnvironmentSpec(f"playground:{name}", array_specs(state.obs), action)
