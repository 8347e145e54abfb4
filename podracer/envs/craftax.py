"""Craftax and Craftax-Classic (Matthews et al. 2024)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import (
    array_specs,
    cast_like,
    import_optional,
    strongly_typed,
    without_key,
)
from podracer.errors import ConfigError
from podracer.io.names import nearest
from podracer.types import Discrete, EnvironmentSpec, PyTree, TimeStep

NAMES = (
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
)


def craftax(name: str, *, resets_per_step: int = 4) -> AutoReset:
    """Return the Craftax environment `name`, restarting by itself.

    A reset takes far longer than a step, so only `resets_per_step` of them are computed at each
    step for the whole batch, see `auto_reset`; 0 computes one for each environment.
    Raises `ConfigError` where craftax is not installed and for an unknown name.
    """
    return auto_reset(Craftax(name), resets_per_step=resets_per_step)


@dataclasses.dataclass(frozen=True)
class Craftax:
    """One environment, without restarts."""

    name: str

    def __post_init__(self) -> None:
        _load(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name)[2]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, _ = _load(self.name)
        observation, state = strongly_typed(env.reset_env(key, params))
        return without_key(state, "state_rng"), restart(observation)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, params, spec = _load(self.name)
        state_with_key = state.replace(state_rng=key)
        observation, next_state, reward, done, _ = env.step_env(key, state_with_key, action, params)
        # `done` includes the time limit, so any other end is a death.
        timeout = next_state.timestep >= params.max_timesteps
        timestep = transition(
            cast_like(observation, spec.observation),
            reward,
            terminal=done & ~timeout,
            timeout=timeout,
        )
        return cast_like(without_key(next_state, "state_rng"), state), timestep

    def render(self, state: PyTree) -> np.ndarray:
        """Return Craftax's own picture of a state, uint8 `[H, W, 3]`."""
        state = state.replace(state_rng=jax.random.key(0))  # of the noise in the dark
        return np.asarray(_renderer(self.name)(state)).astype(np.uint8)


@functools.cache
def _renderer(name: str) -> Any:
    """Return the function that draws a state, with 16 pixels for each side of a block."""
    package = "craftax_classic" if "Classic" in name else "craftax"
    module = import_optional(f"craftax.{package}.renderer", f"craftax:{name}", "craftax")
    return jax.jit(module.make_craftax_pixel_renderer(16))


@functools.cache
def _load(name: str) -> tuple[Any, Any, EnvironmentSpec]:
    if name not in NAMES:
        raise ConfigError(f"Craftax has no environment {name!r}: {nearest(name, NAMES)}")
    library = import_optional("craftax.craftax_env", f"craftax:{name}", "craftax")
    with jax.ensure_compile_time_eval():
        env = library.make_craftax_env_from_name(name, auto_reset=False)
        params = jax.tree.map(jnp.asarray, env.default_params)
        observation, _ = jax.eval_shape(env.reset_env, jax.random.key(0), params)
        num_actions = int(env.action_space(params).n)
    spec = EnvironmentSpec(f"craftax:{name}", array_specs(observation), Discrete(num_actions))
    return env, params, spec
