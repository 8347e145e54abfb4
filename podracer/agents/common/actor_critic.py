"""Actor-critics: a network with policy and value heads, how it acts, and what it minimizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from podracer.agents.common.settings import ActorCriticSettings
from podracer.devices.reductions import MaskedMean
from podracer.networks import Head, Network, NetworkBuilder
from podracer.networks.groups import GroupNetwork
from podracer.networks.torsos import join
from podracer.ops.action_masks import joint_mask, mask_logits
from podracer.ops.distributions import ActionDistribution, num_outputs, policy, to_bounds
from podracer.types import (
    ACTION_MASK,
    ActionSpace,
    Carry,
    Continuous,
    EnvironmentSpec,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    action_mask,
)


def build_network(
    network: NetworkBuilder,
    spec: EnvironmentSpec,
    *,
    num_heads: int = 1,
    state_dependent_std: bool = False,
    critic_network: NetworkBuilder | None = None,
    groups: Mapping[str, tuple[str, ...]] | None = None,
) -> Network:
    """Return a network with the heads `policy` and `value`.

    The policy's initial weights are small, so that it begins nearly uniform. With `num_heads` of
    each, the others are named `policy_1`, `value_1`, `policy_2` and so on. Logits of actions that
    an observation masks are very low. The logarithm of a Gaussian's scale, initially 0, is a
    parameter (Schulman et al. 2017, section 6.1), or with `state_dependent_std` an output. Values
    have a network of their own where there is a `critic_network`, or where the critic sees other
    keys of the observation than the actor by `groups`, see `Agent.groups`.
    """
    suffixes = head_suffixes(num_heads)
    names = ["policy" + suffix for suffix in suffixes]
    free_std = isinstance(spec.action, Continuous) and not state_dependent_std
    size = num_outputs(spec.action) // (2 if free_std else 1)
    heads = {name: Head(size, 0.01) for name in names}
    values = {"value" + suffix: Head(1) for suffix in suffixes}
    actor_keys, critic_keys = ((groups or {}).get(role, ()) for role in ("actor", "critic"))
    actor = GroupNetwork(network, actor_keys) if actor_keys else network
    if critic_network is None and set(actor_keys) == set(critic_keys):
        plain_network = actor.build(spec.observation, heads | values)
    else:
        critic = GroupNetwork(critic_network or network, critic_keys)
        parts = {"actor": (actor, heads), "critic": (critic, values)}
        plain_network = join({n: x.build(spec.observation, h) for n, (x, h) in parts.items()})
    if free_std:
        return _with_free_std(plain_network, names, size)
    is_masked = any(action_mask(x.observation) is not None for x in (spec, *spec.agents.values()))
    return _with_masks(plain_network, spec, names) if is_masked else plain_network


def _with_masks(network: Network, spec: EnvironmentSpec, policies: Sequence[str]) -> Network:
    """Return a network whose policies have very low logits where the observation masks actions."""

    def apply(params: Params, carry: Carry, observation: PyTree, first: jax.Array):
        outputs, carry = network.apply(params, carry, observation, first)
        masks = {ACTION_MASK: joint_mask(spec, observation)}
        masked = {name: mask_logits(masks, outputs[name]) for name in policies}
        return {**outputs, **masked}, carry

    return dataclasses.replace(network, apply=apply)


def _with_free_std(network: Network, policies: Sequence[str], size: int) -> Network:
    """Return a network whose policies consist of its outputs and of as many parameters.

    The parameters are the logarithms of scales, see `distributions.policy`.
    """

    def init(key: jax.Array) -> Params:
        log_std = {name: jnp.zeros(size) for name in policies}
        return {"network": network.init(key), "log_std": log_std}

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


@dataclasses.dataclass(frozen=True)
class ActorCritic:
    """Network with the heads `policy` and `value`, for the actions of a space."""

    network: Network
    space: ActionSpace
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)
    """Keys of the observation that the `actor` and the `critic` see, see `Agent.groups`."""

    def carry(self, num_envs: int) -> Carry:
        return self.network.carry(num_envs)

    def outputs(
        self, params: Params, carry: Carry, timestep: TimeStep
    ) -> tuple[dict[str, jax.Array], Carry]:
        """Return the outputs `[B, n]` of each head at a timestep, and the new recurrent state."""
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        outputs, carry = self.network.apply(params, carry, observation, timestep.first[None])
        return {name: x[0] for name, x in outputs.items()}, carry

    def distribution(
        self, params: Params, carry: Carry, timestep: TimeStep
    ) -> tuple[ActionDistribution, Carry]:
        """Return the policy at a timestep `[B, ...]`, and the new recurrent state."""
        outputs, carry = self.outputs(params, carry, timestep)
        return policy(self.space, outputs["policy"]), carry

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], Carry]:
        """Return an action for each environment `[B, ...]`, extras and the new recurrent state.

        Extras are the outputs `policy` and `value` of the network and `sample`, the action before
        it is scaled to the environment's bounds: log-probabilities are those of the sample. No
        gradient flows through it.
        """
        outputs, carry = self.outputs(params, carry, timestep)
        distribution = policy(self.space, outputs["policy"])
        sample = distribution.sample(keys) if explore else distribution.mode()
        sample = jax.lax.stop_gradient(sample)
        extras = {"policy": outputs["policy"], "value": outputs["value"][:, 0], "sample": sample}
        return to_bounds(self.space, sample), extras, carry

    def act_with_log_prob(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], Carry]:
        """Act as `act` does; extras are `sample` and its `log_prob`, for importance ratios."""
        action, extras, carry = self.act(params, carry, timestep, keys, explore)
        log_prob = policy(self.space, extras["policy"]).log_prob(extras["sample"])
        return action, {"sample": extras["sample"], "log_prob": log_prob}, carry

    def final_value(self, params: Params, trajectory: Trajectory) -> jax.Array:
        """Return the value of the final timestep, `[B]`."""
        outputs, _ = self.outputs(params, trajectory.final_carry, trajectory.final)
        return outputs["value"][:, 0]

    def unroll(
        self, params: Params, trajectory: Trajectory, reuse: bool = False
    ) -> tuple[ActionDistribution, jax.Array]:
        """Return the policy of each step `[T, B]` and the values of all timesteps `[T+1, B]`.

        With `reuse` the outputs are those that `act` stored in the extras, and only the final
        timestep has a forward pass; without it all T+1 timesteps have one.
        """
        if reuse:
            extras = trajectory.steps.extras
            last_value = self.final_value(params, trajectory)
            values = jnp.concatenate([extras["value"], last_value[None]])
            return policy(self.space, extras["policy"]), values
        timesteps = trajectory.timesteps()
        outputs, _ = self.network.apply(
            params, trajectory.carry, timesteps.observation, timesteps.first
        )
        return policy(self.space, outputs["policy"][:-1]), outputs["value"][..., 0]


def build(
    settings: ActorCriticSettings, spec: EnvironmentSpec, *, num_heads: int = 1
) -> ActorCritic:
    """Return the actor-critic of an agent's settings, see `build_network`."""
    groups = settings.groups(spec)
    network = build_network(
        settings.network,
        spec,
        num_heads=num_heads,
        state_dependent_std=settings.state_dependent_std,
        critic_network=settings.critic_network,
        groups=groups,
    )
    return ActorCritic(network, spec.action, groups)


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
) -> tuple[MaskedMean, Metrics]:
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
    return MaskedMean(total, share), {name: MaskedMean(part, share) for name, part in parts.items()}
