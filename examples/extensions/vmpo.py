"""V-MPO: on-policy maximum a posteriori policy optimization, for all three kinds of actions.

Advantages weigh the better half of a rollout; the policy is fitted to it within a trust region,
whose size a learned multiplier keeps. Source: Song et al. 2020 (arXiv 1909.12238), equations 3 to
5. Different from the paper: the old policy is the one that acted in the rollout, one trust region
holds for mean and scale together, and advantages are generalized.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import podracer
from podracer import Head, LearnerState, TimeStep, Trajectory
from podracer.ops import distributions
from podracer.ops.action_masks import mask_logits
from podracer.ops.returns import generalized_advantages
from podracer.types import Metrics


@podracer.struct
class State:
    """All that lives longer than an update."""

    params: Any  # the network's, and logarithms of the temperature and the multiplier
    optimizer: Any


@podracer.struct
class VMPO:
    """V-MPO for discrete or continuous actions."""

    learning_rate: float = podracer.bounded(1e-3)
    discount: float = podracer.bounded(0.99, high=1.0)
    gae_lambda: float = podracer.bounded(0.95, high=1.0)
    temperature_bound: float = podracer.bounded(0.1)
    divergence_bound: float = podracer.bounded(0.01)
    num_steps: int = podracer.static(default=8, low=1)
    network: podracer.TorsoNetwork = podracer.static(
        default=podracer.TorsoNetwork(podracer.MLP((64, 64), "tanh"), shared=False)
    )

    def build(self, spec: podracer.EnvironmentSpec, context: podracer.Context) -> podracer.Agent:
        heads = {"policy": Head(distributions.num_outputs(spec.action), 0.01), "value": Head(1)}
        network = self.network.build(spec.observation, heads)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.learning_rate))

        def unroll(params: Any, carry: Any, timesteps: TimeStep) -> tuple[Any, jax.Array, Any]:
            outputs, carry = network.apply(params, carry, timesteps.observation, timesteps.first)
            logits = mask_logits(timesteps.observation, outputs["policy"])
            return distributions.policy(spec.action, logits), outputs["value"][..., 0], carry

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            logs = {"log_temperature": jnp.zeros(()), "log_multiplier": jnp.zeros(())}
            params = {"network": network.init(key), **logs}
            return LearnerState(State(params, optimizer.init(params)))

        def distribution(params: Any, carry: Any, timestep: TimeStep) -> tuple[Any, Any]:
            policy, _, carry = unroll(params, carry, jax.tree.map(lambda x: x[None], timestep))
            return jax.tree.map(lambda x: x[0], policy), carry

        def act(
            params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool
        ) -> tuple[jax.Array, Any, Any]:
            policy, carry = distribution(params, carry, timestep)
            sample = policy.sample(keys) if explore else policy.mode()
            return distributions.to_bounds(spec.action, sample), {"sample": sample}, carry

        def loss(
            params: Any, trajectory: Trajectory, old: Any, advantages: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, Metrics]:
            stop, valid = jax.lax.stop_gradient, trajectory.valid()
            policy, values, _ = unroll(params["network"], trajectory.carry, trajectory.timesteps())
            policy = jax.tree.map(lambda x: x[:-1], policy)
            log_prob = policy.log_prob(trajectory.steps.extras["sample"])
            candidates = jnp.where(valid, advantages, -1e9).ravel()
            better, items = jax.lax.top_k(candidates, (valid.size + 1) // 2)
            temperature = jnp.exp(params["log_temperature"])
            weights = stop(jax.nn.softmax(better / temperature))
            log_mean = jax.nn.logsumexp(better / temperature) - jnp.log(len(items))
            multiplier = jnp.exp(params["log_multiplier"])
            divergence = podracer.mean_of(old.divergence(policy), valid).value
            parts = {
                "policy_loss": -jnp.sum(weights * log_prob.ravel()[items]),
                "temperature_loss": temperature * (self.temperature_bound + log_mean),
                "multiplier_loss": multiplier * (self.divergence_bound - stop(divergence)),
                "trust_loss": stop(multiplier) * divergence,
                "value_loss": podracer.mean_of(0.5 * (targets - values[:-1]) ** 2, valid).value,
            }
            return sum(parts.values(), jnp.zeros(())), parts

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, Metrics]:
            network_params, following = state.shared.params["network"], trajectory.next_timesteps()
            old, values, _ = unroll(network_params, trajectory.carry, trajectory.timesteps())
            old = jax.tree.map(lambda x: x[:-1], old)
            discount, valid = self.discount * following.discount, trajectory.valid()
            advantages = generalized_advantages(
                values[:-1], values[1:], following.reward, discount, valid, self.gae_lambda
            )
            constants = (trajectory, old, advantages, values[:-1] + advantages)

            def step(learner: State, _: None) -> tuple[State, Metrics]:
                grads, metrics = podracer.global_grad(loss, learner.params, *constants, axis=axis)
                updates, optimizer_state = optimizer.update(grads, learner.optimizer)
                return State(optax.apply_updates(learner.params, updates), optimizer_state), metrics

            learner, metrics = jax.lax.scan(step, state.shared, length=self.num_steps)
            return LearnerState(learner), jax.tree.map(jnp.mean, metrics)

        return podracer.Agent(
            spec=spec,
            init=init,
            act=act,
            learn=learn,
            carry=network.carry,
            actor_params=lambda state: state.shared.params["network"],
            distribution=distribution,
        )


def main(**overrides: Any) -> float:
    """Train on CartPole; return the mean return of the last evaluation."""
    driver = podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=10)
    result = podracer.train(
        "cartpole_ppo", recipe="cartpole_vmpo", agent=VMPO(), driver=driver, **overrides
    )
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.1f}; the most possible is 500")
