"""Gumbel AlphaZero: planning in the environment itself, where it is a pure function.

Runs in environments that show their state (`envs/model.py`). Search is by mctx. Sources: Silver et
al. 2018 for the loss; Danihelka et al. 2022, "Policy improvement by planning with Gumbel", for the
search.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mctx
import optax

from podracer.agents.common import actor_critic, planning, value_based
from podracer.environment import Environment
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, TorsoNetwork, outputs
from podracer.ops.returns import lambda_returns
from podracer.types import (
    Carry,
    ConfigError,
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
class AlphaZero:
    """Planning in the true model, discrete actions."""

    learning_rate: float = 1e-3
    discount: float = 0.99
    lambda_: float = 0.95
    value_cost: float = 0.5
    max_gradient_norm: float = 1.0
    simulations: int = static(default=16)
    """Of the environment, for each action."""
    considered: int = static(default=16)
    """Actions that the root compares, at most."""
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(128, 128))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(actor_critic.init_params(self._network, self._optimizer, key))

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared.params

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        def plan(timestep: TimeStep, key: jax.Array) -> tuple[jax.Array, PyTree]:
            """For one environment: what it draws depends on its own key alone."""
            timestep = jax.tree.map(lambda x: x[None], timestep)
            seen, state = timestep.observation["observation"], timestep.observation["state"]
            policy, value = self._predict(params, seen)
            root = mctx.RootFnOutput(
                prior_logits=policy,  # type: ignore[call-arg]
                value=value,  # type: ignore[call-arg]
                embedding=(state, timestep.last),  # type: ignore[call-arg]
            )
            action, policy, value = planning.search(
                params, key, root, self._simulate, seen,
                simulations=self.simulations, considered=self.considered, explore=explore,
            )  # fmt: skip
            return action, {"policy": policy, "value": value}

        action, extras = jax.vmap(plan)(timestep, keys)
        return action, extras, carry

    def _simulate(
        self, params: Params, key: jax.Array, action: jax.Array, embedding: PyTree
    ) -> tuple[mctx.RecurrentFnOutput, PyTree]:
        """One step of the environment. Nothing comes after a terminal; after a time-out it would
        begin anew, which is not part of the plan."""
        state, over = embedding
        keys = jax.random.split(key, action.shape[0])
        state, timestep = jax.vmap(self._model.step)(keys, state, action.astype(jnp.int32))
        policy, value = self._predict(params, timestep.observation)
        made = mctx.RecurrentFnOutput(
            reward=jnp.where(over, 0.0, timestep.reward),  # type: ignore[call-arg]
            discount=jnp.where(over, 0.0, self.discount * timestep.discount),  # type: ignore[call-arg]
            prior_logits=policy,  # type: ignore[call-arg]
            value=value,  # type: ignore[call-arg]
        )
        return made, (state, timestep.last)

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        params = self.actor_params(state)
        grads, metrics = global_grad(self._loss, params, trajectory, axis=axis)
        learner, more = actor_critic.optimizer_step(self._optimizer, state.shared, grads)
        return LearnerState(learner), {**metrics, **more}

    def _loss(self, params: Params, trajectory: Trajectory) -> tuple[jax.Array, Metrics]:
        """The policy follows the search, the value the returns of the policy that it led to."""
        extras, after, valid = (
            trajectory.steps.extras,
            trajectory.next_timesteps(),
            trajectory.valid(),
        )
        timesteps = trajectory.timesteps()
        seen, first = timesteps.observation["observation"], timesteps.first
        made, _ = self._network.apply(params, (), seen, first)
        values = made["value"][..., 0]
        fixed = jnp.concatenate([extras["value"], jax.lax.stop_gradient(values[-1:])])
        discounts = self.discount * after.discount
        targets = lambda_returns(
            fixed[:-1], fixed[1:], after.reward, discounts, valid, self.lambda_
        )
        mask = valid.astype(jnp.float32)
        log_probs = jax.nn.log_softmax(made["policy"][:-1])
        policy_loss = -jnp.mean(mask * jnp.sum(extras["policy"] * log_probs, axis=-1))
        value_loss = 0.5 * jnp.mean(mask * (targets - values[:-1]) ** 2)
        loss = policy_loss + self.value_cost * value_loss
        return loss, {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss}

    def _predict(self, params: Params, seen: PyTree) -> tuple[jax.Array, jax.Array]:
        """Logits of the policy `[N, A]` and values `[N]`."""
        made = outputs(self._network, params, seen)
        return made["policy"], made["value"][:, 0]

    @property
    def _model(self) -> Any:
        """The environment."""
        spec = actor_critic.require_spec(self.spec)
        if not isinstance(spec.extension, Environment):
            raise ConfigError(
                f"AlphaZero plans in the environment itself, and {spec.name} does not show its "
                f"state: take --environment model:{spec.name}."
            )
        return spec.extension

    @property
    def _network(self) -> Network:
        value_based.discrete(self.spec)
        return actor_critic.build(self.network, self._model.spec)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm), optax.adam(self.learning_rate)
        )
