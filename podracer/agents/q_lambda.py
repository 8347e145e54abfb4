"""Greedy Q(λ): the agent of the published Anakin notebook (Hessel et al. 2021, section 3).

It acts greedily in its action values, without exploration and without a target network; the loss is
the mean squared error to λ-returns that bootstrap from the best action. Its loss is a function of
what acting computed, so Anakin can run it as the paper's fused unit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic
from podracer.mesh import global_grad
from podracer.networks import MLP, Head, Network, TorsoNetwork
from podracer.ops.returns import lambda_returns
from podracer.types import (
    Carry,
    ConfigError,
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
class QLambda:
    """Greedy Q(λ), discrete actions."""

    learning_rate: float = 1e-4
    discount: float = 1.0
    lambda_: float = 0.99
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(256,))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(actor_critic.init(self._network, optax.adam(self.learning_rate), key))

    def carry(self, num_envs: int) -> Carry:
        return self._network.carry(num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared["params"]

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        outputs, carry = self._network.apply(params, carry, observation, timestep.first[None])
        q = actor_critic.mask_logits(timestep.observation, outputs["q"][0])
        return jnp.argmax(q, axis=-1).astype(jnp.int32), {"q": q}, carry

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
        q_tm1, q_last = (self._reuse if reuse else self._unroll)(params, trajectory)
        chosen = jax.nn.one_hot(trajectory.steps.action, q_tm1.shape[-1])
        qa_tm1 = jnp.sum(q_tm1 * chosen, axis=-1)
        best = jnp.concatenate([jnp.max(q_tm1, axis=-1), jnp.max(q_last, axis=-1)[None]])
        v_t = jax.lax.stop_gradient(best[1:])
        after, valid = trajectory.next_timesteps(), trajectory.valid()
        # Where acting is greedy the value of a state is that of the action taken there.
        targets = lambda_returns(
            jax.lax.stop_gradient(best[:-1]),
            v_t,
            after.reward,
            self.discount * after.discount,
            valid,
            self.lambda_,
        )
        error = valid.astype(jnp.float32) * (targets - qa_tm1)
        loss = jnp.mean(error**2)
        return loss, {"loss": loss, "q": jnp.mean(qa_tm1)}

    def apply_gradients(self, state: LearnerState, grads: Params) -> tuple[LearnerState, Metrics]:
        return actor_critic.apply_gradients(optax.adam(self.learning_rate), state, grads)

    def _unroll(self, params: Params, trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
        timesteps = trajectory.timesteps()
        outputs, _ = self._network.apply(
            params, trajectory.carry, timesteps.observation, timesteps.first
        )
        q = actor_critic.mask_logits(timesteps.observation, outputs["q"])
        return q[:-1], q[-1]

    def _reuse(self, params: Params, trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
        final = trajectory.final
        observation = jax.tree.map(lambda x: x[None], final.observation)
        outputs, _ = self._network.apply(
            params, trajectory.final_carry, observation, final.first[None]
        )
        last = actor_critic.mask_logits(final.observation, outputs["q"][0])
        return trajectory.steps.extras["q"], last

    @property
    def _network(self) -> Network:
        spec = actor_critic.require_spec(self.spec)
        if not isinstance(spec.action, Discrete):
            raise ConfigError(f"QLambda needs discrete actions; {spec.name} has continuous ones.")
        return self.network.build(spec.observation, {"q": Head(spec.action.num_actions)})
