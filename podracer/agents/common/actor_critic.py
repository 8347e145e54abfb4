"""Actor-critics: a network with policy and value heads, how it acts, and what it minimizes.

Functions whose first parameter is `agent` also serve as methods:

    class A2C:
        carry = actor_critic.carry
        act = actor_critic.act
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import FusedAgent, require_spec
from podracer.agents.common.optimizers import take_step
from podracer.means import Mean, with_share
from podracer.mesh import global_grad, global_grad_in_blocks
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.action_masks import action_mask, mask_logits
from podracer.ops.distributions import ActionDistribution, num_outputs, policy, to_bounds
from podracer.ops.minibatches import take
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


class ActorCritic(Protocol):
    """Attributes of an agent that the functions below use; most need the heads of `build`."""

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    @property
    def _network(self) -> Network: ...

    @property
    def _optimizer(self) -> optax.GradientTransformation: ...


class ActorCriticLearner(ActorCritic, Protocol):
    """Agent whose optimizer steps the functions below take."""

    @property
    def learning_rate(self) -> Schedule: ...


# --- parameters ----------------------------------------------------------------------------------


@struct
class ParamsState:
    """Parameters and the state of their optimizer."""

    params: Params
    optimizer_state: optax.OptState


@struct
class CountedState(ParamsState):
    """Parameters, the state of their optimizer, and how many frames they have learned from."""

    frames: jax.Array  # uint32 [], valid transitions of all rollouts, see `schedules`


State = TypeVar("State", bound=CountedState)


def init_params(
    network: Network, optimizer: optax.GradientTransformation, key: jax.Array
) -> CountedState:
    """Return new parameters of a network and the state of their optimizer."""
    params = network.init(key)
    return CountedState(params, optimizer.init(params), schedules.init_frames())


def optimizer_step(agent: ActorCriticLearner, state: State, grads: PyTree) -> tuple[State, Metrics]:
    """Return a state whose parameters took one optimizer step, and the norm of the gradients."""
    rate = schedules.value_at(agent.learning_rate, state.frames)
    params, optimizer_state = take_step(
        agent._optimizer, state.params, state.optimizer_state, grads, rate
    )
    state = dataclasses.replace(state, params=params, optimizer_state=optimizer_state)
    return state, {"gradient_norm": optax.tree.norm(grads)}


def count_frames(state: State, num_frames: jax.Array) -> State:
    """Return a state that has learned from more frames, those of all shards together."""
    return dataclasses.replace(state, frames=schedules.add_frames(state.frames, num_frames))


# --- networks ------------------------------------------------------------------------------------


def build(
    network: NetworkBuilder,
    spec: EnvironmentSpec | None,
    *,
    num_heads: int = 1,
    state_dependent_std: bool = False,
) -> Network:
    """Return a network with the heads `policy` and `value`.

    The policy's initial weights are small, so that it begins nearly uniform. With `num_heads` of
    each, the others are named `policy_1`, `value_1`, `policy_2` and so on. Logits of actions that
    an observation masks are very low. The logarithm of a Gaussian's scale, initially 0, is a
    parameter (Schulman et al. 2017, section 6.1), or with `state_dependent_std` an output.
    """
    spec, suffixes = require_spec(spec), head_suffixes(num_heads)
    names = ["policy" + suffix for suffix in suffixes]
    free_std = isinstance(spec.action, Continuous) and not state_dependent_std
    size = num_outputs(spec.action) // (2 if free_std else 1)
    heads = {name: Head(size, 0.01) for name in names}
    values = {"value" + suffix: Head(1) for suffix in suffixes}
    plain_network = network.build(spec.observation, heads | values)
    if free_std:
        return _with_free_std(plain_network, names, size)
    if action_mask(spec.observation) is not None:
        return _with_masks(plain_network, names)
    return plain_network


def _with_masks(network: Network, policies: Sequence[str]) -> Network:
    """Return a network whose policies have very low logits where the observation masks actions."""

    def apply(params: Params, carry: Carry, observation: PyTree, first: jax.Array):
        outputs, carry = network.apply(params, carry, observation, first)
        masked = {name: mask_logits(observation, outputs[name]) for name in policies}
        return {**outputs, **masked}, carry

    return dataclasses.replace(network, apply=apply)


def _with_free_std(network: Network, policies: Sequence[str], size: int) -> Network:
    """Return a network whose policies consist of its outputs and of as many parameters.

    The parameters are the logarithms of scales, see `distributions.policy`.
    """

    def init(key: jax.Array) -> Params:
        return {
            "network": network.init(key),
            "log_std": {name: jnp.zeros(size) for name in policies},
        }

    def apply(params: Params, carry: Carry, observation: PyTree, first: jax.Array):
        outputs, carry = network.apply(params["network"], carry, observation, first)
        scaled = {}
        for name, log_std in params["log_std"].items():
            mean = outputs[name]
            log_std = jnp.broadcast_to(log_std, mean.shape)
            scaled[name] = jnp.concatenate([mean, log_std], axis=-1)
        return {**outputs, **scaled}, carry

    return dataclasses.replace(network, init=init, apply=apply)


def head_suffixes(num_heads: int) -> tuple[str, ...]:
    """Return the suffixes of the heads' names: none for the main head, then `_1`, `_2`, ..."""
    return ("", *(f"_{i}" for i in range(1, num_heads)))


# --- acting --------------------------------------------------------------------------------------


def init(agent: ActorCritic, key: jax.Array, num_envs: int) -> LearnerState:
    """Return a learner state of parameters and the state of their optimizer only."""
    return LearnerState(init_params(agent._network, agent._optimizer, key))


def carry(agent: ActorCritic, num_envs: int) -> Carry:
    """Return the initial recurrent state of each environment, `[B, ...]`."""
    return agent._network.carry(num_envs)


def actor_params(agent: ActorCritic, state: LearnerState) -> Params:
    """Return the parameters of the network."""
    return state.shared.params


def act(
    agent: ActorCritic,
    params: Params,
    carry: Carry,
    timestep: TimeStep,
    keys: jax.Array,
    explore: bool,
) -> tuple[jax.Array, dict[str, jax.Array], Carry]:
    """Return an action for each environment `[B, ...]`, extras and the new recurrent state.

    Extras are the outputs `policy` and `value` of the network and `sample`, the action before it is
    scaled to the environment's bounds: log-probabilities are those of the sample. No gradient
    flows through it.
    """
    space = require_spec(agent.spec).action
    observation = jax.tree.map(lambda x: x[None], timestep.observation)
    outputs, carry = agent._network.apply(params, carry, observation, timestep.first[None])
    distribution = policy(space, outputs["policy"][0])
    sample = distribution.sample(keys) if explore else distribution.mode()
    sample = jax.lax.stop_gradient(sample)
    extras = {
        "policy": outputs["policy"][0],
        "value": outputs["value"][0, :, 0],
        "sample": sample,
    }
    return to_bounds(space, sample), extras, carry


def act_with_log_prob(
    agent: ActorCritic,
    params: Params,
    carry: Carry,
    timestep: TimeStep,
    keys: jax.Array,
    explore: bool,
) -> tuple[jax.Array, dict[str, jax.Array], Carry]:
    """Act as `act` does; extras are `sample` and its `log_prob`, for importance ratios."""
    action, extras, carry = act(agent, params, carry, timestep, keys, explore)
    log_prob = make_policy(agent, extras["policy"]).log_prob(extras["sample"])
    return action, {"sample": extras["sample"], "log_prob": log_prob}, carry


# --- learning ------------------------------------------------------------------------------------


def make_policy(agent: ActorCritic, outputs: jax.Array) -> ActionDistribution:
    """Return the policy parameterized by the outputs `[*b, n]` of a policy head."""
    return policy(require_spec(agent.spec).action, outputs)


def final_value(agent: ActorCritic, params: Params, trajectory: Trajectory) -> jax.Array:
    """Return the value of the final timestep, `[B]`."""
    final = trajectory.final
    observation = jax.tree.map(lambda x: x[None], final.observation)
    outputs, _ = agent._network.apply(
        params, trajectory.final_carry, observation, final.first[None]
    )
    return outputs["value"][0, :, 0]


def unroll(
    agent: ActorCritic, params: Params, trajectory: Trajectory, reuse: bool = False
) -> tuple[ActionDistribution, jax.Array]:
    """Return the policy of each step `[T, B]` and the values of all timesteps `[T+1, B]`.

    With `reuse` the outputs are those that `act` stored in the extras, and only the final timestep
    has a forward pass; without it all T+1 timesteps have one.
    """
    if reuse:
        extras = trajectory.steps.extras
        last_value = final_value(agent, params, trajectory)
        values = jnp.concatenate([extras["value"], last_value[None]])
        return make_policy(agent, extras["policy"]), values
    timesteps = trajectory.timesteps()
    outputs, _ = agent._network.apply(
        params, trajectory.carry, timesteps.observation, timesteps.first
    )
    return make_policy(agent, outputs["policy"][:-1]), outputs["value"][..., 0]


def learn(
    agent: FusedAgent, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
) -> tuple[LearnerState, Metrics]:
    """Take one optimizer step on the agent's loss of a rollout, with a second forward pass."""
    grads, metrics = global_grad(
        agent.loss, agent.actor_params(state), state, trajectory, False, axis=axis
    )
    num_frames = schedules.count_frames(trajectory, axis)
    state, update_metrics = agent.apply_gradients(state, grads, num_frames)
    return state, {**metrics, **update_metrics}


def minibatch_grad(
    agent: ActorCritic,
    loss: Callable[[Params, PyTree], tuple[jax.Array | Mean, Metrics]],
    params: Params,
    batch: PyTree,
    items: jax.Array,
    axis: str | None,
) -> tuple[Params, Metrics]:
    """Return the gradient of `loss(params, minibatch)`, a mean over items of a batch, and metrics.

    The loss may be a `Mean`. Both are averaged over shards, in one reduction.
    Leaves of the batch are `[T, N, ...]`, those of the minibatch `[T, len(items), ...]`.
    """
    length = max(x.shape[0] for x in jax.tree.leaves(batch))
    return global_grad_in_blocks(
        lambda params, items: loss(params, take(batch, items)),
        params,
        items,
        indices_in_cache=agent._network.rows_in_cache // length,
        axis=axis,
    )


def apply_gradients(
    agent: ActorCriticLearner, state: LearnerState, grads: Params, num_frames: jax.Array
) -> tuple[LearnerState, Metrics]:
    """Take one optimizer step with gradients that are averaged over the mesh.

    They are those of `num_frames` frames.
    """
    learner: CountedState = state.shared
    learner, metrics = optimizer_step(agent, learner, grads)
    return LearnerState(count_frames(learner, num_frames)), metrics


def loss(
    log_prob: jax.Array,
    entropy: jax.Array,
    values: jax.Array,
    *,
    targets: jax.Array,
    advantages: jax.Array,
    valid: jax.Array,
    value_cost: float | jax.Array,
    entropy_cost: float | jax.Array,
    policy_cost: float | jax.Array = 1.0,
    axes: tuple[int, ...] | None = None,
) -> tuple[Mean, Metrics]:
    """Return the actor-critic loss of T steps of B environments, and its parts as metrics.

        L = -c_p E[A log π(a|s)] + c_v E[(G - v(s))² / 2] - c_e E[H(π(·|s))]

    All arrays are `[T, B]`; `targets` G and `advantages` A are constants. Means are over the steps
    (`axes` if given) that are `valid`. Source: Mnih et al. 2016, section 4 (arXiv 1602.01783).
    """
    mask = valid.astype(jnp.float32)
    policy_loss = -jnp.mean(mask * advantages * log_prob, axes)
    value_loss = 0.5 * jnp.mean(mask * (targets - values) ** 2, axes)
    entropy = jnp.mean(mask * entropy, axes)
    total = policy_cost * policy_loss + value_cost * value_loss - entropy_cost * entropy
    parts = {
        "loss": total,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
    }
    share = jnp.mean(mask, axes)
    return Mean(total, share), with_share(parts, share)
