"""Demonstrations in CartPole, and what an agent is built for where a data set is replayed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import podracer
from podracer.environment import action_struct
from podracer.types import ArraySpec, EnvironmentSpec
from podracer_offline import Dataset
from podracer_offline.records import Record


@dataclasses.dataclass(frozen=True)
class Recorded:
    """An environment as a data set of it has it."""

    inner: Any

    @property
    def spec(self) -> EnvironmentSpec:
        spec = self.inner.spec
        action = action_struct(spec)
        record = Record(spec.observation, ArraySpec(action.shape, action.dtype))
        return dataclasses.replace(spec, observation=record)


def teacher(num_envs: int = 16, length: int = 200, seed: int = 0) -> Dataset:
    """Episodes of a rule of thumb: push towards the side that the pole falls to."""
    env = podracer.make("cartpole")

    def step(loop, key):
        state, timestep = loop
        action = (timestep.observation @ jnp.asarray([0.1, 0.3, 1.0, 1.0]) > 0).astype(jnp.int32)
        state, after = jax.vmap(env.step)(jax.random.split(key, num_envs), state, action)
        return (state, after), (timestep.observation, action, after.reward, after.discount == 0)

    start = jax.vmap(env.reset)(jax.random.split(jax.random.key(seed), num_envs))
    (_, final), columns = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), length))
    # An episode of each row, cut after so many steps.
    columns = [np.asarray(x).swapaxes(0, 1) for x in columns]
    observation, action, reward, terminal = (x.reshape(-1, *x.shape[2:]) for x in columns)
    timeout = np.zeros((num_envs, length), bool)
    timeout[:, -1] = True
    cut = ~columns[3][:, -1]
    return Dataset(
        observation=observation,
        action=action,
        reward=reward,
        terminal=terminal,
        timeout=timeout.reshape(-1),
        final_observation=np.asarray(final.observation)[cut],
        environment="cartpole",
    )
