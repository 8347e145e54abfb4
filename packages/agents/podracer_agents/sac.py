"""CrossQ, SimBaV2 and FlashSAC: SAC with networks that normalize.

`crossq` are the settings of Bhatt et al. 2024, "CrossQ: Batch Normalization in Deep Reinforcement
Learning for Greater Sample Efficiency and Simplicity" (arXiv 1902.05605). Different from their
code: Adam of the temperature has the first decay of the networks', 0.5; initial weights and the
least standard deviation are as in SAC of the core; samples that a time-out cut count in no
moments.

`simbav2` are those of Lee et al. 2025, "Hyperspherical Normalization for Scalable Deep
Reinforcement Learning" (arXiv 2502.15280). Different from their code: the critics take their step
before the policy; a return that ends begins anew with the reward after it, not with its last one;
the learning rate decays with frames, not updates.

`flash_sac` has the settings of Kim et al. 2026, "FlashSAC: Fast and Stable Off-Policy Reinforcement
Learning for High-Dimensional Robot Control" (arXiv 2604.04539). Different from their code: what
SimBaV2's list above has; critics' losses are summed, not averaged; the learning rate decays
linearly, not along a cosine; each action has noise of its own, theirs repeats it for up to 16
steps; running variances follow the variances of batches, without the factor N / (N - 1).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common.optimizers import Optimizer, global_norm
from podracer.agents.continuous import learning
from podracer.agents.continuous.learning import ActorCriticState, Parts, Transition
from podracer.agents.sac import SAC, Actor, Method
from podracer.devices.reductions import global_grad
from podracer.fields import bounded, static, struct
from podracer.ops.action_values import Atoms
from podracer.ops.distributions import SquashedNormal
from podracer.schedules import Linear
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params
from podracer_agents.networks import NormalizedMLP
from podracer_agents.scaled_rewards import (
    ReturnStatistics,
    ScaledReplay,
    init_returns,
    scaled,
    with_return_statistics,
)
from podracer_agents.spherical import to_unit_norm

SQUASHED_SCALE_BOUNDS = (-10.0, 2.0)  # SimBaV2's


@struct
class NormalizedState(ActorCriticState):
    """Learner state; critics have no targets with batch normalization alone."""

    updates: jax.Array | None  # i32 [], of the critics; None if each also updates the policy
    returns: ReturnStatistics | None  # None if rewards are not scaled


@struct
class NormalizedSAC(SAC):
    """SAC with networks that normalize batches, weights or both."""

    batch_norm_targets: bool = static(default=False)
    """Keep target critics with batch normalization, too: FlashSAC."""
    policy_period: int = static(default=1, low=1)
    """Updates of the critics for each update of policy and temperature."""
    squashed_scale: bool = static(default=False)
    """Squash the logarithm of the policy's standard deviation into [-10, 2] by tanh."""
    scaled_return_max: float | None = bounded(None, low=1e-6)
    """Largest return G_max after rewards are divided by the running standard deviation of returns,
    or by more where a return was larger than this; None leaves rewards as they are."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        networks = learning.build_networks(self, spec, policy_outputs=2)
        agent = learning.build(self, _Method, networks, spec, context)
        if self.scaled_return_max is None:
            return agent
        return with_return_statistics(agent, self.discount)


class _Method(Method):
    settings: NormalizedSAC

    @property
    def batch_norm(self) -> bool:
        return getattr(self.networks.critic, "apply_batch", None) is not None

    @property
    def has_targets(self) -> bool:
        return not self.batch_norm or self.settings.batch_norm_targets

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        state = super().init(key, num_envs)
        updates = jnp.int32(0) if self.settings.policy_period > 1 else None
        is_scaled = self.settings.scaled_return_max is not None
        returns = init_returns() if is_scaled else None
        shared = NormalizedState(**vars(state.shared), updates=updates, returns=returns)
        if not self.has_targets:
            shared = dataclasses.replace(shared, target_params=())
        local = ScaledReplay(state.local, jnp.zeros(num_envs)) if is_scaled else state.local
        return LearnerState(shared, local)

    def describe(self, outputs: jax.Array) -> SquashedNormal:
        if not self.settings.squashed_scale:
            return super().describe(outputs)
        mean, log_scale = jnp.split(outputs, 2, axis=-1)
        low, high = SQUASHED_SCALE_BOUNDS
        return SquashedNormal(mean, low + (high - low) * 0.5 * (1.0 + jnp.tanh(log_scale)))

    def step(self, state: Any, grads: Parts) -> Any:
        """Return a state after one step; weights that took it have unit norm again."""
        state = super().step(state, grads)
        params = [
            part if grad is None else to_unit_norm(part)
            for part, grad in zip(state.params, grads, strict=True)
        ]
        return dataclasses.replace(state, params=Parts(*params))

    def update(
        self, state: Any, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[Any, Metrics, jax.Array]:
        settings = self.settings
        if state.returns is not None and settings.scaled_return_max is not None:
            transition = scaled(transition, state.returns, settings.scaled_return_max)
        critic_key, actor_key = jax.random.split(key)
        grads, (metrics, priorities, critics) = global_grad(
            partial(self.critic_loss, axis=axis),
            state.params.critics,
            state,
            transition,
            critic_key,
            axis=axis,
        )
        state = dataclasses.replace(state, params=state.params._replace(critics=critics))
        state = self.step(state, Parts(None, grads))

        def update_actor(state: Any) -> tuple[Any, Metrics]:
            grads, (metrics, actor) = global_grad(
                partial(self.actor_loss, axis=axis),
                state.params.actor,
                state,
                transition,
                actor_key,
                axis=axis,
            )
            state = dataclasses.replace(state, params=state.params._replace(actor=actor))
            state = self.step(state, Parts(grads, None))
            return state, {**metrics, "actor_gradient_norm": global_norm(grads)}

        if state.updates is None:
            state, actor_metrics = update_actor(state)
        else:
            updates = state.updates + 1
            state = dataclasses.replace(state, updates=updates)
            is_due = updates % settings.policy_period == 0
            state, actor_metrics = learning.update_if(is_due, update_actor, state)
        if self.has_targets:
            state = self.learner.move_targets(state, state.params.critics)
        return state, {**metrics, **actor_metrics, "gradient_norm": global_norm(grads)}, priorities

    def critic_loss(
        self,
        critics: tuple[Params, ...],
        state: Any,
        transition: Transition,
        key: jax.Array,
        axis: str | None = None,
    ) -> Any:
        actor, networks = state.params.actor, self.networks
        keys = jax.random.split(key, transition.mask.shape)
        next_obs = transition.next_timestep.observation
        next_action, next_log_prob = self.policy(actor, next_obs).sample(keys)
        new_critics, outputs = critics, None
        if self.batch_norm:
            joint = partial(self.joint_outputs, transition, next_action, axis)
            outputs, next_outputs, new_critics = joint(critics)
            if self.has_targets:
                next_outputs = joint(state.target_params)[1]
        else:
            next_outputs = networks.q_outputs(state.target_params, next_obs, next_action)
        penalty = jnp.exp(actor.log_temperature) * next_log_prob
        loss, aux = networks.loss(
            critics, next_outputs, transition, penalty=penalty, outputs=outputs
        )
        return loss, (*aux, new_critics)

    def joint_outputs(
        self, transition: Transition, next_action: jax.Array, axis: str | None, params: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return the outputs `[critics, N, Z]` for both timesteps, which are one batch."""
        pairs = (
            {"action": transition.action, "observation": transition.timestep.observation},
            {"action": next_action, "observation": transition.next_timestep.observation},
        )
        batch = jax.tree.map(lambda *x: jnp.concatenate(x), *pairs)
        critic: Any = self.networks.critic
        apply, weights = critic.apply_batch, jnp.tile(transition.mask, 2)
        heads, new_params = zip(*[apply(p, batch, weights, axis) for p in params], strict=True)
        outputs, next_outputs = jnp.split(jnp.stack([head["q"] for head in heads]), 2, axis=1)
        return outputs, jax.lax.stop_gradient(next_outputs), new_params

    def actor_loss(
        self,
        actor: Actor,
        state: Any,
        transition: Transition,
        key: jax.Array,
        axis: str | None = None,
    ) -> Any:
        obs, mask = transition.timestep.observation, transition.mask
        policy_params, apply = actor.policy, getattr(self.networks.actor, "apply_batch", None)
        if apply is None:
            outputs = self.networks.policy(policy_params, obs)
        elif self.has_targets:
            observations = jax.tree.map(
                lambda *x: jnp.concatenate(x), obs, transition.next_timestep.observation
            )
            heads, policy_params = apply(policy_params, observations, jnp.tile(mask, 2), axis)
            outputs = heads["action"][: len(mask)]
        else:
            heads, policy_params = apply(policy_params, obs, mask, axis)
            outputs = heads["action"]
        policy = self.describe(outputs)
        loss, metrics = self.loss_of_policy(policy, actor, state, transition, key)
        return loss, (metrics, actor._replace(policy=policy_params))


def crossq(**settings: Any) -> NormalizedSAC:
    """Return SAC as CrossQ (Bhatt et al. 2024); `settings` override its fields."""
    return NormalizedSAC(
        **{
            "policy_period": 3,
            "learning_rate": 1e-3,
            "optimizer": Optimizer(epsilon=1e-8, adam_momentum=0.5),
            "network": NormalizedMLP((256, 256), batch_norm=True),
            "critic_network": NormalizedMLP((2048, 2048), batch_norm=True),
            **settings,
        }
    )


def simbav2(**settings: Any) -> NormalizedSAC:
    """Return SAC as SimBaV2 (Lee et al. 2025); `settings` override its fields."""
    return NormalizedSAC(
        **{
            "learning_rate": Linear(1e-4, 5e-5),
            "initial_temperature": 0.01,
            "target_entropy": -0.5,
            "squashed_scale": True,
            "return_distribution": Atoms(-5.0, 5.0, 101),
            "normalize_observations": True,
            "scaled_return_max": 5.0,
            "network": NormalizedMLP((128,), spherical=True, residual_blocks=1, parts=2),
            "critic_network": NormalizedMLP((512,), spherical=True, residual_blocks=2),
            **settings,
        }
    )


def flash_sac(**settings: Any) -> NormalizedSAC:
    """Return SAC as FlashSAC (Kim et al. 2026); `settings` override its fields.

    The target is the entropy of a normal distribution with a standard deviation of 0.15.
    """
    spherical = {"spherical": True, "batch_norm": True, "residual_blocks": 2}
    return NormalizedSAC(
        **{
            "learning_rate": Linear(3e-4, 1.5e-4),
            "target_update_rate": 0.01,
            "initial_temperature": 0.01,
            "target_entropy": 0.5 * math.log(2 * math.pi * math.e * 0.15**2),
            "batch_norm_targets": True,
            "policy_period": 2,
            "squashed_scale": True,
            "return_distribution": Atoms(-5.0, 5.0, 101),
            "scaled_return_max": 5.0,
            "network": NormalizedMLP((128,), **spherical, parts=2),
            "critic_network": NormalizedMLP((256,), **spherical),
            **settings,
        }
    )
