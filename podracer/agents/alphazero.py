"""Gumbel AlphaZero: search in the environment itself, where it is a pure function.

It runs in environments that show their state (`envs/model.py`). Sources: Silver et al. 2018 for the
loss; Danihelka et al. 2022, "Policy improvement by planning with Gumbel", for the search, by mctx.
Different from AlphaZero: also tasks of one player, rewards and a discount; the value's targets are
λ-returns of the searched values along the newest rollout, which is used once, not outcomes of games
in a replay; Adam without weight decay. A state at a time-out is worth what the network says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mctx
import optax

from podracer import schedules
from podracer.agent import require_spec
from podracer.agents.common import actor_critic, planning, value_based
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.environment import Environment
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, NetworkBuilder, TorsoNetwork, outputs
from podracer.ops.returns import lambda_returns
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    ConfigError,
    EnvironmentSpec,
    EnvState,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    bounded,
    static,
    struct,
)


@struct
class Embedding:
    """What the search keeps at each node, leaves `[1, ...]`."""

    state: EnvState
    value: jax.Array  # f32 [1], the network's
    timeout: jax.Array  # bool [1], whether a time-out has cut the episode here


@struct
class AlphaZero:
    """Planning in the true model, for discrete actions."""

    learning_rate: Schedule = bounded(1e-3)
    """Learning rate of the optimizer."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    td_lambda: float = bounded(0.95, high=1.0)
    """Lambda of the value targets, in [0, 1]; 0 bootstraps after one step, 1 after the rollout."""
    value_cost: float = bounded(0.5)
    """Weight of the value loss; the policy loss has weight 1."""
    max_gradient_norm: float = bounded(1.0)
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    min_value_range: float = bounded(1e-8)
    """Smallest range of a node's action values that the search stretches to 1; mctx's epsilon."""
    num_simulations: int = static(default=16, low=1)
    """Simulations of the search, one environment step each, for every action."""
    max_considered_actions: int = static(default=16, low=1)
    """Largest number of actions that the search compares at its root."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(128, 128))))
    """Network of the policy and the value, without its heads."""
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
        def search(timestep: TimeStep, key: jax.Array) -> tuple[jax.Array, PyTree]:
            """Search for one environment, so that its random numbers depend on its key alone."""
            timestep = jax.tree.map(lambda x: x[None], timestep)
            action, policy, value = planning.gumbel_search(
                params,
                key,
                self._root_fn(params, timestep),
                self._recurrent_fn,
                timestep.observation["observation"],
                num_simulations=self.num_simulations,
                max_considered_actions=self.max_considered_actions,
                min_value_range=self.min_value_range,
                explore=explore,
            )
            return action, {"policy": policy, "value": value}

        action, extras = jax.vmap(search)(timestep, keys)
        return action, extras, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        params = self.actor_params(state)
        grads, metrics = global_grad(self._loss, params, trajectory, axis=axis)
        num_frames = schedules.frames_of(trajectory, axis)
        state, update_metrics = actor_critic.apply_gradients(self, state, grads, num_frames)
        return state, {**metrics, **update_metrics}

    def _loss(self, params: Params, trajectory: Trajectory) -> tuple[jax.Array, Metrics]:
        """Fit the policy to the search's, and the value to λ-returns of the searched values."""
        timesteps, next_steps = trajectory.timesteps(), trajectory.next_timesteps()
        extras, valid = trajectory.steps.extras, trajectory.valid()
        heads, _ = self._network.apply(
            params, (), timesteps.observation["observation"], timesteps.first
        )
        values = heads["value"][..., 0]

        # The final timestep was not searched: the network's own value is used for it.
        search_values = jnp.concatenate([extras["value"], jax.lax.stop_gradient(values[-1:])])
        value_targets = lambda_returns(
            search_values[:-1],
            search_values[1:],
            next_steps.reward,
            self.discount * next_steps.discount,
            valid,
            self.td_lambda,
        )
        mask = valid.astype(jnp.float32)
        log_policy = jax.nn.log_softmax(heads["policy"][:-1])
        policy_loss = -jnp.mean(mask * jnp.sum(extras["policy"] * log_policy, axis=-1))
        value_loss = 0.5 * jnp.mean(mask * (value_targets - values[:-1]) ** 2)
        loss = policy_loss + self.value_cost * value_loss
        return loss, {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss}

    # --- callbacks of mctx -----------------------------------------------------------------------

    def _root_fn(self, params: Params, timestep: TimeStep) -> mctx.RootFnOutput:
        policy_logits, value = self._predict(params, timestep.observation["observation"])
        embedding = Embedding(timestep.observation["state"], value, timestep.last)
        return planning.RootFnOutput(prior_logits=policy_logits, value=value, embedding=embedding)

    def _recurrent_fn(
        self, params: Params, key: jax.Array, action: jax.Array, embedding: Embedding
    ) -> tuple[mctx.RecurrentFnOutput, Embedding]:
        """Step the environment.

        A terminal has discount 0. After a time-out the environment would reset, which is no part
        of the plan: each step from there ends it, with the node's own value as its reward. So the
        node is worth that value however often it is visited.
        """
        keys = jax.random.split(key, action.shape[0])
        step = jax.vmap(self._model.step)
        state, timestep = step(keys, embedding.state, action.astype(jnp.int32))
        policy_logits, value = self._predict(params, timestep.observation)
        output = planning.RecurrentFnOutput(
            reward=jnp.where(embedding.timeout, embedding.value, timestep.reward),
            discount=jnp.where(embedding.timeout, 0.0, self.discount * timestep.discount),
            prior_logits=policy_logits,
            value=value,
        )
        return output, Embedding(state, value, timestep.last)

    def _predict(self, params: Params, observation: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return logits of the policy `[N, A]` and values `[N]`."""
        heads = outputs(self._network, params, observation)
        return heads["policy"], heads["value"][:, 0]

    @property
    def _model(self) -> Any:
        """The environment, one instance, as `envs/model.py` provides it."""
        spec = require_spec(self.spec)
        if not isinstance(spec.extension, Environment):
            raise ConfigError(
                f"AlphaZero plans in the environment itself, and {spec.name} does not show its "
                f"state: take --environment model:{spec.name}."
            )
        return spec.extension

    @property
    def _network(self) -> Network:
        value_based.require_discrete(self.spec)
        return actor_critic.build(self.network, self._model.spec)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.optimizer.build(self.max_gradient_norm)
