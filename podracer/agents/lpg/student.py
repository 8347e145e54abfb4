"""Taught: a learner whose updates come from a rule that was learned before, see `lpg.py`.

The rule's numbers are read from a file when a run begins and never change. There is no value
function, no advantage and no bootstrap but what the rule has found for itself.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic, value_based
from podracer.agents.lpg import rule as update_rule
from podracer.agents.lpg.rule import UpdateRule, experience
from podracer.agents.lpg.rule_file import read_rule
from podracer.mesh import global_mean
from podracer.networks import MLP, Network, Table, TorsoNetwork
from podracer.ops.distributions import Categorical
from podracer.types import (
    Carry,
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    static,
    struct,
)


@struct
class LPGStudent:
    """A learner under a learned rule, discrete actions."""

    learning_rate: float = 1e-3
    discount: float = 0.99
    prediction_cost: float = 0.5
    """Weight of the prediction against the policy."""
    file: str = static(default="")
    """The rule's numbers, as `podracer rule` writes them."""
    rule: UpdateRule = static(default=UpdateRule())
    """Its shape, which the file's must be: see `lpg_student`."""
    optimizer: Literal["sgd", "adam"] = static(default="adam")
    network: Table | TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        rule, numbers = read_rule(self.file)
        if rule != self.rule:
            raise ConfigError(f"{self.file} holds {rule}, but the agent was made for {self.rule}.")
        learner = actor_critic.init_params(self._network, self._optimizer, key)
        return LearnerState({"learner": learner, "rule": jax.tree.map(jnp.asarray, numbers)})

    def carry(self, num_envs: int) -> Carry:
        return self._network.carry(num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared["learner"].params

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        outputs, carry = self._network.apply(params, carry, observation, timestep.first[None])
        policy = Categorical(actor_critic.mask_logits(timestep.observation, outputs["policy"][0]))
        return policy.sample(keys) if explore else policy.mode(), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        shared, data = state.shared, experience(trajectory)
        grads, (outputs, targets) = update_rule.learner_grads(
            self.rule, shared["rule"], partial(update_rule.forward, self._network, data),
            shared["learner"].params, data, self.discount, self.prediction_cost,
        )  # fmt: skip
        grads = global_mean(grads, axis)
        learner, metrics = actor_critic.optimizer_step(self._optimizer, shared["learner"], grads)
        state = LearnerState({**shared, "learner": learner})
        policy, valid = Categorical(outputs.policy[:-1]), data.valid
        return state, {
            **metrics,
            "entropy": jnp.mean(valid * policy.entropy()),
            "prediction_entropy": jnp.mean(valid * Categorical(outputs.prediction[:-1]).entropy()),
            "policy_target": jnp.mean(valid * targets.policy),
            "policy_target_size": jnp.mean(valid * jnp.abs(targets.policy)),
        }

    @property
    def _network(self) -> Network:
        heads = update_rule.heads(
            value_based.discrete(self.spec).num_actions, self.rule.predictions
        )
        spec = actor_critic.require_spec(self.spec)
        if spec.extension is not None:
            raise ConfigError(
                f"an update rule needs plain observations, but {spec.name} shows its state or its "
                "task beside them."
            )
        return self.network.build(spec.observation, heads)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return update_rule.optimizer(self.optimizer, self.learning_rate)


def lpg_student(file: str | Path, network: Table | TorsoNetwork, **settings: Any) -> LPGStudent:
    """The agent that a rule's file teaches; unless `settings` say otherwise, tables learn by plain
    descent as LPG's learners do, networks by Adam."""
    rule, _ = read_rule(file)
    if isinstance(network, Table):
        settings = {"learning_rate": 40.0, "optimizer": "sgd"} | settings
    return LPGStudent(file=str(Path(file).resolve()), rule=rule, network=network, **settings)
