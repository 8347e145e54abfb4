"""LPGStudent: an agent whose updates come from an update rule that was learned before.

The rule's parameters come from a file (`rule_file`), are part of the state, and never change. There
is no value function, advantage or bootstrap except as the rule has learned them.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common.optimizers import CountedState, ScheduledOptimizer
from podracer.agents.rules.lifetimes import to_experience
from podracer.agents.rules.lpg.rule import (
    Outputs,
    RuleParams,
    UpdateRule,
    build_network,
    student_loss,
    student_optimizer,
    to_outputs,
)
from podracer.agents.rules.lpg.rule_file import decode_rule
from podracer.devices.reductions import global_mean, mean_of
from podracer.errors import ConfigError
from podracer.fields import bounded, reset_on_warm_start, static, struct
from podracer.io.npz import check_digest
from podracer.networks import MLP, Network, NetworkBuilder, Table, TorsoNetwork
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)


@struct
class StudentState(CountedState):
    """Parameters of the student and the state of their optimizer; the rule."""

    rule: RuleParams = reset_on_warm_start()
    """Parameters of the update rule, which never change."""


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
    optimizer: Literal["sgd", "adam"] = static(default="adam")
    """Optimizer of the network."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
    """Network with the policy and the prediction."""

    @property
    def data_file(self) -> str:
        return self.rule_file

    def read(self, content: bytes) -> RuleParams:
        check_digest(content, self.rule_digest, self.rule_file)
        rule, params = decode_rule(content, self.rule_file)
        if rule != self.rule:
            raise ConfigError(
                f"{self.rule_file} holds {rule}, but the agent expects {self.rule}: set its `rule` "
                "so."
            )
        return params

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment; the context's data are the rule."""
        if context.data is None:
            raise ConfigError(
                "LPGStudent has no rule: give `build` a Context whose `data` are the parameters of "
                "one, as `read` returns them."
            )
        network = build_network(self.network, spec, self.rule)
        optimizer = ScheduledOptimizer(student_optimizer(self.optimizer), self.learning_rate)
        agent = _LPGStudent(self, network, optimizer, context.data)
        return Agent.of(agent, spec, carry=network.carry)


@dataclasses.dataclass(frozen=True)
class _LPGStudent:
    settings: LPGStudent
    network: Network
    optimizer: ScheduledOptimizer
    rule_params: RuleParams

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        rule = jax.tree.map(jnp.asarray, self.rule_params)
        learner = self.optimizer.init(self.network.init(key))
        return LearnerState(StudentState(**vars(learner), rule=rule))

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Sample actions; there are no extras."""
        policy, carry = self.distribution(params, carry, timestep)
        return policy.sample(keys) if explore else policy.mode(), (), carry

    def distribution(
        self, params: Params, carry: Carry, timestep: TimeStep
    ) -> tuple[Categorical, Carry]:
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        heads, carry = self.network.apply(params, carry, observation, timestep.first[None])
        return Categorical(mask_logits(timestep.observation, heads["policy"][0])), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Take one step towards the targets that the rule gives to the rollout."""
        settings, data = self.settings, to_experience(trajectory)
        shared: StudentState = state.shared

        def forward(params: Params) -> Outputs:
            heads, _ = self.network.apply(params, data.carry, data.observation, data.first)
            return to_outputs(data.observation, heads)

        outputs, pullback = jax.vjp(forward, shared.params)
        targets = settings.rule.apply(shared.rule, data, outputs, settings.discount)
        output_grads = jax.grad(student_loss)(outputs, targets, data, settings.prediction_cost)
        (grads,) = pullback(output_grads)
        num_frames = schedules.count_frames(trajectory, axis)
        grads = global_mean(grads, axis)
        state, metrics = self.optimizer.apply_gradients(state, grads, num_frames)
        policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
        return state, {
            **metrics,
            "entropy": mean_of(policy.entropy(), data.valid),
            "prediction_entropy": mean_of(prediction.entropy(), data.valid),
            "policy_target": mean_of(targets.policy, data.valid),
            "policy_target_size": mean_of(jnp.abs(targets.policy), data.valid),
        }


def lpg_student(rule: UpdateRule, network: Table | TorsoNetwork, **settings: Any) -> LPGStudent:
    """Return a student of the rule with the optimizer that suits its network.

    Unless `settings` say otherwise, tables learn by plain descent as LPG's students do, networks
    by Adam.
    """
    if isinstance(network, Table):
        settings = {"learning_rate": 40.0, "optimizer": "sgd"} | settings
    return LPGStudent(rule=rule, network=network, **settings)
