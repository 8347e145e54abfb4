"""Shared parts of DDPG and SAC: actor and critic networks, critic loss, observation moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer import networks
from podracer.agents.common import actor_critic, off_policy
from podracer.agents.common.off_policy import Transition as Transition
from podracer.mesh import global_grad
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.distributions import from_bounds
from podracer.ops.moments import Moments, init_moments, merge, moments_of, normalize
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    ArraySpec,
    Carry,
    ConfigError,
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


def require_continuous(spec: EnvironmentSpec | None) -> Continuous:
    """Return the continuous action space; raise `ConfigError` if there is no spec or another."""
    spec = actor_critic.require_spec(spec)
    if not isinstance(spec.action, Continuous):
        raise ConfigError(f"the agent needs continuous actions; {spec.name} has discrete ones.")
    return spec.action


# --- networks ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ActorCritic:
    """Policy network and Q-network; each coordinate of their actions is in [-1, 1]."""

    space: Continuous
    actor: Network
    critic: Network

    def init(self, key: jax.Array, num_critics: int) -> tuple[Params, tuple[Params, ...]]:
        """Return parameters of the actor and of `num_critics` independent critics."""
        actor_key, critics_key = jax.random.split(key)
        critics = tuple(self.critic.init(key) for key in jax.random.split(critics_key, num_critics))
        return self.actor.init(actor_key), critics

    def policy(self, params: Params, observation: PyTree) -> jax.Array:
        """Return the policy network's outputs, f32 `[N, outputs * size]`."""
        return networks.outputs(self.actor, params, observation)["action"]

    def q_values(
        self, params: tuple[Params, ...], observation: PyTree, action: jax.Array
    ) -> jax.Array:
        """Return Q(s, a) of each critic, f32 `[critics, N]`."""
        inputs = {"action": action, "observation": observation}
        return jnp.stack([networks.outputs(self.critic, p, inputs)["q"][:, 0] for p in params])


def build_networks(
    network: NetworkBuilder, spec: EnvironmentSpec | None, policy_outputs: int
) -> ActorCritic:
    """Build the networks; the policy has `policy_outputs` numbers for each action coordinate."""
    space = require_continuous(spec)
    observation = actor_critic.require_spec(spec).observation
    actor = network.build(observation, {"action": Head(policy_outputs * space.size, 0.01)})
    inputs = {"action": ArraySpec((space.size,)), "observation": observation}
    critic = network.build(inputs, {"q": Head(1)})
    return ActorCritic(space, off_policy.require_feed_forward(actor), critic)


# --- learning ------------------------------------------------------------------------------------


@struct
class ActorCriticState:
    """Learner state; an agent names the types of its parameters."""

    params: Any  # a named tuple, each field with an optimizer of its own
    target_params: Any
    optimizer_states: Any
    obs_moments: Moments | None  # None if observations are not normalized
    exploration_progress: jax.Array  # f32 [], share of the random frames that has passed


State = TypeVar("State", bound=ActorCriticState)


class Agent(Protocol):
    """Attributes of an agent that `learn`, which also serves as a method, uses."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def discount(self) -> float: ...

    @property
    def random_frames(self) -> int: ...

    @property
    def n_step(self) -> int: ...

    @property
    def replay(self) -> Replay: ...

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    @property
    def _networks(self) -> ActorCritic: ...

    @property
    def _loss(self) -> Callable[..., tuple[jax.Array, tuple[Metrics, jax.Array]]]:
        """Function of params, target params, transition, key -> loss, (metrics, priorities)."""
        ...

    @property
    def _apply_gradients(self) -> Callable[[Any, Any], Any]:
        """Function of state, gradients -> state, with new parameters and targets."""
        ...


def observe_rollout(
    state: LearnerState, trajectory: Trajectory, random_frames: int, axis: str | None
) -> LearnerState:
    """Advance the exploration progress and the observation moments by a rollout."""
    shared: ActorCriticState = state.shared
    progress = off_policy.advance_exploration(
        shared.exploration_progress, trajectory, random_frames, axis
    )
    moments = shared.obs_moments
    if moments is not None:
        moments = merge(moments, moments_of(trajectory.steps.timestep.observation, axis))
    shared = dataclasses.replace(shared, exploration_progress=progress, obs_moments=moments)
    return LearnerState(shared, state.local)


def learn(
    agent: Agent, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
) -> tuple[LearnerState, Metrics]:
    """Add a rollout to the replay, then apply the gradient of the agent's loss on each sample."""

    def update(shared: State, sample: Sample, key: jax.Array) -> tuple[State, Metrics, jax.Array]:
        transition = normalized_transition(
            sample, agent.discount, agent._networks.space, shared.obs_moments
        )
        grads, (metrics, priorities) = global_grad(
            agent._loss, shared.params, shared.target_params, transition, key, axis=axis
        )
        shared = agent._apply_gradients(shared, grads)
        return shared, {**metrics, "gradient_norm": optax.tree.norm(grads)}, priorities

    state = observe_rollout(state, trajectory, agent.random_frames, axis)
    buffer = make_buffer(agent)
    return off_policy.learn_from_replay(buffer, update, state, trajectory, key, axis)


def make_buffer(agent: Agent) -> Buffer:
    """Return the agent's replay buffer of n-step transitions."""
    return off_policy.make_buffer(agent.replay, agent.spec, agent.n_step)


def critic_loss(
    q: jax.Array, target: jax.Array, transition: Transition
) -> tuple[jax.Array, jax.Array]:
    """Return the squared error of values `[critics, N]`, and priorities `[N]`.

    The loss is the sum over critics and the mean over samples with importance weights.
    """
    error = target[None] - q
    squared_error = jnp.sum(0.5 * error**2, axis=0)
    loss = jnp.mean(transition.mask * transition.weight * squared_error)
    priorities = transition.mask * jnp.mean(jnp.abs(error), axis=0)
    return loss, jax.lax.stop_gradient(priorities)


Networks = TypeVar("Networks", bound=NamedTuple)


def init_optimizers(agent: Agent, params: Networks) -> Networks:
    """Return a state of Adam for each field of a named tuple of parameters."""
    optimizer = optax.adam(agent.learning_rate)
    return params._make(optimizer.init(part) for part in params)


def optimizer_steps(agent: Agent, state: ActorCriticState, grads: Any) -> tuple[Any, Any]:
    """Take one step of Adam for each field of the parameters; return them and Adam's states."""
    optimizer = optax.adam(agent.learning_rate)

    def step(grad: PyTree, optimizer_state: Any, part: Params) -> tuple[Params, Any]:
        updates, optimizer_state = optimizer.update(grad, optimizer_state, part)
        return optax.apply_updates(part, updates), optimizer_state

    new_params, new_states = zip(
        *map(step, grads, state.optimizer_states, state.params), strict=True
    )
    return grads._make(new_params), grads._make(new_states)


def normalized_transition(
    sample: Sample,
    discount: float | jax.Array,
    space: Continuous,
    obs_moments: Moments | None,
) -> Transition:
    """Return `off_policy.n_step_transition` in the units of the networks.

    Observations are normalized, actions scaled from the environment's bounds to [-1, 1].
    """
    transition = off_policy.n_step_transition(sample, discount)

    def normalized(timestep: TimeStep) -> TimeStep:
        observation = normalized_obs(obs_moments, timestep.observation)
        return dataclasses.replace(timestep, observation=observation)

    return dataclasses.replace(
        transition,
        timestep=normalized(transition.timestep),
        next_timestep=normalized(transition.next_timestep),
        action=from_bounds(space, transition.action),
    )


# --- acting --------------------------------------------------------------------------------------


@struct
class ActorParams:
    """Parameters of an actor for continuous actions."""

    actor: Params
    obs_moments: Moments | None
    exploration_progress: jax.Array  # f32 [], share of the random frames that has passed


def carry(agent: Agent, num_envs: int) -> Carry:
    """Return `()`: the networks are feed-forward."""
    return ()


def actor_params(agent: Agent, state: LearnerState) -> ActorParams:
    """Return the parameters that `act` takes, from the learner's state."""
    shared: ActorCriticState = state.shared
    return ActorParams(shared.params.actor, shared.obs_moments, shared.exploration_progress)


def random_at_start(action: jax.Array, keys: jax.Array, progress: jax.Array) -> jax.Array:
    """Replace actions `[B, size]` by uniform ones in [-1, 1] until the progress reaches 1."""
    size = action.shape[-1]
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0))(keys)
    return jnp.where(progress < 1.0, uniform, action)


# --- observation normalization -------------------------------------------------------------------


def init_obs_moments(enabled: bool, spec: EnvironmentSpec | None) -> Moments | None:
    """Return the moments of zero observations; None if observations are not normalized."""
    return init_moments(actor_critic.require_spec(spec).observation) if enabled else None


def normalized_obs(moments: Moments | None, observation: PyTree) -> PyTree:
    """Return the normalized observation; unchanged if there are no moments."""
    return observation if moments is None else normalize(moments, observation)
