"""Atari games on the host, through ale-py's own vector environment, with its threads and ROMs.

Results on Atari are comparable only under the same evaluation protocol (Machado et al. 2018). The
fields of `Atari` are the whole protocol, and three protocols have names: `impala`, `sticky` and
`machado`.

A lost life that ends a training episode is reported in one timestep that loses no frame: the
reward of the step, `discount` 0 and `first`, with `last` unset. Its observation is both the end of
one episode and the beginning of the next, and the next action is played. ale-py's own
`episodic_life` is not used, because it starts a new game at each lost life.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from podracer.envs.common import check_known, import_optional
from podracer.errors import ConfigError, EnvironmentFault
from podracer.fields import bounded, check_ranges
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, PyTree, TimeStep


def impala(game: str, **settings: Any) -> Atari:
    """Return a game under the training protocol of IMPALA (Espeholt et al. 2018).

    Up to 30 no-ops begin a game, a lost life ends an episode, rewards are clipped to [-1, 1]; DQN's
    protocol is nearly the same. Several games have all 18 actions. `settings` replace fields of
    `Atari`. Raises `ConfigError` as `Atari` does.
    """
    return Atari(game, **{"full_action_set": "+" in game, **settings})


def sticky(game: str, **settings: Any) -> Atari:
    """Return a game with sticky actions under the protocol of Cleanba (Huang et al. 2024).

    Sticky actions are the only source of randomness, an episode is a whole game, and all 18 actions
    are available, as Machado et al. 2018 recommend; frame skip and time-out are DQN's. Dopamine
    (Castro et al. 2018) differs in `full_action_set=False`. Rewards are clipped for training.
    `settings` replace fields of `Atari`. Raises `ConfigError` as `Atari` does.
    """
    protocol = {
        "noop_max": 0,
        "repeat_action_probability": 0.25,
        "life_loss_ends_episode": False,
        "full_action_set": True,
    }
    return Atari(game, **{**protocol, **settings})


def machado(game: str, **settings: Any) -> Atari:
    """Return a game under the protocol of Machado et al. 2018: `sticky`, but for two fields.

    An action is repeated for 5 frames, and a game is cut after 18,000 frames, 5 minutes of play.
    `settings` replace fields of `Atari`. Raises `ConfigError` as `Atari` does.
    """
    return sticky(game, **{"frame_skip": 5, "max_frames": 18_000, **settings})


@dataclasses.dataclass(frozen=True)
class Atari:
    """One game under one protocol, as `HostEnvironments`; the defaults are IMPALA's.

    Observations are u8 `[height, width, stack]`, the newest frame last; in color
    `[height, width, 3 * stack]`. Frames before a game's first are black, as in dopamine, and a lost
    life leaves the stack as it is. Several games play in one batch, row i the game `i % n` of the
    n, and observations have a `picture` and the number of the game, `task`. Raises `ConfigError`
    where ale-py or gymnasium is not installed and for an unknown game.
    """

    game: str
    """Name of the game in ale-py, in snake case, or of several joined by plus signs."""
    noop_max: int = bounded(30)
    """Largest number of no-ops that begin a game, drawn from 0 on; DQN's wrappers draw from 1."""
    use_fire_reset: bool = False
    """Whether FIRE is pressed, where a game has it, at its start and after each lost life."""
    frame_skip: int = bounded(4, low=1)
    """Emulator frames that each action is repeated for."""
    max_pool: bool = True
    """Whether an observation is the maximum over the last two frames of a step."""
    stack: int = bounded(4, low=1)
    """Observations of consecutive steps that are stacked in one."""
    size: tuple[int, int] = bounded((84, 84), low=1)
    """Height and width of observations, resized by averages over areas."""
    grayscale: bool = True
    """Whether observations are gray, with one channel for each stacked frame."""
    repeat_action_probability: float = bounded(0.0, high=1.0)
    """Probability that a frame repeats the previous action (sticky actions), in [0, 1]."""
    life_loss_ends_episode: bool = True
    """Whether a lost life ends an episode, without a new game."""
    clip_rewards: bool = True
    """Whether the reward of each step is clipped to [-1, 1]."""
    full_action_set: bool = False
    """Whether all 18 actions are available, not only those with a meaning in the game."""
    max_frames: int = bounded(108_000, low=1)
    """Emulator frames, without no-ops, after which a time-out cuts a game: 30 minutes of play."""

    def __post_init__(self) -> None:
        check_ranges(self, f"atari:{self.game}")
        if not (isinstance(self.size, tuple) and len(self.size) == 2):
            raise ConfigError(f"size must be a tuple such as (84, 84), not {self.size!r}.")
        for game in self.games:
            game_actions(game, self.full_action_set)
        if len(self.games) > 1 and not self.full_action_set:
            raise ConfigError(
                f"atari:{self.game} needs full_action_set=true, as games share their actions."
            )

    @property
    def games(self) -> tuple[str, ...]:
        """Names of the games."""
        return tuple(self.game.split("+"))

    @property
    def spec(self) -> EnvironmentSpec:
        channels = self.stack * (1 if self.grayscale else 3)
        frame_stack = self.grayscale and self.stack > 1
        observation: PyTree = ArraySpec((*self.size, channels), np.uint8, frame_stack)
        if len(self.games) > 1:
            task = ArraySpec((), np.int32, num_values=len(self.games))
            observation = {"picture": observation, "task": task}
        num_actions = len(game_actions(next(iter(self.games)), self.full_action_set))
        return EnvironmentSpec(f"atari:{self.game}", observation, Discrete(num_actions))

    def for_evaluation(self) -> Atari:
        """Return the same game with whole games as episodes and unclipped rewards."""
        return dataclasses.replace(self, life_loss_ends_episode=False, clip_rewards=False)

    def make(self, num_envs: int, num_threads: int) -> AtariBatch:
        """Make `num_envs` games on `num_threads` threads of ale-py, at most one per core."""
        return AtariBatch(self, num_envs, num_threads)


class AtariBatch:
    """B rows of ale-py, as a `HostEnvironment`. Observations are never overwritten.

    When a game is cut at `max_frames`, ale-py leaves out the very last frame: its final observation
    pools the frame before with those of the previous step.
    """

    def __init__(self, atari: Atari, num_envs: int, num_threads: int) -> None:
        self._atari, self._num_envs, self._num_threads = atari, num_envs, num_threads
        actions = game_actions(atari.games[0], atari.full_action_set)
        self._num_actions = len(actions)
        self._fire = actions.index("FIRE") if atari.use_fire_reset and "FIRE" in actions else None
        self._timesteps = TimestepBuilder(
            num_envs,
            atari.life_loss_ends_episode,
            atari.clip_rewards,
            life_loss_restarts=self._fire is not None,
        )
        self._task = np.zeros(num_envs, np.int32)  # number of each row's game
        self._vectors: dict[int, tuple[Any, Any]] = {}  # rows and environments by game

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Begin new games, `[B, ...]`. Takes about 0.1 s a row, as ale-py loads the ROM again."""
        task = (np.asarray(indices) % len(self._atari.games)).astype(np.int32)
        if not self._vectors or (task != self._task).any():
            self._task, self._vectors = task, self._make_vectors(task)
        seeds = row_seeds(seed, indices, start)
        parts = [env.reset(seed=seeds[rows]) for rows, env in self._vectors.values()]
        observation, lives = self._join([(picture, info["lives"]) for picture, info in parts])
        return self._timesteps.after_reset(self._observation(observation), lives)

    def step(self, action: np.ndarray) -> TimeStep:
        """Step all rows, `[B, ...]`. Raises `EnvironmentFault` for an invalid action."""
        action = check_actions(action, self._num_actions)
        if self._fire is not None:
            action = np.where(self._timesteps.life_lost, np.int32(self._fire), action)
        for rows, env in self._vectors.values():
            env.send(action[rows])
        parts = [env.recv() for _, env in self._vectors.values()]
        parts = [(*part[:4], part[4]["lives"]) for part in parts]
        pictures, *signals = self._join(parts)
        return self._timesteps.after_step(self._observation(pictures), *signals)

    def close(self) -> None:
        self._vectors = {}  # destructors join the threads

    def _make_vectors(self, task: np.ndarray) -> dict[int, tuple[Any, Any]]:
        numbers = np.unique(task).tolist()
        if len(numbers) == 1:
            return {numbers[0]: (slice(None), self._make(numbers[0], self._num_envs))}
        rows = {number: np.flatnonzero(task == number) for number in numbers}
        return {number: (x, self._make(number, len(x))) for number, x in rows.items()}

    def _make(self, number: int, num_envs: int) -> Any:
        from ale_py.vector_env import AtariVectorEnv

        atari = self._atari
        return AtariVectorEnv(
            atari.games[number],
            num_envs,
            num_threads=max(1, self._num_threads // len(atari.games)),
            max_num_frames_per_episode=atari.max_frames,
            repeat_action_probability=atari.repeat_action_probability,
            full_action_space=atari.full_action_set,
            img_height=atari.size[0],
            img_width=atari.size[1],
            grayscale=atari.grayscale,
            stack_num=atari.stack,
            frameskip=atari.frame_skip,
            maxpool=atari.max_pool,
            noop_max=atari.noop_max + 1,  # it draws from 0 to one less
            use_fire_reset=atari.use_fire_reset,
            episodic_life=False,
            reward_clipping=False,
        )

    def _join(self, parts: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
        """Return arrays `[B, ...]` of all rows from the arrays of each game."""
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([rows for rows, _ in self._vectors.values()]))
        return tuple(np.concatenate(arrays)[order] for arrays in zip(*parts, strict=True))

    def _observation(self, pictures: np.ndarray) -> PyTree:
        # A view: of a stack the actor sends the newest frame alone, which is contiguous.
        if self._atari.grayscale:
            pictures = np.moveaxis(pictures, 1, -1)
        else:
            rows, stack, height, width, colors = pictures.shape
            pictures = np.moveaxis(pictures, 1, 3).reshape(rows, height, width, stack * colors)
        several = len(self._atari.games) > 1
        return {"picture": pictures, "task": self._task} if several else pictures


class TimestepBuilder:
    """Timesteps of B rows that play whole games and restart in the step after a game's end.

    A row's game may be cut into several episodes, one for each life. Where no life can be lost,
    `lives` is constant. With `life_loss_restarts` the environment ignores the action after a lost
    life, so that an episode ends with the life (`last`) and the next begins in the step after.
    """

    def __init__(
        self,
        num_rows: int,
        life_loss_ends_episode: bool,
        clip_rewards: bool,
        *,
        life_loss_restarts: bool = False,
    ) -> None:
        self._life_loss_ends_episode = life_loss_ends_episode
        self._clip_rewards = clip_rewards
        self._life_loss_restarts = life_loss_restarts
        self.life_lost = np.zeros(num_rows, bool)  # in the previous step, while the game goes on
        self._lives = np.zeros(num_rows, np.int32)
        self._game_ended = np.ones(num_rows, bool)  # in the previous step: this one restarts

    def after_reset(self, observation: PyTree, lives: np.ndarray) -> TimeStep:
        """Return the timestep after a reset of all rows; `lives` is i32 `[B]`."""
        false = np.zeros(len(lives), bool)
        self._game_ended, self.life_lost = ~false, false
        return self.after_step(observation, np.zeros(len(lives), np.float32), false, false, lives)

    def after_step(
        self,
        observation: PyTree,
        reward: np.ndarray,
        terminal: np.ndarray,
        timeout: np.ndarray,
        lives: np.ndarray,
    ) -> TimeStep:
        """Return the timestep after a step; all arguments are `[B, ...]`.

        Where both ends coincide it is a terminal.
        """
        restarted, game_ended = self._game_ended, terminal | timeout
        # Some games report zero lives for some frames before their end: one end, not two.
        life_lost = ~restarted & (lives < self._lives) & (lives > 0)
        life_ended = life_lost & self._life_loss_ends_episode
        reward = np.clip(reward, -1, 1) if self._clip_rewards else reward
        reward = reward.astype(np.float32)
        discount = 1 - (terminal | life_ended).astype(np.float32)
        if self._life_loss_restarts and self._life_loss_ends_episode:
            first, last = restarted | self.life_lost, game_ended | life_ended
            reward = np.where(first, np.float32(0), reward)
        else:
            first, last = restarted | (life_ended & ~game_ended), game_ended
        self._lives, self._game_ended = lives, game_ended
        self.life_lost = life_lost & ~game_ended
        return TimeStep(observation, reward, discount, first, last)  # type: ignore[arg-type]


def row_seeds(seed: int, indices: np.ndarray, start: int) -> np.ndarray:
    """Return a seed of 31 bits for each row, i64 `[B]`, that depends only on its own index."""
    sequences = (np.random.SeedSequence([seed, int(index), start]) for index in indices)
    return np.array([int(sequence.generate_state(1)[0]) >> 1 for sequence in sequences], np.int64)


def check_actions(action: np.ndarray, num_actions: int) -> np.ndarray:
    """Return discrete actions as i32 `[B]`. Raises `EnvironmentFault` for one that does not exist.

    With such an action ale-py would wait forever.
    """
    action = np.asarray(action, np.int32)
    if action.min() < 0 or action.max() >= num_actions:
        raise EnvironmentFault(f"Actions must be 0 to {num_actions - 1}, but they are {action}.")
    return action


@functools.cache
def game_actions(game: str, full: bool) -> tuple[str, ...]:
    """Return the names of a game's actions in order. Raises `ConfigError` for an unknown game."""
    ale_py, roms, _ = (
        import_optional(module, f"atari:{game}", "atari")
        for module in ("ale_py", "ale_py.roms", "ale_py.vector_env")
    )
    check_known(game, roms.get_all_rom_ids(), "ale-py has no game")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # it prints a greeting to stderr
    ale = ale_py.ALEInterface()
    ale.loadROM(str(roms.get_rom_path(game)))
    actions = ale.getLegalActionSet() if full else ale.getMinimalActionSet()
    return tuple(action.name for action in actions)
