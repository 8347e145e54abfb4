"""What an agent is, and the check that a user can call.

An agent is a frozen pytree (see `types.struct`): its float hyperparameters are leaves, so that a
population may carry different ones in one program; everything else is static structure. It is
made for an environment by filling in `spec`, and holds no arrays.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from podracer.environment import action_struct
from podracer.types import (
    Carry,
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    Step,
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


def check_agent(agent: Any, *, num_envs: int = 2, length: int = 3) -> None:
    """Reject an agent that breaks the contract, by abstract evaluation: nothing is compiled.

    Raises `ConfigError` naming the method, what was expected and what came.
    """
    name = type(agent).__name__
    if not isinstance(agent, Agent):
        missing = [m for m in ("init", "carry", "actor_params", "act", "learn", "spec")
                   if not hasattr(agent, m)]  # fmt: skip
        raise ConfigError(f"{name} is not an agent: it lacks {', '.join(missing)}.")
    if agent.spec is None:
        raise ConfigError(f"{name} has no `spec`: make it for an environment first.")
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    key = jax.eval_shape(lambda: jax.random.key(0))
    # The agent itself is an argument: its float leaves must not steer Python control flow.
    state = _trace(name, "init", lambda a, k: a.init(k, num_envs), agent, key)
    if not isinstance(state, LearnerState):
        raise ConfigError(f"{name}.init must return a LearnerState, not {type(state).__name__}.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.local):
        if not leaf.shape or not leaf.shape[0] or num_envs % leaf.shape[0]:
            raise ConfigError(
                f"{name}.init: local{jax.tree_util.keystr(path)} must lead with num_envs "
                f"({num_envs}) or a number that divides it, but its shape is {leaf.shape}."
            )
    trajectory = _trace(
        name, "act", lambda a, s, k: _abstract_rollout(a, s, k, num_envs, length),
        agent, state, keys,
    )  # fmt: skip
    result = _trace(name, "learn", lambda a, *x: a.learn(*x, None), agent, state, trajectory, key)
    new_state, metrics = result
    if not all(x.shape == () for x in jax.tree.leaves(metrics)):
        raise ConfigError(f"{name}.learn must return scalar metrics.")
    before, after = jax.tree.structure(state), jax.tree.structure(new_state)
    if before != after:
        raise ConfigError(f"{name}.learn must keep the state's structure: {before} != {after}.")
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new_state), strict=True
    ):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ConfigError(
                f"{name}.learn must keep state{jax.tree_util.keystr(path)} as "
                f"{old.dtype}{list(old.shape)}, but it became {new.dtype}{list(new.shape)}."
            )


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


def _trace(name: str, method: str, function: Any, *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"{name}.{method} cannot be traced: {reason}") from error


def _abstract_rollout(
    agent: Agent, state: LearnerState, keys: jax.Array, num_envs: int, length: int
) -> Trajectory:
    assert agent.spec is not None

    def zeros(leaf: Any) -> jax.Array:
        return jnp.zeros((num_envs, *leaf.shape), leaf.dtype)

    timestep = TimeStep(
        observation=jax.tree.map(zeros, agent.spec.observation),
        reward=jnp.zeros(num_envs),
        discount=jnp.ones(num_envs),
        first=jnp.ones(num_envs, bool),
        last=jnp.zeros(num_envs, bool),
    )
    carry = agent.carry(num_envs)
    params = agent.actor_params(state)
    action, extras, new_carry = agent.act(params, carry, timestep, keys, True)
    want = action_struct(agent.spec)
    if action.shape != (num_envs, *want.shape) or action.dtype != want.dtype:
        raise ConfigError(
            f"{type(agent).__name__}.act must return actions {want.dtype}"
            f"{[num_envs, *want.shape]}, but they are {action.dtype}{list(action.shape)}."
        )
    if jax.tree.structure(carry) != jax.tree.structure(new_carry):
        raise ConfigError(f"{type(agent).__name__}.act must keep the structure of its memory.")
    step = Step(timestep, action, extras)
    steps = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), step)
    return Trajectory(steps, timestep, carry, new_carry)
