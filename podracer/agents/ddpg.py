"""DDPG: a deterministic policy that follows the gradient of a learned value; and TD3, which is DDPG
with two critics, delayed updates of the policy and smoothed targets.

Sources: Lillicrap et al. 2016 (arXiv 1509.02971); Fujimoto et al. 2018 (arXiv 1802.09477).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import continuous, off_policy
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, TorsoNetwork, outputs
from podracer.ops.distributions import to_bounds
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    Carry,
    Continuous,
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
class DDPG:
    """Deterministic policy gradient, continuous actions; see also `td3`."""

    learning_rate: float = 3e-4
    discount: float = 0.99
    target_rate: float = 0.005
    """How far the target networks follow in each update."""
    noise: float = 0.1
    """Deviation of the noise on actions, in halves of the bounds' width."""
    smoothing: float = 0.0
    """Deviation of the noise on the target policy's actions, which is cut at ..."""
    smoothing_bound: float = 0.5
    """... this."""
    critics: int = static(default=1)
    policy_delay: int = static(default=1)
    """Updates of the critics for each one of the policy and the targets."""
    n_step: int = static(default=1)
    random_frames: int = static(default=5_000)
    """Frames with random actions at first."""
    normalize_observations: bool = static(default=False)
    replay: Replay = static(default=Replay(1_000_000, warmup=5_000))
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(256, 256))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        shared = continuous.init(self._actor, self._critic, self.critics, self._optimizer, key, {})
        shared["target"] = jax.tree.map(jnp.copy, shared["params"])
        shared["observations"] = continuous.observations(self.normalize_observations, self.spec)
        shared["updates"] = jnp.int32(0)
        return LearnerState(shared, self._buffer.init(num_envs))

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> Params:
        return continuous.acting(state.shared)

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        action = self._policy(params["actor"], continuous.seen(params, timestep.observation))
        if not explore:
            return to_bounds(self._space, action), (), carry
        noise = jax.vmap(lambda key: jax.random.normal(key, (self._space.size,)))(keys)
        action = jnp.clip(action + self.noise * noise, -1.0, 1.0)
        return continuous.random_at_first(self._space, action, keys, params["explored"]), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        def update(
            shared: PyTree, sample: Sample, key: jax.Array
        ) -> tuple[PyTree, Metrics, jax.Array]:
            now = continuous.transition(sample, self.discount, self._space, shared)
            grads, (metrics, priorities) = global_grad(
                self._loss, shared["params"], shared["target"], now, sample.weights, key, axis=axis
            )
            metrics["gradient_norm"] = optax.tree.norm(grads)
            return self._stepped(shared, grads), metrics, priorities

        shared = off_policy.explored(state.shared, trajectory, self.random_frames, axis)
        shared = continuous.observed(shared, trajectory, axis)
        state = LearnerState(shared, state.local)
        return off_policy.learn(self._buffer, update, state, trajectory, key, axis)

    def _stepped(self, shared: PyTree, grads: PyTree) -> PyTree:
        """The critics' update; every `policy_delay`-th one is the policy's and the targets' too."""
        critic = continuous.stepped(self._optimizer, shared, {"critic": grads["critic"]})
        both = continuous.stepped(self._optimizer, critic, {"actor": grads["actor"]})
        target = optax.incremental_update(both["params"], shared["target"], self.target_rate)
        both = {**both, "target": target}
        updates = shared["updates"] + 1
        due = updates % self.policy_delay == 0
        chosen = jax.tree.map(lambda new, old: jnp.where(due, new, old), both, critic)
        return {**chosen, "updates": updates}

    def _loss(
        self,
        params: Params,
        target: Params,
        now: off_policy.Transition,
        weights: jax.Array,
        key: jax.Array,
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Of the critics and of the policy, which sees the first critic as a constant."""
        value = partial(continuous.values, self._critic)
        next_action = self._policy(target["actor"], now.then.observation)
        noise = self.smoothing * jax.random.normal(key, next_action.shape)
        noise = jnp.clip(noise, -self.smoothing_bound, self.smoothing_bound)
        next_action = jnp.clip(next_action + noise, -1.0, 1.0)
        after = jnp.min(value(target["critic"], now.then.observation, next_action), axis=0)
        target_value = now.returns + now.discounts * after
        q = value(params["critic"], now.first.observation, now.action)
        error = target_value[None] - q
        critic_loss = jnp.mean(now.mask * weights * jnp.sum(0.5 * error**2, axis=0))

        first = jax.lax.stop_gradient(params["critic"][:1])
        action = self._policy(params["actor"], now.first.observation)
        actor_loss = -jnp.mean(now.mask * value(first, now.first.observation, action)[0])
        metrics = {"loss": critic_loss, "actor_loss": actor_loss, "q": jnp.mean(q)}
        priorities = now.mask * jnp.mean(jnp.abs(error), axis=0)
        return critic_loss + actor_loss, (metrics, jax.lax.stop_gradient(priorities))

    def _policy(self, params: Params, observation: PyTree) -> jax.Array:
        """Actions `[N, size]` in [-1, 1]."""
        return jnp.tanh(outputs(self._actor, params, observation)["action"])

    @property
    def _space(self) -> Continuous:
        return continuous.space_of(self.spec)

    @property
    def _actor(self) -> Network:
        return continuous.build_actor(self.network, self.spec, 1)

    @property
    def _critic(self) -> Network:
        return continuous.build_critic(self.network, self.spec)

    @property
    def _buffer(self) -> Buffer:
        return off_policy.buffer(self.replay, self.spec, self.n_step)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)


def td3(**settings: Any) -> DDPG:
    """TD3: DDPG with the settings of Fujimoto et al. 2018, and others that are given."""
    return DDPG(**{"critics": 2, "policy_delay": 2, "smoothing": 0.2, **settings})
