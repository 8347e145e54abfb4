"""Gumbel MuZero: search in a learned model of policies, values and rewards.

Sources: Schrittwieser et al. 2020 (arXiv 1911.08265) for the model, its losses and reanalysis;
Danihelka et al. 2022, "Policy improvement by planning with Gumbel", for the search, by mctx;
Hubert et al. 2021 (arXiv 2104.06303), Sampled MuZero, for continuous actions.
Different from MuZero's paper: hidden states are vectors and the dynamics fully connected by
default; convolutional ones begin with the torso of IMPALA, whose max-pools halve the image, have
layer norm or none, not batch norm, and the dynamics are residual as a whole; observations are those
of the environment, without the actions that led there; targets bootstrap from a target network by
default, as in the paper's Reanalyze; Adam with decoupled weight decay, not momentum with an L2
loss; a priority is the newest error of the network's value, not that of the first search, and its
exponents are 0.6 and 0.4 by default, not 1; actions are those of the Gumbel search, not sampled
from visit counts. Different from Sampled MuZero's: actions are sampled from the policy itself, and
explored with the Gumbel search's noise only; the policy learns that search's improved policy over
the samples.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from podracer.agent import require_spec
from podracer.agents.common import off_policy, planning
from podracer.agents.common.muzero_model import Model, ModelParams, build_model, scale_gradient
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.agents.common.search_actions import SearchActions, search_actions
from podracer.means import Mean, mean_of
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops.returns import n_step_targets
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    PyTree,
    TimeStep,
    Trajectory,
    bounded,
    static,
    struct,
)


@struct
class MuZero:
    """Planning in a learned model, for discrete or continuous actions."""

    learning_rate: Schedule = bounded(1e-3)
    """Learning rate of the optimizer."""
    discount: float = bounded(0.997, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    value_cost: float = bounded(0.25)
    """Weight of the value loss; policy and reward losses have weight 1."""
    max_gradient_norm: float = bounded(5.0, low=1e-6)
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    weight_decay: float = bounded(1e-4)
    """Weight decay, times the learning rate, of all parameters at each step, as in AdamW."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    min_value_range: float = bounded(1e-8, low=1e-12)
    """Smallest range of a node's action values that the search stretches to 1; mctx's epsilon."""
    num_simulations: int = static(default=16, low=1)
    """Number of simulations of the search for each decision; each takes one step of the model."""
    max_considered_actions: int = static(default=16, low=1)
    """Largest number of actions that the search compares at its root; of continuous actions the
    number of samples at each node."""
    unroll_steps: int = static(default=5, low=1)
    """Steps K that the model is unrolled for in the loss."""
    n_step: int = static(default=5, low=1)
    """Rewards n in a value target before it bootstraps."""
    bootstrap: Literal["search", "target_network"] = static(default="target_network")
    """Values that the targets bootstrap from: those that the search found when acting, or those of
    a target network."""
    reanalyze_fraction: float = static(default=0.0, low=0.0, high=1.0)
    """Fraction of each sample whose policies and search values are searched anew, in [0, 1]."""
    target_update_period: int = static(default=100, low=1)
    """Number of updates between copies of the parameters to the target network."""
    support_max: float = static(default=30.0, low=1e-6)
    """Largest value and reward after the transform h(x), nearly a square root; 30 means 900."""
    support_size: int = static(default=61, low=2)
    """Number of atoms for values and rewards, from minus to plus the support's largest value."""
    latent_size: int = static(default=64, low=1)
    """Size of the model's hidden state, where it is a vector."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(128,))))
    """Representation network h, from an observation to a hidden state."""
    dynamics_hidden: tuple[int, ...] = static(default=(128,), low=1)
    """Widths of the fully connected hidden layers of the dynamics network g."""
    dynamics_blocks: int = static(default=0, low=0)
    """Number of residual blocks of the dynamics network; above 0 the model is convolutional."""
    prediction_hidden: tuple[int, ...] = static(default=(128,), low=1)
    """Widths of the fully connected hidden layers of the prediction network f."""
    replay: Replay = static(default=Replay(batch_size=128, prioritized=True))
    """Replay buffer."""
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        params = self._model.init(key)
        state = off_policy.init_target_network_state(params, self._optimizer)
        return LearnerState(state, self._buffer.init(num_envs, extras=self._actions.extras))

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> ModelParams:
        return state.shared.params

    def act(
        self, params: ModelParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        search = partial(self._search, params, explore)
        action, extras = jax.vmap(search)(timestep.observation, keys)
        return action, extras, carry

    def _search(
        self, params: ModelParams, explore: bool, observation: PyTree, key: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Search for one environment, so that its random numbers depend on its key alone."""
        observation, model = jax.tree.map(lambda x: x[None], observation), self._model
        key = key if explore else jax.random.key(0)  # the best action ignores its key
        # Another key than those that mctx splits it into, 0 and 1.
        root = model.root(params, observation, jax.random.fold_in(key, 2))
        index, policy, value = planning.gumbel_search(
            params,
            key,
            root,
            partial(model.step, planning.next_discount(require_spec(self.spec), self.discount)),
            observation,
            num_simulations=self.num_simulations,
            max_considered_actions=self.max_considered_actions,
            min_value_range=self.min_value_range,
            explore=explore,
        )
        _, samples = root.embedding
        extras = {"policy": policy, "value": value, **jax.tree.map(lambda x: x[0], samples)}
        return self._actions.to_actions(index[None], samples)[0], extras

    learn = off_policy.learn_with_target_network

    def _loss(
        self, params: ModelParams, target_params: ModelParams, sample: Sample, key: jax.Array
    ) -> tuple[Mean, tuple[Metrics, jax.Array]]:
        """Unroll the model for K steps along each sampled sequence, and sum its losses.

        At the root and after each step the prediction network learns the search's policy and an
        n-step value; the dynamics network learns each step's reward (Schrittwieser et al. 2020,
        equation 1). The losses of the K steps are divided by K, so that their sum does not depend
        on K. Samples that begin at an episode's end count in no mean.
        """
        trajectory = planning.reanalyze(
            partial(self._search, jax.lax.stop_gradient(params), True),
            sample.trajectory,
            key,
            fraction=self.reanalyze_fraction,
            # With policy targets; then, where these are used, with values to bootstrap from.
            num_timesteps=self.unroll_steps + 1 + self.n_step * (self.bootstrap == "search"),
        )
        steps, next_steps, valid = trajectory.steps, trajectory.next_timesteps(), trajectory.valid()
        model = self._model
        value_targets = self._value_targets(target_params, trajectory)

        def prediction_loss(
            k: int, state: jax.Array, alive: jax.Array, observed: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            policy, value_logits = model.prediction(params, state)
            searched = jax.tree.map(lambda x: x[k], steps.extras)
            log_probs = self._actions.log_probs(policy, searched)
            policy_loss = -alive * valid[k] * jnp.sum(searched["policy"] * log_probs, axis=-1)
            value_loss = model.cross_entropy(value_logits, alive * value_targets[k])
            return policy_loss + observed * self.value_cost * value_loss, value_logits

        # Two masks [N] along the unroll. `alive`: the episode has not ended before this step.
        # A terminal leads to an absorbing state: its reward and value targets are 0, and it has no
        # policy target. `observed` is 0 after a time-out: the following steps were not observed, so
        # nothing is learned from them, nor from a sample that begins at an episode's end.
        alive = observed = valid[0].astype(jnp.float32)

        state = model.representation(
            params, jax.tree.map(lambda x: x[0], steps.timestep.observation)
        )
        losses, root_value_logits = prediction_loss(0, state, alive, observed)
        for k in range(self.unroll_steps):
            state, reward_logits = model.dynamics(params, state, steps.action[k])
            reward_target = alive * next_steps.reward[k]
            observed = observed * jnp.where(valid[k], 1.0, 1.0 - alive)
            alive = alive * (valid[k] & (next_steps.discount[k] != 0))
            reward_loss = observed * model.cross_entropy(reward_logits, reward_target)
            losses += reward_loss / self.unroll_steps
            step_loss, _ = prediction_loss(k + 1, state, alive, observed)
            losses += step_loss / self.unroll_steps
            state = scale_gradient(state, 0.5)  # appendix G: the dynamics are used K times

        loss = Mean(jnp.mean(sample.weights * losses), jnp.mean(valid[0], dtype=jnp.float32))
        root_value = model.to_scalar(root_value_logits)
        priorities = jax.lax.stop_gradient(valid[0] * jnp.abs(root_value - value_targets[0]))
        return loss, ({"loss": loss, "value": mean_of(root_value, valid[0])}, priorities)

    def _value_targets(self, target_params: ModelParams, trajectory: Trajectory) -> jax.Array:
        """Return n-step targets `[K + 1, N]`."""
        timesteps, next_steps = trajectory.timesteps(), trajectory.next_timesteps()
        T = self.unroll_steps + self.n_step
        if self.bootstrap == "search":
            values: jax.Array = trajectory.steps.extras["value"]
        else:
            values = jax.vmap(partial(self._model.value, target_params))(timesteps.observation)
        rewards, discounts, valid = (
            x[:T] for x in (next_steps.reward, next_steps.discount, trajectory.valid())
        )
        return n_step_targets(values, rewards, self.discount * discounts, valid, self.n_step)

    @property
    def _model(self) -> Model:
        return build_model(
            self.network,
            require_spec(self.spec).observation,
            self._actions,
            latent_size=self.latent_size,
            dynamics_hidden=self.dynamics_hidden,
            dynamics_blocks=self.dynamics_blocks,
            prediction_hidden=self.prediction_hidden,
            support_max=self.support_max,
            support_size=self.support_size,
        )

    @property
    def _actions(self) -> SearchActions:
        return search_actions(self.spec, self.max_considered_actions)

    @property
    def _buffer(self) -> Buffer:
        # What the search found is known of the timesteps of a sample but of the last.
        num_transitions = self.unroll_steps + self.n_step + (self.bootstrap == "search")
        return off_policy.make_buffer(self.replay, self.spec, num_transitions)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        method = self.optimizer.build(self.max_gradient_norm)
        return optax.chain(method, optax.add_decayed_weights(self.weight_decay))
