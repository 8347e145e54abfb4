"""A2C: policy gradient with a learned value, one update for each rollout.

Its loss is a function of what acting computed, so Anakin can run it as the paper's fused unit.
Sources: Mnih et al. 2016 (arXiv 1602.01783); advantages by GAE, Schulman et al. 2016.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, Table, TorsoNetwork
from podracer.ops.returns import generalized_advantages
from podracer.types import (
    Carry,
    Continuous,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    static,
    struct,
)


@struct
class A2C:
    """Advantage actor-critic, discrete or continuous actions."""

    learning_rate: float = 7e-4
    discount: float = 0.99
    lambda_: float = 0.95
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    max_gradient_norm: float = 0.5
    network: Table | TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(actor_critic.init(self._network, self._optimizer, key))

    def carry(self, num_envs: int) -> Carry:
        return self._network.carry(num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared["params"]

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        return actor_critic.act(self._network, self._space, params, carry, timestep, keys, explore)

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        params = self.actor_params(state)
        grads, metrics = global_grad(self.loss, params, trajectory, False, axis=axis)
        state, more = self.apply_gradients(state, grads)
        return state, {**metrics, **more}

    def loss(
        self, params: Params, trajectory: Trajectory, reuse: bool
    ) -> tuple[jax.Array, Metrics]:
        forward = actor_critic.reuse if reuse else actor_critic.unroll
        policy, values = forward(self._network, self._space, params, trajectory)
        after, valid = trajectory.next_timesteps(), trajectory.valid()
        fixed = jax.lax.stop_gradient(values)
        advantages = generalized_advantages(
            fixed[:-1], fixed[1:], after.reward, self.discount * after.discount, valid, self.lambda_
        )
        # Means over all T x B steps, cut ones as zeros: equal shards then average exactly.
        mask = valid.astype(jnp.float32)
        log_prob = policy.log_prob(trajectory.steps.extras["sample"])
        policy_loss = -jnp.mean(advantages * log_prob)
        value_loss = 0.5 * jnp.mean(mask * (fixed[:-1] + advantages - values[:-1]) ** 2)
        entropy = jnp.mean(mask * policy.entropy())
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
        }

    def apply_gradients(self, state: LearnerState, grads: Params) -> tuple[LearnerState, Metrics]:
        return actor_critic.apply_gradients(self._optimizer, state, grads)

    @property
    def _network(self) -> Network:
        return actor_critic.build(self.network, self.spec)

    @property
    def _space(self) -> Discrete | Continuous:
        return actor_critic.require_spec(self.spec).action

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adam(self.learning_rate, eps=1e-5),
        )
