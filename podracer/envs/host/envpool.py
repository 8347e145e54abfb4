"""Any single-player task of EnvPool (Weng et al. 2022): Atari, classic control, MuJoCo and more.

EnvPool restarts a row in the step after its end, as a `HostEnvironment` does. What its Python
layer calls a termination is an end before the limit of steps; a task that also says which ends are
true (`info["terminated"]`: Atari, MuJoCo Playground) is believed. Where another one ends by itself
in the very step of its limit, EnvPool tells only of the time-out.

Its asynchronous mode is not used: actor threads do what it is for, and stay reproducible
(decision 0017).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import numpy as np

from podracer.envs.host.atari import Games, checked_actions, row_seeds
from podracer.io.names import nearest
from podracer.types import (
    ArraySpec,
    ConfigError,
    Continuous,
    Discrete,
    EnvironmentSpec,
    PyTree,
    TimeStep,
)

IMPALA = {
    "noop_max": 30,  # EnvPool draws from 1
    "use_fire_reset": False,
    "frame_skip": 4,
    "stack_num": 4,
    "img_height": 84,
    "img_width": 84,
    "gray_scale": True,
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "max_episode_steps": 27_000,  # agent steps: 108 000 frames
}
NARROW = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}
# What the adapter sets by itself, or shows in its own way.
OURS = {
    *("num_envs", "batch_size", "num_threads", "max_num_players", "seed", "env_seed"),
    *("base_path", "task", "gym_reset_return_info"),
    *("episodic_life", "reward_clip", "zero_discount_on_life_loss"),
}


def envpool(task: str, **options: Any) -> EnvPool:
    """EnvPool's `task`, such as `CartPole-v1`; an Atari task gets the settings of IMPALA
    (Espeholt et al. 2018), see `podracer.envs.host.atari`.

    `options` are EnvPool's own for the task, such as `max_episode_steps`, and replace `IMPALA`.
    Raises `ConfigError` where EnvPool is not installed, for an unknown task or option, and where
    actions are neither discrete nor bounded.
    """
    atari = _is_atari(task)
    chosen = IMPALA | options if atari else options
    return EnvPool(task, tuple(sorted(chosen.items())), atari, atari)


@dataclasses.dataclass(frozen=True)
class EnvPool:
    """One task and its options. Makes `HostEnvironment`s.

    Observations are EnvPool's, f64 as f32 and i64 as i32, and of Atari with the channels last:
    u8 `[84, 84, 4]`.
    """

    task: str
    options: tuple[tuple[str, Any], ...] = ()
    life_loss_ends_episode: bool = False  # Atari only
    clip_rewards: bool = False  # of each step to [-1, 1]

    def __post_init__(self) -> None:
        _load(self.task, self.options)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.task, self.options)

    def for_evaluation(self) -> EnvPool:
        """The same with whole games as episodes and unclipped rewards; Atari's alone differs."""
        return dataclasses.replace(self, life_loss_ends_episode=False, clip_rewards=False)

    def make(self, num_envs: int, num_threads: int) -> EnvPoolBatch:
        """`num_envs` of them on `num_threads` threads of EnvPool."""
        return EnvPoolBatch(self, num_envs, num_threads)


class EnvPoolBatch:
    """B rows of EnvPool, a `HostEnvironment`. Observations are never overwritten."""

    def __init__(self, envpool: EnvPool, num_envs: int, num_threads: int) -> None:
        self._envpool = envpool
        self._num_envs, self._num_threads = num_envs, num_threads
        self._spec = envpool.spec
        self._atari = _is_atari(envpool.task)
        flags = envpool.life_loss_ends_episode, envpool.clip_rewards
        self._games = Games(num_envs, *flags)
        self._pool: Any = None

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """New episodes, `[B, ...]`, in a new pool: EnvPool takes seeds nowhere else."""
        self.close()
        self._pool = _library().make_gymnasium(
            self._envpool.task,
            num_envs=self._num_envs,
            num_threads=self._num_threads,
            seed=row_seeds(seed, indices, start).tolist(),
            **dict(self._envpool.options),
        )
        observation, info = self._pool.reset()
        return self._games.begin(self._observation(observation), self._lives(info))

    def step(self, action: np.ndarray) -> TimeStep:
        """One step, `[B, ...]`. Raises `EnvironmentFault` for an action that does not exist."""
        if isinstance(self._spec.action, Discrete):
            action = checked_actions(action, self._spec.action.num_actions)
        observation, reward, terminated, truncated, info = self._pool.step(np.asarray(action))
        ended = terminated | truncated
        terminal = ended & info["terminated"].astype(bool) if "terminated" in info else terminated
        return self._games.timestep(
            self._observation(observation), reward, terminal, truncated, self._lives(info)
        )

    def scores(self) -> list[tuple[float, int]]:
        """(unclipped return, steps) of the whole episodes that ended since the last call."""
        return self._games.scores()

    def close(self) -> None:
        self._pool = None  # its destructor joins the threads

    def _lives(self, info: dict[str, Any]) -> np.ndarray:
        return info["lives"] if self._atari else np.zeros(self._num_envs, np.int32)

    def _observation(self, observation: PyTree) -> PyTree:
        if self._atari:
            return np.moveaxis(observation, 1, -1)  # a view, see `AtariBatch`
        return jax.tree.map(
            lambda leaf, array: leaf.astype(array.dtype, copy=False),
            observation,
            self._spec.observation,
        )


@functools.cache
def _load(task: str, options: tuple[tuple[str, Any], ...]) -> EnvironmentSpec:
    atari = _is_atari(task)
    known = [key for key in _make_spec(task)._config_keys if key not in OURS]
    for key, _ in options:
        if key not in known:
            raise ConfigError(f"envpool:{task} has no option {key!r}: {nearest(key, known)}")
    spec = _make_spec(task, **dict(options))
    observation = _arrays(spec.observation_space)
    if atari:
        channels, height, width = observation.shape
        chosen = dict(options)
        stacked = chosen["gray_scale"] and chosen["stack_num"] > 1
        observation = ArraySpec((height, width, channels), observation.dtype, stacked)
    return EnvironmentSpec(f"envpool:{task}", observation, _action(task, spec.action_space))


def _library(module: str = "envpool") -> Any:
    """EnvPool itself, of which a type checker need not know."""
    return importlib.import_module(module)


def _is_atari(task: str) -> bool:
    """Raises `ConfigError` where EnvPool is not installed and for an unknown task."""
    try:
        _library()
        registry = _library("envpool.registration").registry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"envpool:{task} needs the package {error.name}: pip install envpool."
        ) from error
    if task not in registry.specs:
        raise ConfigError(f"EnvPool has no task {task!r}: {nearest(task, registry.specs)}")
    return registry.specs[task][0] == "envpool.atari"


def _make_spec(task: str, **options: Any) -> Any:
    try:
        return _library().make_spec(task, **options)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".:")
        raise ConfigError(f"EnvPool cannot make {task!r}: {reason}.") from error


def _action(task: str, space: Any) -> Discrete | Continuous:
    if getattr(space, "start", None) == 0:
        return Discrete(int(space.n))
    if getattr(space, "dtype", None) in (np.float32, np.float64):
        low, high = space.low, space.high
        if low.ndim == 1 and np.isfinite([low, high]).all():
            return Continuous(tuple(low.tolist()), tuple(high.tolist()))
    raise ConfigError(
        f"envpool:{task} has actions of the kind {space}: neither discrete nor bounded."
    )


def _arrays(space: Any) -> Any:
    """A gymnasium space as `ArraySpec`s."""
    if hasattr(space, "spaces"):
        return {key: _arrays(inner) for key, inner in space.spaces.items()}
    return ArraySpec(space.shape, NARROW.get(space.dtype, space.dtype))
