"""Disco: an agent whose updates come from a rule that DiscoRL discovered, such as Disco103.

The rule's parameters come from a published file (`rule_file.py`), are part of the state, and never
change; the user brings the file. Values are learned by Retrace and only inform the rule.
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms" (Nature),
and the settings of the published notebook, which evaluates the rule on Catch.

As there, a sample has the T - 1 transitions between the T timesteps of a rollout, and the one that
leads to the next rollout is never learned. So no end of an episode is learned where all fall on the
last steps of rollouts: if each episode takes the same multiple of T timesteps, as in Catch, whose
episodes have 9, with rollouts of 9 or 3.

Differs from the published code: what a terminal leads to, which the rule reads too, is in a device
environment the first timestep of the next episode instead of the last of its own, so there and in a
host environment the rule teaches slightly differently (docs/decisions/0002); ignored actions at
time-outs count in no mean and end Retrace's traces, where the code has no time-outs and lets the
step after an end count in all means but the loss; torsos end with an activation; weights are
initialized orthogonally; the moving average of TD errors, which only a log reads, is left out.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import require_rollout_length, require_spec
from podracer.agents.common import off_policy, recurrent
from podracer.agents.common.lifetimes import to_experience
from podracer.agents.disco.network import Outputs, StudentNetwork, build_network
from podracer.agents.disco.rule import RuleParams
from podracer.agents.disco.rule_file import decode_rule
from podracer.agents.disco.students import DiscoStudents, StudentState, build_optimizer
from podracer.io.npz import check_digest
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops.distributions import Categorical
from podracer.ops.transforms import evenly_spaced
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
from podracer.types import (
    ArraySpec,
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
class DiscoState(StudentState, off_policy.ReplayLearnerState):
    """Learner state: that of a student, and the rule."""

    rule: RuleParams


@struct
class Disco:
    """Agent trained by a rule that DiscoRL discovered, discrete actions."""

    learning_rate: Schedule = bounded(3e-4)
    """Learning rate of the network (Adam)."""
    discount: float = bounded(0.997, high=1.0)
    """Discount factor gamma of the action values, in [0, 1]."""
    trace_lambda: float = bounded(0.95, high=1.0)
    """Parameter lambda of Retrace, in [0, 1]."""
    value_cost: float = bounded(0.2)
    """Weight of the action values' loss against the four others, each of which has weight 1."""
    support_max: float = static(default=300.0, low=1e-6)
    """Largest value after the transform h(x), nearly a square root; 300 means about 58,700."""
    support_size: int = static(default=601, low=2)
    """Number of atoms for values, from minus to plus the support's largest value."""
    model_size: int = static(default=128, low=1)
    """Units of the model's LSTM, and of the hidden layer of each of its outputs."""
    rule_file: str = static(default="")
    """File of the update rule, such as `disco_103.npz`."""
    rule_digest: str = static(default="")
    """SHA-256 of that file in hexadecimal; another content is refused. Empty accepts any."""
    rule_params: Derived[RuleParams] = derived(leaf=True)
    """Parameters of the update rule, read from its file."""
    predictions: Derived[int] = derived()
    """Categories of the student's predictions y and z, those of the rule."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(512, 512))))
    """Network before the policy, the predictions and the model."""
    replay: Replay = static(default=Replay(capacity=1024 * 29, batch_size=64, warmup=64 * 29))
    """Replay buffer; a sample is the timesteps of a rollout and the transitions between them."""
    rollout_length: Derived[int] = derived()
    """Timesteps of a rollout, taken from the driver."""
    spec: EnvironmentSpec | None = static(default=None)

    @property
    def data_file(self) -> str:
        if not self.rule_file:
            raise ConfigError(
                "Disco needs the file of a discovered rule: --update-rule disco_103.npz, which "
                "comes with github.com/google-deepmind/disco_rl."
            )
        return self.rule_file

    def with_data(self, content: bytes) -> Disco:
        check_digest(content, self.rule_digest, self.rule_file)
        params = decode_rule(content, self.rule_file)
        predictions = params.prediction.bias.size
        return dataclasses.replace(self, rule_params=params, predictions=predictions)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        if self.rule_params is None:
            raise ConfigError("Disco has no `rule_params`: give it those of a rule.")
        state = DiscoState(
            frames=schedules.init_frames(),
            rule=jax.tree.map(jnp.asarray, self.rule_params),
            **vars(self._students(self.rule_params, learning_rate=0.0).init(key)),
        )
        carry = recurrent.stored_spec(self.carry(1))
        extras = {"policy": ArraySpec((self._network.num_actions,))}
        return LearnerState(state, self._buffer.init(num_envs, extras=extras, carry=carry))

    def carry(self, num_envs: int) -> Carry:
        return self._network.torso.carry(num_envs)

    def actor_params(self, state: LearnerState) -> Params:
        return state.shared.params

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        logits, carry = self._network.policy(params, carry, observation, timestep.first[None])
        policy = Categorical(logits[0])
        action = policy.sample(keys) if explore else policy.mode()
        return action, {"policy": logits[0]}, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        recurrent.check_rollout(self.rollout_length, trajectory)
        update = partial(self._update, axis=axis)
        carry = trajectory.carry
        return off_policy.learn_from_replay(
            self._buffer, update, state, trajectory, key, axis, carry
        )

    # --- one update ------------------------------------------------------------------------------

    def _update(
        self, state: DiscoState, sample: Sample, key: jax.Array, *, axis: str | None
    ) -> tuple[DiscoState, Metrics, jax.Array]:
        del key
        behavior = sample.trajectory.steps.extras["policy"]
        data = to_experience(sample.trajectory, behavior)

        def forward(params: Params) -> Outputs:
            return self._network.apply(params, data.carry, data.observation, data.first)

        students = self._students(state.rule, schedules.value_at(self.learning_rate, state.frames))
        state, metrics, _ = students.step(state.rule, state, data, forward, axis)
        return state, metrics, sample.weights

    # --- parts -----------------------------------------------------------------------------------

    def _students(self, rule: RuleParams, learning_rate: float | jax.Array) -> DiscoStudents:
        return DiscoStudents(
            self._network,
            build_optimizer(),
            evenly_spaced(-self.support_max, self.support_max, self.support_size),
            learning_rate=learning_rate,
            discount=self.discount,
            trace_lambda=self.trace_lambda,
            value_cost=self.value_cost,
            memory_units=rule.lifetime.hidden.shape[0],
        )

    @property
    def _network(self) -> StudentNetwork:
        if self.predictions is None:
            raise ConfigError("Disco has no `predictions`: give it a rule, see `with_data`.")
        return build_network(
            self.network,
            self.spec,
            predictions=self.predictions,
            support_size=self.support_size,
            model_size=self.model_size,
        )

    @property
    def _buffer(self) -> Buffer:
        length, spec = require_rollout_length(self), require_spec(self.spec)
        if length < 2:
            raise ConfigError(
                "Disco learns from transitions within a rollout: make it longer, with "
                "--rollout-length 2 or more."
            )
        if self.replay.prioritized:
            raise ConfigError("Disco samples its replay uniformly: leave out --prioritized.")
        return Buffer(self.replay, spec, length, stride=length, every_step=True)
