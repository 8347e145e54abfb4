"""Greedy episodes of any agent in any device environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.environment import Environment
from podracer.rollout import (
    ActorState,
    Purpose,
    environment_keys,
    init_actor,
    interact,
    purpose_key,
)
from podracer.types import ConfigError, Params


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes, one for each environment."""

    returns: np.ndarray  # f32 [episodes]
    lengths: np.ndarray  # i32 [episodes]
    unfinished: int  # cut by `max_steps`: their returns are partial


def make_evaluator(
    agent: Agent, env: Environment, episodes: int, *, max_steps: int = 30_000
) -> Callable[[Params, jax.Array], Evaluation]:
    """A function `(actor_params, run_key) -> Evaluation`, compiled once.

    Each episode has an environment of its own, so short episodes are not preferred to long ones.
    """
    indices = jnp.arange(episodes, dtype=jnp.uint32)

    def step(params: Params, key: jax.Array, t: jax.Array, actor: ActorState) -> ActorState:
        moment = jnp.uint32(t + 1)[None]
        act_keys = environment_keys(purpose_key(key, Purpose.ACT), indices, moment)[0]
        step_keys = environment_keys(purpose_key(key, Purpose.STEP), indices, moment)[0]
        return interact(agent, env, params, actor, act_keys, step_keys, explore=False)[0]

    @jax.jit
    def run(params: Params, run_key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        key = purpose_key(run_key, Purpose.EVALUATE)
        resets = environment_keys(
            purpose_key(key, Purpose.RESET), indices, jnp.zeros(1, jnp.uint32)
        )

        def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            t, actor, returns, lengths, done = carry
            actor = step(params, key, t, actor)
            finished = (actor.episodes.count == 1) & ~done
            # The totals still hold only the first episode when it has just ended.
            returns = jnp.where(finished, actor.episodes.total_return, returns)
            lengths = jnp.where(finished, actor.episodes.total_length, lengths)
            return t + 1, actor, returns, lengths, done | finished

        zeros = jnp.zeros(episodes)
        start = (0, init_actor(agent, env, resets[0]), zeros, zeros.astype(jnp.int32), zeros > 0)
        _, actor, returns, lengths, done = jax.lax.while_loop(
            lambda carry: (carry[0] < max_steps) & ~jnp.all(carry[-1]), advance, start
        )
        returns = jnp.where(done, returns, actor.episodes.running_return)
        return returns, jnp.where(done, lengths, actor.episodes.running_length), done

    def evaluate(params: Params, run_key: jax.Array) -> Evaluation:
        returns, lengths, done = jax.device_get(run(params, run_key))
        return Evaluation(returns, lengths, int((~done).sum()))

    return evaluate


def record_frames(
    agent: Agent, env: Environment, params: Params, run_key: jax.Array, *, episodes: int,
    max_steps: int,
) -> tuple[np.ndarray, list[float]]:  # fmt: skip
    """Pictures of greedy episodes, uint8 `[T, H, W, 3]`, and the returns of those that ended.

    Raises `ConfigError` where the environment cannot be drawn.
    """
    render = getattr(env, "render", None)
    if render is None:
        raise ConfigError(f"{env.spec.name} has no method `render(state)`, so it cannot be drawn.")
    key = purpose_key(run_key, Purpose.EVALUATE)

    @jax.jit
    def step(actor: ActorState, t: jax.Array) -> ActorState:
        keys = jax.random.split(jax.random.fold_in(key, t), 2)
        return interact(agent, env, params, actor, keys[:1], keys[1:], explore=False)[0]

    actor = jax.jit(lambda k: init_actor(agent, env, k[None]))(key)
    frames, returns = [], []
    for t in range(max_steps):
        frames.append(render(jax.device_get(jax.tree.map(lambda x: x[0], actor.env_state))))
        previous = actor
        actor = step(actor, jnp.uint32(t))
        if int(actor.episodes.count[0]) > len(returns):
            total = actor.episodes.total_return[0] - previous.episodes.total_return[0]
            returns.append(float(total))
            if len(returns) == episodes:
                break
    return np.stack(frames), returns
