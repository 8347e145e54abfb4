"""A research loop: an update of your own, in a loop of your own around a driver.

The driver is an iterator. It compiles the agent's `learn` into its program and yields the progress
of each chunk; at boundaries, which you choose, also the whole training state.
"""

from __future__ import annotations

import dataclasses

import jax

import podracer
from podracer import LearnerState, Trajectory
from podracer.devices.mesh import make_mesh
from podracer.drivers.anakin import anakin
from podracer.drivers.common import Orders, init_state
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
    settings = TwoPassA2C(podracer.A2C(learning_rate=2e-3))
    blueprint = podracer.Blueprint(settings, env.spec)  # what drivers build the agent from
    agent = blueprint.build()
    mesh = make_mesh(jax.devices()[:1])
    config = podracer.AnakinConfig(num_envs=128, rollout_length=16, updates_per_chunk=50)
    state = init_state(blueprint, env, mesh, config, jax.random.key(0))
    evaluate = podracer.make_evaluator(agent, env, 64)

    score = 0.0
    orders = Orders(num_updates, is_boundary=lambda updates: True)
    for progress in anakin(blueprint, env, mesh, config, state, orders):
        assert progress.state is not None  # every chunk is a boundary here
        params = agent.actor_params(progress.state.learner)
        score = float(evaluate(params, progress.state.key).returns.mean())
        print(f"update {progress.updates}: loss {progress.metrics['loss']:.3f}, return {score:.2f}")
        if score >= target:
            break
    return score


if __name__ == "__main__":
    main()
