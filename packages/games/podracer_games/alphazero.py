"""Gumbel AlphaZero: search in the environment itself, where it is a pure function.

It runs in environments that show their state (`envs/model.py`). Sources: Silver et al. 2018 for the
loss; Danihelka et al. 2022, "Policy improvement by planning with Gumbel", for the search, by mctx.
Different from AlphaZero: also tasks of one player, rewards and a discount; the value's targets are
λ-returns of the searched values along the newest rollout, of which nothing is kept, not outcomes of
games in a replay; Adam without weight decay. A state at a time-out is worth what the network says.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import mctx

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import actor_critic, epochs, off_policy, value_based
from podracer.agents.common.optimizers import (
    ScheduledOptimizer,
    with_more_frames,
)
from podracer.agents.common.settings import EpochSettings, build_optimizer
from podracer.agents.planning import gumbel
from podracer.agents.planning.gumbel import PlanningSettings
from podracer.devices.reductions import MaskedMean
from podracer.environment import Environment
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Network, NetworkBuilder, TorsoNetwork, outputs
from podracer.ops import returns
from podracer.types import (
    Carry,
    EnvironmentSpec,
    EnvState,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)
from podracer_games.opponents import HIDDEN_CARDS


@struct
class Embedding:
    """State and value of a node of the search, leaves `[1, ...]`."""

    state: EnvState
    value: jax.Array  # f32 [1], the network's
    timeout: jax.Array  # bool [1], whether a time-out has cut the episode here


@struct
class Batch(epochs.Batch):
    """Timesteps of a rollout and what the search made of them."""

    policy: jax.Array  # f32 [1, N, A], the search's


@struct
class AlphaZero(PlanningSettings, EpochSettings):
    """Planning in the true model, for discrete actions."""

    td_lambda: float = bounded(0.95, high=1.0)
    """Lambda of the value targets, in [0, 1]; 0 bootstraps after one step, 1 after the rollout."""
    max_gradient_norm: float = bounded(1.0, low=1e-6)
    num_epochs: int = static(default=1, low=1)
    num_minibatches: int = static(default=1, low=1)
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(128, 128))))
    """Network of the policy and the value, without its heads."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        value_based.require_discrete(spec)
        if not isinstance(spec.extension, Environment):
            raise ConfigError(
                f"AlphaZero plans in the environment itself, and {spec.name} does not show its "
                f'state: take `environment="model:{spec.name}"`.'
            )
        if spec.name.removeprefix("game:") in HIDDEN_CARDS:
            raise ConfigError(
                f"AlphaZero would see the cards of both players in {spec.name}: take an agent "
                "without a model, such as PPO."
            )
        model = spec.extension
        network = off_policy.require_feed_forward(
            actor_critic.build_network(self.network, model.spec)
        )
        optimizer = build_optimizer(self)
        agent = _AlphaZero(self, model, network, optimizer)
        return Agent(spec=spec, init=agent.init, act=agent.act, learn=agent.learn)


@dataclasses.dataclass(frozen=True)
class _AlphaZero:
    settings: AlphaZero
    model: Environment  # one instance
    network: Network
    optimizer: ScheduledOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(self.optimizer.init(self.network.init(key)))

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        def search(timestep: TimeStep, key: jax.Array) -> tuple[jax.Array, PyTree]:
            """Search for one environment, so that its random numbers depend on its key alone."""
            timestep = jax.tree.map(lambda x: x[None], timestep)
            action, policy, value = gumbel.gumbel_search(
                params,
                key,
                self.root_fn(params, timestep),
                self.recurrent_fn,
                timestep.observation["observation"],
                self.settings,
                explore=explore,
            )
            return action, {"policy": policy, "value": value}

        action, extras = jax.vmap(search)(timestep, keys)
        return action, extras, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update in `num_epochs` times `num_minibatches` optimizer steps."""
        batch = self.make_batch(state.shared.params, trajectory)
        batch, items = epochs.shuffle(key, batch, self.settings)
        learner, metrics = epochs.fit(
            self.optimizer, self.network, self.loss, state.shared, batch, (items,), axis
        )
        num_frames = schedules.frames_of(batch.valid, metrics["loss"].share, axis)
        return LearnerState(with_more_frames(learner, num_frames)), metrics

    def make_batch(self, params: Params, trajectory: Trajectory) -> Batch:
        """Return a rollout `[T, B, ...]` with λ-returns of the searched values."""
        steps, final = trajectory.steps, trajectory.final
        rewards, discounts, valid = trajectory.transitions(self.settings.discount)
        # The final timestep was not searched: the network's own value is used for it.
        final_value = self.predict(params, final.observation["observation"])[1]
        values = jnp.concatenate([steps.extras["value"], final_value[None]])
        target = returns.lambda_returns(
            values[:-1], values[1:], rewards, discounts, valid, self.settings.td_lambda
        )
        return Batch(
            observation=steps.timestep.observation["observation"],
            first=steps.timestep.first,
            policy=steps.extras["policy"],
            target=target,
            valid=valid.astype(jnp.float32),
            carry=(),
        )

    def loss(self, params: Params, batch: Batch) -> tuple[MaskedMean, Metrics]:
        """Fit the policy to the search's, and the value to the λ-returns."""
        heads, _ = self.network.apply(params, (), batch.observation, batch.first)
        log_policy = jax.nn.log_softmax(heads["policy"])
        policy_loss = -jnp.mean(batch.valid * jnp.sum(batch.policy * log_policy, axis=-1))
        value_loss = 0.5 * jnp.mean(batch.valid * (batch.target - heads["value"][..., 0]) ** 2)
        loss = policy_loss + self.settings.value_cost * value_loss
        parts = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss}
        share = jnp.mean(batch.valid)
        metrics = {name: MaskedMean(part, share) for name, part in parts.items()}
        return MaskedMean(loss, share), metrics

    # --- callbacks of mctx -----------------------------------------------------------------------

    def root_fn(self, params: Params, timestep: TimeStep) -> mctx.RootFnOutput:
        policy_logits, value = self.predict(params, timestep.observation["observation"])
        embedding = Embedding(timestep.observation["state"], value, timestep.last)
        return gumbel.RootFnOutput(prior_logits=policy_logits, value=value, embedding=embedding)

    def recurrent_fn(
        self, params: Params, key: jax.Array, action: jax.Array, embedding: Embedding
    ) -> tuple[mctx.RecurrentFnOutput, Embedding]:
        """Step the environment.

        A terminal has discount 0. After a time-out the environment would reset, which is no part
        of the plan: each step from there ends it, with the node's own value as its reward. So the
        node is worth that value however often it is visited.
        """
        keys = jax.random.split(key, action.shape[0])
        step = jax.vmap(self.model.step)
        state, timestep = step(keys, embedding.state, action.astype(jnp.int32))
        policy_logits, value = self.predict(params, timestep.observation)
        output = gumbel.RecurrentFnOutput(
            reward=jnp.where(embedding.timeout, embedding.value, timestep.reward),
            discount=jnp.where(embedding.timeout, 0.0, self.settings.discount * timestep.discount),
            prior_logits=policy_logits,
            value=value,
        )
        return output, Embedding(state, value, timestep.last)

    def predict(self, params: Params, observation: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return logits of the policy `[N, A]` and values `[N]`."""
        heads = outputs(self.network, params, observation)
        return heads["policy"], heads["value"][:, 0]
