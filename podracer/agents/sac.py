"""SAC: a stochastic policy that is paid for its entropy, at a price that is learned.

Sources: Haarnoja et al. 2018 (arXiv 1812.05905).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import continuous, off_policy
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, TorsoNetwork, outputs
from podracer.ops.distributions import LOG_SCALE_BOUNDS, SquashedNormal, to_bounds
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
class SAC:
    """Soft actor-critic, continuous actions."""

    learning_rate: float = 3e-4
    discount: float = 0.99
    target_rate: float = 0.005
    """How far the target critics follow in each update."""
    initial_temperature: float = 1.0
    target_entropy: float = -1.0
    """Entropy that the temperature steers to, for each coordinate of an action."""
    critics: int = static(default=2)
    n_step: int = static(default=1)
    random_frames: int = static(default=5_000)
    """Frames with random actions at first."""
    normalize_observations: bool = static(default=False)
    replay: Replay = static(default=Replay(1_000_000, warmup=5_000))
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(256, 256))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        temperature = {"temperature": jnp.log(jnp.float32(self.initial_temperature))}
        shared = continuous.init(
            self._actor, self._critic, self.critics, self._optimizer, key, temperature
        )
        shared["target"] = jax.tree.map(jnp.copy, shared["params"]["critic"])
        shared["observations"] = continuous.observations(self.normalize_observations, self.spec)
        return LearnerState(shared, self._buffer.init(num_envs))

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> Params:
        return continuous.acting(state.shared)

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        policy = self._policy(params["actor"], continuous.seen(params, timestep.observation))
        if not explore:
            return to_bounds(self._space, policy.mode()), (), carry
        action, _ = policy.sample(keys)
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
            shared = continuous.stepped(self._optimizer, shared, grads)
            critic = shared["params"]["critic"]
            target = optax.incremental_update(critic, shared["target"], self.target_rate)
            metrics["gradient_norm"] = optax.tree.norm(grads)
            return {**shared, "target": target}, metrics, priorities

        shared = off_policy.explored(state.shared, trajectory, self.random_frames, axis)
        shared = continuous.observed(shared, trajectory, axis)
        state = LearnerState(shared, state.local)
        return off_policy.learn(self._buffer, update, state, trajectory, key, axis)

    def _loss(
        self,
        params: Params,
        target: Params,
        now: off_policy.Transition,
        weights: jax.Array,
        key: jax.Array,
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Of critics, actor and temperature; each of them sees the others as constants."""
        keys = jax.random.split(key, (2, *now.mask.shape))
        fixed = jax.lax.stop_gradient(params)
        temperature = jnp.exp(fixed["temperature"])
        value = partial(continuous.values, self._critic)

        next_action, next_log_prob = self._policy(fixed["actor"], now.then.observation).sample(
            keys[0]
        )
        after = jnp.min(value(target, now.then.observation, next_action), axis=0)
        after = after - temperature * next_log_prob
        target_value = now.returns + now.discounts * after
        q = value(params["critic"], now.first.observation, now.action)
        error = target_value[None] - q
        critic_loss = jnp.mean(now.mask * weights * jnp.sum(0.5 * error**2, axis=0))

        action, log_prob = self._policy(params["actor"], now.first.observation).sample(keys[1])
        gain = jnp.min(value(fixed["critic"], now.first.observation, action), axis=0)
        actor_loss = jnp.mean(now.mask * (temperature * log_prob - gain))

        excess = jax.lax.stop_gradient(-log_prob) - self.target_entropy * self._space.size
        temperature_loss = params["temperature"] * jnp.mean(now.mask * excess)
        metrics = {
            "loss": critic_loss,
            "actor_loss": actor_loss,
            "q": jnp.mean(q),
            "entropy": -jnp.mean(log_prob),
            "temperature": temperature,
        }
        priorities = jax.lax.stop_gradient(now.mask * jnp.mean(jnp.abs(error), axis=0))
        return critic_loss + actor_loss + temperature_loss, (metrics, priorities)

    def _policy(self, params: Params, observation: PyTree) -> SquashedNormal:
        mean, log_scale = jnp.split(outputs(self._actor, params, observation)["action"], 2, axis=-1)
        return SquashedNormal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))

    @property
    def _space(self) -> Continuous:
        return continuous.space_of(self.spec)

    @property
    def _actor(self) -> Network:
        return continuous.build_actor(self.network, self.spec, 2)

    @property
    def _critic(self) -> Network:
        return continuous.build_critic(self.network, self.spec)

    @property
    def _buffer(self) -> Buffer:
        return off_policy.buffer(self.replay, self.spec, self.n_step)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)
