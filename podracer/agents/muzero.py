"""Gumbel MuZero: search in a learned model of policies, values and rewards.

Sources: Schrittwieser et al. 2020 (arXiv 1911.08265) for the model, its losses and reanalysis;
Danihelka et al. 2022, "Policy improvement by planning with Gumbel", for the search, by mctx;
Hubert et al. 2021 (arXiv 2104.06303), Sampled MuZero, for continuous actions.
Different from MuZero's paper: hidden states are vectors and the dynamics fully connected by
default; convolutional ones begin with the torso of IMPALA, whose max-pools halve the image, have
layer norm or none, not batch norm, and the dynamics are residual as a whole; observations are those
of the environment, without the actions that led there; targets bootstrap from a target network by
default, as in the paper's Reanalyze; Adam with decoupled weight decay, not momentum with an L2
loss; a priority is the newest error of the network's value, not the first search's, and its
exponents are 0.6 and 0.4 by default, not 1; the Gumbel search chooses actions instead of sampling
them from visit counts. Different from Sampled MuZero's: actions are sampled from the policy itself
and explored with the Gumbel search's noise only; the policy learns that search's improved policy
over the samples.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy
from podracer.agents.common.optimizers import ScheduledOptimizer
from podracer.agents.common.settings import TargetNetworkSettings
from podracer.agents.planning import gumbel
from podracer.agents.planning.actions import search_actions
from podracer.agents.planning.gumbel import PlanningSettings
from podracer.agents.planning.model import Model, ModelParams, ModelSettings, scale_gradient
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops import returns
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    PyTree,
    TimeStep,
    Trajectory,
)


@struct
class MuZero(PlanningSettings, ModelSettings, TargetNetworkSettings):
    """Planning in a learned model, for discrete or continuous actions."""

    discount: float = bounded(0.997, high=1.0)
    value_cost: float = bounded(0.25)
    max_gradient_norm: float = bounded(5.0, low=1e-6)
    weight_decay: float = bounded(1e-4)
    """Weight decay, times the learning rate, of all parameters at each step, as in AdamW."""
    unroll_steps: int = static(default=5, low=1)
    """Steps K that the model is unrolled for in the loss."""
    n_step: int = static(default=5, low=1)
    bootstrap: Literal["search", "target_network"] = static(default="target_network")
    """Values that the targets bootstrap from: what the search found when acting, or a target
    network's."""
    reanalyze_fraction: float = static(default=0.0, low=0.0, high=1.0)
    """Fraction of each sample whose policies and search values are searched anew, in [0, 1]."""
    target_update_period: int = static(default=100, low=1)
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(128,))))
    """Representation network h, from an observation to a hidden state."""
    replay: Replay = static(default=Replay(batch_size=128, prioritized=True))

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        actions = search_actions(spec, self.max_considered_actions)
        model = self.build_model(self.network, spec.observation, actions)
        method = self.optimizer.build(self.max_gradient_norm)
        method = optax.chain(method, optax.add_decayed_weights(self.weight_decay))
        scheduled = ScheduledOptimizer(method, self.learning_rate)
        optimizer = off_policy.TargetNetworkOptimizer(scheduled, self.target_update_period)
        # What the search found is known of the timesteps of a sample but of the last.
        num_transitions = self.unroll_steps + self.n_step + (self.bootstrap == "search")
        buffer = self.replay.build(spec, num_transitions + 1)
        next_discount = gumbel.next_discount(spec, self.discount)
        agent = _MuZero(self, model, buffer, optimizer, next_discount)
        return Agent.of(agent, spec)


@dataclasses.dataclass(frozen=True)
class _MuZero:
    settings: MuZero
    model: Model
    buffer: Buffer
    optimizer: off_policy.TargetNetworkOptimizer
    next_discount: float | jax.Array  # for the next state's value in the search

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        state = self.optimizer.init(self.model.init(key))
        return LearnerState(state, self.buffer.init(num_envs, extras=self.model.actions.extras))

    def act(
        self, params: ModelParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Search for each environment; extras are what the search found."""
        search = jax.vmap(partial(self.search, params, explore))
        action, extras = search(timestep.observation, keys)
        return action, extras, carry

    def search(
        self, params: ModelParams, explore: bool, observation: PyTree, key: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Search for one environment, so that its random numbers depend on its key alone."""
        settings, model = self.settings, self.model
        observation = jax.tree.map(lambda x: x[None], observation)
        key = key if explore else jax.random.key(0)  # the best action ignores its key
        # Another key than those that mctx splits it into, 0 and 1.
        root = model.root(params, observation, jax.random.fold_in(key, 2))
        step = partial(model.step, self.next_discount)
        index, policy, value = gumbel.gumbel_search(
            params, key, root, step, observation, settings, explore=explore
        )
        samples = root.embedding[1]
        extras = {"policy": policy, "value": value, **jax.tree.map(lambda x: x[0], samples)}
        return model.actions.to_actions(index[None], samples)[0], extras

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        update = partial(self.optimizer.update, self.loss, axis)
        return off_policy.learn_from_replay(self.buffer, update, state, trajectory, key, axis)

    def loss(
        self, params: ModelParams, target_params: ModelParams, sample: Sample, key: jax.Array
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Unroll the model for K steps along each sampled sequence, and sum its losses.

        At the root and after each step the prediction network learns the search's policy and an
        n-step value; the dynamics network learns each step's reward (Schrittwieser et al. 2020,
        equation 1). The losses of the K steps are divided by K, so that their sum does not depend
        on K. Samples that begin at an episode's end count in no mean.
        """
        settings, model = self.settings, self.model
        K, n = settings.unroll_steps, settings.n_step
        trajectory = gumbel.reanalyze(
            partial(self.search, jax.lax.stop_gradient(params), True),
            sample.trajectory,
            key,
            fraction=settings.reanalyze_fraction,
            # With policy targets; then, where these are used, with values to bootstrap from.
            num_timesteps=K + 1 + n * (settings.bootstrap == "search"),
        )
        steps, next_steps, valid = trajectory.steps, trajectory.next_timesteps(), trajectory.valid()
        value_targets = self.value_targets(target_params, trajectory)

        def prediction_loss(
            k: int, state: jax.Array, alive: jax.Array, observed: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            policy, value_logits = model.prediction(params, state)
            searched = jax.tree.map(lambda x: x[k], steps.extras)
            log_probs = model.actions.log_probs(policy, searched)
            policy_loss = -alive * valid[k] * jnp.sum(searched["policy"] * log_probs, axis=-1)
            value_loss = model.cross_entropy(value_logits, alive * value_targets[k])
            return policy_loss + observed * settings.value_cost * value_loss, value_logits

        # Two masks [N] along the unroll. `alive`: the episode has not ended before this step.
        # A terminal leads to an absorbing state: its reward and value targets are 0, and it has no
        # policy target. `observed` is 0 after a time-out: the following steps were not observed, so
        # nothing is learned from them, nor from a sample that begins at an episode's end.
        alive = observed = valid[0].astype(jnp.float32)
        observation = jax.tree.map(lambda x: x[0], steps.timestep.observation)
        state = model.representation(params, observation)
        losses, root_value_logits = prediction_loss(0, state, alive, observed)
        for k in range(K):
            state, reward_logits = model.dynamics(params, state, steps.action[k])
            reward_target = alive * next_steps.reward[k]
            observed = observed * jnp.where(valid[k], 1.0, 1.0 - alive)
            alive = alive * (valid[k] & (next_steps.discount[k] != 0))
            reward_loss = observed * model.cross_entropy(reward_logits, reward_target)
            losses += reward_loss / K
            step_loss, _ = prediction_loss(k + 1, state, alive, observed)
            losses += step_loss / K
            state = scale_gradient(state, 0.5)  # appendix G: the dynamics are used K times

        loss = MaskedMean(jnp.mean(sample.weights * losses), jnp.mean(valid[0], dtype=jnp.float32))
        root_value = model.to_scalar(root_value_logits)
        priorities = jax.lax.stop_gradient(valid[0] * jnp.abs(root_value - value_targets[0]))
        return loss, ({"loss": loss, "value": mean_of(root_value, valid[0])}, priorities)

    def value_targets(self, target_params: ModelParams, trajectory: Trajectory) -> jax.Array:
        """Return n-step targets `[K + 1, N]`."""
        settings, n = self.settings, self.settings.n_step
        timesteps = trajectory.timesteps()
        if settings.bootstrap == "search":
            values: jax.Array = trajectory.steps.extras["value"]
        else:
            values = jax.vmap(partial(self.model.value, target_params))(timesteps.observation)
        rewards, discounts, valid = (
            x[: settings.unroll_steps + n] for x in trajectory.transitions(settings.discount)
        )
        return returns.n_step_targets(values, rewards, discounts, valid, n)
