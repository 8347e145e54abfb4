"""What actor-critics share: a network with a policy and a value head, and how it acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.distributions import Policy, num_outputs, policy, to_bounds
from podracer.types import (
    ACTION_MASK,
    Carry,
    ConfigError,
    Continuous,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)


def require_spec(spec: EnvironmentSpec | None) -> EnvironmentSpec:
    """The environment that the agent was made for, or `ConfigError`."""
    if spec is None:
        raise ConfigError("the agent has no `spec`: make it for an environment first.")
    return spec


def build(network: NetworkBuilder, spec: EnvironmentSpec | None, pairs: int = 1) -> Network:
    """Heads `policy` (small initial weights: a nearly uniform policy) and `value`; where there are
    more pairs of them, also `policy_1`, `value_1` and so on."""
    spec, names = require_spec(spec), suffixes(pairs)
    policies = {"policy" + suffix: Head(num_outputs(spec.action), 0.01) for suffix in names}
    values = {"value" + suffix: Head(1) for suffix in names}
    made = network.build(spec.observation, policies | values)

    def apply(params: Params, carry: Carry, observation: PyTree, first: jax.Array):
        outputs, carry = made.apply(params, carry, observation, first)
        masked = {name: mask_logits(observation, outputs[name]) for name in policies}
        return {**outputs, **masked}, carry

    return dataclasses.replace(made, apply=apply) if has_action_mask(spec.observation) else made


def suffixes(pairs: int) -> tuple[str, ...]:
    """What follows the names of each pair of heads: nothing for the main one, then `_1`, ..."""
    return ("", *(f"_{i}" for i in range(1, pairs)))


def has_action_mask(observation: PyTree) -> bool:
    """Whether observations say which actions are possible, see `types.Discrete`."""
    return isinstance(observation, Mapping) and ACTION_MASK in observation


def mask_logits(observation: PyTree, values: jax.Array) -> jax.Array:
    """Logits or values `[*b, A]`, very low where the observation says that an action is not
    possible."""
    if not has_action_mask(observation):
        return values
    return jnp.where(observation[ACTION_MASK], values, -1e9)


def act(
    network: Network,
    space: Discrete | Continuous,
    params: Params,
    carry: Carry,
    timestep: TimeStep,
    keys: jax.Array,
    explore: bool,
) -> tuple[jax.Array, dict[str, jax.Array], Carry]:
    """One action for each environment `[B]`; extras are the network's outputs and the sample.

    The sample is the action before it is brought to the environment's bounds, which is what
    log-probabilities are of. No gradient flows through it.
    """
    observation = jax.tree.map(lambda x: x[None], timestep.observation)
    outputs, carry = network.apply(params, carry, observation, timestep.first[None])
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
    network: Network,
    space: Discrete | Continuous,
    params: Params,
    carry: Carry,
    timestep: TimeStep,
    keys: jax.Array,
    explore: bool,
) -> tuple[jax.Array, dict[str, jax.Array], Carry]:
    """The same for agents that learn off-policy: extras are the sample and its log-probability."""
    action, extras, carry = act(network, space, params, carry, timestep, keys, explore)
    log_prob = policy(space, extras["policy"]).log_prob(extras["sample"])
    return action, {"sample": extras["sample"], "log_prob": log_prob}, carry


def final_value(network: Network, params: Params, trajectory: Trajectory) -> jax.Array:
    """The value of the final timestep, `[B]`."""
    final = trajectory.final
    observation = jax.tree.map(lambda x: x[None], final.observation)
    outputs, _ = network.apply(params, trajectory.final_carry, observation, final.first[None])
    return outputs["value"][0, :, 0]


def unroll(
    network: Network, space: Discrete | Continuous, params: Params, trajectory: Trajectory
) -> tuple[Policy, jax.Array]:
    """A second forward pass: the policy `[T, B]` and the values `[T+1, B]`."""
    timesteps = trajectory.timesteps()
    outputs, _ = network.apply(params, trajectory.carry, timesteps.observation, timesteps.first)
    return policy(space, outputs["policy"][:-1]), outputs["value"][..., 0]


def reuse(
    network: Network, space: Discrete | Continuous, params: Params, trajectory: Trajectory
) -> tuple[Policy, jax.Array]:
    """The same from acting's own outputs, and a forward pass of the final timestep alone."""
    extras = trajectory.steps.extras
    last = final_value(network, params, trajectory)
    return policy(space, extras["policy"]), jnp.concatenate([extras["value"], last[None]])


def init(network: Network, optimizer: optax.GradientTransformation, key: jax.Array) -> PyTree:
    """Parameters and their optimizer's state."""
    params = network.init(key)
    return {"params": params, "optimizer": optimizer.init(params)}


def apply_gradients(
    optimizer: optax.GradientTransformation, state: LearnerState, grads: Params
) -> tuple[LearnerState, Metrics]:
    """One optimizer step on `shared`."""
    shared = state.shared
    updates, optimizer_state = optimizer.update(grads, shared["optimizer"], shared["params"])
    params = optax.apply_updates(shared["params"], updates)
    new = {**shared, "params": params, "optimizer": optimizer_state}
    return LearnerState(new, state.local), {"gradient_norm": optax.tree.norm(grads)}
