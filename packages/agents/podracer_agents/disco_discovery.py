"""DiscoDiscovery: a rule with the inputs and outputs of Disco103, learned from many lifetimes.

Each group of environments is the lifetime of one student in one task (`environment.TaskGroups`).
The rule updates the students after each rollout. After K updates the next rollout gives the
meta-objective: a policy gradient with the advantages of critics of its own. It is differentiated
through all K updates with respect to the rule (`rules/meta_training.py`, as LPG is learned).
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms" (Nature),
methods, and the published notebook of meta-training.

Differs from both: students have no replay; meta-gradients also flow through what the rule reads of
policies and values, and through the students' Adam, where the published code stops them; the raw
outputs of the rule have no penalty of their own; entropies count after each update of a student,
not in the next rollout alone; that is as long as the others, its advantages are standardized by
themselves and not by moving averages; critics learn by TD(lambda) instead of V-trace; one Adam for
the rule.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common.value_based import gather_action
from podracer.agents.rules.disco.network import (
    Outputs,
    StudentNetwork,
    StudentParams,
    build_network,
)
from podracer.agents.rules.disco.rule import RuleParams, apply_rule, remember
from podracer.agents.rules.disco.student import (
    StudentState,
    build_optimizer,
    descend,
    init_student,
    student_loss,
)
from podracer.agents.rules.disco.values import (
    Values,
    estimate_values,
    masked_powers,
)
from podracer.agents.rules.lifetimes import (
    Experience,
    lifetime_means,
    map_lifetimes,
    student_spec,
)
from podracer.agents.rules.meta_training import MetaSettings, MetaTraining
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.ops.distributions import Categorical
from podracer.ops.transforms import evenly_spaced
from podracer.types import EnvironmentSpec, Params, PyTree
from podracer_agents.disco_rules import RuleSize, encode_rule


@struct
class DiscoDiscovery(MetaSettings):
    """Discovers a rule of DiscoRL's structure for students with discrete actions."""

    trace_lambda: float = bounded(0.95, high=1.0)
    """Parameter lambda of the students' Retrace, in [0, 1]."""
    student_learning_rate: float = bounded(0.05)
    value_cost: float = bounded(0.2)
    """Weight of the action values' loss in a student's loss."""
    policy_entropy_cost: float = bounded(0.01)
    target_divergence_cost: float = bounded(1e-2)
    """Weight of the divergence of the policy's targets from the policy of the target parameters, a
    penalty in the meta-objective."""
    rule: RuleSize = static(default=RuleSize())
    """Size of the update rule."""
    support_max: float = static(default=3.0, low=1e-6)
    """Largest value of the students after the transform h(x); 3 means 15."""
    support_size: int = static(default=31, low=2)
    """Number of the students' atoms for values, from minus to plus the support's largest value."""
    model_size: int = static(default=16, low=1)
    """Units of the students' model, and of the hidden layer of each of its outputs."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment of lifetimes."""
        network = build_network(
            self.network,
            student_spec(spec, self.inner_updates, context.rollout_length),
            predictions=self.rule.predictions,
            support_size=self.support_size,
            model_size=self.model_size,
        )
        if jax.tree.leaves(network.torso.carry(1)):
            raise ConfigError("students of a rule that is discovered need a feed-forward network.")
        # Adam's step has a derivative of up to 1e4 with this constant within its root. With 1e-12
        # gradients near 0, as of states that are seldom seen, decided the meta-gradient.
        optimizer = build_optimizer(root_epsilon=1e-8)
        training = _DiscoDiscovery(self, spec, context.rollout_length, network, optimizer)
        # The published format has no place for the origin.
        return training.agent(lambda state, origin: encode_rule(state.shared.rule))


class _DiscoDiscovery(MetaTraining):
    """Students that the rule trains, one for each lifetime.

    Each learns from its newest rollout, which its own policy made, without a replay.
    """

    settings: DiscoDiscovery
    network: StudentNetwork

    def init_student(self, key: jax.Array) -> StudentState:
        memory_units = self.settings.rule.lifetime_units
        return init_student(self.network, self.optimizer, memory_units, key)

    def policy(self, params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
        def logits(params: StudentParams, observation: PyTree, first: jax.Array) -> jax.Array:
            return self.network.policy(params, (), observation, first)[0]

        return map_lifetimes(logits, params, (observation, first))

    def outputs(self, params: Params, observation: PyTree, first: jax.Array) -> Outputs:
        def apply(params: StudentParams, observation: PyTree, first: jax.Array) -> Outputs:
            return self.network.apply(params, (), observation, first)

        return map_lifetimes(apply, params, (observation, first))

    def update_students(
        self, rule: RuleParams, students: StudentState, data: Experience
    ) -> tuple[StudentState, dict[str, jax.Array]]:
        """Update the students, see `MetaTraining`.

        All that the rule reads and its targets stay functions of rule and students, through which
        meta-gradients are taken; the students' own gradients take the targets as constants.
        """
        settings, lifetimes = self.settings, students.moments.mean.shape[0]
        support = evenly_spaced(-settings.support_max, settings.support_max, settings.support_size)
        outputs, pullback = jax.vjp(
            lambda params: self.outputs(params, data.observation, data.first), students.params
        )
        target_outputs = self.outputs(students.target_params, data.observation, data.first)
        data = dataclasses.replace(data, behavior=outputs.policy[:-1])
        values = estimate_values(
            outputs, target_outputs, data, support, settings.discount, settings.trace_lambda
        )
        mask = data.valid.astype(jnp.float32)
        means = [lifetime_means(x, lifetimes) for x in masked_powers(values.advantages, mask)]
        moments, share = students.moments.update(means)
        # The rule is applied to all environments at once, each with what its student knows: under
        # `vmap` the gradients of its weights would be kept for each lifetime, and then summed.
        share, env_moments, memory = jax.tree.map(
            lambda x: jnp.repeat(x, mask.shape[1] // lifetimes, axis=0),
            (share, moments, students.memory),
        )
        weights = mask / share[None]
        normalize = jax.vmap(Values.normalized, in_axes=(1, 0), out_axes=1)
        targets, memory_inputs = apply_rule(
            rule, memory, data, outputs, target_outputs, normalize(values, env_moments)
        )
        output_grads, _ = jax.grad(student_loss, has_aux=True)(
            outputs,
            outputs.policy[1:],
            targets,
            values.targets,
            data,
            weights,
            support,
            settings.value_cost,
        )
        (grads,) = pullback(output_grads)
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: lifetimes * g, grads)
        memory_input = lifetime_means(weights[..., None] * memory_inputs, lifetimes)
        step = jax.vmap(partial(descend, self.optimizer, settings.student_learning_rate))
        students = dataclasses.replace(
            step(students, grads),
            moments=moments,
            memory=remember(rule, students.memory, memory_input),
        )
        target_policy = Categorical(target_outputs.policy[:-1])
        divergence = target_policy.divergence(Categorical(targets.policy))
        return students, {
            **self.entropies(outputs, data, lifetimes),
            "target_divergence": lifetime_means(data.valid * divergence, lifetimes),
        }

    def entropies(self, outputs: Outputs, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
        acted = jax.tree.map(lambda x: x[:-1], outputs)
        of_action = Categorical(gather_action(acted.action_prediction, data.action))
        prediction = Categorical(acted.prediction).entropy() + of_action.entropy()
        policy_entropy = Categorical(acted.policy).entropy()
        return {
            "policy_entropy": lifetime_means(data.valid * policy_entropy, lifetimes),
            "prediction_entropy": lifetime_means(data.valid * prediction, lifetimes),
        }
