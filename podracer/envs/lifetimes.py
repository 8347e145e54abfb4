"""Lifetimes: groups of environments that show one world each, and another one after a while.

What an agent that learns how to learn acts in: each group is the life of one learner (Oh et al.
2020, arXiv 2007.08794).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import Environment, HasWorlds, Renderable
from podracer.ops.random import random_word
from podracer.types import (
    ArraySpec,
    ConfigError,
    EnvironmentSpec,
    EnvState,
    Lifetimes,
    PyTree,
    TimeStep,
    struct,
)

T = TypeVar("T")


@struct
class LivesState:
    """The inner environment's state, and where its group's life stands."""

    inner: EnvState
    world: jax.Array  # i32, which of `Lifetimes.worlds`
    life: jax.Array  # i32, lives before this one
    age: jax.Array  # i32, steps of this life


@dataclasses.dataclass(frozen=True)
class Lives:
    """Any environment of the device, in groups of `envs` rows of the batch that share a world, for
    lives of `steps` steps; observations are those of `types.Lifetimes`.

    The last timestep of a life is shown with `last` set, and may be a terminal, too; the step after
    it ignores its action and begins the next life, in a new world. First lives begin at a random
    age, so that they do not all end together. Environments with `draw` and `enter`, those of
    `envs/worlds.py`, have many worlds; any other is one world, and just begins anew.
    """

    inner: Any
    envs: int = 64
    steps: int = 10_000

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Environment):
            kind = type(self.inner).__name__
            raise ConfigError(f"{kind} is no environment of the device, so it can have no lives.")
        if isinstance(self.inner, Renderable):  # on the instance, where `isinstance` looks
            object.__setattr__(self, "render", self._render)
        for name in ("envs", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of a lifetime must be at least 1, not {value!r}.")

    @property
    def spec(self) -> EnvironmentSpec:
        inner = self.inner.spec
        worlds = self.inner.kinds if isinstance(self.inner, HasWorlds) else (inner.name,)
        number = ArraySpec((), np.int32)
        return dataclasses.replace(
            inner,
            name=f"lifetimes:{inner.name}",
            observation={"seen": inner.observation, "life": number, "world": number},
            model=None,
            lifetimes=Lifetimes(self.envs, self.steps, worlds),
        )

    def reset(self, key: jax.Array) -> tuple[LivesState, TimeStep]:
        key, age_key = jax.random.split(key)
        word = of_group(random_word, age_key, self.envs)
        return self._begin(key, jnp.int32(0), (word % self.steps).astype(jnp.int32))

    def step(
        self, key: jax.Array, state: LivesState, action: jax.Array
    ) -> tuple[LivesState, TimeStep]:
        inner, timestep = self.inner.step(key, state.inner, action)
        age = state.age + 1
        shown = dataclasses.replace(
            timestep,
            observation={"seen": timestep.observation, "life": state.life, "world": state.world},
            last=timestep.last | (age >= self.steps),
        )
        going = LivesState(inner, state.world, state.life, age), shown
        # The key is used but once: where a life begins, what the inner step made is forgotten.
        beginning = key, state.life + 1, jnp.int32(0)
        return where_any(state.age >= self.steps, self._begin, beginning, going)

    def _render(self, state: LivesState) -> np.ndarray:
        return self.inner.render(state.inner)

    def _begin(
        self, key: jax.Array, life: jax.Array, age: jax.Array
    ) -> tuple[LivesState, TimeStep]:
        """A life in a world that the group shares; the rest of the beginning is each row's own."""
        world_key, key = jax.random.split(key)
        if isinstance(self.inner, HasWorlds):
            world = of_group(self.inner.draw, world_key, self.envs)
            kind, (inner, timestep) = world.kind, self.inner.enter(key, world)
        else:
            kind, (inner, timestep) = jnp.int32(0), self.inner.reset(key)
        observation = {"seen": timestep.observation, "life": life, "world": kind}
        state = LivesState(inner, kind, life, age)
        return state, dataclasses.replace(timestep, observation=observation)


# --- what sees the batch -------------------------------------------------------------------------


def of_group(make: Callable[[jax.Array], T], key: jax.Array, envs: int) -> T:
    """`make(key)`; of a batch, made once for each `envs` rows, with the key of the first of them.

    The groups of a batch that is no multiple end with a shorter one.
    """
    one = jax.custom_batching.custom_vmap(make)

    @one.def_vmap
    def _(size: int, batched: Any, keys: jax.Array) -> tuple[Any, Any]:
        made = jax.vmap(make)(keys[::envs])
        rows = jax.tree.map(lambda x: jnp.repeat(x, envs, axis=0)[:size], made)
        return rows, jax.tree.map(lambda _: True, rows)

    return one(key)


def where_any(
    condition: jax.Array, make: Callable[..., PyTree], args: PyTree, otherwise: PyTree
) -> PyTree:
    """`make(*args)` where the condition holds; a batch where it holds nowhere makes nothing."""

    def choose(condition: jax.Array, args: PyTree, otherwise: PyTree) -> PyTree:
        return jax.tree.map(lambda m, o: jnp.where(condition, m, o), make(*args), otherwise)

    one = jax.custom_batching.custom_vmap(choose)

    @one.def_vmap
    def _(size: int, batched: Any, *values: PyTree) -> tuple[PyTree, PyTree]:
        def spread(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        values = jax.tree.map(spread, values, tuple(batched))
        some = jnp.any(values[0])
        chosen = jax.lax.cond(some, jax.vmap(choose), lambda c, a, otherwise: otherwise, *values)
        return chosen, jax.tree.map(lambda _: True, chosen)

    return one(condition, args, otherwise)
