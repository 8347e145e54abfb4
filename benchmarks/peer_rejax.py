"""PPO of rejax (tested with 0.1.3), as a contender of `ppo.py`; runs in a Python that has it.

Without `--solve` it is a contender. With `--solve SEED` it trains until an evaluation of 128
greedy episodes is at 475, and prints how long that took. Nothing of podracer is imported here.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
from peer_common import flags, take_turns
from reference_common import gymnax_environment
from rejax import get_algo
from rejax.evaluate import evaluate

SOLVED, EPISODES = 475.0, 128


def create(options: argparse.Namespace, steps: int) -> Any:
    """The algorithm; `train` then takes `steps` steps and evaluates once, at the end."""
    env, params = gymnax_environment(options.environment)
    return get_algo("ppo").create(
        env=env,
        env_params=params,
        agent_kwargs={"activation": options.activation, "hidden_layer_sizes": (64, 64)},
        num_envs=options.envs,
        num_steps=options.length,
        num_minibatches=options.minibatches,
        num_epochs=options.epochs,
        learning_rate=options.learning_rate,
        max_grad_norm=0.5,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
    )


def compiled(algorithm: Any, seed: int) -> tuple[Any, Any, float]:
    """The training function, the first state, and the seconds that compiling took."""
    state = jax.jit(algorithm.init_state)(jax.random.key(seed))
    began = time.perf_counter()
    train = jax.jit(lambda state: algorithm.train(train_state=state)).lower(state).compile()
    return train, state, time.perf_counter() - began


def compete(options: argparse.Namespace) -> None:
    steps = options.envs * options.length * options.updates
    algorithm = create(options, steps).replace(eval_callback=lambda algorithm, state, key: ())
    train, state, compile_seconds = compiled(algorithm, 0)

    def repeat() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(train(state))

    repeat()
    take_turns(repeat, options, compile_seconds, ["rejax", "gymnax", "jax"])


def greedy_evaluation(algorithm: Any, state: Any, key: jax.Array) -> jax.Array:
    """The mean return of its own evaluation, made greedy."""

    def act(observation: jax.Array, key: jax.Array) -> jax.Array:
        params = state.actor_ts.params
        policy = algorithm.actor.apply(params, observation[None], method="_action_dist")
        return policy.mode()[0]

    limit = algorithm.env_params.max_steps_in_episode
    _, returns = evaluate(act, key, algorithm.env, algorithm.env_params, EPISODES, limit)
    return returns.mean()


def solve(options: argparse.Namespace) -> None:
    every = options.evaluate_every
    algorithm = create(options, every).replace(eval_callback=greedy_evaluation)
    train, state, compile_seconds = compiled(algorithm, options.solve)
    steps, score, began = 0, 0.0, time.perf_counter()
    while score < SOLVED and steps < options.limit:
        state, scores = train(state)
        score = float(scores[-1])
        steps = int(state.global_step)
    print(
        json.dumps({
            "seconds": time.perf_counter() - began,
            "steps": steps,
            "score": score,
            "compile_seconds": compile_seconds,
        })
    )  # fmt: skip


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--solve", type=int, metavar="SEED")
    parser.add_argument("--evaluate-every", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.solve is None:
        compete(options)
    else:
        solve(options)


if __name__ == "__main__":
    main()
