"""The grid worlds of XLand-MiniGrid (Nikulin et al. 2024)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import import_optional, strongly_typed, without_key
from podracer.errors import ConfigError
from podracer.io.names import nearest
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, PyTree, TimeStep


def xminigrid(name: str) -> AutoReset:
    """Return the environment `name`, such as `MiniGrid-Empty-8x8`, restarting by itself.

    Raises `ConfigError` where xminigrid is not installed and for an unknown name.
    """
    return auto_reset(XMiniGrid(name))


@dataclasses.dataclass(frozen=True)
class XMiniGrid:
    """One environment, without restarts.

    Observations are bool `[H, W, tiles + colors]`, one-hot, because numbers of tiles have no order.
    """

    name: str

    def __post_init__(self) -> None:
        _load(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name)[2]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, _ = _load(self.name)
        inner = strongly_typed(env.reset(params, key))
        return inner.replace(state=without_key(inner.state)), restart(_one_hot(inner.observation))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, _ = _load(self.name)
        inner = state.replace(state=state.state.replace(key=key))
        inner = strongly_typed(env.step(params, inner, action))
        last = inner.last()
        timestep = transition(
            _one_hot(inner.observation),
            inner.reward,
            terminal=last & (inner.discount == 0),
            timeout=last,
        )
        return inner.replace(state=without_key(inner.state)), timestep


def _num_tiles_and_colors() -> tuple[int, int]:
    constants = import_optional("xminigrid.core.constants", "xminigrid", "xminigrid")
    return constants.NUM_TILES, constants.NUM_COLORS


def _one_hot(observation: jax.Array) -> jax.Array:
    one_hots = [
        jax.nn.one_hot(observation[..., i], size, dtype=bool)
        for i, size in enumerate(_num_tiles_and_colors())
    ]
    return jnp.concatenate(one_hots, axis=-1)


@functools.cache
def _load(name: str) -> tuple[Any, Any, EnvironmentSpec]:
    library = import_optional("xminigrid", f"xminigrid:{name}", "xminigrid")
    registered = library.registered_environments()
    if name not in registered:
        raise ConfigError(f"xminigrid has no environment {name!r}: {nearest(name, registered)}")
    with jax.ensure_compile_time_eval():
        env, params = library.make(name)
    height, width, _ = env.observation_shape(params)
    observation = ArraySpec((height, width, sum(_num_tiles_and_colors())), np.bool_)
    action = Discrete(int(env.num_actions(params)))
    return env, params, EnvironmentSpec(f"xminigrid:{name}", observation, action)
