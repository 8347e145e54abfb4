"""Shared parts of DDPG, SAC and QT-Opt: critic loss, optimizer steps, acting, moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import require_spec
from podracer.agents.common import normalization, off_policy, recurrent
from podracer.agents.common.continuous_networks import ContinuousNetworks, CriticNetworks
from podracer.agents.common.off_policy import Transition as Transition
from podracer.agents.common.optimizers import OptimizerBuilder, take_step
from podracer.agents.common.recurrent import History, Recurrence
from podracer.means import Mean, mean_of
from podracer.mesh import global_grad
from podracer.ops.distributions import from_bounds
from podracer.ops.moments import Moments, init_moments, merge, moments_of, normalize
from podracer.replay import Buffer, Replay, ReplayState, Sample
from podracer.schedules import Schedule
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
    struct,
)

# --- learning ------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Parameters in two parts, each updated by a loss of its own; or their optimizers' states."""

    actor: Any
    critics: Any


@struct
class ActorCriticState(off_policy.ReplayLearnerState):
    """Learner state of DDPG, SAC or QT-Opt: actor, if any, critics and their targets."""

    params: Parts
    target_params: Any
    optimizer_states: Parts
    obs_moments: Moments | None  # None if observations are not normalized


State = TypeVar("State", bound=ActorCriticState)


class ContinuousAgent(Protocol):
    """Attributes of an agent that the functions here use; `learn` also serves as a method."""

    @property
    def learning_rate(self) -> Schedule: ...

    @property
    def discount(self) -> float: ...

    @property
    def optimizer(self) -> OptimizerBuilder: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def n_step(self) -> int: ...

    @property
    def replay(self) -> Replay: ...

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    @property
    def _networks(self) -> CriticNetworks: ...

    @property
    def _update(self) -> Callable[..., tuple[Any, Metrics, jax.Array]]:
        """Function of state, transition, key, axis -> new state, metrics, priorities."""
        ...

    def carry(self, num_envs: int) -> Carry: ...


class ActorCriticAgent(Protocol):
    """Agent with a policy network, which is recurrent where its critics are."""

    @property
    def _networks(self) -> ContinuousNetworks: ...


def learn(
    agent: ContinuousAgent,
    state: LearnerState,
    trajectory: Trajectory,
    key: jax.Array,
    axis: str | None,
) -> tuple[LearnerState, Metrics]:
    """Add a rollout to the replay, then make the agent's update on each sample."""
    networks, buffer = agent._networks, make_buffer(agent)

    def update(shared: State, sample: Sample, key: jax.Array) -> tuple[State, Metrics, jax.Array]:
        if networks.recurrence is None:
            transition = normalized_transition(agent, sample, shared.obs_moments)
            return agent._update(shared, transition, key, axis)
        transition = sequence_transition(agent, networks.recurrence, sample, shared.obs_moments)
        shared, metrics, errors = agent._update(shared, transition, key, axis)
        errors, mask = (x.reshape(-1, sample.rows.size) for x in (errors, transition.mask))
        return shared, metrics, recurrent.sequence_priorities(errors, mask)

    if networks.recurrence is not None:
        recurrent.check_rollout(buffer.stride, trajectory)
    shared = cast(ActorCriticState, state.shared)
    if shared.obs_moments is not None:
        valid = trajectory.valid().astype(jnp.float32)
        rollout_moments = moments_of(trajectory.steps.timestep.observation, axis, valid)
        obs_moments = merge(shared.obs_moments, rollout_moments)
        state = LearnerState(dataclasses.replace(shared, obs_moments=obs_moments), state.local)
    return off_policy.learn_from_replay(
        buffer, update, state, trajectory, key, axis, trajectory.carry
    )


def make_buffer(agent: ContinuousAgent) -> Buffer:
    """Return the agent's replay buffer of n-step transitions, or of sequences."""
    recurrence = agent._networks.recurrence
    if recurrence is None:
        return off_policy.make_buffer(agent.replay, agent.spec, agent.n_step)
    return recurrent.make_buffer(
        agent, agent.replay, recurrence.burn_in_length, recurrence.unroll_length, agent.n_step
    )


def init_replay(agent: ContinuousAgent, num_envs: int) -> ReplayState:
    """Return the agent's empty replay."""
    return make_buffer(agent).init(num_envs, carry=recurrent.stored_spec(agent.carry(1)))


def critic_loss(
    agent: ContinuousAgent,
    critics: tuple[Params, ...],
    next_outputs: jax.Array,
    transition: Transition,
    *,
    penalty: float | jax.Array = 0.0,
) -> tuple[Mean, tuple[Metrics, jax.Array]]:
    """Return the critics' error from targets G + γ (X - penalty), and `(metrics, priorities [N])`.

    X is the value or the distribution of `next_outputs [N, Z]`; the penalty `[N]` is SAC's
    α log π(a'|s'). Errors of values are squared, a distribution has a loss of its own. The loss is
    the sum over critics and the mean over valid samples with importance weights.
    """
    critic, returns = agent._networks, transition.n_step_return
    discounts = transition.bootstrap_discount
    outputs = critic.q_outputs(critics, transition.timestep.observation, transition.action)
    if critic.distribution is None:
        target = returns + discounts * (critic.mean(next_outputs) - penalty)
        error = target[None] - critic.mean(outputs)
        losses, errors = 0.5 * error**2, jnp.abs(error)
    else:
        losses, errors = jax.vmap(critic.distribution.loss, (0, None, None, None))(
            outputs, next_outputs, returns - discounts * penalty, discounts
        )
    loss = mean_of(transition.weight * jnp.sum(losses, axis=0), transition.mask)
    priorities = transition.mask * jnp.mean(errors, axis=0)
    q = jnp.mean(critic.mean(outputs), axis=0)
    metrics = {"loss": loss, "q": mean_of(q, transition.mask)}
    return loss, (metrics, jax.lax.stop_gradient(priorities))


def build_optimizer(agent: ContinuousAgent) -> optax.GradientTransformation:
    """Return the agent's unscaled optimizer, with decoupled weight decay if it has one.

    Only matrices decay: no biases, scales of normalized layers or temperature. Source: Loshchilov
    and Hutter 2019 (arXiv 1711.05101).
    """
    optimizer = agent.optimizer.build()
    if agent.weight_decay == 0:
        return optimizer

    def is_matrix(path: tuple[Any, ...], param: jax.Array) -> bool:
        # By its name, too: the vectors of residual blocks are stacked.
        names = {getattr(key, "name", "") for key in path[-1:]}
        return param.ndim > 1 and not names & {"bias", "scale", "shift"}

    def matrices(params: Params) -> PyTree:
        return jax.tree.map_with_path(is_matrix, params)

    return optax.chain(optimizer, optax.add_decayed_weights(agent.weight_decay, matrices))


def init_optimizers(agent: ContinuousAgent, params: Parts) -> Parts:
    """Return a state of the optimizer for each part of the parameters."""
    return Parts(*map(build_optimizer(agent).init, params))


def gradient_step(
    agent: ContinuousAgent,
    part: str,
    loss: Callable[..., tuple[Mean, Any]],
    state: State,
    transition: Transition,
    key: jax.Array,
    axis: str | None,
) -> tuple[State, Any, jax.Array]:
    """Take one optimizer step on the loss of one part of the parameters, `actor` or `critics`.

    The loss is called as `loss(params, state, transition, key)` and returns the loss and `aux`.
    Returns the state, `aux` and the norm of the gradient.
    """
    params = getattr(state.params, part)
    optimizer_state = getattr(state.optimizer_states, part)
    grads, aux = global_grad(loss, params, state, transition, key, axis=axis)
    learning_rate = schedules.value_at(agent.learning_rate, state.frames)
    params, optimizer_state = take_step(
        build_optimizer(agent), params, optimizer_state, grads, learning_rate
    )
    state = dataclasses.replace(
        state,
        params=state.params._replace(**{part: params}),
        optimizer_states=state.optimizer_states._replace(**{part: optimizer_state}),
    )
    return state, aux, optax.tree.norm(grads)


def normalized_transition(
    agent: ContinuousAgent, sample: Sample, obs_moments: Moments | None
) -> Transition:
    """Return `off_policy.n_step_transition` in the units of the networks.

    Observations are normalized, actions scaled from the environment's bounds to [-1, 1].
    """
    transition = off_policy.n_step_transition(sample, agent.discount)
    normalized = partial(normalization.normalize_observation, obs_moments)
    return dataclasses.replace(
        transition,
        timestep=normalized(transition.timestep),
        next_timestep=normalized(transition.next_timestep),
        action=from_bounds(agent._networks.space, transition.action),
    )


def sequence_transition(
    agent: ContinuousAgent, recurrence: Recurrence, sample: Sample, obs_moments: Moments | None
) -> Transition:
    """Return the transitions, as `normalized_transition`, of all timesteps that are learned from.

    Sequences of `U` such timesteps have `U * N` transitions; observations are `History`s.
    """
    space, trajectory = agent._networks.space, sample.trajectory
    samples = recurrent.windows(sample, recurrence, agent.n_step)
    transition = off_policy.n_step_transition(samples, agent.discount)
    timesteps, start = trajectory.timesteps(), trajectory.carry
    last_actions = jnp.concatenate([start.last_action[None], trajectory.steps.action])
    inputs = _inputs(space, obs_moments, timesteps, last_actions)
    burn_in_length = recurrence.burn_in_length

    def with_history(timestep: TimeStep) -> TimeStep:
        positions = timestep.observation
        observation = History(inputs, timesteps.first, start.memory, positions, burn_in_length)
        return dataclasses.replace(timestep, observation=observation)

    return dataclasses.replace(
        transition,
        timestep=with_history(transition.timestep),
        next_timestep=with_history(transition.next_timestep),
        action=from_bounds(space, transition.action),
    )


def _inputs(
    space: Continuous, obs_moments: Moments | None, timesteps: TimeStep, last_actions: jax.Array
) -> PyTree:
    """Return what recurrent networks see of timesteps `[T, B, ...]` and the actions before them."""
    observation = normalized_obs(obs_moments, timesteps.observation)
    return recurrent.with_last_step(observation, timesteps, from_bounds(space, last_actions))


# --- acting --------------------------------------------------------------------------------------


@struct
class ActorParams:
    """Parameters of an actor for continuous actions."""

    actor: Params
    obs_moments: Moments | None
    frames: jax.Array  # uint32 [], valid transitions of all rollouts, see `schedules`


@struct
class MemoryCarry:
    """Recurrent state of each environment, `[B, ...]`."""

    memory: PyTree  # recurrent state of the policy
    last_action: jax.Array  # f32 [B, size], 0 before the first one


def carry(agent: ActorCriticAgent, num_envs: int) -> MemoryCarry | tuple[()]:
    """Return the policy's initial recurrent state, `()` if its network is feed-forward."""
    networks = agent._networks
    if networks.recurrence is None:
        return ()
    return MemoryCarry(networks.actor.carry(num_envs), jnp.zeros((num_envs, networks.space.size)))


def actor_params(agent: ContinuousAgent, state: LearnerState) -> ActorParams:
    """Return the parameters that `act` takes, from the learner's state."""
    shared: ActorCriticState = state.shared
    return ActorParams(shared.params.actor, shared.obs_moments, shared.frames)


def policy_outputs(
    agent: ActorCriticAgent, params: ActorParams, policy: Params, carry: Carry, timestep: TimeStep
) -> tuple[jax.Array, Carry]:
    """Return the policy network's outputs `[B, n]` for parameters `policy`, and its new memory.

    The last action in the carry is still the old one, see `with_last_action`.
    """
    networks = agent._networks
    if not isinstance(carry, MemoryCarry):
        observation = normalized_obs(params.obs_moments, timestep.observation)
        return networks.policy(policy, observation), carry
    timesteps, last_actions = jax.tree.map(lambda x: x[None], (timestep, carry.last_action))
    inputs = _inputs(networks.space, params.obs_moments, timesteps, last_actions)
    heads, memory = networks.actor.apply(policy, carry.memory, inputs, timesteps.first)
    return heads["action"][0], dataclasses.replace(carry, memory=memory)


def with_last_action(carry: Carry, action: jax.Array) -> Carry:
    """Return the carry after actions `[B, size]` in the units of the environment."""
    is_memory = isinstance(carry, MemoryCarry)
    return dataclasses.replace(carry, last_action=action) if is_memory else carry


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


# --- observation normalization -------------------------------------------------------------------


def init_obs_moments(enabled: bool, spec: EnvironmentSpec | None) -> Moments | None:
    """Return the moments before the first observation; None if observations are not normalized."""
    return init_moments(require_spec(spec).observation) if enabled else None


def normalized_obs(moments: Moments | None, observation: PyTree) -> PyTree:
    """Return the normalized observation; unchanged if there are no moments."""
    return observation if moments is None else normalize(moments, observation)
