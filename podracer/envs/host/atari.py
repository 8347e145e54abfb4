"""Atari games on the host, through ale-py's own vector environment: its threads, its ROMs.

The protocol, which is all that makes Atari results comparable (Machado et al. 2018), is the fields
of `Atari`. Two have names: `impala` and `sticky`.

Life losses are shown here and not by ale-py, whose `episodic_life` starts a new game at each. A
lost life that ends a training episode is shown in the form that loses no frame: in one timestep
the reward of the step, `discount` 0 and `first`, with `last` unset. Its observation is both the
end of one episode and the beginning of the next, and the next action is played.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from podracer.io.names import nearest
from podracer.types import (
    ArraySpec,
    ConfigError,
    Discrete,
    EnvironmentFault,
    EnvironmentSpec,
    PyTree,
    TimeStep,
)


def impala(game: str) -> Atari:
    """The training protocol of IMPALA (Espeholt et al. 2018) and, nearly, of DQN before it.

    Up to 30 no-ops begin a game, a lost life ends an episode, rewards are clipped to [-1, 1].
    Raises `ConfigError` as `Atari` does.
    """
    return Atari(game)


def sticky(game: str) -> Atari:
    """The protocol of Machado et al. 2018: chance comes from sticky actions alone, an episode is
    a whole game, and all 18 actions are there. Rewards are clipped for training.

    Raises `ConfigError` as `Atari` does.
    """
    return Atari(
        game,
        noop_max=0,
        repeat_action_probability=0.25,
        life_loss_ends_episode=False,
        full_action_set=True,
    )


@dataclasses.dataclass(frozen=True)
class Atari:
    """One game and the whole protocol; the defaults are IMPALA's. Makes `HostEnvironment`s.

    Observations are u8 `[height, width, stack]`, the newest frame last; in color
    `[height, width, 3 * stack]`. The screens before a game's first are black. Raises `ConfigError`
    where ale-py or gymnasium is not installed and for an unknown game.
    """

    game: str  # ale-py's name, in snake case
    noop_max: int = 30  # a game begins with 0 to this many no-ops, drawn uniformly
    use_fire_reset: bool = False  # press FIRE first, where the game has it; counts as a no-op
    frame_skip: int = 4  # frames that each action is repeated for
    max_pool: bool = True  # observe the maximum of the last two of these
    stack: int = 4  # observations in one
    size: tuple[int, int] = (84, 84)  # height and width, by averages over areas
    grey: bool = True
    repeat_action_probability: float = 0.0  # that a frame ignores the action, for the one before
    life_loss_ends_episode: bool = True
    clip_rewards: bool = True  # of each step to [-1, 1]
    full_action_set: bool = False  # all 18 instead of those with a meaning in the game
    max_frames: int = 108_000  # a game is cut after these: 30 minutes

    def __post_init__(self) -> None:
        _num_actions(self.game, self.full_action_set)

    @property
    def spec(self) -> EnvironmentSpec:
        channels = self.stack * (1 if self.grey else 3)
        return EnvironmentSpec(
            f"atari:{self.game}",
            ArraySpec((*self.size, channels), np.uint8, stacked=self.grey and self.stack > 1),
            Discrete(_num_actions(self.game, self.full_action_set)),
        )

    def for_evaluation(self) -> Atari:
        """The same with whole games as episodes and unclipped rewards."""
        return dataclasses.replace(self, life_loss_ends_episode=False, clip_rewards=False)

    def make(self, num_envs: int, num_threads: int) -> AtariBatch:
        """`num_envs` games on `num_threads` threads of ale-py, at most one per core."""
        return AtariBatch(self, num_envs, num_threads)


class AtariBatch:
    """B games of ale-py, a `HostEnvironment`. Observations are never overwritten.

    Of a game cut at `max_frames` the newest screen shown is not quite the last: ale-py stops
    before it takes that in, and pools the one before with those of the step before.
    """

    def __init__(self, atari: Atari, num_envs: int, num_threads: int) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self._atari = atari
        self._num_actions = _num_actions(atari.game, atari.full_action_set)
        self._games = Games(num_envs, atari.life_loss_ends_episode, atari.clip_rewards)
        self._env: Any = AtariVectorEnv(
            atari.game,
            num_envs,
            num_threads=num_threads,
            max_num_frames_per_episode=atari.max_frames,
            repeat_action_probability=atari.repeat_action_probability,
            full_action_space=atari.full_action_set,
            img_height=atari.size[0],
            img_width=atari.size[1],
            grayscale=atari.grey,
            stack_num=atari.stack,
            frameskip=atari.frame_skip,
            maxpool=atari.max_pool,
            noop_max=atari.noop_max + 1,  # it draws from 0 to one less
            use_fire_reset=atari.use_fire_reset,
            episodic_life=False,
            reward_clipping=False,
        )

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """New games, `[B, ...]`. Takes about 0.1 s a row: ale-py loads the ROM anew."""
        observation, info = self._env.reset(seed=row_seeds(seed, indices, start))
        return self._games.begin(self._channels_last(observation), info["lives"])

    def step(self, action: np.ndarray) -> TimeStep:
        """One step, `[B, ...]`. Raises `EnvironmentFault` for an action that does not exist."""
        action = checked_actions(action, self._num_actions)
        observation, reward, terminal, timeout, info = self._env.step(action)
        return self._games.timestep(
            self._channels_last(observation), reward, terminal, timeout, info["lives"]
        )

    def scores(self) -> list[tuple[float, int]]:
        """(unclipped return, agent steps) of the whole games that ended since the last call."""
        return self._games.scores()

    def close(self) -> None:
        self._env = None  # its destructor joins the threads

    def _channels_last(self, observation: np.ndarray) -> np.ndarray:
        # A view: JAX takes it in as fast as a contiguous array, while numpy would need 0.7 ms to
        # make it one for 32 games.
        if self._atari.grey:
            return np.moveaxis(observation, 1, -1)
        rows, stack, height, width, colors = observation.shape
        return np.moveaxis(observation, 1, 3).reshape(rows, height, width, stack * colors)


class Games:
    """The episodes of B rows that play whole games, and the games' scores.

    A row restarts in the step after its game's end. What a step says is `reward`, `terminal`,
    `timeout` and `lives`, all `[B]`; where no life can be lost, `lives` is constant.
    """

    def __init__(self, rows: int, life_loss_ends_episode: bool, clip_rewards: bool) -> None:
        self._life_loss_ends_episode = life_loss_ends_episode
        self._clip_rewards = clip_rewards
        self._lives = np.zeros(rows, np.int32)
        self._ended = np.ones(rows, bool)
        self._returns = np.zeros(rows, np.float64)
        self._steps = np.zeros(rows, np.int64)
        self._scores: list[tuple[float, int]] = []

    def begin(self, observation: PyTree, lives: np.ndarray) -> TimeStep:
        """The timestep after a reset of all rows."""
        none = np.zeros(len(lives), bool)
        self._ended = ~none
        return self.timestep(observation, np.zeros(len(lives), np.float32), none, none, lives)

    def timestep(
        self,
        observation: PyTree,
        reward: np.ndarray,
        terminal: np.ndarray,
        timeout: np.ndarray,
        lives: np.ndarray,
    ) -> TimeStep:
        """The timestep after a step; a terminal wins where both ends fall together."""
        began, ended = self._ended, terminal | timeout
        # Some games show no life left for some frames before they are over: one end, not two.
        lost = ~began & (lives < self._lives) & (lives > 0) & self._life_loss_ends_episode
        self._lives, self._ended = lives, ended
        self._score(began, ended, reward)
        if self._clip_rewards:
            reward = np.clip(reward, -1, 1)
        discount = 1 - (terminal | lost).astype(np.float32)
        first = began | (lost & ~ended)
        reward = reward.astype(np.float32)
        return TimeStep(observation, reward, discount, first, ended)  # type: ignore[arg-type]

    def scores(self) -> list[tuple[float, int]]:
        """(unclipped return, agent steps) of the games that ended since the last call."""
        scores, self._scores = self._scores, []
        return scores

    def _score(self, began: np.ndarray, ended: np.ndarray, reward: np.ndarray) -> None:
        self._returns = np.where(began, 0, self._returns + reward)
        self._steps = np.where(began, 0, self._steps + 1)
        for row in np.flatnonzero(ended):
            self._scores.append((float(self._returns[row]), int(self._steps[row])))


def row_seeds(seed: int, indices: np.ndarray, start: int) -> np.ndarray:
    """A seed of 31 bits for each row, i64 `[B]`, that depends on nothing but its own index."""
    sequences = (np.random.SeedSequence([seed, int(index), start]) for index in indices)
    return np.array([int(sequence.generate_state(1)[0]) >> 1 for sequence in sequences], np.int64)


def checked_actions(action: np.ndarray, num_actions: int) -> np.ndarray:
    """Discrete actions, i32 `[B]`. Raises `EnvironmentFault` for one that does not exist, which
    would leave ale-py waiting for ever and EnvPool reading beyond its memory."""
    action = np.asarray(action, np.int32)
    if action.min() < 0 or action.max() >= num_actions:
        raise EnvironmentFault(f"Actions must be 0 to {num_actions - 1}, but they are {action}.")
    return action


@functools.cache
def _num_actions(game: str, full: bool) -> int:
    try:
        import ale_py
        from ale_py import roms, vector_env  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'atari:{game} needs the package {error.name}: pip install "podracer[atari]".'
        ) from error
    games = roms.get_all_rom_ids()
    if game not in games:
        raise ConfigError(f"ale-py has no game {game!r}: {nearest(game, games)}")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # it greets on stderr
    ale = ale_py.ALEInterface()
    ale.loadROM(str(roms.get_rom_path(game)))
    return len(ale.getLegalActionSet() if full else ale.getMinimalActionSet())
