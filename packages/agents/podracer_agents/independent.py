"""Independent learners: agents of one environment, each with settings and parameters of its own.

    @podracer.struct
    class Pair(IndependentLearners):
        speaker: A2C = A2C()
        listener: PPO = PPO()

Each agent takes the others for a part of the environment (Tan 1993, "Multi-agent reinforcement
learning: independent versus cooperative agents"). They act at once, and share the reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.checks import check_spec
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.types import (
    ActionSpace,
    Carry,
    Continuous,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    MultiDiscrete,
    Params,
    PyTree,
    Step,
    TimeStep,
    Trajectory,
)


def joint_spec(name: str, **agents: tuple[PyTree, ActionSpace]) -> EnvironmentSpec:
    """Return the specification of an environment of several agents.

    `agents` are what each of them observes, and its actions. The environment's observation is a
    dictionary by agent. Its action is that of each agent in turn, i32 `[n]` or f32 `[n]`: all are
    discrete, or all continuous.
    """
    specs = {agent: EnvironmentSpec(f"{name}.{agent}", *spaces) for agent, spaces in agents.items()}
    for spec in specs.values():
        check_spec(SimpleNamespace(spec=spec))  # a check of all together finds no mask
    observation = {agent: spec.observation for agent, spec in specs.items()}
    boxes = [spec.action for spec in specs.values() if isinstance(spec.action, Continuous)]
    choices = [spec.action for spec in specs.values() if not isinstance(spec.action, Continuous)]
    if boxes and choices:
        raise ConfigError(f"{name}: actions are all discrete or all continuous.")
    low, high = (sum((getattr(x, side) for x in boxes), ()) for side in ("low", "high"))
    components = sum((space.components for space in choices), ())
    action = Continuous(low, high) if boxes else MultiDiscrete(components)
    return EnvironmentSpec(name, observation, action, agents=specs)


@struct
class IndependentLearners:
    """Settings whose fields are the agents' settings, by the names of `joint_spec`."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        names, specs = [field.name for field in dataclasses.fields(self)], spec.agents
        if sorted(specs) != sorted(names):
            raise ConfigError(
                f"{type(self).__name__} has the agents {', '.join(names)}, and {spec.name} has "
                f"{', '.join(specs) or 'none'}: name them alike, "
                "and make the specification by joint_spec."
            )
        agents = {name: getattr(self, name).build(part, context) for name, part in specs.items()}
        return Agent.of(_Learners(agents, spec), spec, agents=agents)


@dataclasses.dataclass(frozen=True)
class _Learners:
    agents: dict[str, Agent]
    spec: EnvironmentSpec

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        states = self._each(lambda name, agent, key: agent.init(key, num_envs), key)
        return _joined(states)

    def carry(self, num_envs: int) -> dict[str, Carry]:
        return {name: agent.carry(num_envs) for name, agent in self.agents.items()}

    def actor_params(self, state: LearnerState) -> dict[str, Params]:
        return {name: agent.actor_params(_part(state, name)) for name, agent in self.agents.items()}

    def act(
        self,
        params: dict[str, Params],
        carry: dict[str, Carry],
        timestep: TimeStep,
        keys: jax.Array,
        explore: bool,
    ) -> tuple[jax.Array, dict[str, PyTree], dict[str, Carry]]:
        """Let each agent act on its own observation; extras are by name, too."""

        def act(name: str, agent: Agent, keys: jax.Array) -> Any:
            return agent.act(params[name], carry[name], _seen(timestep, name), keys, explore)

        results = self._each(act, keys)
        actions = [action.reshape(len(keys), -1) for action, _, _ in results.values()]
        extras = {name: extra for name, (_, extra, _) in results.items()}
        carries = {name: new_carry for name, (_, _, new_carry) in results.items()}
        return jnp.concatenate(actions, axis=-1), extras, carries

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Let each agent learn from its own part; metrics have its name in front."""

        def learn(name: str, agent: Agent, key: jax.Array) -> tuple[LearnerState, Metrics]:
            return agent.learn(_part(state, name), parts[name], key, axis)

        parts = self._parts(trajectory)
        results = self._each(learn, key)
        metrics = {f"{name}_{k}": v for name, (_, x) in results.items() for k, v in x.items()}
        return _joined({name: new for name, (new, _) in results.items()}), metrics

    def _parts(self, trajectory: Trajectory) -> dict[str, Trajectory]:
        """Return what each agent saw and did."""
        steps = trajectory.steps
        spaces = [agent.spec.action for agent in self.agents.values()]
        sizes = [1 if isinstance(space, Discrete) else space.size for space in spaces]
        actions = jnp.split(steps.action, np.cumsum(sizes)[:-1], axis=-1)
        parts = {}
        for name, space, action in zip(self.agents, spaces, actions, strict=True):
            action = action[..., 0] if isinstance(space, Discrete) else action
            parts[name] = Trajectory(
                Step(_seen(steps.timestep, name), action, steps.extras[name]),
                _seen(trajectory.final, name),
                trajectory.carry[name],
                trajectory.final_carry[name],
            )
        return parts

    def _each(self, function: Callable[..., Any], keys: jax.Array) -> dict[str, Any]:
        """Return `function(name, agent, keys)` by agent, with other keys `[*b]` for each."""
        results = {}
        for i, (name, agent) in enumerate(self.agents.items()):
            fold = partial(jax.random.fold_in, data=i)
            own_keys = jax.vmap(fold)(keys) if keys.ndim else fold(keys)
            results[name] = function(name, agent, own_keys)
        return results


def _seen(timestep: TimeStep, name: str) -> TimeStep:
    return dataclasses.replace(timestep, observation=timestep.observation[name])


def _part(state: LearnerState, name: str) -> LearnerState:
    return LearnerState(state.shared[name], state.local[name] if state.local else ())


def _joined(states: dict[str, LearnerState]) -> LearnerState:
    return LearnerState(
        {name: state.shared for name, state in states.items()},
        {name: state.local for name, state in states.items()},
    )
