"""Shared parts of agents with action values: the Q-network and epsilon-greedy exploration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from podracer.agents.common.optimizers import CountedState
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.networks import Head, Network, NetworkBuilder
from podracer.schedules import Schedule, value_at
from podracer.types import Discrete, EnvironmentSpec, LearnerState, MultiDiscrete, Params


def require_discrete(spec: EnvironmentSpec) -> Discrete:
    """Return the discrete action space; raise `ConfigError` if there is no spec or another one."""
    if isinstance(spec.action, MultiDiscrete):
        raise ConfigError(
            f"the agent needs one discrete action at a time; an action of {spec.name} is an array "
            f"of {spec.action.size}, which A2C, PPO, IMPALA and STACX learn."
        )
    if not isinstance(spec.action, Discrete):
        raise ConfigError(
            f"the agent needs discrete actions; {spec.name} has continuous ones: take PPO, SAC or "
            "podracer.agents.ddpg.td3()."
        )
    return spec.action


def build_q_network(
    network: NetworkBuilder,
    spec: EnvironmentSpec,
    size: int,
    *,
    dueling: bool,
    noisy: bool = False,
    noise_scale: float = 0.5,
    hidden: tuple[int, ...] = (),
) -> Network:
    """Build a network with `size` outputs Z for each action, in the head `advantage`.

    A dueling network has as many for the state alone, in the head `value`. Both heads have `hidden`
    layers of their own.
    """
    num_actions = require_discrete(spec).num_actions
    head = partial(Head, noisy=noisy, noise_scale=noise_scale, hidden=hidden)
    heads = {"advantage": head(num_actions * size)}
    if dueling:
        heads["value"] = head(size)
    return network.build(spec.observation, heads)


def q_outputs(heads: dict[str, jax.Array], size: int) -> jax.Array:
    """Combine the heads `[T, B, n]` to outputs `[T, B, A, Z]`.

    For dueling networks `Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)`.
    Source: Wang et al. 2016, equation 9.
    """
    advantage = heads["advantage"]
    advantage = advantage.reshape(*advantage.shape[:-1], -1, size)
    if "value" not in heads:
        return advantage
    return heads["value"][..., None, :] + advantage - advantage.mean(-2, keepdims=True)


def gather_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """Return the values `[*b, Z]` of one action each, i32 `[*b]`, out of values `[*b, A, Z]`."""
    # A one-hot product: its gradient is a product too, where a gather's is a slow scatter.
    one_hot = jax.nn.one_hot(action, values.shape[-2])
    return jnp.sum(values * one_hot[..., None], axis=-2)


def at_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """Return the values `[*b]` of one action each, i32 `[*b]`, out of values `[*b, A]`."""
    return gather_action(values[..., None], action)[..., 0]


@struct
class ActorParams:
    """Parameters of an epsilon-greedy actor."""

    params: Params  # for the Q-network
    epsilon: jax.Array  # f32 [], before each environment's exponent


def environment_ranks(num_envs: int) -> jax.Array:
    """Return the rank i / (B - 1) of each of B environments, f32 `[B]`, for `apex_epsilon`."""
    return jnp.arange(num_envs, dtype=jnp.float32) / max(1, num_envs - 1)


def apex_epsilon(epsilon: jax.Array, apex_alpha: float | jax.Array, rank: jax.Array) -> jax.Array:
    """Return the epsilon of each environment, f32 `[B]`, to the power of 1 + α rank.

    Source: Horgan et al. 2018, section 4.1.
    """
    return epsilon ** (1.0 + apex_alpha * rank)


def actor_params(epsilon: Schedule) -> Callable[[LearnerState], ActorParams]:
    """Return a function for `Agent.actor_params`: the network's parameters and present epsilon."""

    def present_params(state: LearnerState) -> ActorParams:
        shared: CountedState = state.shared
        present = jnp.asarray(value_at(epsilon, shared.frames), jnp.float32)
        return ActorParams(shared.params, present)

    return present_params
