"""Runs of rejax (tested with 0.1.3, gymnax 1.0.1 and JAX 0.10.2) for `references.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
from foreign import Report, distinct_episodes, gymnax_environment, parse
from rejax import get_algo
from rejax.evaluate import evaluate


def acting(algorithm: Any, state: Any, policy: str, epsilon: float) -> Any:
    """Return the function that acts in evaluations."""
    normalize = getattr(algorithm, "normalize_observations", False)

    def act(observation: jax.Array, key: jax.Array) -> jax.Array:
        if normalize:
            observation = algorithm.normalize_obs(state.obs_rms_state, observation)
        if hasattr(algorithm, "agent"):  # its networks of action values are epsilon-greedy
            return algorithm.agent.apply(
                state.q_ts.params, observation[None], key, epsilon=epsilon, method="act"
            )[0]
        actor, params = algorithm.actor, state.actor_ts.params
        if policy == "sampled":
            return actor.apply(params, observation[None], key, method="act")[0]
        if not hasattr(actor, "_action_dist"):
            return actor.apply(params, observation[None])[0]  # deterministic
        mode = actor.apply(params, observation[None], method="_action_dist").mode()[0]
        if hasattr(actor, "bij"):  # squashed
            return actor.action_loc + jax.numpy.tanh(mode) * actor.action_scale
        return mode if algorithm.discrete else jax.numpy.clip(mode, *actor.action_range)

    return act


def evaluation(
    algorithm: Any, state: Any, key: jax.Array, policy: str, epsilon: float, episodes: int
) -> tuple[Any, Any, Any]:
    """Return its steps so far, and lengths and returns of whole episodes."""
    act = acting(algorithm, state, policy, epsilon)
    limit = algorithm.env_params.max_steps_in_episode
    lengths, returns = evaluate(act, key, algorithm.env, algorithm.env_params, episodes, limit)
    return state.global_step, lengths, returns


def main() -> None:
    options = parse(__doc__)
    report = Report("rejax", "gymnax", "jax", "flax", "optax")
    env, params = gymnax_environment(options.environment)
    settings = dict(options.settings)
    iteration = settings["num_envs"] * settings.get("num_steps", 1)
    between = iteration * max(1, round(options.frames / options.evaluations / iteration))
    if settings.pop("anneal", False):  # its optimizer takes a schedule in place of a rate
        steps = between * options.evaluations // iteration
        steps *= settings["num_epochs"] * settings["num_minibatches"]
        settings["learning_rate"] = optax.linear_schedule(settings["learning_rate"], 0.0, steps)
    algorithm = get_algo(options.agent).create(
        env=env,
        env_params=params,
        total_timesteps=between * options.evaluations,  # whole iterations: else it trains longer
        eval_freq=between,
        skip_initial_evaluation=True,
        **settings,
    )
    how = {"policy": options.policy, "epsilon": options.epsilon, "episodes": options.episodes}
    algorithm = algorithm.replace(eval_callback=functools.partial(evaluation, **how))
    train = jax.jit(lambda key: algorithm.train(rng=key)[1])
    for seed in options.seeds:
        frames, lengths, returns = jax.device_get(train(jax.random.key(seed)))
        curve = list(zip(frames, returns.mean(axis=1), strict=True))
        report(seed, curve, distinct_episodes(returns[-1], lengths[-1]))


if __name__ == "__main__":
    main()
