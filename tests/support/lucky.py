"""An environment with a part of the observation that is for critics: luck, in each reward."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import podracer
from podracer.types import ArraySpec, Continuous, Discrete, EnvironmentSpec

ACTIONS = Discrete(2)


@podracer.struct
class Draws:
    cue: jax.Array  # f32 [1], 1 or -1, the policy's
    luck: jax.Array  # f32 [1], 1 or -1, the critic's


@dataclasses.dataclass(frozen=True)
class Lucky:
    """One step, rewarded by luck and by an action that fits the cue: the best value is 1 + luck."""

    space: Any = ACTIONS
    groups: tuple[tuple[str, tuple[str, ...]], ...] = (("actor", ("cue",)),)

    @property
    def spec(self) -> EnvironmentSpec:
        observation = {"cue": ArraySpec((1,)), "luck": ArraySpec((1,))}
        return EnvironmentSpec("lucky", observation, self.space, groups=dict(self.groups))

    def reset(self, key: jax.Array) -> Any:
        state = Draws(*jax.random.rademacher(key, (2, 1), jnp.float32))
        return state, podracer.restart(vars(state))

    def step(self, key: jax.Array, state: Draws, action: jax.Array) -> Any:
        cue, luck = state.cue[0], state.luck[0]
        if isinstance(self.space, Continuous):
            fit = 1.0 - (action[0] - cue / 2) ** 2
        else:
            fit = jnp.where((action == 1) == (cue > 0), 1.0, -1.0)
        return state, podracer.transition(vars(state), fit + luck, terminal=True)


LUCKY = podracer.auto_reset(Lucky())
LUCKY_BOX = podracer.auto_reset(Lucky(Continuous((-1.0,), (1.0,))))
