"""PPO: several epochs of clipped policy updates on each rollout.

Minibatches are shuffled within the shard: single transitions for feed-forward networks, whole
sequences from their stored memory for recurrent ones. Sources: Schulman et al. 2017 (arXiv
1707.06347); Engstrom et al. 2020 (arXiv 2005.12729) for the normalizations.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic
from podracer.mesh import global_grad_in_blocks
from podracer.networks import MLP, Network, TorsoNetwork
from podracer.ops.distributions import policy
from podracer.ops.minibatches import permutation, take
from podracer.ops.moments import Moments, init_moments, merge, moments_of, normalize
from podracer.ops.returns import discounted_sums, generalized_advantages
from podracer.types import (
    Carry,
    ConfigError,
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
class Batch:
    """Items to learn from: `[1, N, ...]` transitions, or `[T, N, ...]` sequences."""

    observation: PyTree
    first: jax.Array
    sample: jax.Array
    log_prob: jax.Array
    value: jax.Array  # as acting saw it
    target: jax.Array
    advantage: jax.Array
    valid: jax.Array  # f32, 0 where an episode was cut
    carry: Carry  # memory at the start of each item, [1, N, ...]; () without memory


@struct
class PPO:
    """Proximal policy optimization, discrete or continuous actions."""

    learning_rate: float = 2.5e-4
    discount: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    max_gradient_norm: float = 0.5
    epochs: int = static(default=4)
    minibatches: int = static(default=4)
    normalize_observations: bool = static(default=False)
    normalize_rewards: bool = static(default=False)
    decay_updates: int = static(default=0)
    network: TorsoNetwork = static(default=TorsoNetwork(MLP((64, 64), "tanh"), shared=False))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        shared = actor_critic.init(self._network, self._optimizer, key)
        shared["observations"] = shared["returns"] = ()
        if self.normalize_observations:
            shared["observations"] = init_moments(actor_critic.require_spec(self.spec).observation)
        if self.normalize_rewards:
            shared["returns"] = init_moments(jnp.zeros(()))
        # Discounted sums of past rewards, whose deviation scales the rewards.
        return LearnerState(shared, jnp.zeros(num_envs) if self.normalize_rewards else ())

    def carry(self, num_envs: int) -> Carry:
        return self._network.carry(num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        return {name: state.shared[name] for name in ("params", "observations")}

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        timestep = self._normalized(params["observations"], timestep)
        action, extras, carry = actor_critic.act(
            self._network, self._space, params["params"], carry, timestep, keys, explore
        )
        behavior = policy(self._space, extras.pop("policy"))
        return action, {**extras, "log_prob": behavior.log_prob(extras["sample"])}, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        raw = trajectory.steps.timestep.observation
        trajectory, scale, sums = self._normalized_trajectory(state, trajectory, axis)
        batch = self._batch(state.shared["params"], trajectory)
        # Measured together: fewer reductions, and none that could overtake another.
        batch, observations = self._standardized(state.shared["observations"], batch, raw, axis)
        items = batch.valid.shape[1]
        self._check_minibatches(items)

        def epoch(learner: LearnerState, key: jax.Array) -> tuple[LearnerState, Metrics]:
            minibatches = permutation(key, items).reshape(self.minibatches, -1)
            return jax.lax.scan(partial(self._minibatch_update, axis, batch), learner, minibatches)

        keys = jax.random.split(key, self.epochs)
        learner, metrics = jax.lax.scan(epoch, LearnerState(state.shared), keys)
        # The new moments only now: acting and learning must see the same observations.
        shared = {**learner.shared, "returns": scale, "observations": observations}
        return LearnerState(shared, sums), jax.tree.map(jnp.mean, metrics)

    def _standardized(
        self, moments: PyTree, batch: Batch, observation: PyTree, axis: str | None
    ) -> tuple[Batch, PyTree]:
        """Advantages with zero mean and unit deviation over the batch of all shards; and the
        moments with what was observed."""
        measured = {"advantage": batch.advantage}
        if self.normalize_observations:
            measured["observation"] = observation
        seen = moments_of(measured, axis)
        centered = batch.advantage - seen.mean["advantage"]
        advantage = centered * jax.lax.rsqrt(seen.variance["advantage"] + 1e-8)
        if self.normalize_observations:
            part = Moments(seen.count, seen.mean["observation"], seen.variance["observation"])
            moments = merge(moments, part)
        return dataclasses.replace(batch, advantage=advantage), moments

    def _normalized_trajectory(
        self, state: LearnerState, trajectory: Trajectory, axis: str | None
    ) -> tuple[Trajectory, PyTree, PyTree]:
        """Observations as acting saw them, rewards scaled; and the new moments of the returns."""
        see = partial(self._normalized, state.shared["observations"])
        steps = dataclasses.replace(trajectory.steps, timestep=see(trajectory.steps.timestep))
        trajectory = dataclasses.replace(trajectory, steps=steps, final=see(trajectory.final))
        if not self.normalize_rewards:
            return trajectory, (), ()
        after = trajectory.next_timesteps()
        ended = after.last | (after.discount == 0)
        decay = jnp.full_like(after.reward, 1.0) * self.discount
        returns, sums = discounted_sums(state.local, after.reward, decay, ended)
        scale = merge(state.shared["returns"], moments_of(returns, axis))
        deviation = jax.lax.rsqrt(scale.variance + 1e-8)

        def scaled(timestep: TimeStep) -> TimeStep:
            return dataclasses.replace(timestep, reward=timestep.reward * deviation)

        steps = dataclasses.replace(trajectory.steps, timestep=scaled(trajectory.steps.timestep))
        return (
            dataclasses.replace(trajectory, steps=steps, final=scaled(trajectory.final)),
            scale,
            sums,
        )

    def _batch(self, params: Params, trajectory: Trajectory) -> Batch:
        steps, extras, after = (
            trajectory.steps,
            trajectory.steps.extras,
            trajectory.next_timesteps(),
        )
        last = actor_critic.final_value(self._network, params, trajectory)
        values = jnp.concatenate([extras["value"], last[None]])
        valid = trajectory.valid()
        advantage = generalized_advantages(
            values[:-1],
            values[1:],
            after.reward,
            self.discount * after.discount,
            valid,
            self.lambda_,
        )
        batch = Batch(
            observation=steps.timestep.observation,
            first=steps.timestep.first,
            sample=extras["sample"],
            log_prob=extras["log_prob"],
            value=extras["value"],
            target=extras["value"] + advantage,
            advantage=advantage,
            valid=valid.astype(jnp.float32),
            carry=jax.tree.map(lambda x: x[None], trajectory.carry),
        )
        if not jax.tree.leaves(trajectory.carry):
            batch = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch)
        return batch

    def _minibatch_update(
        self, axis: str | None, batch: Batch, learner: LearnerState, items: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        grads, metrics = global_grad_in_blocks(
            lambda params, items: self._loss(params, take(batch, items)),
            learner.shared["params"],
            items,
            indices_in_cache=self._network.rows_in_cache // batch.valid.shape[0],
            axis=axis,
        )
        learner, more = actor_critic.apply_gradients(self._optimizer, learner, grads)
        return learner, {**metrics, **more}

    def _loss(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        carry = jax.tree.map(lambda x: x[0], batch.carry)
        outputs, _ = self._network.apply(params, carry, batch.observation, batch.first)
        now = policy(self._space, outputs["policy"])
        value = outputs["value"][..., 0]
        log_ratio = now.log_prob(batch.sample) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - self.clip, 1.0 + self.clip)
        gain = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        near = batch.value + jnp.clip(value - batch.value, -self.clip, self.clip)
        error = jnp.maximum((value - batch.target) ** 2, (near - batch.target) ** 2)
        policy_loss = -jnp.mean(batch.valid * gain)
        value_loss = 0.5 * jnp.mean(batch.valid * error)
        entropy = jnp.mean(batch.valid * now.entropy())
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approximate_kl": jnp.mean(ratio - 1.0 - log_ratio),
            "clip_share": jnp.mean((jnp.abs(ratio - 1.0) > self.clip).astype(jnp.float32)),
        }

    def _normalized(self, moments: PyTree, timestep: TimeStep) -> TimeStep:
        if not self.normalize_observations:
            return timestep
        seen = normalize(moments, timestep.observation)
        return dataclasses.replace(timestep, observation=seen)

    def _check_minibatches(self, items: int) -> None:
        if items % self.minibatches:
            raise ConfigError(
                f"PPO cannot split the {items} items of a device's rollout into "
                f"{self.minibatches} equal minibatches."
            )

    @property
    def _network(self) -> Network:
        return actor_critic.build(self.network, self.spec)

    @property
    def _space(self) -> Discrete | Continuous:
        return actor_critic.require_spec(self.spec).action

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        rate = self.learning_rate
        if self.decay_updates:
            steps = self.decay_updates * self.epochs * self.minibatches
            rate = optax.linear_schedule(rate, 0.0, steps)
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm), optax.adam(rate, eps=1e-5)
        )
