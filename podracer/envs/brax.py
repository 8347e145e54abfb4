"""The continuous control of brax (Freeman et al. 2021)."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, continuous_actions, import_optional, strongly_typed
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.io.names import nearest
from podracer.types import EnvironmentSpec, PyTree, TimeStep


def brax(name: str, *, backend: str = "spring", episode_length: int = 1000) -> AutoReset:
    """Return the brax environment `name`, such as `ant`, restarting by itself.

    A time-out cuts an episode after `episode_length` steps. Raises `ConfigError` where brax is not
    installed and for an unknown name or backend.
    """
    return auto_reset(Brax(name, backend, episode_length))


@struct
class TimedState:
    """State of an environment that does not count its own steps."""

    inner: PyTree
    time: jax.Array  # i32, steps since the reset


@dataclasses.dataclass(frozen=True)
class Brax:
    """One environment, without restarts. Actions are in [-1, 1]."""

    name: str
    backend: str = "spring"
    episode_length: int = 1000

    def __post_init__(self) -> None:
        _load(self.name, self.backend)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.backend)[1]

    def reset(self, key: jax.Array) -> tuple[TimedState, TimeStep]:
        env, _ = _load(self.name, self.backend)
        state = strongly_typed(env.reset(key))
        return TimedState(state, jnp.int32(0)), restart(state.obs)

    def step(
        self, key: jax.Array, state: TimedState, action: jax.Array
    ) -> tuple[TimedState, TimeStep]:
        env, _ = _load(self.name, self.backend)
        inner = strongly_typed(env.step(state.inner, action))
        time = state.time + 1
        timestep = transition(
            inner.obs, inner.reward, terminal=inner.done > 0, timeout=time >= self.episode_length
        )
        return TimedState(inner, time), timestep

    def render(self, state: TimedState) -> np.ndarray:
        """Return a picture of the links as a stick figure, uint8 `[H, W, 3]`.

        brax's own pictures need OpenGL, which a machine without a screen seldom has.
        """
        env, _ = _load(self.name, self.backend)
        return _draw_links(np.asarray(state.inner.pipeline_state.x.pos), env.sys.link_parents)


def _draw_links(position: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """Return a picture of links at positions `[L, 3]`, in meters, each joined to its parent.

    It is seen from the side, or from above where all links lie in the plane of the ground.
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


@functools.cache
def _load(name: str, backend: str) -> tuple[Any, EnvironmentSpec]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its maintenance
        library = import_optional("brax.envs", f"brax:{name}", "brax")
    if name not in library._envs:
        raise ConfigError(f"brax has no environment {name!r}: {nearest(name, library._envs)}")
    backends = ("spring", "positional", "generalized", "mjx")
    if backend not in backends:
        raise ConfigError(f"brax has no backend {backend!r}: {nearest(backend, backends)}")
    with jax.ensure_compile_time_eval(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = library.get_environment(name, backend=backend)
        state = jax.eval_shape(env.reset, jax.random.key(0))
    action = continuous_actions(f"brax:{name}", -1.0, 1.0, (env.action_size,))
    return env, EnvironmentSpec(f"brax:{name}", array_specs(state.obs), action)
