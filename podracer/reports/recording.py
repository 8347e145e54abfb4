"""Recording of episodes as pictures, for `podracer play`."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.environment import Environment, HostEnvironments, Renderable
from podracer.evaluate import (
    ActingRule,
    Policy,
    advance,
    episode_keys,
    evaluation_key,
    host_steps,
)
from podracer.rollout import ActorState, Purpose, init_actor
from podracer.types import ArraySpec, ConfigError, Params


def record_frames(
    agent: Agent,
    env: Environment | HostEnvironments,
    params: Params,
    run_key: jax.Array,
    update: int | jax.Array = 0,
    *,
    episodes: int,
    max_steps: int,
    policy: Policy = "greedy",
    epsilon: float = 0.0,
) -> tuple[np.ndarray, list[float]]:
    """Return pictures of episodes, uint8 `[T, H, W, 3]`, and returns of those that ended.

    `policy`, `epsilon` and `update` are as in `make_evaluator`. Raises `ConfigError` where the
    environment cannot be drawn.
    """
    rule = ActingRule(policy, epsilon)
    rule.check(env.spec)
    if isinstance(env, HostEnvironments):
        return _host_frames(agent, env, rule, params, run_key, update, episodes, max_steps)
    if not isinstance(env, Renderable):
        raise ConfigError(f"{env.spec.name} has no method `render(state)`, so it cannot be drawn.")
    key, indices = evaluation_key(run_key, jnp.uint32(update)), jnp.zeros(1, jnp.uint32)
    step = jax.jit(lambda actor, t: advance(agent, env, rule, params, actor, key, indices, t)[1])
    start = jax.jit(lambda t: init_actor(agent, env, episode_keys(key, Purpose.RESET, indices, t)))
    actor: ActorState = start(jnp.uint32(0))
    frames, returns = [], []
    for t in range(max_steps):
        frames.append(env.render(jax.device_get(jax.tree.map(lambda x: x[0], actor.env_state))))
        previous = actor
        actor = step(actor, jnp.uint32(t))
        if int(actor.episodes.count[0]) > len(returns):
            total = actor.episodes.total_return[0] - previous.episodes.total_return[0]
            returns.append(float(total))
            if len(returns) == episodes:
                break
    return np.stack(frames), returns


def _host_frames(
    agent: Agent,
    env: HostEnvironments,
    rule: ActingRule,
    params: Params,
    run_key: jax.Array,
    update: int | jax.Array,
    episodes: int,
    max_steps: int,
) -> tuple[np.ndarray, list[float]]:
    """Return the newest channel of image observations, doubled in size, and the returns."""
    observation = env.spec.observation
    if not isinstance(observation, ArraySpec) or len(observation.shape) != 3:
        raise ConfigError(
            f"{env.spec.name} cannot be drawn: of host environments only image observations are."
        )
    frames, returns, total = [], [], 0.0
    act = jax.jit(partial(rule.act, agent))
    steps = host_steps(agent, env, act, params, run_key, update, 1)
    with contextlib.closing(steps):
        for previous_last, _, timestep in itertools.islice(steps, max_steps):
            picture = np.asarray(timestep.observation)[0, :, :, -1].repeat(2, 0).repeat(2, 1)
            frames.append(np.stack([picture] * 3, axis=-1).astype(np.uint8))
            total += float(timestep.reward[0])
            if timestep.ends_episode(previous_last)[0]:
                returns.append(total)
                total = 0.0
            if len(returns) == episodes:
                break
    return np.stack(frames), returns
