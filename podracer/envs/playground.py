"""The tasks of MuJoCo Playground (Zakka et al. 2025), simulated by JAX."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.arrays import box, described, load, strong
from podracer.envs.brax import ClockedState
from podracer.io.names import nearest
from podracer.types import ConfigError, EnvironmentSpec, PyTree, TimeStep


def playground(name: str, **config: Any) -> AutoReset:
    """The task `name`, such as `CartpoleBalance`, restarting by itself; cut by a time-out after
    its own `episode_length`.

    `config` overrides its settings. Those of the DeepMind control suite come with the package,
    others download their robots when they are made. Raises `ConfigError` where the package is not
    installed, for an unknown task and for one that cannot be made.
    """
    return auto_reset(Playground(name, tuple(sorted(config.items()))))


@dataclasses.dataclass(frozen=True)
class Playground:
    """One task, whose ends are marked only. Actions are in [-1, 1]."""

    name: str
    config: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _load(self.name, self.config)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.config)[1]

    def reset(self, key: jax.Array) -> tuple[ClockedState, TimeStep]:
        env, _ = _load(self.name, self.config)
        state = _without_key(strong(env.reset(key)))
        return ClockedState(state, jnp.int32(0)), restart(state.obs)

    def step(
        self, key: jax.Array, state: ClockedState, action: jax.Array
    ) -> tuple[ClockedState, TimeStep]:
        env, _ = _load(self.name, self.config)
        info = {**state.inner.info, "rng": key}
        inner = _without_key(strong(env.step(state.inner.replace(info=info), action)))
        time = state.time + 1
        over = time >= int(env._config.episode_length)
        timestep = transition(inner.obs, inner.reward, terminal=inner.done > 0, timeout=over)
        return ClockedState(inner, time), timestep


def _without_key(state: PyTree) -> PyTree:
    """Keys are given to each step, so a state keeps none."""
    return state.replace(info={name: x for name, x in state.info.items() if name != "rng"})


@functools.cache
def _load(name: str, config: tuple[tuple[str, Any], ...]) -> tuple[Any, EnvironmentSpec]:
    registry = load("mujoco_playground", f"playground:{name}", "playground").registry
    if name not in registry.ALL_ENVS:
        raise ConfigError(f"Playground has no task {name!r}: {nearest(name, registry.ALL_ENVS)}")
    with jax.ensure_compile_time_eval():
        try:
            env = registry.load(name, config_overrides={"impl": "jax", **dict(config)})
        except Exception as error:  # whatever a download or a wrong setting raises
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"Playground cannot make {name!r}: {reason}.") from error
        state = jax.eval_shape(env.reset, jax.random.key(0))
    action = box(f"playground:{name}", -1.0, 1.0, (env.action_size,))
    return env, EnvironmentSpec(f"playground:{name}", described(state.obs), action)
