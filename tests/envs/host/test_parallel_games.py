"""Games of PettingZoo's parallel API as rows of a batch, from the examples."""

import copy
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

import podracer

FILE = Path(__file__).parents[3] / "examples" / "extensions" / "parallel_games.py"
SPEC = importlib.util.spec_from_file_location("parallel_games", FILE)
parallel_games = sys.modules["parallel_games"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(parallel_games)
ParallelGames = parallel_games.ParallelGames


class Hunt:
    """Three agents who may rest (0) or hunt (1), paid 3, 2 and 1; agent i dies after i + 1 hunts.

    After six steps the game is over for all. Agents without health have no action.
    """

    possible_agents = ("a", "b", "c")

    def observation_space(self, agent):
        mask = spaces.MultiBinary(2)
        return spaces.Dict({"observation": spaces.Box(0, 6, (5,)), "action_mask": mask})

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        self.health = {"a": 1, "b": 2, "c": 3}
        return {agent: self.observe(agent) for agent in self.agents}, {}

    def observe(self, agent):
        i = self.possible_agents.index(agent)
        values = [*np.eye(3)[i], self.health[agent], self.time / 6]
        mask = np.full(2, self.health[agent] > 0, np.int8)
        return {"observation": np.array(values, np.float64), "action_mask": mask}

    def step(self, actions):
        assert set(actions) == set(self.agents), "those who are over do not act"
        self.time += 1
        rewards, terminals, timeouts = {}, {}, {}
        for agent, action in actions.items():
            self.health[agent] -= action
            rewards[agent] = action * (3 - self.possible_agents.index(agent))
            terminals[agent] = self.health[agent] == 0
            timeouts[agent] = self.time >= 6 and not terminals[agent]
        observations = {agent: self.observe(agent) for agent in self.agents}
        self.agents = [x for x in self.agents if not (terminals[x] or timeouts[x])]
        return observations, rewards, terminals, timeouts, {}

    def close(self):
        pass


def play(games, actions, num_envs=3):
    batch = games.make(num_envs, 1)
    timestep = batch.reset(0, np.arange(num_envs), 0)
    timesteps = [timestep]
    for action in actions:
        timesteps.append(copy.deepcopy(batch.step(np.resize(action, num_envs))))
    batch.close()
    return timesteps


def test_the_rows_of_the_dead_are_cut_until_the_game_begins_again():
    timesteps = play(ParallelGames(Hunt), [[1, 1, 0]] * 8)
    reward = np.stack([x.reward for x in timesteps])
    first = np.stack([x.first for x in timesteps])
    last = np.stack([x.last for x in timesteps])
    discount = np.stack([x.discount for x in timesteps])
    assert reward.T.tolist() == [
        [0, 3, 0, 0, 0, 0, 0, 0, 3],
        [0, 2, 2, 0, 0, 0, 0, 0, 2],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert last.T.astype(int).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 0, 1],
        [0, 0, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
    ]
    assert first.T.astype(int).tolist() == [
        [1, 0, 1, 1, 1, 1, 1, 1, 0],
        [1, 0, 0, 1, 1, 1, 1, 1, 0],
        [1, 0, 0, 0, 0, 0, 0, 1, 0],
    ]
    assert np.argwhere(discount == 0).tolist() == [[1, 0], [2, 1], [8, 0]]


class HuntFromOne(Hunt):
    def action_space(self, agent):
        return spaces.Discrete(2, start=1)

    def step(self, actions):
        return super().step({agent: action - 1 for agent, action in actions.items()})


class HuntOfButtons(Hunt):
    def action_space(self, agent):
        return spaces.MultiBinary(2)


def test_actions_have_the_numbers_of_the_game():
    timesteps = [play(ParallelGames(game), [[1, 1, 0]] * 3) for game in (Hunt, HuntFromOne)]
    assert np.array_equal(*[[x.reward for x in steps] for steps in timesteps])
    assert ParallelGames(HuntFromOne).spec.action.start == 1
    with pytest.raises(podracer.ConfigError, match="the same discrete actions"):
        ParallelGames(HuntOfButtons)


def test_an_evaluation_counts_the_mean_return_of_a_team_to_the_end_of_its_game():
    games = ParallelGames(Hunt).for_evaluation()
    timesteps = play(games, [[1, 1, 1]] * 4, num_envs=6)
    reward = np.stack([x.reward for x in timesteps])
    assert reward.sum(axis=0).tolist() == pytest.approx([10 / 3] * 6)
    assert [x.last.tolist() for x in timesteps] == [[k == 3] * 6 for k in range(5)]
    assert [x.discount.tolist() for x in timesteps] == [[float(k != 3)] * 6 for k in range(5)]
    assert timesteps[4].first.all()
    masks = [x.observation["action_mask"] for x in timesteps[1:]]
    assert all(mask.all() for mask in masks)  # also of the dead
    resting = play(games, [[0, 0, 0]] * 6)
    assert resting[6].last.all()
    assert resting[6].discount.all()  # a time-out


def test_a_game_of_pettingzoo_plays():
    """Rock, paper, scissors of the real package: two agents, a fixed number of rounds."""
    rps = pytest.importorskip("pettingzoo.classic.rps_v2", exc_type=ImportError)
    games = ParallelGames(rps.parallel_env)
    assert games.num_agents == 2
    timesteps = play(games, [[0, 1]] * 20, num_envs=4)
    reward = np.stack([x.reward for x in timesteps])
    assert (reward[:, ::2] == -reward[:, 1::2]).all()
    assert reward.any()
    assert np.stack([x.last for x in timesteps]).sum(axis=0).tolist() == [1, 1, 1, 1]
