"""A curriculum as a callback: levels that the agent fails come more often, while one run trains.

Corridors of several lengths, in which each place has one right action and a wrong one leads back to
the start. The environment draws a level by `weights`, numbers that a run can change. The callback
plays each level at each evaluation and weighs it by the return that is missed there; Prioritized
Level Replay (Jiang et al. 2021, arXiv 2010.03934) does so by errors of the value. Nothing is
compiled again, and a checkpoint has the weights. `python curriculum.py` prints it beside equal
weights: in 51,200 frames three of three seeds solve the longest level, with equal weights two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import podracer

LENGTHS = np.array([3, 6, 9, 12])  # places before the goal, of each level
EQUAL = np.full(len(LENGTHS), 0.25, np.float32)


@podracer.struct
class Corridor:
    """Corridor without restarts. Observation: f32 `[13]`, the place; reward 1 at the goal."""

    weights: Any = dataclasses.field(default_factory=lambda: EQUAL)
    """Weight of each level among those that episodes begin in, f32 `[4]`."""

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        return podracer.EnvironmentSpec(
            "corridor", podracer.ArraySpec((LENGTHS.max() + 1,)), podracer.Discrete(3)
        )

    def reset(self, key: jax.Array) -> tuple[Any, podracer.TimeStep]:
        level = jax.random.categorical(key, jnp.log(self.weights))
        place = jnp.int32(0)
        return (jnp.asarray(LENGTHS)[level], place, place), podracer.restart(self.observe(place))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, podracer.TimeStep]:
        length, place, time = state
        place = jnp.where(action == place * place % 3, place + 1, 0)
        is_there, is_late = place == length, time + 1 >= 2 * LENGTHS.max()
        timestep = podracer.transition(
            self.observe(place), is_there.astype(jnp.float32), terminal=is_there, timeout=is_late
        )
        return (length, place, time + 1), timestep

    def observe(self, place: jax.Array) -> jax.Array:
        return jax.nn.one_hot(place, LENGTHS.max() + 1)


class Curriculum(podracer.Callback):
    """Weighs each level by the return that the agent misses there."""

    def on_start(self, run: Any) -> None:
        levels = np.eye(len(LENGTHS), dtype=np.float32)
        self.evaluators = [podracer.make_evaluator(run.agent, course(x), 64) for x in levels]

    def on_boundary(self, run: Any) -> None:
        if run.is_due:
            params, key = run.agent.actor_params(run.state.learner), run.state.key
            missed = np.array([1.05 - play(params, key).returns.mean() for play in self.evaluators])
            run.change({"environment": {"inner": {"weights": missed / missed.sum()}}})


def course(weights: np.ndarray) -> podracer.Environment:
    """Return corridors, of levels by these weights, that begin anew at their end."""
    return podracer.auto_reset(Corridor(weights))


def train(callbacks: Any = (), **overrides: Any) -> podracer.Result:
    """Train PPO in all levels."""
    experiment = podracer.Experiment(
        recipe="corridors",
        environment=course(EQUAL),
        agent=podracer.PPO(learning_rate=1e-3),
        driver=podracer.AnakinConfig(num_envs=32, rollout_length=16, updates_per_chunk=5),
        frames=51_200,
        evaluations=20,
    )
    return podracer.train(experiment, callbacks=callbacks, progress=False, **overrides)


if __name__ == "__main__":
    longest = course(np.array([0, 0, 0, 1], np.float32))
    for name, callbacks in {"equal weights": [], "curriculum": [Curriculum()]}.items():
        results = [train(callbacks, seed=seed) for seed in range(3)]
        for seed, result in enumerate(results):
            play = podracer.make_evaluator(result.agent, longest, 64)
            returns = play(result.agent.actor_params(result.state), jax.random.key(1)).returns
            print(f"{name}, seed {seed}: return {returns.mean():.2f} in the longest level")
