"""The grid worlds of XLand-MiniGrid (Nikulin et al. 2024)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import check_known, strongly_typed
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import Adapted, import_suite, without_key


def xminigrid(name: str) -> AutoReset:
    """Return a grid world of xminigrid, such as `xminigrid:MiniGrid-Empty-8x8`.

    It restarts by itself. Observations are bool `[H, W, tiles + colors]`, one-hot, because numbers
    of tiles have no order. Raises `ConfigError` where xminigrid is not installed and for an unknown
    name.
    """
    return auto_reset(_load(name))


@functools.cache
def _load(name: str) -> Adapted:
    library = import_suite("xminigrid", f"xminigrid:{name}")
    constants = import_suite("xminigrid.core.constants", "xminigrid")
    sizes = (constants.NUM_TILES, constants.NUM_COLORS)
    check_known(name, library.registered_environments(), "xminigrid has no environment")
    with jax.ensure_compile_time_eval():
        env, params = library.make(name)

    def one_hot(observation: jax.Array) -> jax.Array:
        parts = [jax.nn.one_hot(observation[..., i], n, dtype=bool) for i, n in enumerate(sizes)]
        return jnp.concatenate(parts, axis=-1)

    def reset(key: jax.Array) -> tuple[PyTree, TimeStep]:
        inner = strongly_typed(env.reset(params, key))
        return inner.replace(state=without_key(inner.state)), restart(one_hot(inner.observation))

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        inner = state.replace(state=state.state.replace(key=key))
        inner = strongly_typed(env.step(params, inner, action))
        last = inner.last()
        timestep = transition(
            one_hot(inner.observation),
            inner.reward,
            terminal=last & (inner.discount == 0),
            timeout=last,
        )
        return inner.replace(state=without_key(inner.state)), timestep

    height, width, _ = env.observation_shape(params)
    observation = ArraySpec((height, width, sum(sizes)), np.bool_)
    action = Discrete(int(env.num_actions(params)))
    return Adapted(EnvironmentSpec(f"xminigrid:{name}", observation, action), reset, step)
