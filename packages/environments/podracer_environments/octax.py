"""The CHIP-8 games of octax (Radji et al. 2025), played by an emulator in the compiled program."""

from __future__ import annotations

import functools
import pkgutil
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, check_known, strongly_typed
from podracer.types import Discrete, EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import Adapted, import_suite, refusing


def octax(name: str, **options: Any) -> AutoReset:
    """Return a CHIP-8 game of octax, such as `octax:brix` or `octax:space_flight1`.

    It restarts by itself. Observations are the frames of a step, bool `[32, 64, frame_skip]`, the
    newest one last. The last action presses no key. A time-out cuts a game after
    `max_num_steps_per_episodes` steps. `options` are those of `octax.env.OctaxEnv`, such as
    `frame_skip`. Raises `ConfigError` where octax or OpenCV, which it imports, is not installed,
    and for an unknown game or option.
    """
    return auto_reset(_load(name, tuple(sorted(options.items()))))


@functools.cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> Adapted:
    library = import_suite("octax.environments", f"octax:{name}")
    check_known(name, _games(library), "octax has no game")
    with (
        jax.ensure_compile_time_eval(),
        refusing(f"octax cannot make {name!r}", OSError, TypeError, ValueError),
    ):
        env, _ = library.create_environment(name, render_mode="rgb_array", **dict(options))
        _, initial, _ = jax.eval_shape(env.reset, jax.random.key(0))

    def reset(key: jax.Array) -> tuple[PyTree, TimeStep]:
        state, frames, _ = strongly_typed(env.reset(key))
        return state.replace(rng=()), restart(_channels_last(frames))

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        state, frames, reward, terminal, timeout, _ = strongly_typed(
            env.step(state.replace(rng=key), action)
        )
        timestep = transition(_channels_last(frames), reward, terminal=terminal, timeout=timeout)
        return state.replace(rng=()), timestep

    observation = array_specs(jax.eval_shape(_channels_last, initial))
    spec = EnvironmentSpec(f"octax:{name}", observation, Discrete(env.num_actions))
    return Adapted(spec, reset, step, env.render)


def _channels_last(frames: jax.Array) -> jax.Array:
    """Return frames `[frame_skip, 64, 32]`, whose columns come before rows, as `[32, 64, ...]`."""
    return jnp.transpose(frames, (2, 1, 0))


def _games(library: Any) -> list[str]:
    """Return the games, those in several levels as `cavern1`, `cavern2` and so on."""
    games = [module.name for module in pkgutil.iter_modules(library.__path__)]
    roms = [rom.stem for rom in Path(library.get_rom_path("")).iterdir()]
    levels = [rom for rom in roms if re.sub(r"\d+$", "", rom) in games and rom not in games]
    with_levels = {re.sub(r"\d+$", "", level) for level in levels}
    return sorted({*games, *levels} - with_levels)
