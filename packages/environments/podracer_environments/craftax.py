"""Craftax and Craftax-Classic (Matthews et al. 2024)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, check_known, strongly_typed
from podracer.types import Discrete, EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import Adapted, cast_like, import_suite, without_key

NAMES = (
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
)


def craftax(name: str, *, resets_per_step: int = 4) -> AutoReset:
    """Return Craftax, such as `craftax:Craftax-Classic-Symbolic-v1`.

    It restarts by itself. A reset takes far longer than a step, so only `resets_per_step` of them
    are computed at each step for the whole batch, see `auto_reset`; 0 computes one for each
    environment. Raises `ConfigError` where craftax is not installed and for an unknown name.
    """
    return auto_reset(_load(name), resets_per_step=resets_per_step)


@functools.cache
def _load(name: str) -> Adapted:
    check_known(name, NAMES, "Craftax has no environment")
    library = import_suite("craftax.craftax_env", f"craftax:{name}")
    with jax.ensure_compile_time_eval():
        env = library.make_craftax_env_from_name(name, auto_reset=False)
        params = jax.tree.map(jnp.asarray, env.default_params)
        initial, _ = jax.eval_shape(env.reset_env, jax.random.key(0), params)
        action = Discrete(int(env.action_space(params).n))
    spec = EnvironmentSpec(f"craftax:{name}", array_specs(initial), action)

    def reset(key: jax.Array) -> tuple[PyTree, TimeStep]:
        observation, state = strongly_typed(env.reset_env(key, params))
        return without_key(state, "state_rng"), restart(observation)

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        state_with_key = state.replace(state_rng=key)
        observation, next_state, reward, is_over, _ = env.step_env(
            key, state_with_key, action, params
        )
        # An end at the time limit is a time-out, any other one a death.
        timeout = next_state.timestep >= params.max_timesteps
        timestep = transition(
            cast_like(observation, spec.observation),
            reward,
            terminal=is_over & ~timeout,
            timeout=timeout,
        )
        return cast_like(without_key(next_state, "state_rng"), state), timestep

    @functools.cache
    def draw() -> jax.stages.Wrapped:
        package = "craftax_classic" if "Classic" in name else "craftax"
        module = import_suite(f"craftax.{package}.renderer", f"craftax:{name}")
        return jax.jit(module.make_craftax_pixel_renderer(16))  # pixels of a block's side

    def render(state: PyTree) -> np.ndarray:
        state = state.replace(state_rng=jax.random.key(0))  # for the noise in the dark
        return np.asarray(draw()(state)).astype(np.uint8)

    return Adapted(spec, reset, step, render)
