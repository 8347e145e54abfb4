"""Recording of episodes as a data set, for `podracer record`."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np

from podracer.agent import Agent
from podracer.environment import (
    Environment,
    HostEnvironments,
    evaluation_environment,
)
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError
from podracer.evaluate import MAX_STEPS, ActingRule, host_steps
from podracer.ops.distributions import SquashedNormal, parameters
from podracer.types import Params, TimeStep
from podracer_offline.dataset import Dataset


def record_episodes(
    agent: Agent,
    env: Environment | HostEnvironments,
    params: Params,
    run_key: jax.Array,
    update: int | jax.Array = 0,
    *,
    episodes: int,
    rule: ActingRule,
    name: str = "",
    max_steps: int = MAX_STEPS,
    with_distributions: bool = False,
) -> Dataset:
    """Return the transitions of whole episodes, each in an environment of its own.

    They are played as evaluations are, in `for_evaluation()`, where `params` act as the rule has
    it. `name` is the environment's. An episode of `max_steps` is cut there, as by a time-out.
    `with_distributions` also records the policy's distributions, `Dataset.distribution`; it raises
    `ConfigError` for a policy that has none of logits or of a Gaussian.
    """
    env = evaluation_environment(env)
    rule.check(env.spec)
    host = env if isinstance(env, HostEnvironments) else DeviceEnvironments(env)
    # Observations, and parameters of distributions.
    inputs: list[tuple[Any, Any]] = []
    act_compiled = jax.jit(partial(rule.act, agent))
    describe = jax.jit(partial(_distribution, agent)) if with_distributions else lambda *_: None

    def act(params: Params, carry: Any, timestep: TimeStep, *args: Any) -> Any:
        distribution = describe(params, carry, timestep)
        inputs.append(jax.tree.map(np.array, (timestep.observation, distribution)))
        return act_compiled(params, carry, timestep, *args)

    columns: list[tuple[np.ndarray, ...]] = []  # action, reward, terminal, timeout, counts
    begins = np.zeros(episodes, int)  # step in which each row's episode began
    is_over = np.zeros(episodes, bool)
    final: Any = None
    steps = host_steps(agent, host, act, params, run_key, update, is_over, set())
    with contextlib.closing(steps):
        for t, (previous_last, action, timestep) in enumerate(islice(steps, max_steps), 1):
            counts = ~is_over & ~previous_last
            begins[~is_over & timestep.begins_after_loss(previous_last)] = t
            ended = ~is_over & timestep.ends_episode(previous_last)
            terminal = ended & (timestep.discount == 0)
            timeout = (ended | (~is_over & (t == max_steps))) & ~terminal
            columns.append((action, np.array(timestep.reward), terminal, timeout, counts))
            final = _put(final, timestep.observation, timeout)
            is_over |= ended
            if is_over.all():
                break
    action, reward, terminal, timeout, counts = (
        np.stack(x, axis=1) for x in zip(*columns, strict=True)
    )  # [B, T, ...]
    counts &= np.arange(counts.shape[1]) >= begins[:, None]
    cut = (timeout & counts).any(axis=1)
    observation, distribution = jax.tree.map(lambda *x: np.stack(x, axis=1)[counts], *inputs)
    return Dataset(
        observation=observation,
        distribution=distribution,
        action=action[counts],
        reward=reward[counts],
        terminal=terminal[counts],
        timeout=timeout[counts],
        final_observation=jax.tree.map(lambda x: x[cut], final) if cut.any() else None,
        environment=name,
    )


def _distribution(agent: Agent, params: Params, carry: Any, timestep: TimeStep) -> jax.Array:
    """Return the parameters `[B, n]` of the distributions of actions."""
    distribution = None
    if agent.distribution is not None:
        distribution, _ = agent.distribution(params, carry, timestep)
    if distribution is None or isinstance(distribution, SquashedNormal):
        raise ConfigError(
            f"{agent.name} chooses actions by no distribution of logits or of a Gaussian: record "
            "the actions alone."
        )
    return parameters(distribution)


def _put(old: Any, new: Any, rows: np.ndarray) -> Any:
    """Return observations `[B, ...]` with new ones in some rows."""
    if old is None:
        return jax.tree.map(np.array, new)
    for old_leaf, new_leaf in zip(*map(jax.tree.leaves, (old, new)), strict=True):
        old_leaf[rows] = np.asarray(new_leaf)[rows]
    return old
