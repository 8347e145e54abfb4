"""Gumbel MuZero: planning in a learned model, which is learned from what planning led to.

Search is by mctx. Sources: Schrittwieser et al. 2020 (arXiv 1911.08265) for the model and its
losses; Danihelka et al. 2022, "Policy improvement by planning with Gumbel", for the search.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import mctx
import optax

from podracer.agents.common import actor_critic, off_policy, planning, value_based
from podracer.mesh import global_grad
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
    static,
    struct,
)


@struct
class MuZero:
    """Planning in a learned model, discrete actions."""

    learning_rate: float = 1e-3
    discount: float = 0.997
    value_cost: float = 0.25
    max_gradient_norm: float = 5.0
    weight_decay: float = 1e-4
    simulations: int = static(default=16)
    """Of the model, for each action."""
    considered: int = static(default=16)
    """Actions that the root compares, at most."""
    unroll: int = static(default=5)
    """Steps of the model that are learned from each sample."""
    n_step: int = static(default=5)
    """Steps from each of them to the bootstrap value."""
    target_period: int = static(default=100)
    """Updates between two copies of the parameters to the target network."""
    bound: float = static(default=30.0)
    """Largest value and reward on the squashed scale; 30 there stands for 900."""
    bins: int = static(default=61)
    """Atoms of values and rewards, from -bound to bound."""
    latent: int = static(default=64)
    """Size of the model's state."""
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(128,))))
    """From an observation to the model's state."""
    dynamics: tuple[int, ...] = static(default=(128,))
    """Widths of the layers from a state and an action to what is added to the state, and the
    reward."""
    prediction: tuple[int, ...] = static(default=(128,))
    """Widths of the layers from a state to policy and value."""
    replay: Replay = static(default=Replay(batch_size=128, prioritized=True))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        extras = {"policy": ArraySpec((self._num_actions,))}
        shared = value_based.init(self._init(key), self._optimizer)
        return LearnerState(shared, self._buffer.init(num_envs, extras=extras))

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared["params"]

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        def plan(observation: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
            """For one environment: what it draws depends on its own key alone."""
            observation = jax.tree.map(lambda x: x[None], observation)
            state = self._represent(params, observation)
            policy, value = self._predict(params, state)
            root = mctx.RootFnOutput(
                prior_logits=policy,  # type: ignore[call-arg]
                value=self._scalar(value),  # type: ignore[call-arg]
                embedding=state,  # type: ignore[call-arg]
            )
            action, policy, _ = planning.search(
                params, key, root, self._imagine, observation,
                simulations=self.simulations, considered=self.considered, explore=explore,
            )  # fmt: skip
            return action, {"policy": policy}

        action, extras = jax.vmap(plan)(timestep.observation, keys)
        return action, extras, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
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

        return off_policy.learn(self._buffer, update, state, trajectory, key, axis)

    def _loss(
        self, params: Params, target: Params, sample: Sample
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Of policy, value and reward at the sample's first step and `unroll` imagined ones."""
        steps, K = sample.trajectory.steps, self.unroll
        after, valid = sample.trajectory.next_timesteps(), sample.trajectory.valid()
        targets = self._value_targets(target, sample.trajectory)
        state = self._represent(params, jax.tree.map(lambda x: x[0], steps.timestep.observation))
        # An end is followed by nothing, rewards and values of 0; after a time-out all is unknown.
        alive = known = jnp.ones(valid.shape[1])
        losses, first_value = jnp.zeros(valid.shape[1]), jnp.zeros(valid.shape[1])
        for k in range(K + 1):
            policy, value = self._predict(params, state)
            first_value = self._scalar(value) if k == 0 else first_value
            wanted = steps.extras["policy"][k]
            loss = -alive * jnp.sum(wanted * jax.nn.log_softmax(policy), axis=-1)
            loss += known * self.value_cost * self._cross_entropy(value, alive * targets[k])
            losses += loss if k == 0 else loss / K
            if k == K:
                break
            state, reward = self._step(params, state, steps.action[k])
            # Half the gradient at each step, so that far ones do not outweigh near ones.
            state = 0.5 * state + 0.5 * jax.lax.stop_gradient(state)
            gained = alive * after.reward[k]
            known = known * jnp.where(valid[k], 1.0, 1.0 - alive)
            alive = alive * (valid[k] & (after.discount[k] > 0))
            losses += known * self._cross_entropy(reward, gained) / K
        loss = jnp.mean(sample.weights * losses)
        error = jax.lax.stop_gradient(jnp.abs(first_value - targets[0]))
        return loss, ({"loss": loss, "value": jnp.mean(first_value)}, error)

    def _value_targets(self, target: Params, trajectory: Trajectory) -> jax.Array:
        """n-step targets `[unroll + 1, N]`, with bootstrap values of the target network."""
        timesteps, after = trajectory.timesteps(), trajectory.next_timesteps()
        T, N = timesteps.reward.shape
        flat = jax.tree.map(lambda x: x.reshape(T * N, *x.shape[2:]), timesteps.observation)
        _, value = self._predict(target, self._represent(target, flat))
        values = self._scalar(value).reshape(T, N)
        discounts = self.discount * after.discount
        return n_step_targets(values, after.reward, discounts, trajectory.valid(), self.n_step)

    # --- the model: all over [N, ...] ------------------------------------------------------------

    def _represent(self, params: Params, observation: PyTree) -> jax.Array:
        """A state `[N, latent]`."""
        made = outputs(self._networks["network"], params["network"], observation)
        return _scaled(made["state"])

    def _predict(self, params: Params, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of the policy `[N, A]` and of the value `[N, bins]`."""
        made = outputs(self._networks["prediction"], params["prediction"], state)
        return made["policy"], made["value"]

    def _step(
        self, params: Params, state: jax.Array, action: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The state after an action `[N]`, and logits of the reward `[N, bins]`."""
        seen = {"action": jax.nn.one_hot(action, self._num_actions), "state": state}
        made = outputs(self._networks["dynamics"], params["dynamics"], seen)
        return _scaled(state + made["state"]), made["reward"]

    def _imagine(
        self, params: Params, key: jax.Array, action: jax.Array, state: jax.Array
    ) -> tuple[mctx.RecurrentFnOutput, jax.Array]:
        state, reward = self._step(params, state, action)
        policy, value = self._predict(params, state)
        reward, value = self._scalar(reward), self._scalar(value)
        discount = jnp.full_like(reward, 1.0) * self.discount
        made = mctx.RecurrentFnOutput(
            reward=reward,  # type: ignore[call-arg]
            discount=discount,  # type: ignore[call-arg]
            prior_logits=policy,  # type: ignore[call-arg]
            value=value,  # type: ignore[call-arg]
        )
        return made, state

    def _scalar(self, logits: jax.Array) -> jax.Array:
        return unsquash(jax.nn.softmax(logits) @ self._support)

    def _cross_entropy(self, logits: jax.Array, value: jax.Array) -> jax.Array:
        target = two_hot(squash(value), self._support)
        return -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)

    @property
    def _support(self) -> jax.Array:
        return jnp.linspace(-self.bound, self.bound, self.bins)

    @property
    def _num_actions(self) -> int:
        return value_based.discrete(self.spec).num_actions

    @property
    def _networks(self) -> dict[str, Network]:
        spec, state = actor_critic.require_spec(self.spec), ArraySpec((self.latent,))
        seen = {"action": ArraySpec((self._num_actions,)), "state": state}
        # Hardly a preference at first: rewards and values near 0, all actions nearly alike.
        heads = {"policy": Head(self._num_actions, 0.01), "value": Head(self.bins, 0.01)}
        moved = {"state": Head(self.latent), "reward": Head(self.bins, 0.01)}
        return {
            "network": self.network.build(spec.observation, {"state": Head(self.latent)}),
            "dynamics": TorsoNetwork(MLP(self.dynamics)).build(seen, moved),
            "prediction": TorsoNetwork(MLP(self.prediction)).build(state, heads),
        }

    def _init(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        networks = self._networks.items()
        return {name: network.init(k) for (name, network), k in zip(networks, keys, strict=True)}

    @property
    def _buffer(self) -> Buffer:
        return off_policy.buffer(self.replay, self.spec, self.unroll + self.n_step)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adamw(self.learning_rate, weight_decay=self.weight_decay),
        )


def _scaled(state: jax.Array) -> jax.Array:
    """Each state `[N, latent]` between 0 and 1. Source: Schrittwieser et al. 2020, appendix G."""
    low = jnp.min(state, axis=-1, keepdims=True)
    high = jnp.max(state, axis=-1, keepdims=True)
    return (state - low) / (high - low + 1e-5)
