"""The continuous control of brax (Freeman et al. 2021)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, check_known, strongly_typed
from podracer.fields import struct
from podracer.types import EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import (
    Adapted,
    check_time_limit,
    continuous_actions,
    import_suite,
)

BACKENDS = ("spring", "positional", "generalized", "mjx")


def brax(name: str, *, backend: str = "spring", episode_length: int = 1000) -> AutoReset:
    """Return a task of brax, such as `brax:ant`.

    It restarts by itself. Actions are in [-1, 1]. A time-out cuts an episode after `episode_length`
    steps. Raises `ConfigError` where brax is not installed and for an unknown name or backend.
    """
    return auto_reset(load_simulator(name, backend, episode_length))


@struct
class TimedState:
    """State of an environment that does not count its own steps."""

    inner: PyTree
    time: jax.Array  # i32, steps since the reset


def timed_transition(
    inner: PyTree, observation: PyTree, time: jax.Array, limit: int
) -> tuple[TimedState, TimeStep]:
    """Return a simulator's new state and timestep after the step that began at a time."""
    timeout = time + 1 >= limit
    timestep = transition(observation, inner.reward, terminal=inner.done > 0, timeout=timeout)
    return TimedState(inner, time + 1), timestep


@functools.cache
def load_simulator(name: str, backend: str, episode_length: int) -> Adapted:
    """Return an environment of Brax as reset and step, one object for equal arguments."""
    check_time_limit(f"brax:{name}", "episode_length", episode_length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its maintenance
        library = import_suite("brax.envs", f"brax:{name}")
    check_known(name, library._envs, "brax has no environment")
    check_known(backend, BACKENDS, "brax has no backend")
    with jax.ensure_compile_time_eval(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = library.get_environment(name, backend=backend)
        initial = jax.eval_shape(env.reset, jax.random.key(0))

    def reset(key: jax.Array) -> tuple[TimedState, TimeStep]:
        state = strongly_typed(env.reset(key))
        return TimedState(state, jnp.int32(0)), restart(state.obs)

    def step(key: jax.Array, state: TimedState, action: jax.Array) -> tuple[TimedState, TimeStep]:
        inner = strongly_typed(env.step(state.inner, action))
        return timed_transition(inner, inner.obs, state.time, episode_length)

    def render(state: TimedState) -> np.ndarray:
        return _draw_links(np.asarray(state.inner.pipeline_state.x.pos), env.sys.link_parents)

    action = continuous_actions(f"brax:{name}", -1.0, 1.0, (env.action_size,))
    spec = EnvironmentSpec(f"brax:{name}", array_specs(initial.obs), action)
    return Adapted(spec, reset, step, render)


def _draw_links(position: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """Return a picture of links at positions `[L, 3]`, in meters, each joined to its parent.

    It is seen from the side, or from above where all links lie in the plane of the ground. brax's
    own pictures need OpenGL, which a machine without a screen seldom has.
    """
    vertical = 1 if len(position) > 1 and np.ptp(position[:, 2]) < 1e-3 else 2
    x = 120 + 80 * (position[:, 0] - position[0, 0])
    y = (80 if vertical == 1 else 140) - 80 * position[:, vertical]
    image = Image.new("RGB", (240, 160), (240, 240, 240))
    draw = ImageDraw.Draw(image)
    if vertical == 2:
        draw.line([(0, 140), (240, 140)], fill=(120, 120, 120))
    for link, parent in enumerate(parents):
        if parent >= 0:
            draw.line([(x[parent], y[parent]), (x[link], y[link])], fill=(31, 119, 180), width=4)
        draw.ellipse([x[link] - 4, y[link] - 4, x[link] + 4, y[link] + 4], fill=(214, 39, 40))
    return np.asarray(image)
