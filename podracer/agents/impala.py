"""IMPALA: an actor-critic that corrects for acting with older parameters, by V-trace.

Source: Espeholt et al. 2018 (arXiv 1802.01561), section 4.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, TorsoNetwork
from podracer.ops.returns import vtrace
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
class Impala:
    """V-trace actor-critic, discrete or continuous actions."""

    learning_rate: float = 6e-4
    discount: float = 0.99
    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_c: float = 1.0
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    max_gradient_norm: float = 40.0
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
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
        return actor_critic.act_with_log_prob(
            self._network, self._space, params, carry, timestep, keys, explore
        )

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        params = self.actor_params(state)
        grads, metrics = global_grad(self._loss, params, trajectory, axis=axis)
        state, more = actor_critic.apply_gradients(self._optimizer, state, grads)
        return state, {**metrics, **more}

    def _loss(self, params: Params, trajectory: Trajectory) -> tuple[jax.Array, Metrics]:
        policy, values = actor_critic.unroll(self._network, self._space, params, trajectory)
        extras, after, valid = (
            trajectory.steps.extras,
            trajectory.next_timesteps(),
            trajectory.valid(),
        )
        log_prob = policy.log_prob(extras["sample"])
        fixed, ratio = jax.lax.stop_gradient((values, jnp.exp(log_prob - extras["log_prob"])))
        corrected = vtrace(
            fixed[:-1],
            fixed[1:],
            after.reward,
            self.discount * after.discount,
            valid,
            ratio,
            lambda_=self.lambda_,
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            clip_pg_rho=self.clip_rho,
        )
        mask = valid.astype(jnp.float32)
        policy_loss = -jnp.mean(corrected.advantages * log_prob)
        value_loss = 0.5 * jnp.mean(mask * (corrected.targets - values[:-1]) ** 2)
        entropy = jnp.mean(mask * policy.entropy())
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "importance_ratio": jnp.mean(ratio),
        }

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
