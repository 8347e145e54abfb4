"""Shared parts of DDPG, SAC and QT-Opt: their learner, and how they explore."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import Agent, Context
from podracer.agents.common import normalization, off_policy, optimizers, recurrent
from podracer.agents.common.off_policy import Transition as Transition
from podracer.agents.common.recurrent import History, Recurrence
from podracer.agents.common.settings import GroupSettings, LearnerSettings
from podracer.agents.continuous import models
from podracer.agents.continuous.models import ContinuousNetworks, CriticNetworks, ReturnDistribution
from podracer.devices.reductions import Moments, as_mean, init_moments
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Head, NetworkBuilder, TorsoNetwork
from podracer.networks.groups import GroupNetwork
from podracer.ops.distributions import from_bounds
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
from podracer.types import (
    ArraySpec,
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    TimeStep,
    Trajectory,
)


@struct
class ContinuousSettings(LearnerSettings):
    """Settings of DDPG, SAC and QT-Opt."""

    learning_rate: Schedule = bounded(3e-4)
    target_update_rate: float = bounded(0.005, high=1.0)
    """Rate tau, in [0, 1], at which the target networks follow the networks in each update."""
    optimizer: optimizers.OptimizerBuilder = optimizers.Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    weight_decay: float = static(default=0.0, low=0.0)
    """Decoupled weight decay of matrices, times the learning rate (AdamW); biases do not decay."""
    num_critics: int = static(default=2, low=1)
    """Number of critics; targets use the smallest of their values."""
    return_distribution: ReturnDistribution | None = static(default=None)
    """Distribution of returns that the critics learn, categorical (C51) or quantiles; None for its
    mean alone."""
    n_step: int = static(default=1, low=1)
    """Rewards n in a return before it bootstraps."""
    random_frames: int = static(default=5_000, low=0)
    """Frames with uniformly random actions at the start of training."""
    normalize_observations: bool = static(default=False)
    """Normalize observations by their running mean and variance."""
    replay: Replay = static(default=Replay(1_000_000, warmup=5_000))
    """Replay buffer."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(256, 256))))
    """Network of the policy, if there is one, and of each critic, without their heads."""


@struct
class PolicySettings(GroupSettings, ContinuousSettings):
    """Settings of DDPG and SAC, which learn a policy."""

    recurrence: Recurrence = static(default=Recurrence())
    """Settings for a recurrent network."""


def build(
    settings: PolicySettings,
    method: Callable[[Any, Any, Learner], Any],
    networks: ContinuousNetworks,
    spec: EnvironmentSpec,
    context: Context,
) -> Agent:
    """Return an agent with the functions `init`, `act`, `update` and `distribution` of a method."""
    if recurrence := networks.recurrence:  # sequences that begin where rollouts do
        length = recurrence.burn_in_length + recurrence.unroll_length + settings.n_step
        buffer = settings.replay.build(spec, length, context.rollout_length, every_step=True)
    else:
        buffer = settings.replay.build(spec, settings.n_step + 1)
    learner = Learner(settings, networks, buffer, build_optimizer(settings))
    agent = method(settings, networks, learner)
    learn, groups = partial(learner.learn, agent.update), settings.groups(spec)
    return Agent.of(
        agent, spec, learn=learn, carry=networks.carry, actor_params=actor_params, groups=groups
    )


def build_networks(
    settings: PolicySettings, spec: EnvironmentSpec, *, policy_outputs: int
) -> ContinuousNetworks:
    """Return the networks of a policy, with so many numbers for each coordinate, and critics."""
    groups = settings.groups(spec)
    space, distribution = models.require_continuous(spec), settings.return_distribution
    network = GroupNetwork(settings.network, groups.get("actor", ()))
    # Critics take actions beside observations, recurrent networks the step before.
    critic_network = GroupNetwork(
        settings.critic_network or settings.network, groups.get("critic", ()), "observation"
    )
    policy = Head(policy_outputs * space.size, 0.01)
    actor = network.build(spec.observation, {"action": policy})
    if not jax.tree.leaves(actor.carry(1)):
        critics = models.build_critics(critic_network, spec, distribution)
        if jax.tree.leaves(critics.critic.carry(1)):
            raise ConfigError(
                "the critics' network has a memory, but the policy's has none: give both one, "
                "`agent.network` and `agent.critic_network`, or neither."
            )
        return ContinuousNetworks(**vars(critics), actor=actor)

    size = settings.recurrence.head_size
    observation = recurrent.last_step_spec(spec.observation, space.size)
    network = dataclasses.replace(network, entry="observation")
    spec = dataclasses.replace(spec, observation=ArraySpec((size,)))
    critics = models.build_critics(TorsoNetwork(MLP((size,))), spec, distribution)
    return ContinuousNetworks(
        space,
        critics.critic,
        distribution,
        history=critic_network.build(observation, {"history": Head(size)}),
        recurrence=settings.recurrence,
        actor=network.build(observation, {"action": dataclasses.replace(policy, hidden=(size,))}),
    )


class Parts(NamedTuple):
    """Parameters in two parts, each updated by a loss of its own; or their optimizers' states."""

    actor: Any
    critics: Any


@struct
class ActorCriticState(off_policy.ReplayLearnerState):
    """Learner state of DDPG, SAC or QT-Opt: actor, if any, critics and their targets."""

    params: Parts
    target_params: Any  # both parts in DDPG, else the critics alone
    optimizer_states: Parts
    obs_moments: Moments | None  # None if observations are not normalized


State = TypeVar("State", bound=ActorCriticState)
# (state, transition, key, axis) -> (new state, metrics, priorities f32 [N])
Update = Callable[[State, Transition, jax.Array, str | None], tuple[State, Metrics, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Learner:
    """Replay of n-step transitions, or of sequences of them, and optimizer of the two parts."""

    settings: ContinuousSettings
    networks: CriticNetworks
    buffer: Buffer
    optimizer: optimizers.ScheduledOptimizer

    def init(
        self, params: Parts, target_params: Any, num_envs: int, carry: Carry = ()
    ) -> LearnerState:
        """Return the state before the first update; `carry [1, ...]` is the actor's."""
        observation = self.buffer.spec.observation
        state = ActorCriticState(
            params=params,
            target_params=jax.tree.map(jnp.copy, target_params),
            optimizer_states=Parts(*map(self.optimizer.optimizer.init, params)),
            obs_moments=init_moments(observation) if self.settings.normalize_observations else None,
            frames=schedules.init_frames(),
        )
        stored = recurrent.stored_spec(carry)
        return LearnerState(state, self.buffer.init(num_envs, carry=stored))

    def learn(
        self,
        update: Update[Any],
        state: LearnerState,
        trajectory: Trajectory,
        key: jax.Array,
        axis: str | None,
    ) -> tuple[LearnerState, Metrics]:
        """Add a rollout to the replay, then make the agent's update on each sample."""
        is_recurrent = self.networks.recurrence is not None

        def learn_sample(
            shared: ActorCriticState, sample: Sample, key: jax.Array
        ) -> tuple[ActorCriticState, Metrics, jax.Array]:
            transition = self.transition(sample, shared.obs_moments)
            shared, metrics, errors = update(shared, transition, key, axis)
            if not is_recurrent:
                return shared, metrics, errors
            errors, mask = (x.reshape(-1, sample.rows.size) for x in (errors, transition.mask))
            return shared, metrics, recurrent.sequence_priorities(errors, mask)

        if is_recurrent:
            recurrent.check_rollout(self.buffer.stride, trajectory)
        shared: ActorCriticState = state.shared
        if shared.obs_moments is not None:
            obs_moments = normalization.update_moments(shared.obs_moments, trajectory, axis)
            shared = dataclasses.replace(shared, obs_moments=obs_moments)
        state = LearnerState(shared, state.local)
        return off_policy.learn_from_replay(
            self.buffer, learn_sample, state, trajectory, key, axis, trajectory.carry
        )

    def transition(self, sample: Sample, obs_moments: Moments | None) -> Transition:
        """Return the transitions of a sample in the units of the networks.

        Observations are normalized, and actions scaled from the environment's bounds to [-1, 1].
        Sequences have a transition for each of the `U` timesteps that are learned from, `U * N`
        in all, whose observations are `History`s.
        """
        recurrence, trajectory = self.networks.recurrence, sample.trajectory
        observe = partial(normalization.normalize_observation, obs_moments)
        if recurrence is not None:
            timesteps, start = observe(trajectory.timesteps()), trajectory.carry
            last_actions = jnp.concatenate([start.last_action[None], trajectory.steps.action])
            inputs = self.networks.recurrent_inputs(timesteps, last_actions)

            def observe(timestep: TimeStep) -> TimeStep:  # whose observation are positions
                positions, burn_in_length = timestep.observation, recurrence.burn_in_length
                history = History(inputs, timesteps.first, start.memory, positions, burn_in_length)
                return dataclasses.replace(timestep, observation=history)

            sample = recurrent.windows(sample, recurrence, self.settings.n_step)
        transition = off_policy.n_step_transition(sample, self.settings.discount)
        return dataclasses.replace(
            transition,
            timestep=observe(transition.timestep),
            next_timestep=observe(transition.next_timestep),
            action=from_bounds(self.networks.space, transition.action),
        )

    def step(self, state: State, grads: Parts) -> State:
        """Return a state after one optimizer step of each part that has a gradient, not None."""

        def step_part(params: Params, optimizer_state: Any, grads: Params | None) -> Any:
            if grads is None:
                return params, optimizer_state
            part = optimizers.CountedState(params, optimizer_state, state.frames)
            part, _ = self.optimizer.step(part, grads)
            return part.params, part.optimizer_state

        parts = map(step_part, state.params, state.optimizer_states, grads)
        params, optimizer_states = map(Parts._make, zip(*parts, strict=True))
        return dataclasses.replace(state, params=params, optimizer_states=optimizer_states)

    def move_targets(self, state: State, params: Any) -> State:
        """Return a state whose target parameters have followed these parameters."""
        rate = self.settings.target_update_rate
        target_params = optax.incremental_update(params, state.target_params, rate)
        return dataclasses.replace(state, target_params=target_params)


def update_if(
    is_due: jax.Array, update: Callable[[State], tuple[State, Metrics]], state: State
) -> tuple[State, Metrics]:
    """Return the state after an update that is due, and metrics; otherwise the state as it is.

    Metrics of an update that is not due count in no mean over updates.
    """

    def run(state: State) -> tuple[State, Metrics]:
        state, metrics = update(state)
        return state, {name: as_mean(metric) for name, metric in metrics.items()}

    def keep(state: State) -> tuple[State, Metrics]:
        shapes = jax.eval_shape(run, state)[1]
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.lax.cond(is_due, run, keep, state)


def build_optimizer(settings: ContinuousSettings) -> optimizers.ScheduledOptimizer:
    """Return an optimizer, with decoupled weight decay where that is not 0.

    Only matrices decay: no biases, scales of normalized layers or temperature. Source: Loshchilov
    and Hutter 2019 (arXiv 1711.05101).
    """
    method = settings.optimizer.build()

    def is_matrix(path: tuple[Any, ...], param: jax.Array) -> bool:
        # By its name, too: vectors of residual blocks and of attention's heads are stacked.
        name = getattr(path[-1], "name", "") if path else ""
        return param.ndim > 1 and not name.endswith(("bias", "scale", "shift"))

    matrices = partial(jax.tree.map_with_path, is_matrix)
    if settings.weight_decay != 0:
        method = optax.chain(method, optax.add_decayed_weights(settings.weight_decay, matrices))
    return optimizers.ScheduledOptimizer(method, settings.learning_rate)


@struct
class ActorParams:
    """Parameters of an actor for continuous actions."""

    actor: Params
    obs_moments: Moments | None
    frames: jax.Array  # uint32 [], valid transitions of all rollouts, see `schedules`


def actor_params(state: LearnerState) -> ActorParams:
    """Return the parameters that `act` takes, from the learner's state."""
    shared: ActorCriticState = state.shared
    return ActorParams(shared.params.actor, shared.obs_moments, shared.frames)


def with_noise(action: jax.Array, keys: jax.Array, std: float | jax.Array) -> jax.Array:
    """Return actions `[B, size]` in [-1, 1] with Gaussian noise, clipped to these bounds."""
    noise = jax.vmap(lambda key: jax.random.normal(key, action.shape[1:]))(keys)
    return jnp.clip(action + std * noise, -1.0, 1.0)


def random_at_start(
    action: jax.Array, keys: jax.Array, frames: jax.Array, random_frames: int
) -> jax.Array:
    """Replace actions `[B, size]` by uniform ones in [-1, 1] during the first frames of a run."""
    size = action.shape[-1]
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0))(keys)
    return jnp.where(frames < random_frames, uniform, action)
