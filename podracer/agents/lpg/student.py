"""LPGStudent: an agent whose updates come from an update rule that was learned before.

The rule's parameters come from a file (`rule_file`), are part of the state, and never change. There
is no value function, advantage or bootstrap except as the rule has learned them.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agents.common import actor_critic, value_based
from podracer.agents.common.lifetimes import to_experience
from podracer.agents.lpg.rule import (
    RuleParams,
    UpdateRule,
    student_grads,
    student_heads,
    student_optimizer,
    student_outputs,
)
from podracer.agents.lpg.rule_file import decode_rule
from podracer.io.npz import check_digest
from podracer.means import mean_of
from podracer.mesh import global_mean
from podracer.networks import MLP, Network, NetworkBuilder, Table, TorsoNetwork
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    ConfigError,
    Derived,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    bounded,
    derived,
    static,
    struct,
)


@struct
class StudentState(actor_critic.CountedState):
    """Parameters of the student and the state of their optimizer; the rule's parameters."""

    rule: RuleParams


@struct
class LPGStudent:
    """Agent trained by an update rule that LPG learned, discrete actions."""

    learning_rate: Schedule = bounded(1e-3)
    """Learning rate of the network."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, an input of the update rule, in [0, 1]."""
    prediction_cost: float = bounded(0.5)
    """Weight alpha_y of the prediction's loss against the policy's."""
    rule_file: str = static(default="")
    """File of the update rule, as `podracer rule` writes it."""
    rule_digest: str = static(default="")
    """SHA-256 of that file in hexadecimal; another content is refused. Empty accepts any."""
    rule: UpdateRule = static(default=UpdateRule())
    """Network of the update rule, the same as in its file."""
    rule_params: Derived[RuleParams] = derived(leaf=True)
    """Parameters of the update rule, read from its file."""
    optimizer: Literal["sgd", "adam"] = static(default="adam")
    """Optimizer of the network."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
    """Network with the policy and the prediction."""
    spec: EnvironmentSpec | None = static(default=None)

    @property
    def data_file(self) -> str:
        return self.rule_file

    def with_data(self, content: bytes) -> LPGStudent:
        check_digest(content, self.rule_digest, self.rule_file)
        rule, params = decode_rule(content, self.rule_file)
        if rule != self.rule:
            raise ConfigError(
                f"{self.rule_file} holds {rule}, but the agent expects {self.rule}: set its `rule` "
                "so."
            )
        return dataclasses.replace(self, rule_params=params)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        if self.rule_params is None:
            raise ConfigError("LPGStudent has no `rule_params`: give it those of an update rule.")
        params = self._network.init(key)
        rule = jax.tree.map(jnp.asarray, self.rule_params)
        optimizer_state = self._optimizer.init(params)
        return LearnerState(StudentState(params, optimizer_state, schedules.init_frames(), rule))

    carry = actor_critic.carry
    actor_params = actor_critic.actor_params

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        heads, carry = self._network.apply(params, carry, observation, timestep.first[None])
        policy = Categorical(mask_logits(timestep.observation, heads["policy"][0]))
        return policy.sample(keys) if explore else policy.mode(), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        shared, data = state.shared, to_experience(trajectory)
        grads, (outputs, targets) = student_grads(
            self.rule, shared.rule, partial(student_outputs, self._network, data),
            shared.params, data, self.discount, self.prediction_cost,
        )  # fmt: skip
        shared, metrics = actor_critic.optimizer_step(self, shared, global_mean(grads, axis))
        shared = actor_critic.count_frames(shared, schedules.count_frames(trajectory, axis))
        policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
        return LearnerState(shared), {
            **metrics,
            "entropy": mean_of(policy.entropy(), data.valid),
            "prediction_entropy": mean_of(prediction.entropy(), data.valid),
            "policy_target": mean_of(targets.policy, data.valid),
            "policy_target_size": mean_of(jnp.abs(targets.policy), data.valid),
        }

    @property
    def _network(self) -> Network:
        spec = value_based.require_for_rule(self.spec)
        num_actions = value_based.require_discrete(spec).num_actions
        heads = student_heads(num_actions, self.rule.predictions)
        return self.network.build(spec.observation, heads)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return student_optimizer(self.optimizer)


def lpg_student(rule: UpdateRule, network: Table | TorsoNetwork, **settings: Any) -> LPGStudent:
    """Return a student of the rule with the optimizer that suits its network.

    Unless `settings` say otherwise, tables learn by plain descent as LPG's students do, networks
    by Adam.
    """
    if isinstance(network, Table):
        settings = {"learning_rate": 40.0, "optimizer": "sgd"} | settings
    return LPGStudent(rule=rule, network=network, **settings)
