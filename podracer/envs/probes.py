"""Probe environments: tiny, with known values, each to detect one kind of bug.

After A. Jones 2021, "Debugging Reinforcement Learning Systems". Each probe adds one thing to the
previous one: the first that an agent does not learn shows where its bug is. Values are those of
the optimal policy with the discount `GAMMA`. `make("probe:NAME")` makes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from podracer import types
from podracer.environment import restart, transition
from podracer.fields import struct

GAMMA = 0.9
_BINARY = types.Discrete(2)


@struct
class ProbeState:
    """State of a probe."""

    cue: jax.Array  # f32, 1 or -1 with equal probability, drawn at the reset
    time: jax.Array  # i32, steps since the reset


@dataclasses.dataclass(frozen=True)
class Probe:
    """An environment with episodes of `length` steps and a known solution."""

    name: str
    description: str
    observe: Callable[[ProbeState], jax.Array]  # f32 [n]
    reward: Callable[[ProbeState, jax.Array], jax.Array | float]  # for an action in a state
    values: tuple[tuple[tuple[float, ...], float], ...]  # (observation, value) of early states
    best_return: float  # mean, undiscounted
    best_actions: tuple[int | float, ...] = ()  # in the states of `values`, if not any
    length: int = 1
    timeout: bool = False  # whether episodes end by a time-out, not by a terminal
    action: types.ActionSpace = _BINARY

    @property
    def spec(self) -> types.EnvironmentSpec:
        return types.EnvironmentSpec(
            f"probe:{self.name}", types.ArraySpec((len(self.values[0][0]),)), self.action
        )

    def reset(self, key: jax.Array) -> tuple[ProbeState, types.TimeStep]:
        state = ProbeState(jax.random.rademacher(key, (), jnp.float32), jnp.int32(0))
        return state, restart(self.observe(state))

    def step(
        self, key: jax.Array, state: ProbeState, action: jax.Array
    ) -> tuple[ProbeState, types.TimeStep]:
        reward = self.reward(state, action)
        state = ProbeState(state.cue, state.time + 1)
        last = state.time >= self.length
        terminal = False if self.timeout else last
        return state, transition(self.observe(state), reward, terminal=terminal, timeout=last)


def _observe_constant(state: ProbeState) -> jax.Array:
    return jnp.ones(1)


def _observe_cue(state: ProbeState) -> jax.Array:
    return state.cue[None]


def _match_cue(state: ProbeState, action: jax.Array) -> jax.Array:
    return jnp.where((action == 1) == (state.cue > 0), 1.0, -1.0)


MEMORY_LENGTH = 4  # steps of an episode of the memory probes


def _observe_first_cue(state: ProbeState) -> jax.Array:
    is_last_step = jnp.float32(state.time == MEMORY_LENGTH - 1)
    return jnp.stack([jnp.where(state.time == 0, state.cue, 0.0), is_last_step])


PROBES = {
    probe.name: probe
    for probe in (
        Probe(
            "constant",
            "one step, reward 1: the value loss",
            observe=_observe_constant,
            reward=lambda state, action: 1.0,
            values=(((1.0,), 1.0),),
            best_return=1.0,
        ),
        Probe(
            "observation",
            "one step, the reward is the observation, 1 or -1: the value network",
            observe=_observe_cue,
            reward=lambda state, action: state.cue,
            values=(((1.0,), 1.0), ((-1.0,), -1.0)),
            best_return=0.0,
        ),
        Probe(
            "discount",
            "two steps, reward 1 at the second: discounting and bootstrapping",
            observe=lambda state: jnp.float32(state.time)[None],
            reward=lambda state, action: state.time,
            values=(((0.0,), GAMMA), ((1.0,), 1.0)),
            best_return=1.0,
            length=2,
        ),
        Probe(
            "action",
            "one step, reward 1 for action 1 and -1 for action 0: the policy loss",
            observe=_observe_constant,
            reward=lambda state, action: 2 * action - 1,
            values=(((1.0,), 1.0),),
            best_actions=(1,),
            best_return=1.0,
        ),
        Probe(
            "policy",
            "one step, the better action depends on the observation: policy and value together",
            observe=_observe_cue,
            reward=_match_cue,
            values=(((1.0,), 1.0), ((-1.0,), 1.0)),
            best_actions=(1, 0),
            best_return=1.0,
        ),
        Probe(
            "timeout",
            "reward 1 at each step, a time-out every 5 steps: bootstrapping through time-outs",
            observe=_observe_constant,
            reward=lambda state, action: 1.0,
            values=(((1.0,), 1 / (1 - GAMMA)),),
            best_return=5.0,
            length=5,
            timeout=True,
        ),
        Probe(
            "continuous",
            "one step, reward -(action - cue / 2)^2: policies over real actions",
            observe=_observe_cue,
            reward=lambda state, action: -jnp.square(action[0] - state.cue / 2),
            values=(((1.0,), 0.0), ((-1.0,), 0.0)),
            best_actions=(0.5, -0.5),
            best_return=0.0,
            action=types.Continuous((-1.0,), (1.0,)),
        ),
        Probe(
            "multidiscrete",
            "one step, two actions at once that depend on the observation: products of policies",
            observe=_observe_cue,
            reward=lambda state, action: (
                0.5 * _match_cue(state, action[0])
                + jnp.where(action[1] == 1 + state.cue, 0.5, -0.5)
            ),
            values=(((1.0,), 1.0), ((-1.0,), 1.0)),
            best_actions=(1, 2, 0, 0),
            best_return=1.0,
            action=types.MultiDiscrete((2, 3)),
        ),
        Probe(
            "memory",
            "the last action must match a cue shown at the first step: 0 on average without memory",
            observe=_observe_first_cue,
            reward=lambda state, action: (
                (state.time == MEMORY_LENGTH - 1) * _match_cue(state, action)
            ),
            values=(
                ((1.0, 0.0), GAMMA ** (MEMORY_LENGTH - 1)),
                ((-1.0, 0.0), GAMMA ** (MEMORY_LENGTH - 1)),
            ),
            best_return=1.0,
            length=MEMORY_LENGTH,
        ),
        Probe(
            "continuous-memory",
            "reward -(action - cue / 2)^2 at the last step, for a cue shown at the first: memories "
            "of policies over real actions",
            observe=_observe_first_cue,
            reward=lambda state, action: (
                (state.time == MEMORY_LENGTH - 1) * -jnp.square(action[0] - state.cue / 2)
            ),
            values=(((1.0, 0.0), 0.0), ((-1.0, 0.0), 0.0)),
            best_return=0.0,
            length=MEMORY_LENGTH,
            action=types.Continuous((-1.0,), (1.0,)),
        ),
    )
}
