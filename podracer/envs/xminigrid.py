"""The grid worlds of XLand-MiniGrid (Nikulin et al. 2024)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.arrays import load, strong
from podracer.io.names import nearest
from podracer.types import ArraySpec, ConfigError, Discrete, EnvironmentSpec, PyTree, TimeStep


def xminigrid(name: str) -> AutoReset:
    """The environment `name`, such as `MiniGrid-Empty-8x8`, restarting by itself. Raises
    `ConfigError` where xminigrid is not installed and for an unknown name."""
    return auto_reset(XMiniGrid(name))


@dataclasses.dataclass(frozen=True)
class XMiniGrid:
    """One environment, whose ends are marked only.

    Observations are bool `[H, W, tiles + colors]`, one-hot: numbers of tiles have no order.
    """

    name: str

    def __post_init__(self) -> None:
        _load(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name)[2]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, _ = _load(self.name)
        inner = strong(env.reset(params, key))
        return _without_key(inner), restart(_one_hot(inner.observation))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, _ = _load(self.name)
        inner = state.replace(state=state.state.replace(key=key))
        inner = strong(env.step(params, inner, action))
        over = inner.last()
        timestep = transition(
            _one_hot(inner.observation),
            inner.reward,
            terminal=over & (inner.discount == 0),
            timeout=over,
        )
        return _without_key(inner), timestep


def _without_key(inner: PyTree) -> PyTree:
    """Keys are given to each step, so a state keeps none."""
    return inner.replace(state=inner.state.replace(key=()))


def _sizes() -> tuple[int, int]:
    constants = load("xminigrid.core.constants", "xminigrid", "xminigrid")
    return constants.NUM_TILES, constants.NUM_COLORS


def _one_hot(observation: jax.Array) -> jax.Array:
    parts = [
        jax.nn.one_hot(observation[..., i], size, dtype=bool) for i, size in enumerate(_sizes())
    ]
    return jnp.concatenate(parts, axis=-1)


@functools.cache
def _load(name: str) -> tuple[Any, Any, EnvironmentSpec]:
    library = load("xminigrid", f"xminigrid:{name}", "xminigrid")
    known = library.registered_environments()
    if name not in known:
        raise ConfigError(f"xminigrid has no environment {name!r}: {nearest(name, known)}")
    with jax.ensure_compile_time_eval():
        env, params = library.make(name)
    height, width, _ = env.observation_shape(params)
    observation = ArraySpec((height, width, sum(_sizes())), np.bool_)
    action = Discrete(int(env.num_actions(params)))
    return env, params, EnvironmentSpec(f"xminigrid:{name}", observation, action)
