"""Games of PettingZoo's parallel API, whose agents share one policy: rows of a batch on the host.

`agents_as_rows` does the same for games in JAX. A game needs only the methods of PettingZoo's
`ParallelEnv`; all of its agents have the same spaces. An agent that is over has no part in the
game: its row is cut until the game begins again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import podracer
from podracer.types import action_mask


@dataclasses.dataclass(frozen=True)
class ParallelGames:
    """Factory of batches of a game: rows `i n` to `i n + n - 1` are the n agents of one."""

    game: Callable[[], Any]
    """Class or function that makes one game."""
    by_team: bool = False
    """Whether rows get the mean reward of all, to the end of the game."""

    def __post_init__(self) -> None:
        inspect_game(self.game)

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        return inspect_game(self.game)[0]

    @property
    def num_agents(self) -> int:
        return inspect_game(self.game)[1]

    def for_evaluation(self) -> ParallelGames:
        """Return the games whose returns belong to teams."""
        return dataclasses.replace(self, by_team=True)

    def make(self, num_envs: int, num_threads: int) -> GameBatch:
        if num_envs % self.num_agents:
            raise podracer.ConfigError(
                f"{self.spec.name}: {num_envs} rows cannot be shared by games of {self.num_agents} "
                f"agents: take a multiple of {self.num_agents}."
            )
        return GameBatch(self, num_envs // self.num_agents)


class GameBatch:
    """Games that one thread steps, one after the other."""

    def __init__(self, factory: ParallelGames, num_games: int) -> None:
        self.n, self.by_team = factory.num_agents, factory.by_team
        actions: Any = factory.spec.action
        self.start = actions.start  # number of the game's first action
        self.games = [factory.game() for _ in range(num_games)]
        rows = num_games * self.n
        self.observation = jax.tree.map(
            lambda x: np.zeros((rows, *x.shape), x.dtype), factory.spec.observation
        )

    def reset(self, seed: int, indices: np.ndarray, start: int) -> podracer.TimeStep:
        for i, game in enumerate(self.games):
            words = np.random.SeedSequence([seed, int(indices[i * self.n]), start])
            self.write(i, game.reset(seed=int(words.generate_state(1)[0] >> 1))[0])
        self.finished = np.zeros((len(self.games), self.n), bool)
        return self.timestep(~self.finished, self.finished, 0 * self.finished, ~self.finished)

    def step(self, action: np.ndarray) -> podracer.TimeStep:
        action = np.asarray(action).reshape(len(self.games), self.n)
        first, last = np.zeros((2, len(self.games), self.n), bool)
        reward, discount = np.zeros(first.shape), np.ones(first.shape)
        for i, game in enumerate(self.games):
            if self.finished[i].all():  # in the step before
                self.write(i, game.reset()[0])
                first[i], self.finished[i] = True, False
                continue
            playing = [(k, game.possible_agents[k]) for k in np.flatnonzero(~self.finished[i])]
            observations, rewards, terminals, timeouts, _ = game.step(
                {name: self.start + int(action[i, k]) for k, name in playing}
            )
            self.write(i, observations)
            first[i] = last[i] = self.finished[i]  # the rows of those who are over are cut
            for k, name in playing:
                reward[i, k], discount[i, k] = rewards[name], not terminals[name]
                last[i, k] = terminals[name] or timeouts[name]
            is_timeout = (last[i] & ~first[i] & (discount[i] > 0)).any()
            self.finished[i] = last[i]
            if self.by_team:
                is_over = last[i].all()
                reward[i], first[i], last[i] = reward[i].mean(), False, is_over
                discount[i] = is_timeout or not is_over
                if (mask := action_mask(self.observation)) is not None:  # the dead may have none
                    mask.reshape(*last.shape, -1)[i][self.finished[i]] = True
        return self.timestep(first, last, reward, discount)

    def write(self, i: int, observations: dict[str, Any]) -> None:
        """Write the observations of a game's agents into its rows; others stay."""
        for k, name in enumerate(self.games[i].possible_agents):
            if name in observations:
                row = i * self.n + k

                def put(array: np.ndarray, value: Any, row: int = row) -> None:
                    array[row] = value

                jax.tree.map(put, self.observation, observations[name])

    def timestep(self, first: Any, last: Any, reward: Any, discount: Any) -> podracer.TimeStep:
        def rows(x: Any, dtype: Any) -> np.ndarray:
            return np.array(x, dtype).reshape(-1)

        return podracer.TimeStep(
            observation=self.observation,
            reward=rows(reward, np.float32),  # type: ignore[arg-type]
            discount=rows(discount, np.float32),  # type: ignore[arg-type]
            first=rows(first, bool),  # type: ignore[arg-type]
            last=rows(last, bool),  # type: ignore[arg-type]
        )

    def close(self) -> None:
        for game in self.games:
            game.close()


@functools.cache
def inspect_game(make: Callable[[], Any]) -> tuple[podracer.EnvironmentSpec, int]:
    """Return what an agent observes and does, and the number of agents."""
    game, name = make(), getattr(make, "__name__", "parallel_games")
    spaces = [(game.observation_space(x), game.action_space(x)) for x in game.possible_agents]
    game.close()
    observation, action = spaces[0]
    is_discrete = hasattr(action, "start") and action.shape == ()
    if any(space != spaces[0] for space in spaces) or not is_discrete:
        raise podracer.ConfigError(f"{name}: all agents must have the same discrete actions.")
    actions = podracer.Discrete(int(action.n), int(action.start))
    return podracer.EnvironmentSpec(name, to_specs(observation), actions), len(spaces)


def to_specs(space: Any) -> Any:
    """Return the specification of observations of a space of Gymnasium: Box, or Dict of them.

    An entry `action_mask` becomes the mask that agents obey.
    """
    if hasattr(space, "spaces"):
        specs = {name: to_specs(part) for name, part in space.spaces.items()}
        if "action_mask" in specs:
            specs["action_mask"] = podracer.ArraySpec(specs["action_mask"].shape, np.bool_)
        return specs
    is_double = space.dtype == np.float64
    return podracer.ArraySpec(space.shape, np.float32 if is_double else space.dtype)
