"""PPO that is paid for what is new: random network distillation around an agent of the library.

A second network learns to repeat a random one, and its error is the bonus. Its fields are flags
too: `podracer train rnd:curious_catch --rnd-network.torso.hidden 128 128`. Source: Burda et al.
2019 (arXiv 1810.12894). Different from the paper: the two rewards share one value function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import podracer
from podracer import MLP, Head, LearnerState, TorsoNetwork, Trajectory
from podracer.devices.reductions import Moments, init_moments, merge, moments_of
from podracer.networks import outputs
from podracer.types import Metrics

CONTEXT = podracer.Context()


@podracer.struct
class State:
    """State of PPO, both networks, and the moments of the predictor's errors."""

    ppo: Any
    target: Any
    predictor: Any
    optimizer: Any
    moments: Moments


@podracer.struct
class RND:
    """PPO with a bonus for observations that its predictor has seldom had."""

    ppo: podracer.PPO = podracer.PPO()
    """Settings of PPO."""
    bonus: float = podracer.bounded(0.5)
    """Weight of the bonus, in standard deviations of the predictor's error."""
    predictor_rate: float = podracer.bounded(1e-3)
    """Learning rate of the predictor."""
    features: int = podracer.static(default=32, low=1)
    """Number of features that the predictor repeats."""
    rnd_network: TorsoNetwork = podracer.static(default=TorsoNetwork(MLP((64,))))
    """Network of the random features and of their predictor."""

    def build(
        self, spec: podracer.EnvironmentSpec, context: podracer.Context = CONTEXT
    ) -> podracer.Agent:
        ppo, heads = self.ppo.build(spec, context), {"features": Head(self.features)}
        network = self.rnd_network.build(spec.observation, heads)
        optimizer = optax.adam(self.predictor_rate)

        def inner(state: LearnerState) -> LearnerState:
            return LearnerState(state.shared.ppo, state.local)

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            key, target_key, predictor_key = jax.random.split(key, 3)
            state, predictor = ppo.init(key, num_envs), network.init(predictor_key)
            shared = State(
                state.shared,
                network.init(target_key),
                predictor,
                optimizer.init(predictor),
                init_moments(jnp.zeros(())),
            )
            return LearnerState(shared, state.local)

        def loss(predictor: Any, target: Any, observation: Any) -> tuple[jax.Array, jax.Array]:
            features = (outputs(network, x, observation)["features"] for x in (predictor, target))
            errors = jnp.mean(jnp.square(jnp.subtract(*features)), axis=-1)
            return jnp.mean(errors), errors

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, Metrics]:
            old: State = state.shared
            timesteps = trajectory.timesteps()
            rewards = timesteps.reward  # [T + 1, B]
            rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), timesteps.observation)
            grads, errors = podracer.global_grad(loss, old.predictor, old.target, rows, axis=axis)
            updates, optimizer_state = optimizer.update(grads, old.optimizer)
            predictor = optax.apply_updates(old.predictor, updates)
            errors = errors.reshape(rewards.shape)
            moments = merge(old.moments, moments_of(errors, axis))
            bonus = self.bonus * errors * jax.lax.rsqrt(moments.variance + 1e-8)
            trajectory = trajectory.with_rewards(rewards + bonus)
            new, metrics = ppo.learn(inner(state), trajectory, key, axis)
            shared = State(new.shared, old.target, predictor, optimizer_state, moments)
            return LearnerState(shared, new.local), {**metrics, "bonus": jnp.mean(bonus)}

        return dataclasses.replace(
            ppo, init=init, learn=learn, actor_params=lambda state: ppo.actor_params(inner(state))
        )


def curious_catch() -> podracer.Experiment:
    """PPO with random network distillation in Catch."""
    return podracer.Experiment(
        environment="catch",
        agent=RND(podracer.PPO(learning_rate=1e-3)),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=16, updates_per_chunk=10),
        frames=204_800,
    )


def main(**overrides: Any) -> float:
    """Train in Catch; return the mean return of the last evaluation."""
    result = podracer.train(curious_catch(), **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.2f}; the best possible is 1")
