"""Students that LPG's rule trains, one for each lifetime.

Leaves of parameters are `[L, ...]` for L lifetimes. Experience is that of a rollout, `[T, B, ...]`
with B = L x E: each E consecutive environments belong to one lifetime.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.common.critics import descend
from podracer.agents.common.lifetimes import Experience, apply_by_lifetime, lifetime_means
from podracer.agents.common.meta_objective import policy_gradient
from podracer.agents.lpg.rule import Outputs, RuleParams, UpdateRule, student_grads
from podracer.networks import Network
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical
from podracer.types import Metrics, Params, PyTree


@dataclasses.dataclass(frozen=True)
class LPGStudents:
    """Network, optimizer and hyperparameters that all students share."""

    rule: UpdateRule
    network: Network
    optimizer: optax.GradientTransformation
    learning_rate: float | jax.Array
    discount: float | jax.Array
    prediction_cost: float | jax.Array

    def init(self, key: jax.Array) -> ParamsState:
        """Return an untrained student."""
        params = self.network.init(key)
        return ParamsState(params, self.optimizer.init(params))

    def policy(self, params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
        """Return the logits `[T, B, A]` of L policies, each in its own of B environments."""
        heads = apply_by_lifetime(self.network, params, observation, first)
        return mask_logits(observation, heads["policy"])

    def outputs(self, params: Params, data: Experience) -> Outputs:
        """Return each student's outputs on its own timesteps, `[T+1, B, n]`."""
        heads = apply_by_lifetime(self.network, params, data.observation, data.first)
        return Outputs(mask_logits(data.observation, heads["policy"]), heads["prediction"])

    def update(
        self, rule: RuleParams, students: ParamsState, data: Experience
    ) -> tuple[ParamsState, Metrics]:
        """Return the students after one update by the rule, and the rule's regularizers `[L]`."""
        params = students.params
        lifetimes = jax.tree.leaves(params)[0].shape[0]
        grads, (outputs, targets) = student_grads(
            self.rule, rule, lambda p: self.outputs(p, data), params, data,
            self.discount, self.prediction_cost,
        )  # fmt: skip
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: lifetimes * g, grads)
        prediction_size = jnp.sum(targets.prediction**2, axis=-1)
        return descend(self.optimizer, students, grads, self.learning_rate), {
            **_entropies(outputs, data, lifetimes),
            "policy_target": lifetime_means(data.valid * targets.policy**2, lifetimes),
            "prediction_target": lifetime_means(data.valid * prediction_size, lifetimes),
        }

    def policy_objective(
        self, students: ParamsState, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy-gradient objective and the entropies of each student, `[L]` each."""
        lifetimes = jax.tree.leaves(students.params)[0].shape[0]
        outputs = self.outputs(students.params, data)
        objective = policy_gradient(outputs.policy, data, advantages, lifetimes)
        return objective, _entropies(outputs, data, lifetimes)


def _entropies(outputs: Outputs, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
    """Return mean entropies of policy and prediction over the steps of each lifetime, `[L]`."""
    policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
    return {
        "policy_entropy": lifetime_means(data.valid * policy.entropy(), lifetimes),
        "prediction_entropy": lifetime_means(data.valid * prediction.entropy(), lifetimes),
    }
