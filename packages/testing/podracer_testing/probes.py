"""Probes: environments so small that what must be learned is known (`podracer.envs.probes`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.progress import Orders
from podracer.envs import make
from podracer.envs.probes import PROBES
from podracer.types import LearnerState, TimeStep


def train(
    settings: Any, environment: str, updates: int = 200, *, fused: bool = False
) -> tuple[Agent, LearnerState, float]:
    """Return the agent, what it has learned, and its last episodes' mean return."""
    config = AnakinConfig(32, 8, updates_per_chunk=50, fused=fused)
    driver = Anakin(settings, make(environment), config, find_devices(1))
    *_, progress = driver.run(driver.init(jax.random.key(0)), Orders(updates))
    assert progress.state is not None
    return driver.agent, progress.state.learner, progress.metrics["episode_return"]


def check_probe(
    settings: Any,
    probe: str,
    updates: int = 200,
    *,
    values: Callable[[Agent, LearnerState, TimeStep, Any, Any], Any],
    fused: bool = False,
) -> None:
    """Assert that an agent learns the known values and the known actions, and acts on them.

    `values(agent, learner, timestep, carry, extras)` says what the agent takes its best action in
    each environment to be worth.
    """
    agent, learner, episode_return = train(settings, f"probe:{probe}", updates, fused=fused)
    solution = PROBES[probe]
    observation: Any = jnp.array([observation for observation, _ in solution.values])
    count = len(observation)
    ones = jnp.ones(count)
    timestep = TimeStep(observation, 0 * ones, ones, ones > 0, ones < 0)
    keys, carry = jax.random.split(jax.random.key(0), count), agent.carry(count)
    action, extras, _ = agent.act(agent.actor_params(learner), carry, timestep, keys, False)
    got = np.asarray(values(agent, learner, timestep, carry, extras))
    np.testing.assert_allclose(got, [value for _, value in solution.values], atol=0.1)
    if solution.best_actions:
        best = np.array(solution.best_actions).reshape(action.shape)
        np.testing.assert_allclose(action, best, atol=0.1)
        assert episode_return > solution.best_return - 0.1
