"""DQN and what was added to it, each as a setting; all of them together are Rainbow.

Sources: Mnih et al. 2015; double: van Hasselt et al. 2016 (arXiv 1509.06461); dueling: Wang et al.
2016 (arXiv 1511.06581); prioritized replay: Schaul et al. 2016 (arXiv 1511.05952); noisy networks:
Fortunato et al. 2018 (arXiv 1706.10295); distributions: see `ops/action_values.py`; all of them:
Hessel et al. 2018 (arXiv 1710.02298); one epsilon for each environment: Horgan et al. 2018 (arXiv
1803.00933).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic, off_policy, value_based
from podracer.mesh import global_grad
from podracer.networks import MLP, Network, TorsoNetwork
from podracer.ops.action_values import ActionValue, Atoms, Mean
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    Carry,
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
class DQN:
    """Action values from replay, discrete actions."""

    learning_rate: float = 2.5e-4
    discount: float = 0.99
    epsilon: float = 0.01
    """Share of random actions, once exploration has decayed."""
    ladder: float = 0.0
    """Environment i of B explores with `epsilon ** (1 + ladder * i / (B - 1))`."""
    max_gradient_norm: float = 10.0
    epsilon_frames: int = static(default=50_000)
    """Frames in which random actions decay from all of them to `epsilon`; 0: they do not."""
    target_period: int = static(default=250)
    """Updates between two copies of the parameters to the target network."""
    n_step: int = static(default=1)
    double: bool = static(default=True)
    dueling: bool = static(default=False)
    noisy: bool = static(default=False)
    """Noisy heads, which explore by themselves: set `epsilon` and `epsilon_frames` to 0."""
    value: ActionValue = static(default=Mean())
    replay: Replay = static(default=Replay())
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(128, 128))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        shared = value_based.init(self._network.init(key), self._optimizer)
        shared["explored"] = jnp.float32(0.0 if self.epsilon_frames else 1.0)
        return LearnerState(shared, self._buffer.init(num_envs))

    def carry(self, num_envs: int) -> Carry:
        return value_based.exponents(self.ladder, num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        epsilon = value_based.epsilon(self.epsilon, state.shared["explored"])
        return {"online": state.shared["params"], "epsilon": epsilon}

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        noise = value_based.noise_keys(keys) if self.noisy and explore else None
        outputs = self._outputs(params["online"], timestep, noise)
        epsilon = params["epsilon"] ** carry if explore else jnp.zeros(())
        values = actor_critic.mask_logits(timestep.observation, self.value.mean(outputs))
        return value_based.epsilon_greedy(values, keys, epsilon), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        def update(
            shared: PyTree, sample: Sample, key: jax.Array
        ) -> tuple[PyTree, Metrics, jax.Array]:
            grads, (metrics, priorities) = global_grad(
                self._loss, shared["params"], shared["target"], sample, key, axis=axis
            )
            shared, more = value_based.apply_gradients(
                self._optimizer, shared, grads, self.target_period
            )
            return shared, {**metrics, **more}, priorities

        shared = off_policy.explored(state.shared, trajectory, self.epsilon_frames, axis)
        state = LearnerState(shared, state.local)
        return off_policy.learn(self._buffer, update, state, trajectory, key, axis)

    def _loss(
        self, params: Params, target: Params, sample: Sample, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        now = off_policy.transition(sample, self.discount)
        # One noise for all samples, as in Fortunato et al. 2018, section 3.1.
        noise = jax.random.split(key, (3, 1)) if self.noisy else (None, None, None)
        outputs = self._outputs(params, now.first, noise[0])
        after = self._outputs(target, now.then, noise[1])
        judge = self._outputs(params, now.then, noise[2]) if self.double else after
        values = actor_critic.mask_logits(now.then.observation, self.value.mean(judge))
        best = jnp.argmax(values, axis=-1)
        chosen = value_based.of_action(outputs, now.action)
        after = jax.lax.stop_gradient(value_based.of_action(after, best))
        losses, priorities = self.value.loss(chosen, after, now.returns, now.discounts)
        loss = jnp.mean(now.mask * sample.weights * losses)
        metrics = {"loss": loss, "q": jnp.mean(self.value.mean(chosen))}
        return loss, (metrics, jax.lax.stop_gradient(now.mask * priorities))

    def _outputs(self, params: Params, timestep: TimeStep, noise: jax.Array | None) -> jax.Array:
        """What the network says of each action, `[B, A, Z]`, of timesteps `[B, ...]`."""
        timestep = jax.tree.map(lambda x: x[None], timestep)
        extra = () if noise is None else (noise[None],)
        outputs, _ = self._network.apply(params, (), timestep.observation, timestep.first, *extra)
        return value_based.combined(outputs, self.value.size)[0]

    @property
    def _network(self) -> Network:
        return off_policy.without_memory(
            value_based.build(self.network, self.spec, self.value.size, self.dueling, self.noisy)
        )

    @property
    def _buffer(self) -> Buffer:
        return off_policy.buffer(self.replay, self.spec, self.n_step)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adam(self.learning_rate, eps=1e-5),
        )


def rainbow(**settings: Any) -> DQN:
    """Rainbow: DQN with all of its extensions (Hessel et al. 2018), and others that are given."""
    everything = {
        "epsilon": 0.0,
        "epsilon_frames": 0,
        "n_step": 3,
        "dueling": True,
        "noisy": True,
        "value": Atoms(),
        "replay": Replay(prioritized=True, priority_exponent=0.5),
    }
    return DQN(**{**everything, **settings})
