"""Prioritized Level Replay (Jiang et al. 2021, arXiv 2010.03934) on mazes: a recipe's callback.

An episode is in one maze of 256, drawn by `weights`, numbers that a run can change. Each copy of
the environment counts its episodes and successes by level, so that the callback needs no frames of
its own. A level's score is the mean distance of its returns from their mean, an L1 error of the
value at the start; the paper takes the errors of all steps. Evaluations are in 1,000 other mazes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import podracer
from podracer.envs.worlds import Worlds

LEVELS, WORLDS = 256, Worlds(("maze",))  # one goal and up to 30 walls on 9 x 9 cells
EQUAL = np.full(LEVELS, 1 / LEVELS, np.float32)


@podracer.struct
class Mazes:
    """Mazes that restart in another one. Observation: f32 `[27]`, walls near, way to the goal."""

    weights: Any = dataclasses.field(default_factory=lambda: EQUAL)
    first: int = podracer.static(default=0)  # number of the first level
    spec = podracer.EnvironmentSpec("mazes", podracer.ArraySpec((27,)), podracer.Discrete(5))

    def for_evaluation(self) -> "Mazes":
        return Mazes(np.full(1000, 1 / 1000, np.float32), LEVELS)

    def reset(self, key: jax.Array) -> tuple[Any, podracer.TimeStep]:
        level = jax.random.categorical(key, jnp.log(self.weights))
        world = WORLDS.draw(jax.random.fold_in(jax.random.key(0), self.first + level))
        maze, _ = WORLDS.enter(key, world)
        return (level, maze, jnp.zeros((len(self.weights), 2))), podracer.restart(look(maze))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, podracer.TimeStep]:
        level, maze, counts = state
        maze, timestep = WORLDS.step(key, maze, action)
        ends = (timestep.discount == 0) | timestep.last  # a time-out is a failure here
        counts = counts.at[level].add(jnp.where(ends, jnp.stack([1.0, timestep.reward]), 0.0))
        fresh = self.reset(key)[0][:2]
        level, maze = jax.tree.map(lambda *x: jnp.where(ends, *x), fresh, (level, maze))
        discount, last = (~ends).astype(jnp.float32), jnp.zeros_like(ends)
        return (level, maze, counts), podracer.TimeStep(
            look(maze), timestep.reward, discount, first=ends, last=last
        )


def look(maze: Any) -> jax.Array:
    cells, (row, column) = jnp.arange(81), jnp.divmod(maze.cell, 9)
    walls = maze.world.walls[cells // 32] >> (cells % 32).astype(jnp.uint32) & 1
    walls = jnp.pad(walls.reshape(9, 9), 2, constant_values=1).astype(jnp.float32)
    goal = jnp.stack(jnp.divmod(maze.objects[0], 9)) - jnp.stack([row, column])
    return jnp.append(jax.lax.dynamic_slice(walls, (row, column), (5, 5)), goal / 9)


class LevelReplay(podracer.Callback):
    """Draws levels by their scores, and a share of them by the time since they were played."""

    def __init__(self, share: str) -> None:
        self.share = float(share)
        self.counts, self.recent, self.played = np.zeros((3, LEVELS, 2))

    def check(self, run: Any) -> None:
        if run.experiment.pods:  # `run.change` would say so after the first compilation
            raise podracer.ConfigError("level_replay draws the levels of one run: train each seed.")

    def saved(self) -> dict[str, Any]:
        return {"level_replay": [x.tolist() for x in (self.counts, self.recent, self.played)]}

    def restore(self, run: Any, saved: Any) -> None:
        self.counts, self.recent, self.played = map(np.array, saved["level_replay"])

    def on_boundary(self, run: Any) -> None:
        if run.is_due:
            counts = np.asarray(run.state.actor.env_state[2], np.float64).sum(axis=0)
            new, self.counts = counts - self.counts, counts
            self.recent = self.recent / 2 + new  # what is older counts less
            self.played[new[:, 0] > 0] = run.totals.updates
            solved = (self.recent[:, 1] + 1) / (self.recent[:, 0] + 2)
            scores, ages = solved * (1 - solved), run.totals.updates - self.played[:, 0]
            scores, ages = scores / scores.sum(), ages / max(ages.sum(), 1)
            weights = (1 - self.share) * scores + self.share * ages
            run.change({"environment": {"weights": weights / weights.sum()}})


def maze_random() -> podracer.Experiment:
    """PPO in mazes of 256 levels that are equally likely: domain randomization."""
    return podracer.Experiment(
        environment="mazes",
        agent=podracer.PPO(learning_rate=1e-3),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=5),
        frames=1_000_000,
        evaluations=40,
        evaluation_episodes=64,
        evaluation_policy="sampled",
    )


def maze_plr() -> podracer.Experiment:
    """PPO in the same mazes, drawn by Prioritized Level Replay."""
    return dataclasses.replace(maze_random(), callbacks=("level_replay:0.1",))
