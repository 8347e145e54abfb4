"""Evaluation: greedy episodes of any agent in any environment."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.environment import (
    Environment,
    HostEnvironments,
    Renderable,
    call_environment,
    evaluation_environment,
)
from podracer.mesh import from_first_process, on_one_device
from podracer.rollout import (
    ActorState,
    Purpose,
    environment_keys,
    init_actor,
    interact,
    purpose_key,
)
from podracer.types import ArraySpec, Carry, ConfigError, Params, TimeStep

MAX_STEPS = 30_000  # of an episode


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes, one for each environment."""

    returns: np.ndarray
    """Returns, f32 `[episodes]`; of a population `[P, episodes]`."""
    lengths: np.ndarray
    """Valid transitions, i32 of the same shape."""
    unfinished: int
    """Number of episodes that were cut by `max_steps`: their returns are partial."""


def make_evaluator(
    agent: Agent,
    env: Environment | HostEnvironments,
    episodes: int,
    *,
    max_steps: int = MAX_STEPS,
) -> Callable[[Params, jax.Array], Evaluation]:
    """Return a function `(actor_params, run_key) -> Evaluation`, compiled once.

    Each episode has an environment of its own, so that short episodes are not preferred to long
    ones. An environment that is `HasEvaluation` is evaluated in `for_evaluation()`: whole games and
    unclipped rewards for Atari, the validation period for trading.
    """
    if isinstance(env, HostEnvironments):
        return _host_evaluator(agent, env, episodes, max_steps)
    evaluation_env: Environment = evaluation_environment(env)
    run = jax.jit(partial(greedy_episodes, agent, evaluation_env, episodes, max_steps))

    def evaluate(params: Params, run_key: jax.Array) -> Evaluation:
        returns, lengths, done = jax.device_get(run(params, run_key))
        return Evaluation(returns, lengths, int((~done).sum()))

    return evaluate


def greedy_episodes(
    agent: Agent,
    env: Environment,
    episodes: int,
    max_steps: int,
    params: Params,
    run_key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each episode's return, length and whether it ended; may be traced."""
    indices = jnp.arange(episodes, dtype=jnp.uint32)
    key = purpose_key(run_key, Purpose.EVALUATE)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        t, actor, returns, lengths, done = carry
        step = jnp.uint32(t + 1)[None]
        act_keys = environment_keys(purpose_key(key, Purpose.ACT), indices, step)[0]
        step_keys = environment_keys(purpose_key(key, Purpose.STEP), indices, step)[0]
        actor, _ = interact(agent, env, params, actor, act_keys, step_keys, explore=False)
        finished = (actor.episodes.count == 1) & ~done
        # The totals still hold only the first episode when it has just ended.
        returns = jnp.where(finished, actor.episodes.total_return, returns)
        lengths = jnp.where(finished, actor.episodes.total_length, lengths)
        return t + 1, actor, returns, lengths, done | finished

    resets = environment_keys(purpose_key(key, Purpose.RESET), indices, jnp.zeros(1, jnp.uint32))
    zeros = jnp.zeros(episodes)
    start = (0, init_actor(agent, env, resets[0]), zeros, zeros.astype(jnp.int32), zeros > 0)
    _, actor, returns, lengths, done = jax.lax.while_loop(
        lambda carry: (carry[0] < max_steps) & ~jnp.all(carry[-1]), advance, start
    )
    returns = jnp.where(done, returns, actor.episodes.running_return)
    return returns, jnp.where(done, lengths, actor.episodes.running_length), done


def _host_evaluator(
    agent: Agent, env: HostEnvironments, episodes: int, max_steps: int
) -> Callable[[Params, jax.Array], Evaluation]:
    policy = _greedy(agent)

    def evaluate(params: Params, run_key: jax.Array) -> Evaluation:
        returns, lengths = np.zeros(episodes, np.float32), np.zeros(episodes, np.int32)
        done = np.zeros(episodes, bool)
        steps = _host_steps(agent, env, policy, params, run_key, episodes)
        with contextlib.closing(steps):
            for previous_last, timestep in itertools.islice(steps, max_steps):
                returns += np.where(done, 0, timestep.reward)
                lengths += ~done & ~previous_last
                done |= timestep.ends_episode(previous_last)
                if done.all():
                    break
        # Emulators may differ between hosts, but all hosts must take the same decisions.
        returns, lengths, done = from_first_process((returns, lengths, done))
        return Evaluation(returns, lengths, int((~done).sum()))

    return evaluate


def _greedy(agent: Agent) -> Callable[..., tuple[jax.Array, Carry]]:
    @jax.jit
    def act(
        params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, Carry]:
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, t))(keys)
        action, _, carry = agent.act(params, carry, timestep, step_keys, False)
        return action, carry

    return act


def _host_steps(
    agent: Agent,
    env: HostEnvironments,
    policy: Callable[..., tuple[jax.Array, Carry]],
    params: Params,
    run_key: jax.Array,
    num_envs: int,
) -> Generator[tuple[np.ndarray, TimeStep]]:
    """Yield greedy steps forever: `last [B]` of the previous timestep, and the next timestep."""
    environments: HostEnvironments = evaluation_environment(env)
    params, data = on_one_device((params, jax.random.key_data(run_key)))
    key = purpose_key(jax.random.wrap_key_data(data), Purpose.EVALUATE)
    keys, carry = jax.random.split(key, num_envs), agent.carry(num_envs)
    indices = np.arange(num_envs, dtype=np.uint32)
    call = partial(call_environment, "evaluation")
    with contextlib.closing(
        call(partial(environments.make, num_envs, os.cpu_count() or 1))
    ) as batch:
        timestep = call(partial(batch.reset, int(jax.random.bits(key)), indices, 0))
        for t in itertools.count():
            previous_last = np.array(timestep.last)  # the next step may overwrite it
            action, carry = policy(params, carry, timestep, keys, np.uint32(t))
            timestep = call(partial(batch.step, np.asarray(action)))
            yield previous_last, timestep


def record_frames(
    agent: Agent, env: Environment | HostEnvironments, params: Params, run_key: jax.Array, *,
    episodes: int, max_steps: int,
) -> tuple[np.ndarray, list[float]]:  # fmt: skip
    """Return pictures of greedy episodes, uint8 `[T, H, W, 3]`, and returns of those that ended.

    Raises `ConfigError` where the environment cannot be drawn.
    """
    if isinstance(env, HostEnvironments):
        return _host_frames(agent, env, params, run_key, episodes, max_steps)
    if not isinstance(env, Renderable):
        raise ConfigError(f"{env.spec.name} has no method `render(state)`, so it cannot be drawn.")
    key = purpose_key(run_key, Purpose.EVALUATE)

    @jax.jit
    def step(actor: ActorState, t: jax.Array) -> ActorState:
        keys = jax.random.split(jax.random.fold_in(key, t), 2)
        return interact(agent, env, params, actor, keys[:1], keys[1:], explore=False)[0]

    actor = jax.jit(lambda k: init_actor(agent, env, k[None]))(key)
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
    params: Params,
    run_key: jax.Array,
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
    steps = _host_steps(agent, env, _greedy(agent), params, run_key, 1)
    with contextlib.closing(steps):
        for previous_last, timestep in itertools.islice(steps, max_steps):
            picture = np.asarray(timestep.observation)[0, :, :, -1].repeat(2, 0).repeat(2, 1)
            frames.append(np.stack([picture] * 3, axis=-1).astype(np.uint8))
            total += float(timestep.reward[0])
            if timestep.ends_episode(previous_last)[0]:
                returns.append(total)
                total = 0.0
            if len(returns) == episodes:
                break
    return np.stack(frames), returns
