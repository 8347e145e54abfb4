"""Agents: settings, and the pure functions that they build.

Settings are a frozen pytree without arrays (see `fields.struct`). Float hyperparameters are leaves,
so that the members of a population may have different ones in one program; everything else is
static structure. Settings build an `Agent` for an environment, as an optimizer's build an
`optax.GradientTransformation`:

    agent = PPO(learning_rate=1e-3).build(environment.spec)

Drivers build it inside the compiled program, whose arguments the settings are: another learning
rate compiles nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from podracer import schedules
from podracer.devices.reductions import MaskedMean, global_grad
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.ops.distributions import ActionDistribution, SquashedNormal
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    action_mask,
    select,
)

Act = Callable[[Params, Carry, TimeStep, jax.Array, bool], tuple[jax.Array, PyTree, Carry]]
Distribution = Callable[
    [Params, Carry, TimeStep], tuple[ActionDistribution | SquashedNormal, Carry]
]
Learn = Callable[[LearnerState, Trajectory, jax.Array, str | None], tuple[LearnerState, Metrics]]


class NotPickled:
    """Object of functions that were made while the program runs, which `pickle` cannot take."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled by names; a copy, and cloudpickle, which Ray uses, may go on."""
        frame = inspect.currentframe()
        caller = str(frame and frame.f_back and frame.f_back.f_globals.get("__name__"))
        if caller == "copy" or "cloudpickle" in caller:
            return super().__reduce_ex__(protocol)
        raise ConfigError(
            f"{type(self).__name__} cannot be pickled: call podracer.load_policy(RUN) in the other "
            "process, or write a file by podracer.export_policy(RUN)."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent(NotPickled):
    """Pure functions of an agent that was built for an environment; `B` is one shard's batch.

    An agent lives as long as the program in which it was built: it may hold traced hyperparameters.
    """

    spec: EnvironmentSpec
    """Environment that it was built for."""
    name: str = "Agent"
    """Name in messages; a `Blueprint` takes the name of the settings' class."""
    init: Callable[[jax.Array, int], LearnerState]
    """`(key, num_envs)`: Return the state before the first update.

    Leaves of `local` lead with `num_envs`, or with the number of equal groups of environments, one
    after another in the batch, that share them."""
    act: Act
    """`(params, carry, timestep, keys, explore)`: Choose actions `[B, ...]` for a timestep
    `[B, ...]` with one key for each environment.

    Returns the actions, extras that `learn` needs (leaves `[B, ...]`), and the new recurrent state.
    `explore=False` asks for the agent's best action."""
    learn: Learn | Fused
    """`(state, trajectory, key, axis)`: Update the state from one shard's trajectory; also return
    metrics, each of them an array or a `MaskedMean`, of shape [] or [n].

    The update is applied if the shared state and the metrics `loss`, `*_loss` and `*gradient_norm`
    are finite, else the run ends; other metrics are diagnostics. `axis` is the name of the mesh
    axis that the batch is sharded over, None on one device."""
    carry: Callable[[int], Carry] = lambda num_envs: ()
    """`(num_envs)`: Return the initial recurrent state `[B, ...]`, `()` if there is none."""
    actor_params: Callable[[LearnerState], Params] = lambda state: state.shared.params
    """`(state)`: Return the parameters that `act` takes. They depend on `shared` alone, unless the
    agent learns a `rule`."""
    distribution: Distribution | None = None
    """`(params, carry, timestep)`: Return the distribution that `act` samples from to explore, in
    the units before `to_bounds`, and the new recurrent state.

    It is differentiable in `params`. None where actions come from values, a search or noise.
    Replace it wherever you replace `act`."""
    rule: Rule | None = None
    """Update rule that the agent learns instead of a policy."""
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)
    """Keys of the observation that the policy (`actor`) and critics (`critic`) see; {} for all."""
    agents: Mapping[str, Agent] = dataclasses.field(default_factory=dict, hash=False)
    """Agents that act together in one environment, by name; so are their states in `shared`."""

    @property
    def policy_spec(self) -> EnvironmentSpec:
        """The environment with the part of its observation that the policy sees, and its mask."""
        entries, keys = self.spec.observation, self.groups.get("actor", ())
        if keys:  # the network may see nothing of the entry that holds the mask
            masked = {key for key in entries if action_mask({key: entries[key]}) is not None}
            keys += tuple(key for key in entries if key in masked | self.spec.agents.keys())
        return dataclasses.replace(self.spec, observation=select(entries, keys), groups={})

    @classmethod
    def of(cls, methods: Any, spec: EnvironmentSpec, **functions: Any) -> Agent:
        """Return an agent of an object's methods, or of other functions in their place.

        They are `init`, `act` and `learn`, and `carry`, `actor_params` and `distribution` if any.
        """
        names = ("init", "act", "learn", "carry", "actor_params", "distribution")
        by_name = {name: getattr(methods, name) for name in names if hasattr(methods, name)}
        return cls(spec=spec, **{**by_name, **functions})


@dataclasses.dataclass(frozen=True)
class Fused:
    """`Agent.learn` of an agent whose loss is a function of the outputs that `act` computed.

    Its gradient may go through the rollout itself and reuse that forward pass (Hessel et al. 2021,
    the minimal unit of Anakin). Called as `learn`, it takes one optimizer step on the loss, with a
    second forward pass.
    """

    loss: Callable[[Params, LearnerState, Trajectory, bool], tuple[jax.Array | MaskedMean, Metrics]]
    """`(params, state, trajectory, reuse)`: Return the mean loss over one shard, differentiable in
    `params`, and metrics.

    `params` are what `actor_params` returns for `state`, which is the learner's. With `reuse` the
    network's outputs are those that `act` stored in `extras`, and only the final timestep needs a
    forward pass; without it all T+1 timesteps get a second one."""
    apply_gradients: Callable[[LearnerState, Params, jax.Array], tuple[LearnerState, Metrics]]
    """`(state, grads, num_frames)`: Apply one optimizer step with gradients that are averaged over
    the mesh, from `num_frames` valid transitions, uint32 [], of all shards together."""

    def __call__(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Take one optimizer step on the loss of a rollout, see `Agent.learn`."""
        return self.step(state, lambda params: (trajectory, None), axis, reuse=False)[:2]

    def step(
        self,
        state: LearnerState,
        rollout: Callable[[Params], tuple[Trajectory, PyTree]],
        axis: str | None,
        *,
        reuse: bool,
    ) -> tuple[LearnerState, Metrics, tuple[Trajectory, PyTree]]:
        """Take one optimizer step on the loss of `rollout(params)`; also return what that returned.

        The gradient goes through the rollout. `params` are the field of the shared state.
        """

        def loss(params: Params) -> tuple[jax.Array | MaskedMean, Any]:
            trajectory, auxiliary = rollout(params)
            value, metrics = self.loss(params, state, trajectory, reuse)
            return value, (metrics, trajectory, auxiliary)

        grads, aux = global_grad(loss, state.shared.params, axis=axis)
        metrics, trajectory, auxiliary = aux
        num_frames = schedules.count_frames(trajectory, axis)
        state, gradient_metrics = self.apply_gradients(state, grads, num_frames)
        return state, {**metrics, **gradient_metrics}, (trajectory, auxiliary)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Functions of an agent that learns an update rule instead of a policy.

    Its actor parameters belong to the environments that it learns in (`LearnerState.local`), so no
    other environment can be acted in with them. Metrics named `reward_TASK` are the mean reward of
    a step in one of the tasks that the rule is learned from.
    """

    export: Callable[[LearnerState, Mapping[str, Any]], bytes]
    """`(state, origin)`: Return the learned rule as the content of a file; `origin` says where it
    was learned."""


@struct
class Context:
    """Facts about a run, besides its environment, that an agent is built with."""

    rollout_length: int = static(default=16)
    """Environment steps T of a rollout."""
    data: PyTree = None
    """Content of the settings' file, as `ReadsFile.read` returned it."""


DEFAULT_CONTEXT = Context()


@runtime_checkable
class Settings(Protocol):
    """Frozen pytree of an agent's settings."""

    def build(self, spec: EnvironmentSpec, context: Context) -> Agent:
        """Return the agent for an environment. Raises `ConfigError` where it cannot learn in it."""
        ...


@runtime_checkable
class ReadsFile(Settings, Protocol):
    """Settings of an agent that is initialized from a file."""

    @property
    def data_file(self) -> str | None:
        """Path of the file, None if there is none to read."""
        ...

    def read(self, content: bytes) -> PyTree:
        """Return arrays from the content of the file, or raise `ConfigError`."""
        ...


@struct
class Blueprint:
    """All that an agent is built from: what drivers take, and the argument of their programs."""

    settings: Any
    spec: EnvironmentSpec = static()
    context: Context = DEFAULT_CONTEXT
    environment: PyTree = None
    """The environment with its numbers alone, if it is a pytree of them: Anakin's program takes
    these, so that a run can change them."""

    @property
    def name(self) -> str:
        """Name in messages: the settings' class."""
        return type(self.settings).__name__

    def build(self) -> Agent:
        """Return the agent."""
        agent = self.settings.build(self.spec, self.context)
        return dataclasses.replace(agent, name=self.name)


def with_last_action(carry: Carry, action: jax.Array) -> Carry:
    """Return the recurrent state after actions `[B, ...]`, as `act` returns them.

    Agents that observe their last action keep it in the field `last_action`. Whoever replaces the
    action that `act` chose, as evaluations with an epsilon do, replaces it here too.
    """
    if not hasattr(carry, "last_action"):
        return carry
    return dataclasses.replace(carry, last_action=action)


def policy_params(agent: Agent, state: LearnerState) -> Params:
    """Return parameters that can act in any environment; raises `ConfigError` as `check_policy`."""
    check_policy(agent)
    return agent.actor_params(LearnerState(state.shared))


def check_policy(agent: Agent, advice: str = "it learns an update rule") -> None:
    """Raise `ConfigError`, which ends in `advice`, for an agent that learns no policy."""
    if agent.rule is not None:
        raise ConfigError(f"{agent.name} has no policy that could act elsewhere: {advice}.")
