"""Any single-player task of EnvPool (Weng et al. 2022): Atari, classic control, MuJoCo and more.

EnvPool restarts a row in the step after its end, as a `HostEnvironment` does. Its Python layer
reports a termination where an episode ends before the limit of steps. Tasks that also say which
ends are terminal (`info["terminated"]`: Atari, MuJoCo Playground) are believed. Where any
other task ends by itself in the very step of its limit, EnvPool reports only the time-out.

The asynchronous mode is not used: several actor threads serve the same purpose and stay
reproducible: the order of its rows depends on the scheduler.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from podracer.envs.common import check_known, narrower
from podracer.envs.host.atari import TimestepBuilder, check_actions, row_seeds
from podracer.errors import ConfigError
from podracer.types import ArraySpec, Continuous, Discrete, EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import import_suite, refusing

IMPALA_OPTIONS = {
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
# Options that the adapter sets itself, or whose effect it reports in another way.
RESERVED_OPTIONS = {
    *("num_envs", "batch_size", "num_threads", "max_num_players", "seed", "env_seed"),
    *("base_path", "task", "gym_reset_return_info"),
    *("episodic_life", "reward_clip", "zero_discount_on_life_loss"),
}


def envpool(task: str, **options: Any) -> EnvPool:
    """Return a task of EnvPool, such as `envpool:CartPole-v1`.

    `options` are EnvPool's own for the task, such as `max_episode_steps`. An Atari task gets the
    settings of IMPALA (Espeholt et al. 2018), which `options` replace; its `use_fire_reset` presses
    FIRE at the start of a game only. Raises `ConfigError` where
    EnvPool is not installed, for an unknown task or option, and where actions are neither discrete
    nor bounded.
    """
    atari = _is_atari(task)
    options = IMPALA_OPTIONS | options if atari else options
    return EnvPool(task, tuple(sorted(options.items())), atari, atari)


envpool.on_host = True  # pyright: ignore[reportFunctionMemberAccess]


@dataclasses.dataclass(frozen=True)
class EnvPool:
    """One task and its options, as `HostEnvironments`.

    Observations are EnvPool's, with f64 as f32 and i64 as i32; those of Atari have the channels
    last: u8 `[84, 84, 4]`.
    """

    task: str
    """Name of the task in EnvPool."""
    options: tuple[tuple[str, Any], ...] = ()
    """Pairs of EnvPool's own options for the task and their values."""
    life_loss_ends_episode: bool = False
    """Whether a lost life ends an episode, without a new game; for Atari only."""
    clip_rewards: bool = False
    """Whether the reward of each step is clipped to [-1, 1]."""

    def __post_init__(self) -> None:
        _load(self.task, self.options)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.task, self.options)

    def for_evaluation(self) -> EnvPool:
        """Return the same task with unclipped rewards and, in Atari, whole games as episodes."""
        return dataclasses.replace(self, life_loss_ends_episode=False, clip_rewards=False)

    def make(self, num_envs: int, num_threads: int) -> EnvPoolBatch:
        """Make `num_envs` rows on `num_threads` threads of EnvPool."""
        return EnvPoolBatch(self, num_envs, num_threads)


class EnvPoolBatch:
    """B rows of EnvPool, as a `HostEnvironment`. Observations are never overwritten."""

    def __init__(self, envpool: EnvPool, num_envs: int, num_threads: int) -> None:
        self._envpool = envpool
        self._num_envs, self._num_threads = num_envs, num_threads
        self._spec = envpool.spec
        self._atari = _is_atari(envpool.task)
        self._timesteps = TimestepBuilder(
            num_envs, envpool.life_loss_ends_episode, envpool.clip_rewards
        )
        self._pool: Any = None

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Begin new episodes, `[B, ...]`, in a new pool: EnvPool takes no seeds later."""
        self.close()
        self._pool = import_suite("envpool", self._spec.name).make_gymnasium(
            self._envpool.task,
            num_envs=self._num_envs,
            num_threads=self._num_threads,
            seed=row_seeds(seed, indices, start).tolist(),
            **dict(self._envpool.options),
        )
        observation, info = self._pool.reset()
        return self._timesteps.after_reset(self._observation(observation), self._lives(info))

    def step(self, action: np.ndarray) -> TimeStep:
        """Step all rows, `[B, ...]`. Raises `EnvironmentFault` for an invalid action."""
        if isinstance(self._spec.action, Discrete):
            action = check_actions(action, self._spec.action.num_actions)
        observation, reward, terminated, truncated, info = self._pool.step(np.asarray(action))
        ended = terminated | truncated
        terminal = ended & info["terminated"].astype(bool) if "terminated" in info else terminated
        return self._timesteps.after_step(
            self._observation(observation), reward, terminal, truncated, self._lives(info)
        )

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
    valid = [key for key in _make_spec(task)._config_keys if key not in RESERVED_OPTIONS]
    for key, _ in options:
        check_known(key, valid, f"envpool:{task} has no option")
    spec = _make_spec(task, **dict(options))
    observation = _array_specs(spec.observation_space)
    if atari:
        channels, height, width = observation.shape
        settings = dict(options)
        frame_stack = settings["gray_scale"] and settings["stack_num"] > 1
        observation = ArraySpec((height, width, channels), observation.dtype, frame_stack)
    return EnvironmentSpec(f"envpool:{task}", observation, _action(task, spec.action_space))


def _is_atari(task: str) -> bool:
    """Return whether a task is of Atari.

    Raises `ConfigError` where EnvPool is not installed and for an unknown task.
    """
    registry = import_suite("envpool.registration", f"envpool:{task}").registry
    check_known(task, registry.specs, "EnvPool has no task")
    return registry.specs[task][0] == "envpool.atari"


def _make_spec(task: str, **options: Any) -> Any:
    errors = (AssertionError, ImportError, RuntimeError, TypeError, ValueError)
    with refusing(f"EnvPool cannot make {task!r}", *errors):
        return import_suite("envpool", f"envpool:{task}").make_spec(task, **options)


def _action(task: str, space: Any) -> Discrete | Continuous:
    if getattr(space, "start", None) == 0:
        return Discrete(int(space.n))
    is_box = getattr(space, "dtype", None) in (np.float32, np.float64) and space.low.ndim == 1
    if is_box and np.isfinite([space.low, space.high]).all():
        return Continuous.within(space.low, space.high)
    raise ConfigError(
        f"envpool:{task} has actions of the kind {space}: neither discrete nor bounded."
    )


def _array_specs(space: Any) -> Any:
    if hasattr(space, "spaces"):
        return {key: _array_specs(inner) for key, inner in space.spaces.items()}
    if hasattr(space, "n") and space.start == 0:
        return ArraySpec((), np.int32, num_values=int(space.n))
    is_pixels = space.dtype == np.uint8 and bool(
        (space.low == 0).all() and (space.high == 255).all()
    )
    return ArraySpec(space.shape, narrower(space.dtype), scaled=is_pixels)
