"""Munchausen DQN: a soft policy, and a reward for what it already does.

    target = r + α max(l, τ ln π(a|s)) + γ Σ_a' π(a'|s') (q(s', a') - τ ln π(a'|s'))
    π = softmax(q / τ), of the target network

Source: Vieillard et al. 2020, section 3 (arXiv 2007.14430). Different from the paper: it is a
method of `DQN` with all of its extensions. In a return of n rewards the log-policy is added to the
first alone. The value behind a return is the mixture of the next actions' values under π, for C51
of their distributions. `double` has no effect: the policies are the target network's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents import dqn
from podracer.agents.common import off_policy, value_based
from podracer.agents.dqn import DQN
from podracer.fields import bounded, struct
from podracer.ops.action_masks import mask_logits
from podracer.ops.action_values import ActionValue, Atoms
from podracer.types import EnvironmentSpec, Params

QValues = Float[Array, "N A"]
Probabilities = Float[Array, "N A"]


@struct
class MunchausenDQN(DQN):
    """DQN whose targets come from a soft policy, with a reward for its log-probabilities."""

    temperature: float = bounded(0.03, low=1e-6)
    """Temperature tau of the policy."""
    log_policy_weight: float = bounded(0.9, high=1.0)
    """Weight alpha of the log-policy in the reward, in [0, 1]."""
    log_policy_clip: float = bounded(-1.0, low=-math.inf, high=0.0)
    """Smallest log-policy, times tau, that the reward has, at most 0."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        return dqn.build(self, Method, spec)


class Method(dqn.Method):
    """DQN's functions with the soft targets."""

    settings: MunchausenDQN

    def targets(
        self,
        params: Params,
        target_params: Params,
        transition: off_policy.Transition,
        noises: Sequence[jax.Array | None],
    ) -> tuple[jax.Array, jax.Array]:
        settings, value = self.settings, self.settings.value

        timestep, next_timestep = transition.timestep, transition.next_timestep
        outputs = self.outputs(target_params, timestep, noises[1])
        next_outputs = self.outputs(target_params, next_timestep, noises[0])
        q = mask_logits(timestep.observation, value.mean(outputs))
        next_q = mask_logits(next_timestep.observation, value.mean(next_outputs))
        policy, entropy = soft_policy(next_q, settings.temperature)
        returns = transition.n_step_return + bonus(settings, q, transition.action)
        returns += transition.bootstrap_discount * entropy
        return returns, mixture(value, next_outputs, policy)


def bonus(settings: MunchausenDQN, q: QValues, action: Int[Array, "N"]) -> Float[Array, "N"]:
    """Return the reward `α max(l, τ ln π(a|s))` for the actions taken."""
    log_policy = settings.temperature * jax.nn.log_softmax(q / settings.temperature)
    of_action = value_based.at_action(log_policy, action)
    return settings.log_policy_weight * jnp.maximum(of_action, settings.log_policy_clip)


def soft_policy(
    q: QValues, temperature: float | jax.Array
) -> tuple[Probabilities, Float[Array, "N"]]:
    """Return the policy `π(.|s)`, and its entropy times τ."""
    policy = jax.nn.softmax(q / temperature)
    return policy, -jnp.sum(policy * temperature * jax.nn.log_softmax(q / temperature), axis=-1)


def mixture(
    value: ActionValue, outputs: Float[Array, "N A Z"], policy: Probabilities
) -> Float[Array, "N Z"]:
    """Return the outputs of a policy's value from the actions' outputs."""
    if isinstance(value, Atoms):
        return jnp.log(jnp.sum(jax.nn.softmax(outputs) * policy[..., None], axis=-2))
    return jnp.sum(outputs * policy[..., None], axis=-2)
