"""R2D2: recurrent action values from replayed sequences, each from its stored memory.

Source: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement
Learning".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic, off_policy, value_based
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, TorsoNetwork
from podracer.ops.returns import n_step_targets
from podracer.ops.transforms import squash, unsquash
from podracer.replay import Buffer, Replay, Sample
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
class R2D2:
    """Recurrent double Q-learning, discrete actions."""

    learning_rate: float = 5e-4
    discount: float = 0.997
    epsilon: float = 0.4
    ladder: float = 7.0
    """Environment i of B explores with `epsilon ** (1 + ladder * i / (B - 1))`."""
    max_gradient_norm: float = 40.0
    priority_mix: float = 0.9
    """Weight of the largest error of a sequence in its priority; the mean has the rest."""
    target_period: int = static(default=250)
    """Updates between two copies of the parameters to the target network."""
    burn_in: int = static(default=20)
    """Timesteps that only warm the stored memory up."""
    unroll: int = static(default=20)
    """Timesteps after them whose action values are learned."""
    n_step: int = static(default=5)
    stride: int = static(default=20)
    """Timesteps between two stored memories: the rollout's length."""
    squashed: bool = static(default=True)
    """Learn values on the scale of `ops/transforms.py`, for rewards that are not clipped."""
    replay: Replay = static(default=Replay(batch_size=64, prioritized=True, priority_exponent=0.9))
    network: TorsoNetwork = static(
        default=TorsoNetwork(MLP(hidden=(64,)), memory="lstm", memory_size=64)
    )
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        shared = value_based.init(self._network.init(key), self._optimizer)
        one = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], self._network.carry(1)))
        return LearnerState(shared, self._buffer.init(num_envs, carry=one))

    def carry(self, num_envs: int) -> Carry:
        exponents = value_based.exponents(self.ladder, num_envs)
        return {"memory": self._network.carry(num_envs), "exponent": exponents}

    def actor_params(self, state: LearnerState) -> Params:
        return {"online": state.shared["params"], "epsilon": jnp.asarray(self.epsilon, jnp.float32)}

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        q, memory = self._values(
            params["online"], carry["memory"], jax.tree.map(lambda x: x[None], timestep)
        )
        epsilon = params["epsilon"] ** carry["exponent"] if explore else jnp.zeros(())
        action = value_based.epsilon_greedy(q[0], keys, epsilon)
        return action, (), {**carry, "memory": memory}

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        if trajectory.steps.action.shape[0] != self.stride:
            raise ConfigError(
                f"R2D2 keeps its memory once in {self.stride} steps, so rollout_length must be "
                f"{self.stride} too, but it is {trajectory.steps.action.shape[0]}."
            )

        def update(
            shared: PyTree, sample: Sample, key: jax.Array
        ) -> tuple[PyTree, Metrics, jax.Array]:
            grads, (metrics, priorities) = global_grad(
                self._loss, shared["params"], shared["target"], sample, axis=axis
            )
            shared, more = value_based.apply_gradients(
                self._optimizer, shared, grads, self.target_period
            )
            return shared, {**metrics, **more}, priorities

        memory = trajectory.carry["memory"]
        return off_policy.learn(self._buffer, update, state, trajectory, key, axis, memory)

    def _loss(
        self, params: Params, target: Params, sample: Sample
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        trajectory = sample.trajectory
        q = self._unrolled(params, trajectory)
        target_q = self._unrolled(target, trajectory)
        best = jnp.argmax(q, axis=-1)
        after = value_based.of_action(target_q[..., None], best)[..., 0]
        after = unsquash(after) if self.squashed else after
        steps, valid = trajectory.next_timesteps(), trajectory.valid()
        start = self.burn_in
        discounts = self.discount * steps.discount[start:]
        targets = n_step_targets(after, steps.reward[start:], discounts, valid[start:], self.n_step)
        targets = squash(targets) if self.squashed else targets

        learned = slice(self.burn_in, self.burn_in + self.unroll)
        action = trajectory.steps.action[learned]
        chosen = value_based.of_action(q[: self.unroll, ..., None], action)[..., 0]
        mask = valid[learned].astype(jnp.float32)
        error = mask * (jax.lax.stop_gradient(targets) - chosen)
        loss = jnp.mean(sample.weights[None] * 0.5 * error**2)
        size = jax.lax.stop_gradient(jnp.abs(error))
        mean = jnp.sum(size, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
        priorities = self.priority_mix * jnp.max(size, axis=0) + (1 - self.priority_mix) * mean
        return loss, ({"loss": loss, "q": jnp.mean(chosen)}, priorities)

    def _unrolled(self, params: Params, trajectory: Trajectory) -> jax.Array:
        """Action values `[unroll + n, N, A]` after the burn-in, through which no gradient flows."""
        timesteps = trajectory.timesteps()
        warm = jax.tree.map(lambda x: x[: self.burn_in], timesteps)
        rest = jax.tree.map(lambda x: x[self.burn_in :], timesteps)
        carry = trajectory.carry
        if self.burn_in:
            carry = jax.lax.stop_gradient(self._values(params, carry, warm)[1])
        return self._values(params, carry, rest)[0]

    def _values(self, params: Params, carry: Carry, timesteps: TimeStep) -> tuple[jax.Array, Carry]:
        outputs, carry = self._network.apply(params, carry, timesteps.observation, timesteps.first)
        values = value_based.combined(outputs, 1)[..., 0]
        return actor_critic.mask_logits(timesteps.observation, values), carry

    @property
    def _network(self) -> Network:
        return value_based.build(self.network, self.spec, 1, dueling=True, noisy=False)

    @property
    def _buffer(self) -> Buffer:
        length = self.burn_in + self.unroll + self.n_step
        return Buffer(self.replay, actor_critic.require_spec(self.spec), length, self.stride)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adam(self.learning_rate, eps=1e-3),
        )
