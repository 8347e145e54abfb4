"""Agents: the protocol that drivers call.

An agent is a frozen pytree (see `types.struct`) without arrays. Its float hyperparameters are
leaves, so that the members of a population may have different ones in one program; everything else
is static structure. Filling in `spec` makes an agent for an environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from podracer.means import Mean
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
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@runtime_checkable
class Agent(Protocol):
    """Five pure functions; `B` is the number of environments of one shard."""

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        """Return the state before the first update.

        Leaves of `local` lead with `num_envs`, or with the number of equal groups of environments,
        one after another in the batch, that share them.
        """
        ...

    def carry(self, num_envs: int) -> Carry:
        """Return the initial recurrent state `[B, ...]`, `()` if there is none."""
        ...

    def actor_params(self, state: LearnerState) -> Params:
        """Return the parameters that `act` takes, from the learner's state.

        They depend on `shared` alone, unless the agent is a `MetaLearner`.
        """
        ...

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Choose actions `[B, ...]` for a timestep `[B, ...]` with one key for each environment.

        Returns the actions, extras that `learn` needs (leaves `[B, ...]`), and the new recurrent
        state.
        `explore=False` asks for the agent's best action.
        """
        ...

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update the state from one shard's trajectory; also return scalar metrics, or `Mean`s.

        The update is applied if the shared state and the metrics `loss`, `*_loss` and
        `*gradient_norm` are finite, else the run ends; other metrics are diagnostics. `axis` is
        the name of the mesh axis that the batch is sharded over, None on one device.
        """
        ...


@runtime_checkable
class FusedAgent(Agent, Protocol):
    """Agent whose loss is a function of the outputs that `act` computed.

    Its gradient may go through the rollout itself and reuse that forward pass (Hessel et al. 2021,
    the minimal unit of Anakin).
    """

    def loss(
        self, params: Params, state: LearnerState, trajectory: Trajectory, reuse: bool
    ) -> tuple[jax.Array | Mean, Metrics]:
        """Return the mean loss over one shard, differentiable in `params`, and metrics.

        `params` are what `actor_params` returns for `state`, which is the learner's.

        With `reuse` the network's outputs are those that `act` stored in `extras`, and only the
        final timestep needs a forward pass; without it all T+1 timesteps get a second one.
        """
        ...

    def apply_gradients(
        self, state: LearnerState, grads: Params, num_frames: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        """Apply one optimizer step with gradients that are already averaged over the mesh.

        They are those of `num_frames` valid transitions, uint32 [], of all shards together.
        """
        ...


@runtime_checkable
class MetaLearner(Agent, Protocol):
    """Agent that learns an update rule instead of a policy.

    Its actor parameters belong to the environments that it learns in (`LearnerState.local`), so no
    other environment can be acted in with them. Metrics named `reward_TASK` are the mean reward of
    a step in one of the tasks that the rule is learned from.
    """

    def export(self, state: LearnerState, about: Mapping[str, Any]) -> bytes:
        """Return the learned rule as the content of a file; `about` says where it was learned."""
        ...

    def draw(self, state: LearnerState, figure: Figure) -> None:
        """Draw what the learned rule does, with titles and labels, on an empty figure."""
        ...


@runtime_checkable
class NeedsRolloutLength(Agent, Protocol):
    """Agent whose state depends on the rollout length T of its driver, filled in as `spec` is."""

    @property
    def rollout_length(self) -> int | None: ...


@runtime_checkable
class HasLastAction(Protocol):
    """Recurrent state of an agent that observes its last action.

    Whoever replaces the action that `act` chose, as evaluations with an epsilon do, replaces it
    here too.
    """

    last_action: jax.Array
    """Actions `[B, ...]`, as `act` returned them."""


@runtime_checkable
class NeedsFile(Agent, Protocol):
    """Agent that is initialized from the content of a file, filled in as `spec` is.

    In a run with the weights of another, `rule` in the learner's shared state is still the file's.
    """

    @property
    def data_file(self) -> str:
        """Path of the file."""
        ...

    def with_data(self, content: bytes) -> Agent:
        """Return the agent with the content of its file, or raise `ConfigError`."""
        ...


def require_spec(spec: EnvironmentSpec | None) -> EnvironmentSpec:
    """Return the environment's specification, or raise `ConfigError` where it is None."""
    if spec is None:
        raise ConfigError("the agent has no `spec`: make it for an environment first.")
    return spec


def require_rollout_length(agent: NeedsRolloutLength) -> int:
    """Return the rollout length of the agent's driver, or raise `ConfigError` where it is None."""
    if agent.rollout_length is None:
        name = type(agent).__name__
        raise ConfigError(f"{name} has no `rollout_length`: give it that of the driver.")
    return agent.rollout_length


def policy_params(agent: Agent, state: LearnerState) -> Params:
    """Return parameters that can act in any environment; raises `ConfigError` as `check_policy`."""
    check_policy(agent)
    return agent.actor_params(LearnerState(state.shared))


def check_policy(agent: Agent, advice: str = "it learns an update rule") -> None:
    """Raise `ConfigError`, which ends in `advice`, for an agent that learns no policy."""
    if isinstance(agent, MetaLearner):
        raise ConfigError(
            f"{type(agent).__name__} has no policy that could act elsewhere: {advice}."
        )
