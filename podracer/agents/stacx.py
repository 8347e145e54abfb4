"""STACX: an actor-critic that tunes its own discount, λ, costs and V-trace while it learns.

Its loss has metaparameters; those move along the gradient of a fixed loss through the update that
they steered. Auxiliary policies and values with metaparameters of their own shape the features.
Source: Zahavy et al. 2020, "A Self-Tuning Actor-Critic Algorithm" (arXiv 2002.12928).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic
from podracer.agents.common.meta import clip_by_norm, meta_grad
from podracer.mesh import global_mean
from podracer.networks import MLP, Network, TorsoNetwork
from podracer.ops.distributions import Policy
from podracer.ops.distributions import policy as make_policy
from podracer.ops.returns import vtrace
from podracer.types import (
    Carry,
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

CLOSEST = 0.001  # that a metaparameter may begin to 0 or 1, which a sigmoid never reaches
INITIAL_ALPHA = 0.99  # as in the paper: clips that leak a little


@struct
class Settings:
    """What a loss is weighed by, a number for each head `[H]`."""

    discount: jax.Array
    lambda_: jax.Array
    policy_cost: jax.Array
    value_cost: jax.Array
    entropy_cost: jax.Array
    alpha_rho: jax.Array
    alpha_c: jax.Array


@struct
class Stacx:
    """Self-tuning V-trace actor-critic, discrete or continuous actions."""

    learning_rate: float = 6e-4
    meta_learning_rate: float = 1e-3
    discount: float = 0.99
    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_c: float = 1.0
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    kl_cost: float = 1.0
    max_gradient_norm: float = 40.0
    heads: int = static(default=3)
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        shared, meta = actor_critic.init(self._network, self._optimizer, key), self._initial_meta()
        optimizer = self._meta_optimizer.init(meta)
        return LearnerState({**shared, "meta": meta, "meta_optimizer": optimizer})

    def carry(self, num_envs: int) -> Carry:
        return self._network.carry(num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared["params"]

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        return actor_critic.act_with_log_prob(
            self._network, self._space, params, carry, timestep, keys, explore
        )

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        meta = state.shared["meta"]
        grads, (learner, metrics) = meta_grad(
            partial(self._update, axis),
            partial(self._objective, trajectory),
            meta,
            {name: state.shared[name] for name in ("params", "optimizer")},
            jax.tree.map(lambda x: x[None], trajectory),
        )
        # Each shard has its own part of the objective's gradient, through the mean of all updates.
        grads = global_mean(grads, axis)
        updates, optimizer = self._meta_optimizer.update(grads, state.shared["meta_optimizer"])
        moved = {"meta": optax.apply_updates(meta, updates), "meta_optimizer": optimizer}
        more = {"meta_gradient_norm": optax.tree.norm(grads), **self._metrics(meta)}
        return LearnerState({**learner, **moved}), {**metrics, **more}

    def _update(
        self, axis: str | None, meta: Settings, learner: PyTree, trajectory: Trajectory
    ) -> tuple[PyTree, tuple[Policy, Metrics]]:
        """One update with the tuned loss of all heads; and the main policy before it."""

        def loss(params: Params) -> tuple[jax.Array, tuple[Policy, Metrics]]:
            policy, values = self._unroll(params, trajectory)
            each, metrics = self._losses(policy, values, trajectory, self._tuned(meta))
            return jnp.sum(each), (policy, metrics)

        grads, (policy, metrics) = jax.grad(loss, has_aux=True)(learner["params"])
        grads = global_mean(grads, axis)
        state, more = actor_critic.apply_gradients(self._optimizer, LearnerState(learner), grads)
        return state.shared, (_main(policy), {**metrics, **more})

    def _objective(
        self, trajectory: Trajectory, meta: Settings, learner: PyTree, aux: PyTree
    ) -> tuple[jax.Array, Metrics]:
        """The fixed loss of the main head after the update, and how far its policy moved."""
        before, metrics = jax.tree.map(lambda x: x[0], aux)
        policy, values = _main(self._unroll(learner["params"], trajectory))
        (loss,), _ = self._losses(policy, values, trajectory, self._fixed())
        valid = trajectory.valid()[:, None].astype(jnp.float32)
        moved = jnp.mean(valid * before.divergence(policy))
        outer = loss + self.kl_cost * moved
        return outer, {**metrics, "outer_loss": outer, "policy_change": moved}

    def _unroll(self, params: Params, trajectory: Trajectory) -> tuple[Policy, jax.Array]:
        """The heads' policies `[T, H, B]` and values `[T+1, H, B]`."""
        timesteps = trajectory.timesteps()
        outputs, _ = self._network.apply(
            params, trajectory.carry, timesteps.observation, timesteps.first
        )
        policies = jnp.stack([outputs["policy" + s][:-1] for s in self._suffixes], axis=1)
        values = jnp.stack([outputs["value" + s][..., 0] for s in self._suffixes], axis=1)
        return make_policy(self._space, policies), values

    def _losses(
        self, policy: Policy, values: jax.Array, trajectory: Trajectory, settings: Settings
    ) -> tuple[jax.Array, Metrics]:
        """The actor-critic losses `[H]` of policies `[T, H, B]` and values `[T+1, H, B]` on what
        the main policy did; and the main head's metrics."""
        extras, after, s = trajectory.steps.extras, trajectory.next_timesteps(), settings
        reward, discount, valid = (
            jnp.broadcast_to(x[:, None], values[:-1].shape)
            for x in (after.reward, after.discount, trajectory.valid())
        )
        log_prob = policy.log_prob(extras["sample"][:, None])
        ratio = jnp.exp(log_prob - extras["log_prob"][:, None])
        fixed, ratio = jax.lax.stop_gradient((values, ratio))
        corrected = vtrace(
            fixed[:-1],
            fixed[1:],
            reward,
            s.discount[None, :, None] * discount,
            valid,
            ratio,
            lambda_=s.lambda_[None, :, None],
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            clip_pg_rho=self.clip_rho,
            alpha_rho=s.alpha_rho[None, :, None],
            alpha_c=s.alpha_c[None, :, None],
        )
        mask, mean = valid.astype(jnp.float32), partial(jnp.mean, axis=(0, 2))
        policy_loss = -mean(corrected.advantages * log_prob)
        value_loss = 0.5 * mean(mask * (corrected.targets - values[:-1]) ** 2)
        entropy = mean(mask * policy.entropy())
        loss = s.policy_cost * policy_loss + s.value_cost * value_loss - s.entropy_cost * entropy
        metrics = {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "importance_ratio": mean(ratio),
        }
        return loss, {name: x[0] for name, x in metrics.items()}

    # --- metaparameters ---------------------------------------------------------------------------

    def _fixed(self) -> Settings:
        """Those of the objective, `[1]`."""
        costs = (1.0, self.value_cost, self.entropy_cost)
        numbers = (self.discount, self.lambda_, *costs, 1.0, 1.0)
        return Settings(*(jnp.full(1, x, jnp.float32) for x in numbers))

    def _initial_meta(self) -> PyTree:
        """Unconstrained numbers `[H]` that `_tuned` takes to what the objective has."""
        shares = (self.discount, self.lambda_, 0.5, 0.5, 0.5, INITIAL_ALPHA, INITIAL_ALPHA)
        inside = (jnp.clip(x, CLOSEST, 1.0 - CLOSEST) for x in shares)
        begin = (jax.scipy.special.logit(x) for x in inside)
        return Settings(*(jnp.full(self.heads, x, jnp.float32) for x in begin))

    def _tuned(self, meta: Settings) -> Settings:
        """Shares of 1, or costs from 0 to twice those of the objective, `[H]`."""
        share = jax.tree.map(jax.nn.sigmoid, meta)
        return dataclasses.replace(
            share,
            policy_cost=2.0 * share.policy_cost,
            value_cost=2.0 * self.value_cost * share.value_cost,
            entropy_cost=2.0 * self.entropy_cost * share.entropy_cost,
        )

    def _metrics(self, meta: Settings) -> Metrics:
        tuned = self._tuned(meta)
        return {
            f"meta_{field.name.rstrip('_')}{suffix}": getattr(tuned, field.name)[i]
            for i, suffix in enumerate(self._suffixes)
            for field in dataclasses.fields(Settings)
        }

    @property
    def _suffixes(self) -> tuple[str, ...]:
        return actor_critic.suffixes(self.heads)

    @property
    def _network(self) -> Network:
        return actor_critic.build(self.network, self.spec, self.heads)

    @property
    def _space(self) -> Discrete | Continuous:
        return actor_critic.require_spec(self.spec).action

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        # With an epsilon below the root its slope is finite where a gradient has always been 0.
        adam = optax.adam(self.learning_rate, eps=1e-5, eps_root=1e-10)
        return optax.chain(clip_by_norm(self.max_gradient_norm), adam)

    @property
    def _meta_optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self.meta_learning_rate, eps=1e-8)


def _main(outputs: PyTree) -> PyTree:
    """The main head of policies or values `[T, H, B, ...]`, `[T, 1, B, ...]`."""
    return jax.tree.map(lambda x: x[:, :1], outputs)
