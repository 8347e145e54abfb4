"""Gumbel MuZero: search in a learned model, which learns to predict what the search needs.

Sources: Schrittwieser et al. 2020 (arXiv 1911.08265) for the model and its losses; Danihelka et al.
2022, "Policy improvement by planning with Gumbel", for the search, which mctx does.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mctx
import optax

from podracer.agents.common import actor_critic, off_policy, planning, value_based
from podracer.networks import MLP, Head, Network, TorsoNetwork, outputs
from podracer.ops.returns import n_step_targets
from podracer.ops.transforms import squash, two_hot, unsquash
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    ArraySpec,
    Carry,
    EnvironmentSpec,
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


class MuZeroParams(NamedTuple):
    """Parameters of the model's three networks."""

    dynamics: Params  # g
    representation: Params  # h
    prediction: Params  # f


@struct
class MuZero:
    """Planning in a learned model, for discrete actions."""

    learning_rate: float = bounded(1e-3)
    """Learning rate of AdamW."""
    discount: float = bounded(0.997, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    value_cost: float = bounded(0.25)
    """Weight of the value loss; policy and reward losses have weight 1."""
    max_gradient_norm: float = bounded(5.0)
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    weight_decay: float = bounded(1e-4)
    """Weight decay of AdamW."""
    num_simulations: int = static(default=16, low=1)
    """Simulations of the search, one step of the model each, for every action."""
    max_considered_actions: int = static(default=16, low=1)
    """Largest number of actions that the search compares at its root."""
    unroll_steps: int = static(default=5, low=1)
    """Steps K that the model is unrolled for in the loss."""
    n_step: int = static(default=5, low=1)
    """Rewards n in a value target before it bootstraps."""
    target_update_period: int = static(default=100, low=1)
    """Updates between two copies of the parameters to the target network."""
    support_max: float = static(default=30.0, low=0.0)
    """Largest value and reward on the squashed scale of `ops/transforms.py`; 30 stands for 900."""
    support_size: int = static(default=61, low=2)
    """Number of atoms for values and rewards, from minus to plus the support's largest value."""
    latent_size: int = static(default=64, low=1)
    """Size of the model's hidden state."""
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(128,))))
    """Representation network h, from an observation to a hidden state."""
    dynamics_hidden: tuple[int, ...] = static(default=(128,), low=1)
    """Widths of the hidden layers of the dynamics network g."""
    prediction_hidden: tuple[int, ...] = static(default=(128,), low=1)
    """Widths of the hidden layers of the prediction network f."""
    replay: Replay = static(default=Replay(batch_size=128, prioritized=True))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        representation_key, dynamics_key, prediction_key = jax.random.split(key, 3)
        params = MuZeroParams(
            dynamics=self._dynamics_network.init(dynamics_key),
            representation=self._representation_network.init(representation_key),
            prediction=self._prediction_network.init(prediction_key),
        )
        state = off_policy.init_target_network_state(params, self._optimizer)
        extras = {"policy": ArraySpec((self._num_actions,))}
        return LearnerState(state, self._buffer.init(num_envs, extras=extras))

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> MuZeroParams:
        return state.shared.params

    def act(
        self, params: MuZeroParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        def search(observation: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
            """Search for one environment, so that its random numbers depend on its key alone."""
            observation = jax.tree.map(lambda x: x[None], observation)
            action, policy, _ = planning.gumbel_search(
                params,
                key,
                self._root_fn(params, observation),
                self._recurrent_fn,
                observation,
                num_simulations=self.num_simulations,
                max_considered_actions=self.max_considered_actions,
                explore=explore,
            )
            return action, {"policy": policy}

        action, extras = jax.vmap(search)(timestep.observation, keys)
        return action, extras, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        update = partial(
            off_policy.update_with_target_network,
            loss=self._loss,
            optimizer=self._optimizer,
            target_update_period=self.target_update_period,
            axis=axis,
        )
        return off_policy.learn_from_replay(self._buffer, update, state, trajectory, key, axis)

    def _loss(
        self, params: MuZeroParams, target_params: MuZeroParams, sample: Sample, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Unroll the model for K steps along each sampled sequence, and sum its losses.

        At the root and after each step the prediction network learns the search's policy and an
        n-step value; the dynamics network learns each step's reward (Schrittwieser et al. 2020,
        equation 1). The losses of the K steps are divided by K, so that their sum does not depend
        on K.
        """
        del key
        trajectory, steps = sample.trajectory, sample.trajectory.steps
        next_steps, valid = trajectory.next_timesteps(), trajectory.valid()
        value_targets = self._value_targets(target_params, trajectory)

        def prediction_loss(
            k: int, state: jax.Array, alive: jax.Array, observed: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            policy_logits, value_logits = self._prediction(params, state)
            log_policy = jax.nn.log_softmax(policy_logits)
            policy_loss = -alive * jnp.sum(steps.extras["policy"][k] * log_policy, axis=-1)
            value_loss = self._cross_entropy(value_logits, alive * value_targets[k])
            return policy_loss + observed * self.value_cost * value_loss, value_logits

        # Two masks [N] follow the unroll. `alive`: the episode has not ended before this step.
        # What follows a terminal is an absorbing state: its reward and value targets are 0, and it
        # has no policy target. `observed` is 0 after a time-out: what would have followed was never
        # seen, so nothing is learned from there on.
        alive = observed = jnp.ones(valid.shape[1])

        state = self._representation(
            params, jax.tree.map(lambda x: x[0], steps.timestep.observation)
        )
        losses, root_value_logits = prediction_loss(0, state, alive, observed)
        for k in range(self.unroll_steps):
            state, reward_logits = self._dynamics(params, state, steps.action[k])
            state = _scale_gradient(state, 0.5)  # appendix G: keeps its size constant over steps
            reward_target = alive * next_steps.reward[k]
            observed = observed * jnp.where(valid[k], 1.0, 1.0 - alive)
            alive = alive * (valid[k] & (next_steps.discount[k] > 0))
            reward_loss = observed * self._cross_entropy(reward_logits, reward_target)
            losses += reward_loss / self.unroll_steps
            step_loss, _ = prediction_loss(k + 1, state, alive, observed)
            losses += step_loss / self.unroll_steps

        loss = jnp.mean(sample.weights * losses)
        root_value = self._to_scalar(root_value_logits)
        priorities = jax.lax.stop_gradient(jnp.abs(root_value - value_targets[0]))
        return loss, ({"loss": loss, "value": jnp.mean(root_value)}, priorities)

    def _value_targets(self, target_params: MuZeroParams, trajectory: Trajectory) -> jax.Array:
        """Return n-step targets `[K + 1, N]`, bootstrapped by the target network."""
        timesteps, next_steps = trajectory.timesteps(), trajectory.next_timesteps()
        T, N = timesteps.reward.shape
        observation = jax.tree.map(lambda x: x.reshape(T * N, *x.shape[2:]), timesteps.observation)
        _, value_logits = self._prediction(
            target_params, self._representation(target_params, observation)
        )
        values = self._to_scalar(value_logits).reshape(T, N)
        discounts = self.discount * next_steps.discount
        return n_step_targets(values, next_steps.reward, discounts, trajectory.valid(), self.n_step)

    # --- the model's three functions, over batches [N, ...] --------------------------------------

    def _representation(self, params: MuZeroParams, observation: PyTree) -> jax.Array:
        """Return the hidden state `[N, latent]` of an observation: `s⁰ = h(o)`."""
        heads = outputs(self._representation_network, params.representation, observation)
        return _scale_state(heads["state"])

    def _dynamics(
        self, params: MuZeroParams, state: jax.Array, action: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the next hidden state, and logits of the reward: `rᵏ, sᵏ = g(sᵏ⁻¹, aᵏ)`."""
        inputs = {"action": jax.nn.one_hot(action, self._num_actions), "state": state}
        heads = outputs(self._dynamics_network, params.dynamics, inputs)
        return _scale_state(state + heads["state"]), heads["reward"]

    def _prediction(self, params: MuZeroParams, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits of the policy `[N, A]` and of the value `[N, Z]`: `pᵏ, vᵏ = f(sᵏ)`."""
        heads = outputs(self._prediction_network, params.prediction, state)
        return heads["policy"], heads["value"]

    # --- what mctx calls -------------------------------------------------------------------------

    def _root_fn(self, params: MuZeroParams, observation: PyTree) -> mctx.RootFnOutput:
        state = self._representation(params, observation)
        policy_logits, value_logits = self._prediction(params, state)
        return planning.RootFnOutput(
            prior_logits=policy_logits, value=self._to_scalar(value_logits), embedding=state
        )

    def _recurrent_fn(
        self, params: MuZeroParams, key: jax.Array, action: jax.Array, state: jax.Array
    ) -> tuple[mctx.RecurrentFnOutput, jax.Array]:
        next_state, reward_logits = self._dynamics(params, state, action)
        policy_logits, value_logits = self._prediction(params, next_state)
        reward = self._to_scalar(reward_logits)
        output = planning.RecurrentFnOutput(
            reward=reward,
            discount=jnp.full_like(reward, 1.0) * self.discount,
            prior_logits=policy_logits,
            value=self._to_scalar(value_logits),
        )
        return output, next_state

    # --- values and rewards as categorical distributions (appendix F) ----------------------------

    def _to_scalar(self, logits: jax.Array) -> jax.Array:
        return unsquash(jax.nn.softmax(logits) @ self._support)

    def _cross_entropy(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        target_probs = two_hot(squash(target), self._support)
        return -jnp.sum(target_probs * jax.nn.log_softmax(logits), axis=-1)

    @property
    def _support(self) -> jax.Array:
        return jnp.linspace(-self.support_max, self.support_max, self.support_size)

    # --- networks --------------------------------------------------------------------------------

    @property
    def _num_actions(self) -> int:
        return value_based.require_discrete(self.spec).num_actions

    @property
    def _representation_network(self) -> Network:
        observation = actor_critic.require_spec(self.spec).observation
        return self.network.build(observation, {"state": Head(self.latent_size)})

    @property
    def _dynamics_network(self) -> Network:
        inputs = {
            "action": ArraySpec((self._num_actions,)),
            "state": ArraySpec((self.latent_size,)),
        }
        heads = {"state": Head(self.latent_size), "reward": Head(self.support_size, 0.01)}
        return TorsoNetwork(MLP(self.dynamics_hidden)).build(inputs, heads)

    @property
    def _prediction_network(self) -> Network:
        # Small initial weights: values near 0, and a nearly uniform policy.
        heads = {"policy": Head(self._num_actions, 0.01), "value": Head(self.support_size, 0.01)}
        return TorsoNetwork(MLP(self.prediction_hidden)).build(
            ArraySpec((self.latent_size,)), heads
        )

    @property
    def _buffer(self) -> Buffer:
        return off_policy.make_buffer(self.replay, self.spec, self.unroll_steps + self.n_step)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adamw(self.learning_rate, weight_decay=self.weight_decay),
        )


def _scale_gradient(x: jax.Array, scale: float) -> jax.Array:
    return scale * x + (1 - scale) * jax.lax.stop_gradient(x)


def _scale_state(state: jax.Array) -> jax.Array:
    """Scale each hidden state `[N, latent]` to [0, 1]. Source: appendix G."""
    low = jnp.min(state, axis=-1, keepdims=True)
    high = jnp.max(state, axis=-1, keepdims=True)
    return (state - low) / (high - low + 1e-5)
