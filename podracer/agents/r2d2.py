"""R2D2: recurrent Q-learning from replayed sequences that start at stored recurrent states.

Source: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement
Learning".
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic, off_policy, value_based
from podracer.networks import MLP, Network, TorsoNetwork
from podracer.ops.returns import n_step_targets
from podracer.ops.transforms import squash, unsquash
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    ConfigError,
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


@struct
class R2D2Carry:
    """Recurrent state of each environment, `[B, ...]`."""

    memory: PyTree  # recurrent state of the network
    epsilon_exponent: jax.Array  # f32 [B]


@struct
class R2D2:
    """Recurrent double Q-learning for discrete actions."""

    learning_rate: float = bounded(5e-4)
    """Learning rate of Adam."""
    discount: float = bounded(0.997, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    epsilon: float = bounded(0.4, high=1.0)
    """Probability epsilon of a random action in the first environment, in [0, 1]."""
    apex_alpha: float = bounded(7.0)
    """Spread alpha of epsilon: environment i of B takes epsilon ** (1 + alpha * i / (B - 1))."""
    max_gradient_norm: float = bounded(40.0)
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    priority_eta: float = bounded(0.9, high=1.0)
    """Weight eta, in [0, 1], of a sequence's largest TD error in its priority, against the mean."""
    target_update_period: int = static(default=250, low=1)
    """Number of updates between copies of the parameters to the target network."""
    burn_in_length: int = static(default=20, low=0)
    """Timesteps of a sequence that only refresh the stored recurrent state."""
    unroll_length: int = static(default=20, low=1)
    """Timesteps of a sequence, after the burn-in, whose action values are learned."""
    n_step: int = static(default=5, low=1)
    """Rewards n in a return before it bootstraps."""
    sequence_period: int = static(default=20, low=1)
    """Timesteps between the starts of two replayed sequences; must equal the rollout length."""
    rescale_values: bool = static(default=True)
    """Learn values on the scale h of `ops/transforms.py`, for rewards that are not clipped."""
    replay: Replay = static(default=Replay(batch_size=64, prioritized=True, priority_exponent=0.9))
    """Replay buffer."""
    network: TorsoNetwork = static(
        default=TorsoNetwork(MLP(hidden=(64,)), memory="lstm", memory_size=64)
    )
    """Recurrent network of the action values, without its heads."""
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        state = off_policy.init_target_network_state(self._network.init(key), self._optimizer)
        memory = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], self._network.carry(1)))
        return LearnerState(state, self._buffer.init(num_envs, carry=memory))

    def carry(self, num_envs: int) -> R2D2Carry:
        exponents = value_based.epsilon_exponents(self.apex_alpha, num_envs)
        return R2D2Carry(self._network.carry(num_envs), exponents)

    def actor_params(self, state: LearnerState) -> value_based.ActorParams:
        epsilon = jnp.asarray(self.epsilon, jnp.float32)
        return value_based.ActorParams(state.shared.params, epsilon)

    def act(
        self,
        params: value_based.ActorParams,
        carry: R2D2Carry,
        timestep: TimeStep,
        keys: jax.Array,
        explore: bool,
    ) -> tuple[jax.Array, PyTree, R2D2Carry]:
        timesteps = jax.tree.map(lambda x: x[None], timestep)
        q, memory = self._q_values(params.params, carry.memory, timesteps)
        epsilon = params.epsilon**carry.epsilon_exponent if explore else jnp.zeros(())
        action = value_based.epsilon_greedy(q[0], keys, epsilon)
        return action, (), R2D2Carry(memory, carry.epsilon_exponent)

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        rollout_length = trajectory.steps.action.shape[0]
        if rollout_length != self.sequence_period:
            raise ConfigError(
                f"R2D2 stores its recurrent state once in {self.sequence_period} steps, so "
                f"rollout_length must be {self.sequence_period} too, but it is {rollout_length}."
            )
        update = partial(
            off_policy.update_with_target_network,
            loss=self._loss,
            optimizer=self._optimizer,
            target_update_period=self.target_update_period,
            axis=axis,
        )
        memory = trajectory.carry.memory
        return off_policy.learn_from_replay(
            self._buffer, update, state, trajectory, key, axis, memory
        )

    def _loss(
        self, params: Params, target_params: Params, sample: Sample, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        del key
        trajectory = sample.trajectory
        q = self._unroll(params, trajectory)
        target_q = self._unroll(target_params, trajectory)
        next_values = value_based.gather_action(target_q[..., None], jnp.argmax(q, axis=-1))[..., 0]
        next_values = unsquash(next_values) if self.rescale_values else next_values

        next_steps, valid = trajectory.next_timesteps(), trajectory.valid()
        start = self.burn_in_length
        targets = n_step_targets(
            next_values,
            next_steps.reward[start:],
            self.discount * next_steps.discount[start:],
            valid[start:],
            self.n_step,
        )
        targets = squash(targets) if self.rescale_values else targets

        learned = slice(start, start + self.unroll_length)
        action = trajectory.steps.action[learned]
        predictions = value_based.gather_action(q[: self.unroll_length, ..., None], action)[..., 0]
        mask = valid[learned].astype(jnp.float32)
        td_error = mask * (jax.lax.stop_gradient(targets) - predictions)
        loss = jnp.mean(sample.weights[None] * 0.5 * td_error**2)

        # Section 2.3: p = η max |δ| + (1 - η) mean |δ|.
        size = jax.lax.stop_gradient(jnp.abs(td_error))
        mean = jnp.sum(size, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
        priorities = self.priority_eta * jnp.max(size, axis=0) + (1 - self.priority_eta) * mean
        return loss, ({"loss": loss, "q": jnp.mean(predictions)}, priorities)

    def _unroll(self, params: Params, trajectory: Trajectory) -> jax.Array:
        """Return action values `[unroll + n, N, A]` after the burn-in, which gets no gradient."""
        timesteps, memory = trajectory.timesteps(), trajectory.carry
        if self.burn_in_length:
            burn_in = jax.tree.map(lambda x: x[: self.burn_in_length], timesteps)
            memory = jax.lax.stop_gradient(self._q_values(params, memory, burn_in)[1])
        learned = jax.tree.map(lambda x: x[self.burn_in_length :], timesteps)
        return self._q_values(params, memory, learned)[0]

    def _q_values(
        self, params: Params, memory: PyTree, timesteps: TimeStep
    ) -> tuple[jax.Array, PyTree]:
        """Return action values `[T, B, A]` of timesteps `[T, B, ...]`, and the last memory."""
        heads, memory = self._network.apply(params, memory, timesteps.observation, timesteps.first)
        values = value_based.q_outputs(heads, size=1)[..., 0]
        return actor_critic.mask_logits(timesteps.observation, values), memory

    @property
    def _network(self) -> Network:
        return value_based.build_q_network(self.network, self.spec, 1, dueling=True, noisy=False)

    @property
    def _buffer(self) -> Buffer:
        length = self.burn_in_length + self.unroll_length + self.n_step
        spec = actor_critic.require_spec(self.spec)
        return Buffer(self.replay, spec, length, self.sequence_period)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adam(self.learning_rate, eps=1e-3),
        )
