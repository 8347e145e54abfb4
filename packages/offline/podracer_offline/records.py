"""Records: what a data set shows beside an observation, and agents that act as recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podracer.agent import (
    DEFAULT_CONTEXT,
    Agent,
    Context,
    Fused,
    Learn,
    Settings,
    with_last_action,
)
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.replay import Replay
from podracer.types import (
    EnvironmentSpec,
    LearnerState,
    Metrics,
    PyTree,
    TimeStep,
    Trajectory,
    blank_timestep,
)


@struct
class Record:
    """Observation of an environment that replays a data set."""

    observation: PyTree
    """Observation of the environment that the data come from."""
    action: PyTree
    """Action that was recorded on it."""
    distribution: PyTree = None
    """Parameters of the distribution that the action comes from, if recorded."""


def replayed(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return the specification of the environment that recorded timesteps come from."""
    if not isinstance(spec.observation, Record):
        return spec
    return dataclasses.replace(spec, observation=spec.observation.observation)


def require_records(spec: EnvironmentSpec, name: str) -> EnvironmentSpec:
    """Return `replayed(spec)`. Raises `ConfigError` unless the environment replays a data set."""
    if not isinstance(spec.observation, Record):
        raise ConfigError(
            f"{name} learns from a data set, and {spec.name} is none: take "
            '`environment="data:FILE.npz"`, or `environment="taught:RUN"`.'
        )
    return replayed(spec)


def require_student(agent: Agent) -> None:
    """Raise `ConfigError` for an agent that would take records for observations."""
    parts = jax.tree.leaves(agent.spec.observation, is_leaf=lambda x: isinstance(x, Record))
    if any(isinstance(part, Record) for part in parts):
        raise ConfigError(
            f"{agent.name} learns from its own actions, and not from a data set: take an agent of "
            "podracer_offline, such as Cloning, IQL or FromData(DQN())."
        )


def without_record(timestep: TimeStep) -> TimeStep:
    """Return a timestep as the agent observes it."""
    if not isinstance(timestep.observation, Record):
        return timestep
    return dataclasses.replace(timestep, observation=timestep.observation.observation)


def without_records(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory as the agent observes it."""
    timestep = without_record(trajectory.steps.timestep)
    steps = dataclasses.replace(trajectory.steps, timestep=timestep)
    return dataclasses.replace(trajectory, steps=steps, final=without_record(trajectory.final))


def as_recorded(agent: Agent, spec: EnvironmentSpec) -> Agent:
    """Return an agent, built for `replayed(spec)`, that acts in a data set as it is recorded.

    Elsewhere, such as in evaluations, it acts by itself. A loss to fuse sees the records.
    """
    if not isinstance(spec.observation, Record):
        return agent
    student = as_student(agent)

    def act(params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool) -> Any:
        record = timestep.observation
        action, extras, carry = student.act(params, carry, timestep, keys, explore)
        if not isinstance(record, Record):
            return action, extras, carry
        return record.action, extras, with_recorded_action(carry, record.action)

    learn = agent.learn if isinstance(agent.learn, Fused) else _stripped(agent.learn)
    return dataclasses.replace(student, act=act, learn=learn)


def with_recorded_action(carry: Any, action: Any) -> Any:
    """Return the recurrent state after recorded actions `[B, ...]`, see `agent.with_last_action`.

    Raises `ConfigError` for agents that act together, where one of them observes its last action.
    """
    parts = carry.values() if isinstance(carry, dict) else ()
    if any(hasattr(part, "last_action") for part in parts):
        raise ConfigError(
            "a record has one action of all agents that act together, and one of these observes "
            "its own last action: take agents without that, such as A2C with a memory."
        )
    return with_last_action(carry, action)


def as_student(agent: Agent) -> Agent:
    """Return an agent that acts by itself where records are shown; `learn` sees the records."""
    describe, distribution = agent.distribution, None

    def act(params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool) -> Any:
        return agent.act(params, carry, without_record(timestep), keys, explore)

    if describe is not None:
        distribution = lambda params, carry, timestep: describe(  # noqa: E731
            params, carry, without_record(timestep)
        )
    return dataclasses.replace(agent, act=act, distribution=distribution)


def _stripped(learn: Learn) -> Learn:
    def learn_stripped(
        state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        return learn(state, without_records(trajectory), key, axis)

    return learn_stripped


@struct
class FromData:
    """An agent with a replay, such as DQN or SAC, that a data set fills."""

    agent: Settings
    """Settings of the agent."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment."""
        inner = require_records(spec, type(self.agent).__name__)
        agent = self.agent.build(inner, context)
        if not isinstance(getattr(self.agent, "replay", None), Replay) or _keeps_extras(agent):
            raise ConfigError(
                f"{type(self.agent).__name__} learns from its own actions, and not from a data "
                "set: take an agent that learns from any, such as DQN or SAC."
            )
        return as_recorded(agent, spec)


def _keeps_extras(agent: Agent) -> bool:
    """Return whether `learn` needs more than the action, such as its probability."""

    def extras(key: jax.Array) -> PyTree:
        params, carry = agent.actor_params(agent.init(key, 1)), agent.carry(1)
        keys = jax.random.split(key, 1)
        return agent.act(params, carry, blank_timestep(agent.spec, 1), keys, True)[1]

    return bool(jax.tree.leaves(jax.eval_shape(extras, jax.random.key(0))))
