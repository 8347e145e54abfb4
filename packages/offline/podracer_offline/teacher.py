"""Teachers: an environment that shows what another policy would do, and DAgger, which learns it.

    podracer train cartpole_dagger --environment taught:RUN

The student acts, and on each observation it learns what the teacher would do there. So it is taught
where its own mistakes lead, which a data set of the teacher's episodes never shows.
Source: Ross et al. 2011, "A Reduction of Imitation Learning and Structured Prediction to No-Regret
Online Learning" (arXiv 1011.0686). The student acts alone from the first step on (the paper's beta
is 0). The replay is the aggregate of all episodes, of which each update learns a sample.

A teacher may see more than its student: `hidden` names keys of a dictionary that only the teacher
sees (Chen et al. 2019, "Learning by Cheating", arXiv 1912.12294).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import (
    DEFAULT_CONTEXT,
    Agent,
    Blueprint,
    Context,
    policy_params,
)
from podracer.agents.common import off_policy
from podracer.arguments import typed
from podracer.checks import check_spec
from podracer.devices.reductions import global_grad
from podracer.environment import Environment, evaluation_environment, wrap_features
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.ops.distributions import (
    Categorical,
    MultiCategorical,
    Normal,
    parameters,
    to_bounds,
)
from podracer.replay import Buffer, Replay, Sample
from podracer.run.loading import load_run
from podracer.types import (
    ArraySpec,
    Carry,
    EnvironmentSpec,
    EnvState,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    action_mask,
    blank_timestep,
)
from podracer_offline.cloning import Cloning, Method
from podracer_offline.records import (
    Record,
    as_student,
    replayed,
    require_student,
    with_recorded_action,
)

# --- teachers ------------------------------------------------------------------------------------


class Teacher(Protocol):
    """Policy of the observations `[B, ...]` of a whole environment."""

    def carry(self, num_envs: int) -> Carry:
        """Return the recurrent state `[B, ...]` before the first timestep."""
        ...

    def __call__(
        self, carry: Carry, timestep: TimeStep, keys: jax.Array
    ) -> tuple[PyTree, jax.Array | None, Carry]:
        """Return actions, parameters of their distributions if there are any, and the new state."""
        ...


@struct
class TrainedTeacher:
    """Policy of a run."""

    blueprint: Blueprint
    params: Params
    updates: int = static()
    """Updates of the checkpoint: with another one a student's run is not resumed."""

    def carry(self, num_envs: int) -> Carry:
        return self.blueprint.build().carry(num_envs)

    def __call__(
        self, carry: Carry, timestep: TimeStep, keys: jax.Array
    ) -> tuple[PyTree, jax.Array | None, Carry]:
        agent, distribution = self.blueprint.build(), None
        if agent.distribution is not None:
            policy, _ = agent.distribution(self.params, carry, timestep)
            if isinstance(policy, Categorical | MultiCategorical | Normal):
                distribution = parameters(policy)
        action, _, carry = agent.act(self.params, carry, timestep, keys, False)
        return action, distribution, carry


@struct
class FunctionTeacher:
    """Function of observations `[B, ...]` that returns actions, or a distribution of them."""

    function: Callable[[PyTree], Any] = static()
    spec: EnvironmentSpec = static()

    def carry(self, num_envs: int) -> Carry:
        return ()

    def __call__(
        self, carry: Carry, timestep: TimeStep, keys: jax.Array
    ) -> tuple[PyTree, jax.Array | None, Carry]:
        policy = self.function(timestep.observation)
        if not isinstance(policy, Categorical | MultiCategorical | Normal):
            return policy, None, carry
        return to_bounds(self.spec.action, policy.mode()), parameters(policy), carry


# --- the environment -----------------------------------------------------------------------------


@struct
class TaughtState:
    """State of an environment and of its teacher."""

    environment: EnvState
    carry: Carry


@struct
class Taught:
    """Device environment that shows what a teacher would do: its observations are `Record`s."""

    environment: Any
    teacher: Any
    """Teacher, None for the environment of evaluations."""
    hidden: tuple[str, ...] = static()
    """Keys of the observations that the student does not see."""
    spec: EnvironmentSpec = static()

    def __post_init__(self) -> None:
        wrap_features(self, self.environment, render=self._render)

    def check_agent(self, agent: Agent, experiment: Any) -> None:
        """Raise `ConfigError` for an agent that learns from no records."""
        if self.teacher is not None:
            require_student(agent)

    def for_evaluation(self) -> Taught:
        """Return the environment as the student sees it, without the teacher."""
        environment = evaluation_environment(self.environment)
        return _taught(environment, None, self.hidden)

    def _render(self, state: TaughtState) -> np.ndarray:
        return self.environment.render(state.environment)

    def reset(self, key: jax.Array) -> tuple[TaughtState, TimeStep]:
        carry = () if self.teacher is None else self.teacher.carry(1)
        return self._show(key, carry, *self.environment.reset(key))

    def step(
        self, key: jax.Array, state: TaughtState, action: jax.Array
    ) -> tuple[TaughtState, TimeStep]:
        # The teacher observes what the student did, not what it would have done itself.
        carry = with_recorded_action(state.carry, jnp.asarray(action)[None])
        return self._show(key, carry, *self.environment.step(key, state.environment, action))

    def _show(
        self, key: jax.Array, carry: Carry, state: EnvState, timestep: TimeStep
    ) -> tuple[TaughtState, TimeStep]:
        observation = without_keys(timestep.observation, self.hidden)
        if self.teacher is not None:
            batch = jax.tree.map(lambda x: x[None], timestep)
            action, distribution, carry = self.teacher(carry, batch, key[None])
            label = jax.tree.map(lambda x: x[0], (action, distribution))
            observation = Record(observation, *label)
        return TaughtState(state, carry), dataclasses.replace(timestep, observation=observation)


def without_keys(observation: PyTree, keys: tuple[str, ...]) -> PyTree:
    """Return an observation, or its specification, without some keys of its dictionary."""
    if not keys:
        return observation
    return {name: x for name, x in observation.items() if name not in keys}


@typed
def taught(name: str, environment: str = "", hidden: str = "") -> Taught:
    """Show what the policy of a run would do: taught:RUN,hidden=KEY."""
    return teach(Path(name), environment or None, tuple(filter(None, hidden.split("+"))))


@typed
def teach(
    teacher: str | Path | Callable[[PyTree], Any],
    environment: Any = None,
    hidden: Sequence[str] = (),
) -> Taught:
    """Return a device environment with a teacher.

    `teacher` is the directory of a run, whose newest checkpoint acts and whose environment is the
    default one, or a function of observations `[B, ...]` that returns actions or a distribution.
    The student does not see the `hidden` keys of an observation, by default those outside of the
    group `actor`, if there is one, but for the mask of actions. Raises `ConfigError` where the
    environment is none of the device or lacks a key.
    """
    env = make(environment) if isinstance(environment, str) else environment
    if isinstance(teacher, str | Path):
        run = load_run(teacher, environment=env)
        params = policy_params(run.agent, run.state.learner)
        env, policy = run.env, TrainedTeacher(run.blueprint, params, int(run.state.update))
    elif env is None:
        raise ConfigError("a function teaches in an environment: name it, `teach(f, NAME)`.")
    else:
        policy = FunctionTeacher(teacher, check_spec(env))
    if not isinstance(env, Environment):
        raise ConfigError(
            "a teacher shows its actions within an environment of the device: record its episodes "
            "by `podracer record`, and learn from `data:FILE.npz`."
        )
    return _taught(env, policy, tuple(hidden))


def _taught(env: Any, teacher: Teacher | None, hidden: tuple[str, ...]) -> Taught:
    spec, observation = env.spec, env.spec.observation
    names = set(observation) if isinstance(observation, dict) else set()
    if missing := [name for name in hidden if name not in names]:
        raise ConfigError(
            f"{spec.name} cannot hide {missing[0]}: the keys of its observations are "
            f"{', '.join(sorted(names)) or 'none'}."
        )
    if not hidden and "actor" in spec.groups:
        critic_keys = names - {*spec.keys(("actor",))}
        hidden = tuple(sorted(x for x in critic_keys if action_mask({x: observation[x]}) is None))
    observation = without_keys(observation, hidden)
    if teacher is not None:
        timestep, keys = blank_timestep(spec, 1), jax.random.split(jax.random.key(0), 1)
        label = jax.eval_shape(lambda: teacher(teacher.carry(1), timestep, keys)[:2])
        observation = Record(
            observation, *jax.tree.map(lambda x: ArraySpec(x.shape[1:], x.dtype), label)
        )
    spec = dataclasses.replace(spec, observation=observation, groups={})
    return Taught(env, teacher, hidden, spec)


# --- the student ---------------------------------------------------------------------------------


@struct
class DAgger(Cloning):
    """DAgger: a student that acts by itself, and learns what its teacher would do."""

    replay: Replay | None = static(default=Replay(batch_size=256, warmup=0))
    """Replay of all episodes; None learns from each rollout once, which a student with memory
    needs."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment."""
        if not isinstance(spec.observation, Record):  # a data set would show it no own mistakes
            raise ConfigError(
                f"DAgger learns from a teacher, and {spec.name} has none: take "
                '`environment="taught:RUN"`.'
            )
        inner = replayed(spec)
        method = self.method_for(inner)
        if self.replay is None:
            return as_student(method.agent)
        if self.replay.prioritized:
            raise ConfigError("DAgger samples uniformly: take `agent.replay.prioritized=False`.")
        off_policy.require_feed_forward(method.model.network)
        student = _DAgger(method, self.replay.build(spec, 2))
        return as_student(dataclasses.replace(method.agent, init=student.init, learn=student.learn))


@dataclasses.dataclass(frozen=True)
class _DAgger:
    method: Method
    buffer: Buffer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(self.method.init(key, num_envs).shared, self.buffer.init(num_envs))

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        def update(shared: Any, sample: Sample, key: jax.Array) -> tuple[Any, Metrics, jax.Array]:
            def loss(params: Params) -> Any:
                return self.method.loss(params, LearnerState(shared), sample.trajectory, False)

            grads, metrics = global_grad(loss, shared.params, axis=axis)
            shared, norm = self.method.optimizer.step(shared, grads)
            return shared, {**metrics, **norm}, sample.weights

        steps = dataclasses.replace(trajectory.steps, extras=())
        trajectory = dataclasses.replace(trajectory, steps=steps)
        return off_policy.learn_from_replay(self.buffer, update, state, trajectory, key, axis)
