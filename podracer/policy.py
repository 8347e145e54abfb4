"""Trained policies, for programs that have a loop of their own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from podracer.agent import Agent, NotPickled, policy_params
from podracer.arguments import typed
from podracer.errors import ConfigError
from podracer.evaluate import ActingRule
from podracer.ops.action_masks import component_masks
from podracer.ops.distributions import ActionDistribution, SquashedNormal
from podracer.types import (
    NO_ACTION,
    ActionSpace,
    ArraySpec,
    Carry,
    Continuous,
    LearnerState,
    Params,
    PyTree,
    TimeStep,
    blank_timestep,
    describe,
)


class Policy(NotPickled):
    """A trained policy: `action = policy(observation)`, for one observation or a batch.

    Observations and actions are those of `spec`: normalization, memory and the scaling of actions
    are inside. NumPy in, NumPy out, and JAX arrays likewise. A policy with memory remembers from
    call to call; `reset` begins new episodes. Each batch size is compiled once.
    """

    @typed
    def __init__(
        self, agent: Agent, state: LearnerState, *, sampled: bool = False, seed: int = 0
    ) -> None:
        """Make the policy of an agent at a learner's state.

        It takes the agent's best actions, or with `sampled` those that it explores with, drawn with
        `seed`. Raises `ConfigError` for an agent that learns no policy.
        """
        params = policy_params(agent, state)
        self.spec = agent.policy_spec
        act = partial(_act, agent, ActingRule("sampled" if sampled else "greedy"))
        self._act, self._params = jax.jit(act), params
        self._agent, self._distribution = agent, jax.jit(partial(_distribution, agent))
        self.has_memory = _changes_memory(act, params, self.spec.observation, agent.carry(1))
        """Whether actions depend on what was observed before in the episode."""
        self._key = jax.random.key(seed)
        self._num_calls = 0
        self.reset()

    def __repr__(self) -> str:
        return f"Policy({self.spec})"

    def reset(self, rows: Any = None) -> None:
        """Begin new episodes at the next call: everywhere, or in some rows of the batch.

        `rows` is bool `[B]`, such as the dones of vectorized environments, or indices.
        """
        if rows is None:
            self._memory, self._first = None, None
        elif self._first is None:
            raise ConfigError("reset(rows) needs a call with a batch before it.")
        else:
            rows = np.asarray(rows)
            self._first[rows if rows.dtype == bool else rows.astype(int)] = True

    def copy(self, seed: int = 0) -> Policy:
        """Return a policy of the same parameters with a memory of its own; it compiles nothing.

        With sampled actions it draws others, with `seed`.
        """
        policy = copy.copy(self)
        policy._key, policy._num_calls = jax.random.key(seed), 0
        policy.reset()
        return policy

    def __call__(self, observation: PyTree, reward: Any = 0.0) -> Any:
        """Return the action for an observation as `spec` has it, or actions `[B, ...]` for a batch.

        `reward`, of the step that led here, a number or `[B]`, matters only to agents that observe
        it, such as R2D2. Raises `ConfigError` where shapes do not fit, or numbers that are not of
        the environment's integers or not finite, and for one observation whose mask allows no
        action: in a batch an episode may be over. Floats and masks of JAX are not waited for.
        """
        batch_size, memory, inputs = self._inputs(observation, reward)
        actions, self._memory = self._act(
            self._params, memory, *inputs, self._key, np.uint32(self._num_calls)
        )
        self._first = np.zeros(len(inputs[-1]), bool)
        self._num_calls = (self._num_calls + 1) % 2**32  # a server makes more in days
        if not any(isinstance(x, jax.Array) for x in jax.tree.leaves(observation)):
            actions = np.asarray(actions)
        return actions[0] if batch_size is None else actions

    def distribution(
        self, observation: PyTree, reward: Any = 0.0
    ) -> ActionDistribution | SquashedNormal:
        """Return the distribution over actions, from which a policy with `sampled` draws.

        Its JAX arrays are `[n]` for an observation and `[B, n]` for a batch: logits of actions
        numbered from 0, or means and the logarithms of scales in units where the bounds are -1 and
        1. The memory stays as it is. Raises `ConfigError` as a call does, and for an agent that
        acts by values, a search or noise.
        """
        if self._agent.distribution is None:
            raise ConfigError(
                f"{self._agent.name} has no distribution over actions, because it acts by values, "
                "a search or noise: take an actor-critic such as PPO or SAC."
            )
        batch_size, memory, inputs = self._inputs(observation, reward)
        distribution = self._distribution(self._params, memory, *inputs)
        return jax.tree.map(lambda x: x[0] if batch_size is None else x, distribution)

    def _inputs(
        self, observation: PyTree, reward: Any
    ) -> tuple[int | None, Carry, tuple[PyTree, np.ndarray, np.ndarray]]:
        """Return the batch's size, the memory, and observations, rewards and `first` of rows."""
        if isinstance(self.spec.observation, ArraySpec) and isinstance(observation, list):
            observation = np.asarray(observation)
        batch_size = batch_size_of(self.spec.observation, observation)
        rows = 1 if batch_size is None else batch_size
        observations = jax.tree.map(
            lambda spec, x: _as_dtype(spec, x).reshape(rows, *spec.shape),
            self.spec.observation,
            observation,
        )
        masks = component_masks(self.spec, observations) if batch_size is None else ()
        if any(isinstance(mask, np.ndarray) and not mask.any() for mask in masks):
            raise ConfigError(NO_ACTION)
        if self._first is not None and len(self._first) == rows:
            memory, first = self._memory, self._first.copy()
        elif self._first is None or not self.has_memory:
            memory, first = self._agent.carry(rows), np.ones(rows, bool)
        else:
            raise ConfigError(
                f"the policy was called with {len(self._first)} observations and now with "
                f"{rows}: call `reset` between them."
            )
        rewards = np.asarray(reward, np.float32)
        if not np.isfinite(rewards).all():
            raise ConfigError("the reward is not finite.")
        if rewards.shape not in ((), (rows,)):
            raise ConfigError(f"reward has shape {rewards.shape}: it must be () or ({rows},).")
        return batch_size, memory, (observations, np.broadcast_to(rewards, rows), first)


def _as_dtype(spec: ArraySpec, x: Any) -> np.ndarray | jax.Array:
    """Return an array with the dtype of a spec, an array of JAX of that dtype as it is.

    Raises `ConfigError` if integers would change or are no states, or floats are not finite.
    """
    is_exact = not jnp.issubdtype(spec.dtype, jnp.floating)
    if isinstance(x, jax.Array):
        if is_exact and jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"observations are {spec.dtype}, but these are {x.dtype}.")
        if x.dtype == spec.dtype or not is_exact or isinstance(x, Tracer):
            return x  # without waiting for its numbers
    array = np.asarray(x)
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(spec.dtype, copy=False)
    if is_exact and array.dtype != spec.dtype and not np.array_equal(converted, array):
        raise ConfigError(f"observations are {spec.dtype}, but these have other numbers.")
    if converted.dtype != array.dtype and (np.isinf(converted) & np.isfinite(array)).any():
        raise ConfigError(f"observations are {spec.dtype}, but these have larger numbers.")
    if not is_exact and not np.isfinite(converted).all():
        raise ConfigError("an observation has numbers that are not finite (NaN or infinity).")
    if spec.num_values is not None:
        low, high = spec.start, spec.start + spec.num_values - 1
        if not ((converted >= low) & (converted <= high)).all():
            raise ConfigError(f"observations are {low} to {high}, but these have other numbers.")
    return converted


def _act(
    agent: Agent,
    rule: ActingRule,
    params: Params,
    memory: Carry,
    observation: PyTree,
    reward: jax.Array,
    first: jax.Array,
    key: jax.Array,
    call: jax.Array,
) -> tuple[jax.Array, Carry]:
    """Return actions `[B, ...]` and the new memory; all arrays lead with B but `key`, `call`."""
    timestep = _timestep(agent, observation, reward, first)
    indices = jnp.arange(len(first), dtype=jnp.uint32)
    actions, memory = rule.act(agent, params, memory, timestep, key, indices, call)
    return add_start(agent.spec.action, actions), memory


def _distribution(
    agent: Agent,
    params: Params,
    memory: Carry,
    observation: PyTree,
    reward: jax.Array,
    first: jax.Array,
) -> ActionDistribution | SquashedNormal:
    assert agent.distribution is not None
    return agent.distribution(params, memory, _timestep(agent, observation, reward, first))[0]


def _timestep(agent: Agent, observation: PyTree, reward: jax.Array, first: jax.Array) -> TimeStep:
    """Return the timestep of observations in the environment's own numbers."""
    specs = agent.policy_spec.observation
    observation = jax.tree.map(lambda spec, x: x.astype(spec.dtype), specs, observation)
    observation = from_start(specs, observation)
    timestep = blank_timestep(agent.spec, len(first))
    if agent.groups:  # the rest is for critics alone
        observation = {**timestep.observation, **observation}
    return dataclasses.replace(timestep, observation=observation, reward=reward, first=first)


def _changes_memory(
    act: Callable[..., tuple[jax.Array, Carry]], params: Params, specs: PyTree, memory: Carry
) -> bool:
    """Return whether acting ever changes the memory, not only carries constants such as epsilon."""
    if not jax.tree.leaves(memory):
        return False

    def new_memory(memory: Carry) -> Carry:
        observation = jax.tree.map(lambda spec: jnp.zeros((1, *spec.shape), spec.dtype), specs)
        first, key, call = jnp.ones(1, bool), jax.random.key(0), jnp.uint32(0)
        return act(params, memory, observation, jnp.zeros(1), first, key, call)[1]

    program = jax.make_jaxpr(new_memory)(memory).jaxpr
    return program.outvars != program.invars


def batch_size_of(specs: PyTree, observation: PyTree) -> int | None:
    """Return the size of a batch of observations, None for a single one.

    Raises `ConfigError` where the shapes are neither.
    """
    if jax.tree.structure(specs) != jax.tree.structure(observation):
        raise ConfigError(
            f"an observation must be {describe(specs)}, but it is a {type(observation).__name__}"
            f"{f' of {list(observation)}' if isinstance(observation, dict) else ''}."
        )
    expected = [spec.shape for spec in jax.tree.leaves(specs)]
    shapes = [np.shape(x) for x in jax.tree.leaves(observation)]
    if shapes == expected:
        return None
    batch = shapes[0][:1]
    if batch and shapes == [batch + shape for shape in expected]:
        return batch[0]
    raise ConfigError(
        f"an observation must be {describe(specs)}, or a batch of B with [B, ...], but it has the "
        f"shape {', '.join(map(str, shapes))}."
    )


def from_start(specs: PyTree, observation: PyTree) -> PyTree:
    """Return an observation whose numbers begin at 0, of one in the environment's own numbers."""
    return jax.tree.map(lambda spec, x: x - spec.start if spec.start else x, specs, observation)


def add_start(space: ActionSpace, action: Any) -> Any:
    """Return actions `[*b, ...]` in the environment's own numbers."""
    if isinstance(space, Continuous) or not np.any(space.start):
        return action
    start = np.asarray(space.start, np.int32)
    return action + start.reshape((1,) * (action.ndim - start.ndim) + start.shape)
