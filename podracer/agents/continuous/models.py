"""Networks of agents for continuous actions: a policy, and critics that take actions as inputs.

A recurrent policy and recurrent critics have memories of their own, which see observations and the
last step; a critic's action joins behind its memory, so that memories hold what happened and not
what might be done. Source: Ni et al. 2022, "Recurrent Model-Free RL Can Be a Strong Baseline for
Many POMDPs", whose two critics share a memory and whose networks see the observation again behind
it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from podracer import networks
from podracer.agents.common import recurrent
from podracer.agents.common.off_policy import Transition
from podracer.agents.common.recurrent import History, Recurrence
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.action_values import Atoms, Quantiles
from podracer.ops.distributions import from_bounds
from podracer.types import (
    ArraySpec,
    Carry,
    Continuous,
    Discrete,
    EnvironmentSpec,
    Metrics,
    Params,
    PyTree,
    TimeStep,
)


def require_continuous(spec: EnvironmentSpec) -> Continuous:
    """Return the continuous action space; raise `ConfigError` if there is another one."""
    if not isinstance(spec.action, Continuous):
        advice = "PPO or DQN" if isinstance(spec.action, Discrete) else "PPO or IMPALA"
        raise ConfigError(
            f"the agent needs continuous actions; {spec.name} has discrete ones: take {advice}."
        )
    return spec.action


ReturnDistribution = Atoms | Quantiles


@dataclasses.dataclass(frozen=True)
class CriticNetworks:
    """Q-networks; each coordinate of the actions is in [-1, 1].

    A critic has Z outputs: the value itself, or those of a distribution of returns. Recurrent
    networks take a `History` for the observation.
    """

    space: Continuous
    critic: Network
    distribution: ReturnDistribution | None
    history: Network | None = None
    """Recurrent network of observations, whose head `history` is an input of `critic`."""
    recurrence: Recurrence | None = None
    """Settings of recurrent networks; None for feed-forward ones."""

    def init_critics(self, key: jax.Array, num_critics: int) -> tuple[Params, ...]:
        """Return parameters of `num_critics` independent critics."""
        return tuple(map(self._init_critic, jax.random.split(key, num_critics)))

    def _init_critic(self, key: jax.Array) -> Params:
        if self.history is None:
            return self.critic.init(key)
        history_key, value_key = jax.random.split(key)
        return {"history": self.history.init(history_key), "value": self.critic.init(value_key)}

    def q_outputs(
        self, params: tuple[Params, ...], observation: PyTree, action: jax.Array
    ) -> jax.Array:
        """Return the outputs of each critic, f32 `[critics, N, Z]`."""
        return jnp.stack([self._outputs(p, observation, action) for p in params])

    def _outputs(self, params: Params, observation: PyTree, action: jax.Array) -> jax.Array:
        """Return the outputs `[N, Z]` of one critic."""
        if isinstance(observation, History):
            assert self.history is not None
            # Critics do not act, so nobody knows their memories: the burn-in fills them.
            empty = self.history.carry(observation.first.shape[1])
            heads = recurrent.outputs(self.history, params["history"], observation, empty)
            observation, params = heads["history"], params["value"]
        inputs = {"action": action, "observation": observation}
        return networks.outputs(self.critic, params, inputs)["q"]

    def mean(self, outputs: jax.Array) -> jax.Array:
        """Return the value `[*b]` that outputs `[*b, Z]` of a critic stand for."""
        return outputs[..., 0] if self.distribution is None else self.distribution.mean(outputs)

    def q_values(
        self, params: tuple[Params, ...], observation: PyTree, action: jax.Array
    ) -> jax.Array:
        """Return Q(s, a) of each critic, f32 `[critics, N]`."""
        return self.mean(self.q_outputs(params, observation, action))

    def loss(
        self,
        params: tuple[Params, ...],
        next_outputs: jax.Array,
        transition: Transition,
        *,
        penalty: float | jax.Array = 0.0,
        outputs: jax.Array | None = None,
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Return the error from targets G + γ (X - penalty), and `(metrics, priorities [N])`.

        X is the smallest value, or its distribution, of `next_outputs [critics, N, Z]`; the penalty
        `[N]` is SAC's α log π(a'|s'). Errors of values are squared, a distribution has a loss of
        its own. The loss is the sum over critics and the mean over valid samples with importance
        weights. `outputs [critics, N, Z]` are those for these pairs; None computes them.
        """
        returns, discounts = transition.n_step_return, transition.bootstrap_discount
        if outputs is None:
            outputs = self.q_outputs(params, transition.timestep.observation, transition.action)
        if self.distribution is None:
            target = returns + discounts * (jnp.min(self.mean(next_outputs), axis=0) - penalty)
            error = target[None] - self.mean(outputs)
            losses, errors = 0.5 * error**2, jnp.abs(error)
        else:
            # A distribution is taken whole, by its mean before reward, discount and projection;
            # FastTD3 (arXiv 2505.22642) compares the projected ones (decision 0050).
            def smaller(a: jax.Array, b: jax.Array) -> jax.Array:
                return jnp.where((self.mean(b) < self.mean(a))[:, None], b, a)

            next_outputs = functools.reduce(smaller, list(next_outputs))
            losses, errors = jax.vmap(self.distribution.loss, (0, None, None, None))(
                outputs, next_outputs, returns - discounts * penalty, discounts
            )
        loss = mean_of(transition.weight * jnp.sum(losses, axis=0), transition.mask)
        priorities = transition.mask * jnp.mean(errors, axis=0)
        q = jnp.mean(self.mean(outputs), axis=0)
        metrics = {"loss": loss, "q": mean_of(q, transition.mask)}
        return loss, (metrics, jax.lax.stop_gradient(priorities))

    def recurrent_inputs(self, timesteps: TimeStep, last_actions: jax.Array) -> PyTree:
        """Return what recurrent networks see of timesteps `[T, B, ...]`, and actions before them.

        Actions are in the units of the environment.
        """
        last_actions = from_bounds(self.space, last_actions)
        return recurrent.with_last_step(timesteps.observation, timesteps, last_actions)


@struct
class MemoryCarry:
    """Recurrent state of each environment, `[B, ...]`."""

    memory: PyTree  # recurrent state of the policy
    last_action: jax.Array  # f32 [B, size], 0 before the first one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinuousNetworks(CriticNetworks):
    """Q-networks and the network of a policy, recurrent where they are."""

    actor: Network

    def init(self, key: jax.Array, num_critics: int) -> tuple[Params, tuple[Params, ...]]:
        """Return parameters of the actor and of `num_critics` independent critics."""
        actor_key, critics_key = jax.random.split(key)
        critics = self.init_critics(critics_key, num_critics)
        return self.actor.init(actor_key), critics

    def policy(self, params: Params, observation: PyTree) -> jax.Array:
        """Return the policy network's outputs, f32 `[N, outputs * size]`."""
        if isinstance(observation, History):
            return recurrent.outputs(self.actor, params, observation, observation.memory)["action"]
        return networks.outputs(self.actor, params, observation)["action"]

    def carry(self, num_envs: int) -> MemoryCarry | tuple[()]:
        """Return the policy's initial recurrent state, `()` if its network is feed-forward."""
        if self.recurrence is None:
            return ()
        return MemoryCarry(self.actor.carry(num_envs), jnp.zeros((num_envs, self.space.size)))

    def policy_step(
        self, params: Params, carry: Carry, timestep: TimeStep
    ) -> tuple[jax.Array, Carry]:
        """Return the policy's outputs `[B, n]` for normalized observations, and its new memory.

        The last action in the carry is still the old one, see `agent.with_last_action`.
        """
        if not isinstance(carry, MemoryCarry):
            return self.policy(params, timestep.observation), carry
        timesteps, last_actions = jax.tree.map(lambda x: x[None], (timestep, carry.last_action))
        inputs = self.recurrent_inputs(timesteps, last_actions)
        heads, memory = self.actor.apply(params, carry.memory, inputs, timesteps.first)
        return heads["action"][0], dataclasses.replace(carry, memory=memory)


def build_critics(
    network: NetworkBuilder, spec: EnvironmentSpec, distribution: ReturnDistribution | None
) -> CriticNetworks:
    """Build Q-networks that take observations and actions as they are."""
    space = require_continuous(spec)
    inputs = {"action": ArraySpec((space.size,)), "observation": spec.observation}
    head = Head(1 if distribution is None else distribution.size)
    return CriticNetworks(space, network.build(inputs, {"q": head}), distribution)
