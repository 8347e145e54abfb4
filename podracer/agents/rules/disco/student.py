"""Disco: an agent whose updates come from a rule that DiscoRL discovered, such as Disco103.

The rule's parameters come from a published file (`rule_file.py`), are part of the state, and never
change; the user brings the file. Values are learned by Retrace and only inform the rule.
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms" (Nature),
and the settings of the published notebook, which evaluates the rule on Catch.

As there, a sample has the T - 1 transitions between the T timesteps of a rollout, and the one that
leads to the next rollout is never learned. So no end of an episode is learned where all fall on the
last steps of rollouts: if each episode takes the same multiple of T timesteps, as in Catch, whose
episodes have 9, with rollouts of 9 or 3.

Differs from the published code: the rule also reads what a terminal leads to. In a device
environment that is the first timestep of the next episode instead of the last of its own. So there
and in a host environment the rule teaches slightly differently (docs/decisions/0002). Ignored
actions at time-outs count in no mean and end Retrace's traces. The code has no time-outs, and lets
the step after an end count in all means but the loss. Torsos end with an activation; weights are
initialized orthogonally; the moving average of TD errors, which only a log reads, is left out.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy, recurrent
from podracer.agents.common.optimizers import ParamsState, global_norm, take_step
from podracer.agents.common.value_based import gather_action
from podracer.agents.rules.disco.network import Outputs, StudentNetwork, build_network
from podracer.agents.rules.disco.rule import (
    Memory,
    RuleParams,
    Targets,
    apply_rule,
    init_memory,
    remember,
)
from podracer.agents.rules.disco.rule_file import decode_rule
from podracer.agents.rules.disco.values import (
    AdvantageMoments,
    estimate_values,
    init_moments,
    masked_powers,
)
from podracer.agents.rules.lifetimes import Experience, to_experience
from podracer.devices.reductions import global_mean
from podracer.errors import ConfigError
from podracer.fields import bounded, reset_on_warm_start, static, struct
from podracer.io.npz import check_digest
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops.distributions import Categorical
from podracer.ops.transforms import evenly_spaced, squash, two_hot
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
from podracer.types import (
    ArraySpec,
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)

# Constants with which the published rules were discovered.
_TARGET_DECAY = 0.9  # target parameters are an exponential moving average
_MAX_UPDATE = 1.0  # for a parameter, before the learning rate


@struct
class StudentState(ParamsState):
    """State of a student: `StudentParams`, and what the rule knows of the lifetime."""

    target_params: Params
    moments: AdvantageMoments
    memory: Memory


State = TypeVar("State", bound=StudentState)


def build_optimizer(root_epsilon: float = 0.0) -> optax.GradientTransformation:
    """Return the unscaled optimizer of a student."""
    return optax.chain(optax.scale_by_adam(eps_root=root_epsilon), optax.clip(_MAX_UPDATE))


def init_student(
    network: StudentNetwork,
    optimizer: optax.GradientTransformation,
    memory_units: int,
    key: jax.Array,
) -> StudentState:
    """Return an untrained student."""
    params: Params = network.init(key)
    return StudentState(
        params,
        optimizer.init(params),
        target_params=jax.tree.map(jnp.copy, params),
        moments=init_moments(),
        memory=init_memory(memory_units),
    )


def descend(
    optimizer: optax.GradientTransformation,
    learning_rate: float | jax.Array,
    state: State,
    grads: Params,
) -> State:
    """Return a student whose parameters took a step, and their average followed the old ones."""
    target_params = optax.incremental_update(state.params, state.target_params, 1.0 - _TARGET_DECAY)
    state = take_step(optimizer, learning_rate, state, grads)
    return dataclasses.replace(state, target_params=target_params)


def student_loss(
    outputs: Outputs,
    next_policy: jax.Array,
    targets: Targets,
    value_targets: jax.Array,
    data: Experience,
    weights: jax.Array,
    support: jax.Array,
    value_cost: float | jax.Array,
) -> tuple[jax.Array, Metrics]:
    """Return a student's loss, a mean with `weights [T, B]`, and its parts.

        L = KL(π̂ || π) + KL(ŷ || y) + KL(ẑ || z(a)) + KL(π' || p(a)) + c_q H(two-hot(h(G)), q(a))

    Targets are constants. p(a) is the policy that was predicted for the next timestep, and π' the
    actual one, `next_policy [T, B, A]`, where the episode goes on. `value_targets` G are `[T, B]`.
    """
    acted = jax.tree.map(lambda x: x[:-1], outputs)

    def of_action(x: jax.Array) -> jax.Array:
        return gather_action(x, data.action)

    divergence = _divergence(next_policy, of_action(acted.next_policy))
    log_values = jax.nn.log_softmax(of_action(acted.action_value))
    losses = {
        "policy_loss": _divergence(targets.policy, acted.policy),
        "prediction_loss": _divergence(targets.prediction, acted.prediction),
        "action_prediction_loss": _divergence(
            targets.action_prediction, of_action(acted.action_prediction)
        ),
        "next_policy_loss": jnp.where(data.discount > 0, divergence, 0.0),
        "value_loss": -jnp.sum(two_hot(squash(value_targets), support) * log_values, axis=-1),
    }
    costs = dict.fromkeys(losses, 1.0) | {"value_loss": value_cost}
    parts = {name: jnp.mean(weights * loss) for name, loss in losses.items()}
    total = sum((costs[name] * part for name, part in parts.items()), jnp.float32(0))
    entropy = jnp.mean(weights * Categorical(acted.policy).entropy())
    return total, {"loss": total, **parts, "entropy": entropy}


def _divergence(target: jax.Array, logits: jax.Array) -> jax.Array:
    return Categorical(target).divergence(Categorical(logits))


@struct
class DiscoState(StudentState, off_policy.ReplayLearnerState):
    """Learner state: that of a student, and the rule."""

    rule: RuleParams = reset_on_warm_start()
    """Parameters of the update rule, which never change."""


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
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(512, 512))))
    """Network before the policy, the predictions and the model."""
    replay: Replay = static(default=Replay(capacity=1024 * 29, batch_size=64, warmup=64 * 29))
    """Replay buffer; a sample is the timesteps of a rollout and the transitions between them."""

    @property
    def data_file(self) -> str:
        if not self.rule_file:
            raise ConfigError(
                'Disco needs the file of a discovered rule: `agent.rule_file="disco_103.npz"`, '
                "which comes with github.com/google-deepmind/disco_rl."
            )
        return self.rule_file

    def read(self, content: bytes) -> RuleParams:
        check_digest(content, self.rule_digest, self.rule_file)
        return decode_rule(content, self.rule_file)

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment; the context's data are the rule."""
        rule, length = context.data, context.rollout_length
        if rule is None:
            raise ConfigError(
                "Disco has no rule: give `build` a Context whose `data` are the parameters of one, "
                "as `read` returns them."
            )
        if length < 2:
            raise ConfigError(
                "Disco learns from transitions within a rollout: make it longer, with "
                "`driver.rollout_length=2` or more."
            )
        if self.replay.prioritized:
            raise ConfigError("Disco replays uniformly: leave out `agent.replay.prioritized`.")
        network = build_network(
            self.network,
            spec,
            predictions=rule.prediction.bias.size,
            support_size=self.support_size,
            model_size=self.model_size,
        )
        buffer = self.replay.build(spec, length, length, every_step=True)
        agent = _Disco(self, network, build_optimizer(), buffer, rule)
        return Agent.of(agent, spec, carry=network.torso.carry)


@dataclasses.dataclass(frozen=True)
class _Disco:
    settings: Disco
    network: StudentNetwork
    optimizer: optax.GradientTransformation
    buffer: Buffer
    rule_params: RuleParams

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        memory_units = self.rule_params.lifetime.hidden.shape[0]
        state = DiscoState(
            frames=schedules.init_frames(),
            rule=jax.tree.map(jnp.asarray, self.rule_params),
            **vars(init_student(self.network, self.optimizer, memory_units, key)),
        )
        carry = recurrent.stored_spec(self.network.torso.carry(1))
        extras = {"policy": ArraySpec((self.network.num_actions,))}
        return LearnerState(state, self.buffer.init(num_envs, extras=extras, carry=carry))

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Sample actions; extras are the logits of the `policy`."""
        policy, carry = self.distribution(params, carry, timestep)
        action = policy.sample(keys) if explore else policy.mode()
        return action, {"policy": policy.logits}, carry

    def distribution(
        self, params: Params, carry: Carry, timestep: TimeStep
    ) -> tuple[Categorical, Carry]:
        observation = jax.tree.map(lambda x: x[None], timestep.observation)
        logits, carry = self.network.policy(params, carry, observation, timestep.first[None])
        return Categorical(logits[0]), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        recurrent.check_rollout(self.buffer.length, trajectory)
        update = partial(self.update, axis=axis)
        return off_policy.learn_from_replay(
            self.buffer, update, state, trajectory, key, axis, trajectory.carry
        )

    def update(
        self, state: DiscoState, sample: Sample, key: jax.Array, *, axis: str | None
    ) -> tuple[DiscoState, Metrics, jax.Array]:
        """Return the state after one step towards the rule's targets."""
        del key
        settings, behavior = self.settings, sample.trajectory.steps.extras["policy"]
        data = to_experience(sample.trajectory, behavior)
        support = evenly_spaced(-settings.support_max, settings.support_max, settings.support_size)

        def forward(params: Params) -> Outputs:
            return self.network.apply(params, data.carry, data.observation, data.first)

        outputs, pullback = jax.vjp(forward, state.params)
        target_outputs = forward(state.target_params)
        values = estimate_values(
            outputs, target_outputs, data, support, settings.discount, settings.trace_lambda
        )
        mask = data.valid.astype(jnp.float32)
        means = global_mean([jnp.mean(x) for x in masked_powers(values.advantages, mask)], axis)
        moments, share = state.moments.update(means)
        weights = mask / share  # for means over valid transitions
        targets, memory_inputs = apply_rule(
            state.rule, state.memory, data, outputs, target_outputs, values.normalized(moments)
        )
        output_grads, metrics = jax.grad(student_loss, has_aux=True)(
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
        memory_input = jnp.mean(weights[..., None] * memory_inputs, axis=(0, 1))
        grads, memory_input = global_mean((grads, memory_input), axis)
        rate = schedules.value_at(settings.learning_rate, state.frames)
        state = dataclasses.replace(
            descend(self.optimizer, rate, state, grads),
            moments=moments,
            memory=remember(state.rule, state.memory, memory_input),
        )
        return state, {**metrics, "gradient_norm": global_norm(grads)}, sample.weights
