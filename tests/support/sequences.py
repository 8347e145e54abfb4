"""Replayed sequences, and parameters far from the first ones, for finite differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from walk import begin

from podracer.replay import Buffer, Sample


def drawn(agent: Any, env: Any, buffer: Buffer) -> tuple[Any, Sample]:
    """Return a learner's state with parameters far from its first ones, and replayed sequences
    with ends of both kinds and importance weights."""
    state, trajectory = begin(agent, env)
    carry = trajectory.carry
    if agent.name == "R2D2":
        carry = (carry.memory, carry.last_action)
    rng = np.random.default_rng(0)

    @jax.jit
    def draw(replay: Any) -> Sample:
        for _ in range(3):
            replay = buffer.add(replay, trajectory.steps, carry)
        return buffer.sample(replay, jax.random.key(0), 12)

    sample = draw(state.local)
    weights = jnp.asarray(rng.uniform(0.1, 1.0, 12), jnp.float32)
    sample = dataclasses.replace(sample, weights=weights)
    assert (sample.trajectory.timesteps().discount == 0).any()
    assert not sample.trajectory.valid().all()
    return state.shared, sample


def changed(params: Any, scale: float = 0.3) -> Any:
    """Return other parameters, of which no value or gradient is nearly 0."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + scale * rng.normal(size=x.shape), params)
