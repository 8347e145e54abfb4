"""Recording of episodes as pictures, for `podracer play`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.checks.errors import describe_error, type_text
from podracer.environment import Environment, HostEnvironments, evaluation_environment, features
from podracer.errors import ConfigError
from podracer.evaluate import (
    ActingRule,
    PolicyKind,
    advance,
    episode_keys,
    evaluation_key,
    host_steps,
)
from podracer.rollout import ActorState, Purpose, init_actor
from podracer.types import EnvironmentSpec, Params, PyTree, TimeStep

_PIXELS = 160  # smaller pictures are enlarged to about this many on the longer side
_COLORS = np.frombuffer(
    bytes.fromhex("1f77b4 ff7f0e 2ca02c d62728 9467bd 8c564b e377c2 bcbd22 17becf f0f0f0"), np.uint8
).reshape(-1, 3)


def is_drawable(env: Environment | HostEnvironments) -> bool:
    """Return whether `record_frames` can draw an environment."""
    try:
        env = evaluation_environment(env)
        _ = _host_drawer(env) if isinstance(env, HostEnvironments) else _device_drawer(env)
    except ConfigError:
        return False
    return True


def record_frames(
    agent: Agent,
    env: Environment | HostEnvironments,
    params: Params,
    run_key: jax.Array,
    update: int | jax.Array = 0,
    *,
    episodes: int = 3,
    max_steps: int = 500,
    policy: PolicyKind = "greedy",
    epsilon: float = 0.0,
) -> tuple[np.ndarray, list[float]]:
    """Return pictures of episodes played in turn, and the returns of those that ended.

    The pictures are uint8 `[T, H, W, 3]`, one for each timestep, at most `max_steps` + 1;
    the recording ends there or with the last of so many episodes. An environment that cannot draw
    itself is shown by its observations, where these are images. Raises `ConfigError` for others,
    and where `render` fails or returns no picture.

    `params` are those that act, `agent.actor_params(state)`. The episodes depend on `run_key`, such
    as `jax.random.key(0)`, and on `update`; `policy` and `epsilon` are as in `make_evaluator`.
    """
    rule, env = ActingRule(policy, epsilon), evaluation_environment(env)
    rule.check(env.spec)
    if isinstance(env, HostEnvironments):
        return _host_frames(agent, env, rule, params, run_key, update, episodes, max_steps)
    draw = _device_drawer(env)
    rows = getattr(env, "num_agents", 1)  # rows of one game; the first one is shown
    key, indices = evaluation_key(run_key, jnp.uint32(update)), jnp.arange(rows, dtype=jnp.uint32)
    step = jax.jit(lambda actor, t: advance(agent, env, rule, params, actor, key, indices, t)[1])
    start = jax.jit(lambda t: init_actor(agent, env, episode_keys(key, Purpose.RESET, indices, t)))
    actor: ActorState = start(jnp.uint32(0))
    frames, returns = [], []
    for t in range(max_steps):
        frames.append(draw(actor))
        previous = actor
        actor = step(actor, jnp.uint32(t))
        if int(actor.episodes.count[0]) > len(returns):
            reward = float(actor.timestep.reward[0])
            returns.append(float(previous.episodes.running_return[0]) + reward)
            if len(returns) == episodes:
                break
    return np.stack(frames), returns


def _device_drawer(env: Environment) -> Callable[[ActorState], np.ndarray]:
    """Return a function that draws one environment's state. Raises `ConfigError`."""
    spec = env.spec
    if (render := features(env).render) is not None:
        return lambda actor: _rendered(spec.name, render, _first_row(actor.env_state))
    if has_picture(spec.observation):
        return lambda actor: draw_observation(_first_row(actor.timestep.observation), spec)
    raise ConfigError(
        f"{spec.name} cannot be drawn: it has no method `render(state)`, and its observations are "
        "no images."
    )


def _rendered(name: str, render: Callable[[Any], Any], state: Any) -> np.ndarray:
    try:
        picture = np.asarray(render(state))
    except (Exception, SystemExit) as error:  # its code 0 would count as success
        raise ConfigError(f"{name}.render failed: {describe_error(error)}") from error
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        raise ConfigError(
            f"{name}.render must return uint8 [H, W, 3], but it returned {type_text(picture)}."
        )
    return picture


def _first_row(tree: Any) -> Any:
    return jax.device_get(jax.tree.map(lambda x: x[0], tree))


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
    env, draw, observe = _host_drawer(env)
    frames, returns, total = list[np.ndarray](), list[float](), 0.0
    act_compiled = jax.jit(partial(rule.act, agent))

    def act(params: Params, carry: Any, timestep: TimeStep, *args: Any) -> Any:
        if not frames:  # the first timestep, which is before all steps
            frames.append(draw(timestep.observation))
        timestep = dataclasses.replace(timestep, observation=observe(timestep.observation))
        return act_compiled(params, carry, timestep, *args)

    has_ended, logged = np.zeros(1, bool), set[str]()
    steps = host_steps(agent, env, act, params, run_key, update, has_ended, logged)
    with contextlib.closing(steps):
        for previous_last, _, timestep in itertools.islice(steps, max_steps):
            frames.append(draw(timestep.observation))
            if timestep.begins_after_loss(previous_last)[0]:
                total = 0.0
            total += float(timestep.reward[0])
            if timestep.ends_episode(previous_last)[0]:
                returns.append(total)
                total = 0.0
            if len(returns) == episodes:
                break
    return np.stack(frames), returns


def _host_drawer(
    env: HostEnvironments,
) -> tuple[HostEnvironments, Callable[[Any], np.ndarray], Callable[[Any], Any]]:
    """Return environments to record, and functions of their observations `[1, ...]`.

    The functions return a picture, and the observation that the agent sees. Raises `ConfigError`.
    """
    spec = env.spec
    if (with_pictures := features(env).with_pictures) is not None:
        return with_pictures(), lambda x: np.array(x["picture"][0]), lambda x: x["observation"]
    if has_picture(spec.observation):
        return env, lambda x: draw_observation(_first_row(x), spec), lambda x: x
    raise ConfigError(
        f"{spec.name} cannot be drawn: it has no method `with_pictures`, and its observations are "
        "no images."
    )


# --- pictures of observations, for environments that cannot draw themselves ----------------------


def has_picture(observation: PyTree) -> bool:
    """Return whether an observation, or its spec, has exactly one leaf that is an image."""
    return len(_images(observation)) == 1


def _images(observation: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(observation)
    return [leaf for leaf in leaves if len(leaf.shape) in (2, 3) and min(leaf.shape[:2]) > 1]


def draw_observation(observation: PyTree, spec: EnvironmentSpec) -> np.ndarray:
    """Return a picture of the image `[H, W, C]` in an observation, uint8 `[h, w, 3]`.

    A stack of frames shows its newest one. Three channels are red, green and blue. Other channels
    have a color each, which is shown where they are not 0.
    """
    (image,), (image_spec,) = _images(observation), _images(spec.observation)
    if image.ndim == 2:
        image = image[..., None]
    if image_spec.frame_stack:
        image = image[..., -1:]
    elif image.dtype == np.uint8 and image.shape[-1] % 3 == 0:
        image = image[..., -3:]
    if image.shape[-1] in (1, 3) and image.dtype.kind in "fub":
        bright = image if image.dtype == np.uint8 else np.clip(image, 0, 1) * 255
        picture = np.broadcast_to(bright.astype(np.uint8), (*image.shape[:2], 3))
    elif image.shape[-1] == 1:
        picture = _COLORS[image[..., 0] % len(_COLORS)]
    else:
        picture = np.zeros((*image.shape[:2], 3), np.uint8)
        for channel in range(image.shape[-1]):
            picture[image[..., channel] > 0] = _COLORS[channel % len(_COLORS)]
    factor = -(-_PIXELS // max(picture.shape[:2]))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)
