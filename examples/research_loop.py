"""A research loop: an update of your own, in a loop of your own around a driver.

A driver compiles the agent's `learn` into its program. Its `run` yields the progress of each chunk;
at boundaries, which you choose, also the whole training state.
"""

from __future__ import annotations

import dataclasses

import jax

import podracer
from podracer import LearnerState, Trajectory
from podracer.drivers.anakin import Anakin
from podracer.drivers.progress import Orders
from podracer.types import Metrics


@podracer.struct
class TwoPassA2C:
    """A2C that learns from each rollout twice, the second time with part of the step."""

    a2c: podracer.A2C = podracer.A2C()
    second_step: float = podracer.bounded(0.5, high=1.0)

    def build(self, spec: podracer.EnvironmentSpec, context: podracer.Context) -> podracer.Agent:
        inner = self.a2c.build(spec, context)

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, Metrics]:
            state, metrics = inner.learn(state, trajectory, key, axis)
            second, _ = inner.learn(state, trajectory, key, axis)
            params = jax.tree.map(
                lambda old, new: old + self.second_step * (new - old),
                state.shared.params,
                second.shared.params,
            )
            return LearnerState(dataclasses.replace(second.shared, params=params)), metrics

        return dataclasses.replace(inner, learn=learn)


def main(num_updates: int = 1_000, target: float = 0.95) -> float:
    """Train on Catch until a greedy policy reaches the target; return its mean return."""
    env = podracer.make("catch")
    agent = TwoPassA2C(podracer.A2C(learning_rate=2e-3))
    config = podracer.AnakinConfig(num_envs=128, rollout_length=16, updates_per_chunk=50)
    driver = Anakin(agent, env, config, jax.devices()[:1])
    evaluate = driver.evaluator(episodes=64)

    score, state = 0.0, driver.init(jax.random.key(0))
    for progress in driver.run(state, Orders(num_updates, is_boundary=lambda updates: True)):
        assert progress.state is not None  # every chunk is a boundary here
        score = float(evaluate(progress.state).returns.mean())
        print(f"update {progress.updates}: loss {progress.metrics['loss']:.3f}, return {score:.2f}")
        if score >= target:
            break
    return score


if __name__ == "__main__":
    main()
