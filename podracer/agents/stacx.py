"""STACX: an actor-critic that tunes its own discount, λ, costs and V-trace while it learns.

An update of the parameters θ by a loss with metaparameters η, then one of η by a fixed loss:

    θ' = θ - α ∇_θ L(θ, η)                                `inner_update`
    η  <- η - Adam(∇_η L_outer(θ'(η)))                    `outer_loss`

Auxiliary heads with metaparameters of their own shape the features. Source: Zahavy et al. 2020
(arXiv 2002.12928), but costs begin at the given values and at most double.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import actor_critic, meta
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.optimizers import CountedState, ScheduledOptimizer
from podracer.agents.common.settings import VtraceSettings
from podracer.devices.reductions import MaskedMean, global_mean, mean_of
from podracer.fields import bounded, static, struct
from podracer.ops import distributions, returns
from podracer.ops.distributions import ActionDistribution
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, PyTree, Trajectory

LOGIT_MARGIN = 0.001
"""Smallest distance of an initial metaparameter from 0 and 1, which a sigmoid never reaches."""
INITIAL_ALPHA = 0.99
"""Initial alpha of leaky V-trace, as in the paper: truncations that leak a little."""


@struct
class Metaparams:
    """The metaparameters η of the loss of each head, `[H]`.

    The state has unconstrained ones, see `_Stacx.constrain`.
    """

    discount: float | jax.Array  # gamma
    trace_lambda: float | jax.Array
    policy_cost: float | jax.Array  # g_p
    value_cost: float | jax.Array  # g_v
    entropy_cost: float | jax.Array  # g_e
    alpha_rho: float | jax.Array | None  # leaks of V-trace's truncations, None for none
    alpha_c: float | jax.Array | None


@struct
class Stacx(VtraceSettings, meta.MetaGradientSettings):
    """Self-tuning V-trace actor-critic for discrete or continuous actions."""

    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma of the outer loss, in [0, 1]; the inner begins at most at 0.999."""
    trace_lambda: float = bounded(1.0, high=1.0)
    """Trace parameter lambda of the outer loss, in [0, 1]; the inner begins at most at 0.999."""
    value_cost: float = bounded(0.5)
    """Weight g_v of the value loss in the outer loss; initially also in the inner loss."""
    entropy_cost: float = bounded(0.01)
    """Weight g_e of the entropy bonus in the outer loss; initially also in the inner loss."""
    kl_cost: float = bounded(1.0)
    """Weight g_kl, in the outer loss, of the divergence KL(old policy, new policy)."""
    num_heads: int = static(default=3, low=1)
    """Number of pairs of policy and value heads: the main one and the auxiliary ones."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        return meta.build(self, _Stacx, spec, num_heads=self.num_heads)


@dataclasses.dataclass(frozen=True)
class _Stacx:
    settings: Stacx
    model: ActorCritic
    optimizer: ScheduledOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        """Return new parameters, and metaparameters whose inner loss is nearly the outer one."""
        learner = self.optimizer.init(self.model.network.init(key))
        return meta.init_state(learner, self.initial_metaparams())

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update the parameters by the inner loss, then the metaparameters by the outer loss.

        Both are means over all steps, where those that are not valid count as 0; metrics are means
        over valid ones.
        """
        new_state, metrics = meta.learn(
            self.settings.meta_learning_rate,
            state.shared,
            partial(self.inner_update, axis),
            partial(self.outer_loss, trajectory),
            batches=jax.tree.map(lambda x: x[None], trajectory),  # one inner update
            num_frames=schedules.count_frames(trajectory, axis),
            axis=axis,
        )
        return new_state, {**metrics, **self.metrics(state.shared.metaparams)}

    def inner_update(
        self, axis: str | None, eta: Metaparams, learner: CountedState, trajectory: Trajectory
    ) -> tuple[CountedState, tuple[ActionDistribution, Metrics]]:
        """Take one step on the inner loss of all heads; also return the old main policy."""

        def inner_loss(params: Params) -> tuple[jax.Array, tuple[ActionDistribution, Metrics]]:
            policy, values = self.unroll(params, trajectory)
            losses, metrics = self.losses(policy, values, trajectory, self.constrain(eta))
            return jnp.sum(losses.total), (policy, metrics)

        grads, (policy, metrics) = jax.grad(inner_loss, has_aux=True)(learner.params)
        grads = global_mean(grads, axis)
        learner, update_metrics = self.optimizer.step(learner, grads)
        return learner, (_main_head(policy), {**metrics, **update_metrics})

    def outer_loss(
        self, trajectory: Trajectory, metaparams: Metaparams, learner: CountedState, aux: PyTree
    ) -> tuple[jax.Array, Metrics]:
        """Return the fixed loss of the main head after the update, plus the KL penalty."""
        old_policy, metrics = jax.tree.map(lambda x: x[0], aux)
        policy, values = _main_head(self.unroll(learner.params, trajectory))
        losses, _ = self.losses(policy, values, trajectory, self.outer_hyperparams())
        divergence = mean_of(old_policy.divergence(policy), trajectory.valid()[:, None])
        outer_loss = losses.total[0] + self.settings.kl_cost * divergence.total
        metrics["outer_loss"] = MaskedMean(outer_loss, divergence.share)
        return outer_loss, {**metrics, "policy_change": divergence}

    def unroll(self, params: Params, rollout: Trajectory) -> tuple[ActionDistribution, jax.Array]:
        """Return the policies `[T, H, B]` and the values `[T+1, H, B]` of all heads."""
        timesteps = rollout.timesteps()
        outputs, _ = self.model.network.apply(
            params, rollout.carry, timesteps.observation, timesteps.first
        )
        suffixes = actor_critic.head_suffixes(self.settings.num_heads)
        policies = jnp.stack([outputs["policy" + s][:-1] for s in suffixes], axis=1)
        values = jnp.stack([outputs["value" + s][..., 0] for s in suffixes], axis=1)
        return distributions.policy(self.model.space, policies), values

    def losses(
        self, policy: ActionDistribution, values: jax.Array, trajectory: Trajectory, eta: Metaparams
    ) -> tuple[MaskedMean, Metrics]:
        """Return the actor-critic loss of each head `[H]`, and metrics of the main one.

        All heads learn from the actions of the main policy; `policy` is `[T, H, B]`, `values`
        `[T+1, H, B]`.
        """
        settings, behavior = self.settings, trajectory.steps.extras
        rewards, discounts, valid = (
            jnp.broadcast_to(x[:, None], values[:-1].shape) for x in trajectory.transitions()
        )
        log_prob = policy.log_prob(behavior["sample"][:, None])
        ratio = jnp.exp(log_prob - behavior["log_prob"][:, None])
        baseline, ratio = jax.lax.stop_gradient((values, ratio))
        by_head = jax.tree.map(lambda x: x[None, :, None], eta)
        corrected = returns.vtrace(
            baseline[:-1],
            baseline[1:],
            rewards,
            by_head.discount * discounts,
            valid,
            ratio,
            lambda_=by_head.trace_lambda,
            clip_rho=settings.clip_rho,
            clip_c=settings.clip_c,
            clip_pg_rho=settings.clip_rho,
            alpha_rho=by_head.alpha_rho,
            alpha_c=by_head.alpha_c,
        )
        losses, metrics = actor_critic.loss(
            log_prob,
            policy.entropy(),
            values[:-1],
            targets=corrected.targets,
            advantages=corrected.advantages,
            valid=valid,
            policy_cost=eta.policy_cost,
            value_cost=eta.value_cost,
            entropy_cost=eta.entropy_cost,
            axes=(0, 2),
        )
        metrics = jax.tree.map(lambda x: x[0], metrics)
        return losses, {**metrics, "importance_ratio": mean_of(ratio[:, 0], trajectory.valid())}

    def outer_hyperparams(self) -> Metaparams:
        """Return the fixed hyperparameters of the outer loss, `[1]`."""
        s = self.settings
        eta = Metaparams(s.discount, s.trace_lambda, 1.0, s.value_cost, s.entropy_cost, None, None)
        return jax.tree.map(lambda x: jnp.full(1, x, jnp.float32), eta)

    def initial_metaparams(self) -> Metaparams:
        """Return numbers `[H]` that `constrain` maps to the outer hyperparameters."""
        shares = dataclasses.replace(
            self.outer_hyperparams(),
            policy_cost=0.5,  # times 2: the cost of the outer loss
            value_cost=0.5,
            entropy_cost=0.5,
            alpha_rho=INITIAL_ALPHA,
            alpha_c=INITIAL_ALPHA,
        )
        shares = jax.tree.map(lambda x: jnp.clip(x, LOGIT_MARGIN, 1.0 - LOGIT_MARGIN), shares)
        logits = jax.tree.map(jax.scipy.special.logit, shares)
        return jax.tree.map(lambda x: jnp.full(self.settings.num_heads, x, jnp.float32), logits)

    def constrain(self, metaparams: Metaparams) -> Metaparams:
        """Map unconstrained numbers to [0, 1], or to costs up to twice those of the outer loss."""
        share = jax.tree.map(jax.nn.sigmoid, metaparams)
        return dataclasses.replace(
            share,
            policy_cost=2.0 * share.policy_cost,
            value_cost=2.0 * self.settings.value_cost * share.value_cost,
            entropy_cost=2.0 * self.settings.entropy_cost * share.entropy_cost,
        )

    def metrics(self, metaparams: Metaparams) -> Metrics:
        hyperparams = self.constrain(metaparams)
        return {
            f"meta_{field.name}{suffix}": getattr(hyperparams, field.name)[i]
            for i, suffix in enumerate(actor_critic.head_suffixes(self.settings.num_heads))
            for field in dataclasses.fields(Metaparams)
        }


def _main_head(outputs: PyTree) -> PyTree:
    """Select the main head of policies or values `[T, H, B, ...]`, as `[T, 1, B, ...]`."""
    return jax.tree.map(lambda x: x[:, :1], outputs)
