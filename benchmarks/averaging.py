"""Averaging parameters instead of gradients: what it costs in frames, and saves in messages.

    python benchmarks/averaging.py --environments 8 --updates 400
    python benchmarks/averaging.py --environments 1 --updates 800

Eight replicas learn CartPole by PPO, each from environments of its own. Averaged gradients are one
learner of all environments: what Anakin computes on any number of devices. Bytes are those that a
replica gives away: gradients at each optimizer step, or the floats of the learner's state at each
average. The score is the mean over all evaluations of a run, replicas and seeds, so that it counts
how fast they learn, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Quick

import podracer
from podracer import recipes
from podracer.config.experiment import Experiment
from podracer.drivers.exchange import Averaging
from podracer.drivers.population import Pod
from podracer.envs.catalog import make
from podracer.io.sinks import read_metrics
from podracer.run.sweep import RECORDS

REPLICAS, EVALUATIONS = 8, 8
CONTENDERS: tuple[tuple[str, int], ...] = (
    ("gradients", 0), ("all", 1), ("all", 4), ("all", 16), ("all", 64),
    ("ring", 1), ("ring", 4), ("none", 0),
)  # fmt: skip


def experiment(peers: str, every: int, seed: int, environments: int, updates: int) -> Experiment:
    """Return the run of a contender."""
    recipe = recipes.find("cartpole_ppo")
    num_envs = REPLICAS * environments if peers == "gradients" else environments
    driver = dataclasses.replace(recipe.driver, num_envs=num_envs, updates_per_chunk=1)
    seeds = range(seed * REPLICAS, (seed + 1) * REPLICAS)
    return dataclasses.replace(
        recipe,
        driver=driver,
        frames=updates * num_envs * driver.rollout_length,
        pods=() if peers == "gradients" else tuple(map(Pod, seeds)),
        exchange=Averaging(peers, every) if every else None,  # type: ignore[arg-type]
        seed=seed,
        evaluations=EVALUATIONS,
        evaluation_episodes=32,
        target_return=None,
        save_seconds=1e9,
        keep_best=False,
        devices=1,
    )


def returns(run: Experiment) -> np.ndarray:
    """Train, and return the mean return of each evaluation."""
    with tempfile.TemporaryDirectory() as directory:
        podracer.train(run, run_dir=f"{directory}/run")
        records = read_metrics(Path(directory, "run", RECORDS if run.pods else "metrics.jsonl"))
    found = [record.get("evaluation_return") for record in records]
    return np.array([np.mean(value) for value in found if value is not None])


def bytes_sent(recipe: Any, peers: str, every: int) -> float:
    """Return the bytes that a replica of a recipe of PPO gives away for an update."""
    agent = recipe.agent
    built = agent.build(make(recipe.environment).spec)
    shared = jax.eval_shape(lambda key: built.init(key, 1), jax.random.key(0)).shared
    if peers == "gradients":
        steps = agent.num_epochs * agent.num_minibatches
        return steps * sum(4 * x.size for x in jax.tree.leaves(shared.params))
    floats = [x for x in jax.tree.leaves(shared) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(4 * x.size for x in floats) / every if every else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--environments", type=int, default=8, help="of each replica")
    parser.add_argument("--updates", type=int, default=400, help="of each replica")
    parser.add_argument(
        "--quick", action=Quick, const={"seeds": 1, "environments": 1, "updates": 8}
    )
    options = parser.parse_args()
    sizes = options.environments, options.updates

    def scores(peers: str, every: int) -> list[np.ndarray]:
        runs = [experiment(peers, every, seed, *sizes) for seed in range(options.seeds)]
        return [returns(run) for run in runs]

    contenders = CONTENDERS[:2] if options.quick else CONTENDERS
    print_table(recipes.find("cartpole_ppo"), contenders, scores)


def print_table(
    recipe: Any,
    contenders: Sequence[tuple[str, int]],
    scores_of: Callable[[str, int], list[np.ndarray]],
) -> None:
    """Print a line for each contender, once `scores_of` has given the returns of its seeds."""
    print(f"{'peers':10} {'every':>5} {'kB an update':>13} {'mean return':>12}   seeds", flush=True)
    for peers, every in contenders:
        scores = scores_of(peers, every)
        means, ends = [x.mean() for x in scores], [x[-1] for x in scores]
        sent = bytes_sent(recipe, peers, every) / 1e3
        print(
            f"{peers:10} {every:>5} {sent:13.1f} {np.mean(means):12.0f}   {_text(means)}; "
            f"at the end {_text(ends)}",
            flush=True,
        )


def _text(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


if __name__ == "__main__":
    main()
