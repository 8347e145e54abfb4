"""Categorical and residual critics of SAC and TD3 on Pendulum: what they bring, and what they cost.

    python benchmarks/critics.py learning        # mean returns over frames, three seeds
    python benchmarks/critics.py cost            # CPU seconds of an update, beside the plain agent

The process pins itself to one core; CPU seconds of an update are medians of contenders that take
turns, ratios medians of the turns' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

import podracer
from podracer import recipes
from podracer.config.experiment import Experiment
from podracer.drivers.population import Pod
from podracer.envs import make
from podracer.io.sinks import read_metrics
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.action_values import Atoms
from podracer.run.sweep import RECORDS

RESIDUAL = {
    "network": TorsoNetwork(MLP((64,), residual_blocks=1)),
    "normalize_observations": True,
}
# Smaller returns are clipped: the least possible one is -16.3 / (1 - 0.99), of always the worst.
CATEGORICAL = {"return_distribution": Atoms(-1000.0, 0.0, 101)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "categorical": CATEGORICAL,
    "residual": RESIDUAL,
    "both": {**CATEGORICAL, **RESIDUAL},
}

QUICK = {"recipes": ["pendulum_td3"], "settings": ["both"], "seeds": 1}
QUICK |= {"frames": 4_000, "evaluations": 1, "turns": 1}


def contender(recipe: str, settings: str) -> Experiment:
    """Return a recipe with some settings of its agent, on one device."""
    experiment = recipes.find(recipe)
    agent = dataclasses.replace(experiment.agent, **SETTINGS[settings])
    return dataclasses.replace(experiment, agent=agent, devices=1)


def learning(options: argparse.Namespace) -> None:
    """Print the mean return of each evaluation, over the seeds and of each seed."""
    for recipe in options.recipes:
        for settings in options.settings:
            experiment = dataclasses.replace(
                contender(recipe, settings),
                pods=tuple(map(Pod, range(options.seeds))),
                frames=options.frames,
                evaluations=options.evaluations,
                evaluation_episodes=64,
                save_seconds=1e9,
                keep_best=False,
            )
            start = time.process_time()
            with tempfile.TemporaryDirectory() as directory:
                podracer.train(experiment, run_dir=f"{directory}/run")
                records = read_metrics(f"{directory}/run/{RECORDS}")
            seconds = time.process_time() - start
            print(f"{recipe} {settings}: {seconds:.0f} CPU seconds with compiling", flush=True)
            for record in records:
                if record.get("evaluation_return") is not None:
                    returns = np.asarray(record["evaluation_return"])
                    each = ", ".join(f"{value:.0f}" for value in returns)
                    frames = record["updates"] * experiment.driver.steps_per_update
                    print(f"  {frames:>7,} frames {returns.mean():6.0f}   {each}", flush=True)


def cost(options: argparse.Namespace) -> None:
    """Print CPU seconds of an update, acting included, and their ratio to the first settings'."""
    for recipe in options.recipes:
        laps = [_lap(contender(recipe, settings)) for settings in options.settings]
        turns = [[lap() for lap in laps] for _ in range(options.turns)]
        for index, settings in enumerate(options.settings):
            seconds = statistics.median(turn[index] for turn in turns)
            ratio = statistics.median(turn[index] / turn[0] for turn in turns)
            print(
                f"{recipe} {settings:12}{1e3 * seconds:8.2f} ms an update, {ratio:5.2f} times",
                flush=True,
            )


def _lap(experiment: Experiment) -> Callable[[], float]:
    """Compile a chunk; return a function that runs it and returns CPU seconds for an update."""
    env, chunk = make(experiment.environment), 10
    settings: Any = experiment.agent
    replay = dataclasses.replace(settings.replay, warmup=0)
    settings = dataclasses.replace(settings, replay=replay)
    config = dataclasses.replace(experiment.driver, updates_per_chunk=chunk)
    run = harness.anakin("", settings, env, config).lap
    return lambda: run().cpu_seconds / (chunk * replay.updates_per_rollout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("learning", "cost"))
    parser.add_argument("--recipes", nargs="+", default=["pendulum_td3", "pendulum_sac"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=24_000)
    parser.add_argument("--evaluations", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action=harness.Quick, const=QUICK)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    learning(options) if options.what == "learning" else cost(options)


if __name__ == "__main__":
    main()
