"""Agents: the protocol that drivers call.

An agent is a frozen pytree (see `types.struct`): its float hyperparameters are leaves, so that a
population may carry different ones in one program; everything else is static structure. It is
made for an environment by filling in `spec`, and holds no arrays.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax

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


@runtime_checkable
class Agent(Protocol):
    """Five pure functions. `B` is the batch they are called with: one shard of a driver's."""

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        """A fresh state; leaves of `local` lead with `num_envs`, or with the number of equal groups
        of environments, one after another in the batch, that share them."""
        ...

    def carry(self, num_envs: int) -> Carry:
        """Empty memory `[B, ...]`, row i that of environment i; `()` for agents without any."""
        ...

    def actor_params(self, state: LearnerState) -> Params:
        """The part of the state that acting needs."""
        ...

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Choose actions `[B, ...]` for a timestep `[B, ...]` with one key for each environment.

        Returns the actions, what `learn` wants to know of the choice (leaves `[B, ...]`), and the
        new memory. `explore=False` asks for the agent's best action.
        """
        ...

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update from one shard's trajectory. `axis` names the mesh axis, None on one device."""
        ...


@runtime_checkable
class FusedAgent(Agent, Protocol):
    """An agent whose loss is a function of what acting computed: its gradient may go through the
    rollout itself and reuse that forward pass (Hessel et al. 2021, the minimal unit of Anakin)."""

    def loss(
        self, params: Params, trajectory: Trajectory, reuse: bool
    ) -> tuple[jax.Array, Metrics]:
        """Mean loss over one shard, differentiable in `params` (what `actor_params` returns).

        With `reuse` the network's outputs are those that acting left in `extras`, and only the
        final timestep needs a forward pass; without, all T+1 timesteps get a second one.
        """
        ...

    def apply_gradients(self, state: LearnerState, grads: Params) -> tuple[LearnerState, Metrics]:
        """One optimizer step with gradients that are already averaged over the mesh."""
        ...


def policy_params(agent: Agent, state: LearnerState, advice: str = "") -> Params:
    """What acts in any environment, also in others than those that the agent learns in. Raises
    `ConfigError`, with advice, where acting needs more than `shared`: each environment has its own.
    """
    try:
        return agent.actor_params(LearnerState(state.shared))
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{type(agent).__name__} is no policy that could act elsewhere: "
            f"{advice or '`podracer rule` writes what it learned'}."
        ) from error


def check_policy(agent: Agent, num_envs: int, advice: str) -> None:
    """`ConfigError` where `policy_params` would raise it, by abstract evaluation."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: agent.init(key, num_envs), key)
    jax.eval_shape(lambda state: policy_params(agent, state, advice), state)
