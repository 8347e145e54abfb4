"""Runs of PureJaxRL's own scripts (31756b1) for `references.py`; needs flashbax and a checkout.

The scripts run unchanged. What they import and do not need here is replaced by an empty module, and
gymnax by its release 1 with the `done` of releases before. They keep no policy but the last, so
their learning curves are the returns of their training episodes.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from foreign import Report, distinct_episodes, gymnax_environment, parse


def load(repository: str, agent: str, environment: tuple[Any, Any]) -> Any:
    """Return the module of PureJaxRL that trains this agent in this environment."""
    sys.path.insert(0, str(Path(repository) / "purejaxrl"))
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training"):
        sys.modules[name] = mock.MagicMock()
    sys.modules["navix"] = sys.modules["wandb"] = mock.MagicMock()
    sys.modules["gymnax.wrappers.purerl"] = importlib.import_module("wrappers")
    jax.tree_map = jax.tree.map
    module = importlib.import_module(agent)
    module.gymnax = types.SimpleNamespace(make=lambda name: environment)
    return module


def independent(train: Any) -> Any:
    """Return `train` with the seed in place of the constant that dqn.py draws all numbers from."""

    def run(key: jax.Array) -> Any:
        with mock.patch("jax.random.PRNGKey", return_value=jax.random.fold_in(key, 1)):
            return train(key)

    return run


def evaluate(act: Any, environment: tuple[Any, Any], episodes: int, key: jax.Array) -> Any:
    """Return and length of each of some episodes, of `act(observations, key)`."""
    env, params = environment
    reset_key, key = jax.random.split(key)
    observation, state = jax.vmap(env.reset, (0, None))(
        jax.random.split(reset_key, episodes), params
    )

    def step(carry: Any, key: jax.Array) -> Any:
        observation, state, returns, lengths, done = carry
        act_key, step_key = jax.random.split(key)
        action = act(observation.reshape(episodes, -1), act_key)
        observation, state, reward, ended, _ = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(step_key, episodes), state, action, params
        )
        returns, lengths = returns + reward * ~done, lengths + ~done
        return (observation, state, returns, lengths, done | ended), None

    zeros = jnp.zeros(episodes)
    start = (observation, state, zeros, zeros.astype(int), zeros > 0)
    keys = jax.random.split(key, params.max_steps_in_episode)
    return jax.lax.scan(step, start, keys)[0][2:4]


def training_curve(metrics: Any, frames: int, points: int) -> list[tuple[float, float]]:
    """Return mean returns of the training episodes that ended in each part of the run."""
    ended = np.asarray(metrics.get("returned_episode", True))
    returns = np.asarray(metrics.get("returned_episode_returns", metrics.get("returns")))
    ended = np.broadcast_to(ended, returns.shape)
    curve = []
    parts = zip(np.array_split(returns, points), np.array_split(ended, points), strict=True)
    for part, (values, ends) in enumerate(parts, 1):
        curve.append((frames * part / points, values[ends].mean() if ends.any() else np.nan))
    return curve


def main() -> None:
    options = parse(__doc__)
    report = Report("gymnax", "jax", "flax", "optax", "distrax", "flashbax")
    environment = gymnax_environment(options.environment)
    module = load(options.repository, options.agent, environment)
    config = {**options.settings, "TOTAL_TIMESTEPS": options.frames, "ENV_NAME": "", "PROJECT": ""}
    config["WANDB_MODE"] = "disabled"
    train = jax.jit(independent(module.make_train(config)))
    env, env_params = environment
    actions = env.action_space(env_params).n

    def act(params: Any, observations: jax.Array, key: jax.Array) -> jax.Array:
        if options.agent == "ppo":
            network = module.ActorCritic(actions, activation=config["ACTIVATION"])
            policy, _ = network.apply(params, observations)
            return policy.sample(seed=key) if options.policy == "sampled" else policy.mode()
        values = module.QNetwork(actions).apply(params, observations)
        choose_key, action_key = jax.random.split(key)
        uniform = jax.random.randint(action_key, values.shape[:1], 0, actions)
        explore = jax.random.uniform(choose_key, values.shape[:1]) < options.epsilon
        return jnp.where(explore, uniform, values.argmax(-1))

    @jax.jit
    def final(params: Any, key: jax.Array) -> Any:
        return evaluate(
            lambda observations, key: act(params, observations, key),
            environment, options.episodes, key,
        )  # fmt: skip

    for seed in options.seeds:
        out = jax.device_get(train(jax.random.key(seed)))
        params = out["runner_state"][0].params
        returns, lengths = jax.device_get(final(params, jax.random.key(seed + 1)))
        frames = config["NUM_UPDATES"] * config["NUM_ENVS"] * config.get("NUM_STEPS", 1)
        curve = training_curve(out["metrics"], frames, options.evaluations)
        curve[-1] = (frames, returns.mean())
        report(seed, curve, distinct_episodes(returns, lengths), curve_of="training episodes")


if __name__ == "__main__":
    main()
