"""Shared parts of DDPG and SAC: actor and critic networks, critic loss, observation moments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer import networks, schedules
from podracer.agents.common import actor_critic, off_policy
from podracer.agents.common.off_policy import Transition as Transition
from podracer.agents.common.optimizers import Optimizer, take_step
from podracer.mesh import global_grad
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.action_values import Atoms, Quantiles
from podracer.ops.distributions import from_bounds
from podracer.ops.moments import Moments, init_moments, merge, moments_of, normalize
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
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

ReturnDistribution = Atoms | Quantiles


@dataclasses.dataclass(frozen=True)
class ActorCritic:
    """Policy network and Q-network; each coordinate of their actions is in [-1, 1].

    A critic has Z outputs: the value itself, or those of a distribution of returns.
    """

    space: Continuous
    actor: Network
    critic: Network
    distribution: ReturnDistribution | None

    def init(self, key: jax.Array, num_critics: int) -> tuple[Params, tuple[Params, ...]]:
        """Return parameters of the actor and of `num_critics` independent critics."""
        actor_key, critics_key = jax.random.split(key)
        critics = tuple(self.critic.init(key) for key in jax.random.split(critics_key, num_critics))
        return self.actor.init(actor_key), critics

    def policy(self, params: Params, observation: PyTree) -> jax.Array:
        """Return the policy network's outputs, f32 `[N, outputs * size]`."""
        return networks.outputs(self.actor, params, observation)["action"]

    def q_outputs(
        self, params: tuple[Params, ...], observation: PyTree, action: jax.Array
    ) -> jax.Array:
        """Return the outputs of each critic, f32 `[critics, N, Z]`."""
        inputs = {"action": action, "observation": observation}
        return jnp.stack([networks.outputs(self.critic, p, inputs)["q"] for p in params])

    def mean(self, outputs: jax.Array) -> jax.Array:
        """Return the value `[*b]` that outputs `[*b, Z]` of a critic stand for."""
        return outputs[..., 0] if self.distribution is None else self.distribution.mean(outputs)

    def q_values(
        self, params: tuple[Params, ...], observation: PyTree, action: jax.Array
    ) -> jax.Array:
        """Return Q(s, a) of each critic, f32 `[critics, N]`."""
        return self.mean(self.q_outputs(params, observation, action))

    def smallest(self, outputs: jax.Array) -> jax.Array:
        """Return those outputs `[N, Z]` of `[critics, N, Z]` that stand for the smallest value.

        A distribution is taken whole, as in FastTD3 (Seo et al. 2025, arXiv 2505.22642).
        """

        if self.distribution is None:
            return jnp.min(outputs, axis=0)

        def smaller(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where((self.mean(other) < self.mean(one))[:, None], other, one)

        return functools.reduce(smaller, list(outputs))


def build_networks(agent: Agent, *, policy_outputs: int) -> ActorCritic:
    """Build the networks; the policy has `policy_outputs` numbers for each action coordinate."""
    space, distribution = require_continuous(agent.spec), agent.return_distribution
    observation = actor_critic.require_spec(agent.spec).observation
    actor = agent.network.build(observation, {"action": Head(policy_outputs * space.size, 0.01)})
    inputs = {"action": ArraySpec((space.size,)), "observation": observation}
    size = 1 if distribution is None else distribution.size
    critic = agent.network.build(inputs, {"q": Head(size)})
    return ActorCritic(space, off_policy.require_feed_forward(actor), critic, distribution)


# --- learning ------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Parameters in two parts, each updated by a loss of its own; or their optimizers' states."""

    actor: Any
    critics: Any


@struct
class ActorCriticState(off_policy.ReplayLearnerState):
    """Learner state."""

    params: Parts
    target_params: Any
    optimizer_states: Parts
    obs_moments: Moments | None  # None if observations are not normalized


State = TypeVar("State", bound=ActorCriticState)


class Agent(Protocol):
    """Attributes of an agent that the functions here use; `learn` also serves as a method."""

    @property
    def learning_rate(self) -> Schedule: ...

    @property
    def discount(self) -> float: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def return_distribution(self) -> ReturnDistribution | None: ...

    @property
    def n_step(self) -> int: ...

    @property
    def replay(self) -> Replay: ...

    @property
    def network(self) -> NetworkBuilder: ...

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    @property
    def _networks(self) -> ActorCritic: ...

    @property
    def _update(self) -> Callable[..., tuple[Any, Metrics, jax.Array]]:
        """Function of state, transition, key, axis -> new state, metrics, priorities."""
        ...


def learn(
    agent: Agent, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
) -> tuple[LearnerState, Metrics]:
    """Add a rollout to the replay, then make the agent's update on each sample."""

    def update(shared: State, sample: Sample, key: jax.Array) -> tuple[State, Metrics, jax.Array]:
        transition = normalized_transition(
            sample, agent.discount, agent._networks.space, shared.obs_moments
        )
        return agent._update(shared, transition, key, axis)

    shared: ActorCriticState = state.shared
    if shared.obs_moments is not None:
        rollout_moments = moments_of(trajectory.steps.timestep.observation, axis)
        obs_moments = merge(shared.obs_moments, rollout_moments)
        state = LearnerState(dataclasses.replace(shared, obs_moments=obs_moments), state.local)
    buffer = make_buffer(agent)
    return off_policy.learn_from_replay(buffer, update, state, trajectory, key, axis)


def make_buffer(agent: Agent) -> Buffer:
    """Return the agent's replay buffer of n-step transitions."""
    return off_policy.make_buffer(agent.replay, agent.spec, agent.n_step)


def critic_loss(
    agent: Agent,
    critics: tuple[Params, ...],
    next_outputs: jax.Array,
    transition: Transition,
    *,
    penalty: float | jax.Array = 0.0,
) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """Return the critics' error from targets G + γ (X - penalty), and `(metrics, priorities [N])`.

    X is the value or the distribution of `next_outputs [N, Z]`; the penalty `[N]` is SAC's
    α log π(a'|s'). Errors of values are squared, a distribution has a loss of its own. The loss is
    the sum over critics and the mean over samples with importance weights.
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
    loss = jnp.mean(transition.mask * transition.weight * jnp.sum(losses, axis=0))
    priorities = transition.mask * jnp.mean(errors, axis=0)
    metrics = {"loss": loss, "q": jnp.mean(critic.mean(outputs))}
    return loss, (metrics, jax.lax.stop_gradient(priorities))


def build_optimizer(agent: Agent) -> optax.GradientTransformation:
    """Return the agent's unscaled optimizer, with decoupled weight decay if it has one.

    Only matrices decay: no biases, scales of normalized layers or temperature. Source: Loshchilov
    and Hutter 2019 (arXiv 1711.05101).
    """
    optimizer = agent.optimizer.build()
    if agent.weight_decay == 0:
        return optimizer

    def is_matrix(params: Params) -> PyTree:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(optimizer, optax.add_decayed_weights(agent.weight_decay, is_matrix))


def init_optimizers(agent: Agent, params: Parts) -> Parts:
    """Return a state of the optimizer for each part of the parameters."""
    return Parts(*map(build_optimizer(agent).init, params))


def gradient_step(
    agent: Agent,
    part: str,
    loss: Callable[..., tuple[jax.Array, Any]],
    state: State,
    transition: Transition,
    key: jax.Array,
    axis: str | None,
) -> tuple[State, Any, jax.Array]:
    """Take one optimizer step on the loss of one part of the parameters, `actor` or `critics`.

    The loss is called as `loss(part, state, transition, key)` and returns the loss and `aux`.
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
    frames: jax.Array  # uint32 [], timesteps collected


def carry(agent: Agent, num_envs: int) -> Carry:
    """Return `()`: the networks are feed-forward."""
    return ()


def actor_params(agent: Agent, state: LearnerState) -> ActorParams:
    """Return the parameters that `act` takes, from the learner's state."""
    shared: ActorCriticState = state.shared
    return ActorParams(shared.params.actor, shared.obs_moments, shared.frames)


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
    """Return the moments of zero observations; None if observations are not normalized."""
    return init_moments(actor_critic.require_spec(spec).observation) if enabled else None


def normalized_obs(moments: Moments | None, observation: PyTree) -> PyTree:
    """Return the normalized observation; unchanged if there are no moments."""
    return observation if moments is None else normalize(moments, observation)
