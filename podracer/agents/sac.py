"""SAC: maximum-entropy actor-critic with a stochastic policy and a learned temperature.

Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905).
Each update makes algorithm 1's steps in its order. Different from the paper, and as in common
implementations: the temperature's loss is linear in log alpha and shares its samples of the policy
with the actor's loss; priorities, n-step returns, weight decay and distributional critics are
possible, and of n steps only the last one's entropy counts in the critics' targets. Different from
both: weights are initially orthogonal, and the policy's standard deviation is at least exp(-5), not
exp(-20).

`crossq` are the settings of Bhatt et al. 2024, "CrossQ: Batch Normalization in Deep Reinforcement
Learning for Greater Sample Efficiency and Simplicity" (arXiv 1902.05605). Different from their
code: Adam of the temperature has the first decay of the networks', 0.5; initial weights and the
least standard deviation are SAC's above; samples that a time-out cut count in no moments.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.continuous import learning, models
from podracer.agents.continuous.learning import (
    ActorCriticState,
    ActorParams,
    Learner,
    Parts,
    PolicySettings,
    Transition,
)
from podracer.agents.continuous.models import ContinuousNetworks
from podracer.devices.kernels import global_norm
from podracer.devices.reductions import global_grad
from podracer.fields import bounded, static, struct
from podracer.means import Mean, mean_of
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.action_values import Atoms
from podracer.ops.distributions import LOG_SCALE_BOUNDS, SquashedNormal, to_bounds
from podracer.schedules import Linear
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
)

SQUASHED_SCALE_BOUNDS = (-10.0, 2.0)  # SimBaV2's


class Actor(NamedTuple):
    """Parameters of the policy and of its temperature."""

    policy: Params
    log_temperature: jax.Array  # f32 [], log alpha


@struct
class SACState(ActorCriticState):
    """Learner state; the critics alone have targets, and none with batch normalization."""

    updates: jax.Array | None  # i32 [], of the critics; None if each also updates the policy


@struct
class SAC(PolicySettings):
    """Soft actor-critic for continuous actions."""

    initial_temperature: float = bounded(1.0, low=1e-6)
    """Temperature alpha, the weight of the entropy, before the first update."""
    target_entropy: float = bounded(-1.0, low=-math.inf)
    """Entropy, in nats for each action coordinate, to which the temperature steers the policy."""
    batch_norm: bool = static(default=False)
    """Normalize batches in the networks, current and next pairs of the critics as one batch, and
    bootstrap from the critics themselves, without targets: CrossQ."""
    batch_norm_targets: bool = static(default=False)
    """Keep target critics with `batch_norm`, too, which normalize current and next pairs as one
    batch; the policy learns from a batch of current and next observations: FlashSAC."""
    policy_period: int = static(default=1, low=1)
    """Updates of the critics for each update of policy and temperature."""
    squashed_scale: bool = static(default=False)
    """Squash the logarithm of the policy's standard deviation into [-10, 2] by tanh, as SimBaV2
    does; otherwise it is clipped to [-5, 2]."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        return learning.build(
            self, _SAC, spec, context, policy_outputs=2, batch_norm=self.batch_norm
        )


@dataclasses.dataclass(frozen=True)
class _SAC:
    settings: SAC
    networks: ContinuousNetworks
    learner: Learner

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        policy, critics = self.networks.init(key, self.settings.num_critics)
        actor = Actor(policy, jnp.log(jnp.float32(self.settings.initial_temperature)))
        carry = self.networks.carry(1)
        target_params = critics if self.has_targets else ()
        state = self.learner.init(Parts(actor, critics), target_params, num_envs, carry)
        updates = jnp.int32(0) if self.settings.policy_period > 1 else None
        return LearnerState(SACState(**vars(state.shared), updates=updates), state.local)

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Sample actions of the policy, or take its modes."""
        policy, carry = self.distribution(params, carry, timestep)
        if explore:
            action, _ = policy.sample(keys)
            random_frames = self.settings.random_frames
            action = learning.random_at_start(action, keys, params.frames, random_frames)
        else:
            action = policy.mode()
        action = to_bounds(self.networks.space, action)
        return action, (), models.with_last_action(carry, action)

    def distribution(
        self, params: ActorParams, carry: Carry, timestep: TimeStep
    ) -> tuple[SquashedNormal, Carry]:
        """Return the policy; before `random_frames` are over, acting does not sample from it."""
        timestep = normalize_observation(params.obs_moments, timestep)
        outputs, carry = self.networks.policy_step(params.actor.policy, carry, timestep)
        return policy_of_outputs(outputs, is_squashed=self.settings.squashed_scale), carry

    def update(
        self, state: SACState, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[SACState, Metrics, jax.Array]:
        """Update the critics, then actor and temperature by them, then the targets.

        Actor and temperature wait for every `policy_period`-th time.
        """
        settings, learner = self.settings, self.learner
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
        state = learner.step(state, Parts(None, grads))

        def update_actor(state: SACState) -> tuple[SACState, Metrics]:
            grads, (metrics, actor) = global_grad(
                partial(self.actor_loss, axis=axis),
                state.params.actor,
                state,
                transition,
                actor_key,
                axis=axis,
            )
            state = dataclasses.replace(state, params=state.params._replace(actor=actor))
            state = learner.step(state, Parts(grads, None))
            return state, {**metrics, "actor_gradient_norm": global_norm(grads)}

        if state.updates is None:
            state, actor_metrics = update_actor(state)
        else:
            updates = state.updates + 1
            state = dataclasses.replace(state, updates=updates)
            is_due = updates % settings.policy_period == 0
            state, actor_metrics = learning.update_if(is_due, update_actor, state)
        if self.has_targets:
            state = learner.move_targets(state, state.params.critics)
        return state, {**metrics, **actor_metrics, "gradient_norm": global_norm(grads)}, priorities

    def critic_loss(
        self,
        critics: tuple[Params, ...],
        state: SACState,
        transition: Transition,
        key: jax.Array,
        axis: str | None = None,
    ) -> tuple[Mean, tuple[Metrics, jax.Array, tuple[Params, ...]]]:
        """Regress to r + gamma (min Q'(s', a') - alpha log π(a'|s')), equations 3 and 5.

        With batch normalization Q' is Q, and both are of one batch (Bhatt et al. 2024, section 3).
        """
        actor, networks = state.params.actor, self.networks
        keys = jax.random.split(key, transition.mask.shape)
        next_obs = transition.next_timestep.observation
        next_action, next_log_prob = self.policy(actor, next_obs).sample(keys)
        new_critics, outputs = critics, None
        if self.settings.batch_norm:
            outputs, next_outputs, new_critics = networks.joint_outputs(
                critics, transition, next_action, axis
            )
            if self.has_targets:
                targets = networks.joint_outputs(state.target_params, transition, next_action, axis)
                next_outputs = targets[1]
        else:
            next_outputs = networks.q_outputs(state.target_params, next_obs, next_action)
        penalty = jnp.exp(actor.log_temperature) * next_log_prob
        loss, aux = networks.loss(
            critics, next_outputs, transition, penalty=penalty, outputs=outputs
        )
        return loss, (*aux, new_critics)

    def actor_loss(
        self,
        actor: Actor,
        state: SACState,
        transition: Transition,
        key: jax.Array,
        axis: str | None = None,
    ) -> tuple[Mean, tuple[Metrics, Actor]]:
        """Sum the losses of policy and temperature, equations 9 and 18."""
        obs, mask = transition.timestep.observation, transition.mask
        keys = jax.random.split(key, mask.shape)
        if self.settings.batch_norm and self.has_targets:
            observations = jax.tree.map(
                lambda *x: jnp.concatenate(x), obs, transition.next_timestep.observation
            )
            outputs, policy_params = self.networks.learn_policy(
                actor.policy, observations, jnp.tile(mask, 2), axis
            )
            outputs = outputs[: len(mask)]
        else:
            outputs, policy_params = self.networks.learn_policy(actor.policy, obs, mask, axis)
        policy = policy_of_outputs(outputs, is_squashed=self.settings.squashed_scale)
        action, log_prob = policy.sample(keys)
        min_q = jnp.min(self.networks.q_values(state.params.critics, obs, action), axis=0)
        temperature = jnp.exp(jax.lax.stop_gradient(actor.log_temperature))
        losses, share = temperature * log_prob - min_q, jnp.mean(mask)
        metrics = {"entropy": mean_of(-log_prob, mask), "temperature": temperature}
        # The temperature rises while the entropy is below its target.
        target_entropy = self.settings.target_entropy * self.networks.space.size
        excess_entropy = jax.lax.stop_gradient(-log_prob) - target_entropy
        temperature_loss = actor.log_temperature * jnp.mean(mask * excess_entropy)
        policy_loss = jnp.mean(mask * losses)
        metrics["actor_loss"] = Mean(policy_loss, share)
        return Mean(policy_loss + temperature_loss, share), (
            metrics,
            actor._replace(policy=policy_params),
        )

    @property
    def has_targets(self) -> bool:
        """Whether critics bootstrap from target critics."""
        return not self.settings.batch_norm or self.settings.batch_norm_targets

    def policy(self, actor: Actor, observation: PyTree) -> SquashedNormal:
        """Return the distribution of actions."""
        outputs = self.networks.policy(actor.policy, observation)
        return policy_of_outputs(outputs, is_squashed=self.settings.squashed_scale)


def policy_of_outputs(outputs: jax.Array, *, is_squashed: bool = False) -> SquashedNormal:
    """Return the policy of a network's outputs `[N, 2 * size]`, see `SAC.squashed_scale`."""
    mean, log_scale = jnp.split(outputs, 2, axis=-1)
    if is_squashed:
        low, high = SQUASHED_SCALE_BOUNDS
        return SquashedNormal(mean, low + (high - low) * 0.5 * (1.0 + jnp.tanh(log_scale)))
    return SquashedNormal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))


def crossq(**settings: Any) -> SAC:
    """Return SAC as CrossQ (Bhatt et al. 2024); `settings` override its fields."""
    return SAC(
        **{
            "batch_norm": True,
            "policy_period": 3,
            "learning_rate": 1e-3,
            "optimizer": Optimizer(epsilon=1e-8, adam_momentum=0.5),
            "critic_network": TorsoNetwork(MLP((2048, 2048))),
            **settings,
        }
    )


def simbav2(**settings: Any) -> SAC:
    """Return SAC as SimBaV2 (Lee et al. 2025); `settings` override its fields."""
    return SAC(
        **{
            "learning_rate": Linear(1e-4, 5e-5),
            "initial_temperature": 0.01,
            "target_entropy": -0.5,
            "squashed_scale": True,
            "return_distribution": Atoms(-5.0, 5.0, 101),
            "normalize_observations": True,
            "scaled_return_max": 5.0,
            "network": TorsoNetwork(MLP((128,), residual_blocks=1, spherical=True)),
            "critic_network": TorsoNetwork(MLP((512,), residual_blocks=2, spherical=True)),
            **settings,
        }
    )


def flash_sac(**settings: Any) -> SAC:
    """Return SAC as FlashSAC (Kim et al. 2026); `settings` override its fields.

    The target is the entropy of a normal distribution with a standard deviation of 0.15.
    """
    return SAC(
        **{
            "learning_rate": Linear(3e-4, 1.5e-4),
            "target_update_rate": 0.01,
            "initial_temperature": 0.01,
            "target_entropy": 0.5 * math.log(2 * math.pi * math.e * 0.15**2),
            "batch_norm": True,
            "batch_norm_targets": True,
            "policy_period": 2,
            "squashed_scale": True,
            "return_distribution": Atoms(-5.0, 5.0, 101),
            "scaled_return_max": 5.0,
            "network": TorsoNetwork(MLP((128,), residual_blocks=2, spherical=True)),
            "critic_network": TorsoNetwork(MLP((256,), residual_blocks=2, spherical=True)),
            **settings,
        }
    )
