"""Lifetimes: a device environment in groups, each of which has one task for a lifetime.

The environment of agents that learn an update rule: a group is the lifetime of one student in one
task, and then of the next (Oh et al. 2020, arXiv 2007.08794, section 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import Environment, TaskGroups, features, wrap_features
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.ops.random import random_word
from podracer.types import ArraySpec, EnvironmentSpec, EnvState, PyTree, TimeStep

T = TypeVar("T")


@struct
class LifetimeState:
    """State of the inner environment and progress of its group's lifetime."""

    inner: EnvState
    task: jax.Array  # i32, which of `TaskGroups.tasks`
    lifetime: jax.Array  # i32, number of lifetimes before this one
    age: jax.Array  # i32, steps of this lifetime so far


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """Any environment of the device, in groups of `envs` consecutive rows of the batch.

    A group shares a task for a lifetime of `steps` steps. Observations and
    `EnvironmentSpec.extension` are those of `TaskGroups`; `task_count` numbers the lifetimes.

    The last timestep of a lifetime has `last` set, and may also be a terminal; the next step
    ignores its action and starts the next lifetime in a new task. First lifetimes start at a
    random age, so that they do not all end together. Environments with `Features.kinds` of worlds
    have many tasks, their worlds; any other one repeats a single task.
    """

    inner: Any
    envs: int = 64
    steps: int = 10_000

    def __post_init__(self) -> None:
        has_spec = isinstance(getattr(self.inner, "spec", None), EnvironmentSpec)
        if not (has_spec and isinstance(self.inner, Environment)):
            kind = getattr(self.inner, "__name__", type(self.inner).__name__)
            raise ConfigError(f"{kind} is not a device environment, so it cannot have lifetimes.")
        wrap_features(self, self.inner, "check_agent", render=self._render)
        for name in ("envs", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of a lifetime must be at least 1, not {value!r}.")

    @property
    def spec(self) -> EnvironmentSpec:
        inner = self.inner.spec
        tasks = features(self.inner).kinds or (inner.name,)
        number = ArraySpec((), np.int32)
        return dataclasses.replace(
            inner,
            name=f"lifetimes:{inner.name}",
            observation={"observation": inner.observation, "task": number, "task_count": number},
            extension=TaskGroups(self.envs, self.steps, tasks),
        )

    def reset(self, key: jax.Array) -> tuple[LifetimeState, TimeStep]:
        key, age_key = jax.random.split(key)
        word = shared_by_group(random_word, age_key, self.envs)
        return self._begin(key, jnp.int32(0), (word % self.steps).astype(jnp.int32))

    def step(
        self, key: jax.Array, state: LifetimeState, action: jax.Array
    ) -> tuple[LifetimeState, TimeStep]:
        inner, timestep = self.inner.step(key, state.inner, action)
        age = state.age + 1
        timestep = dataclasses.replace(
            timestep,
            observation=_observation(timestep, state.task, state.lifetime),
            last=timestep.last | (age >= self.steps),
        )
        going_on = LifetimeState(inner, state.task, state.lifetime, age), timestep
        # The key is used only once: where a lifetime begins, the inner step is discarded.
        next_lifetime = key, state.lifetime + 1, jnp.int32(0)
        return where_any(state.age >= self.steps, self._begin, next_lifetime, going_on)

    def _render(self, state: LifetimeState) -> np.ndarray:
        return self.inner.render(state.inner)

    def _begin(
        self, key: jax.Array, lifetime: jax.Array, age: jax.Array
    ) -> tuple[LifetimeState, TimeStep]:
        """Begin a lifetime in a task that the group shares, with an episode for each row."""
        task_key, key = jax.random.split(key)
        if features(self.inner).kinds:
            world = shared_by_group(self.inner.draw, task_key, self.envs)
            task, (inner, timestep) = world.kind, self.inner.enter(key, world)
        else:
            task, (inner, timestep) = jnp.int32(0), self.inner.reset(key)
        observation = _observation(timestep, task, lifetime)
        state = LifetimeState(inner, task, lifetime, age)
        return state, dataclasses.replace(timestep, observation=observation)


def _observation(timestep: TimeStep, task: jax.Array, lifetime: jax.Array) -> dict[str, PyTree]:
    return {"observation": timestep.observation, "task": task, "task_count": lifetime}


def shared_by_group(function: Callable[[jax.Array], T], key: jax.Array, envs: int) -> T:
    """Return `function(key)`; in a batch, one result for each `envs` rows.

    It is computed with the key of the first row of its group. Where the batch is not a multiple of
    `envs`, the last group is shorter.
    """
    batched_function = jax.custom_batching.custom_vmap(function)

    @batched_function.def_vmap
    def _(size: int, batched: Any, keys: jax.Array) -> tuple[Any, Any]:
        groups = jax.vmap(function)(keys[::envs])
        rows = jax.tree.map(lambda x: jnp.repeat(x, envs, axis=0)[:size], groups)
        return rows, jax.tree.map(lambda _: True, rows)

    return batched_function(key)


def where_any(
    condition: jax.Array, function: Callable[..., PyTree], args: PyTree, otherwise: PyTree
) -> PyTree:
    """Return `function(*args)` where the condition holds, else `otherwise`.

    A batch in which it holds nowhere does not compute the function at all.
    """

    def choose(condition: jax.Array, args: PyTree, otherwise: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), function(*args), otherwise)

    batched_choose = jax.custom_batching.custom_vmap(choose)

    @batched_choose.def_vmap
    def _(size: int, batched: Any, *values: PyTree) -> tuple[PyTree, PyTree]:
        def spread(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        values = jax.tree.map(spread, values, tuple(batched))
        is_any = jnp.any(values[0])
        results = jax.lax.cond(is_any, jax.vmap(choose), lambda c, a, otherwise: otherwise, *values)
        return results, jax.tree.map(lambda _: True, results)

    return batched_choose(condition, args, otherwise)
