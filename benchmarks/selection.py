"""Selection inside a sweep's program: what it brings, and what it costs.

    python benchmarks/selection.py learning      # 16 learning rates for CartPole, with every rule
    python benchmarks/selection.py cost          # CPU seconds with and without, 64 and 1024 pods

CPU seconds are those of the process, pinned to one core, of contenders that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import get_args

import jax
import numpy as np
from harness import Quick

import podracer
from podracer import recipes
from podracer.agents.a2c import A2C
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod, Population, run_keys
from podracer.drivers.progress import Request, request_array
from podracer.drivers.selection import PopulationBased, Range, Rule, Selection, Truncation
from podracer.envs import make
from podracer.networks import MLP, TorsoNetwork
from podracer.run.sweep import make_pods

PODS, UPDATES, EVERY = 16, 50, 10
RANGE = Range("learning_rate", 1e-7, 1e-1)


def learning(seeds: int, kinds: Sequence[type[Rule] | None]) -> None:
    """Print the final returns of the pods of sweeps that begin with the same learning rates."""
    recipe = recipes.find("cartpole_ppo")
    for kind in kinds:
        finals = []
        for seed in range(seeds):
            rule = kind() if kind else None
            if isinstance(rule, PopulationBased):
                rule = dataclasses.replace(rule, bounds=(RANGE,))
            experiment = dataclasses.replace(
                recipe,
                pods=make_pods({RANGE.name: RANGE}, [seed], PODS, seed),
                exchange=rule and Selection(rule, EVERY),
                seed=seed,
                frames=UPDATES * recipe.driver.steps_per_update,
                evaluations=1,
                evaluation_episodes=32,
                target_return=None,
                save_seconds=1e9,
                devices=1,
            )
            with tempfile.TemporaryDirectory() as directory:
                result = podracer.train(experiment, run_dir=f"{directory}/run")
            finals.append(result.evaluation.returns.mean(axis=-1))
        medians = [float(np.median(x)) for x in finals]
        bests = [float(x.max()) for x in finals]
        name = kind.__name__ if kind else "none"
        print(f"{name:18} medians {_text(medians)}   best {_text(bests)}", flush=True)


def _text(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def cost(turns: int, chunks: int) -> None:
    """Print CPU seconds of a chunk, without a selection and with one before each chunk."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    env = make("catch")
    agent = A2C(network=TorsoNetwork(MLP((16,))))
    config = AnakinConfig(num_envs=4, rollout_length=8, updates_per_chunk=10)
    for count in (64, 1024):
        pods = tuple(Pod(seed) for seed in range(count))
        runs = [_runner(agent, pods, env, config, x) for x in (None, Selection(Truncation(), 10))]
        seconds = [[run(chunks) for run in runs] for _ in range(turns + 1)][1:]
        without, selecting = (statistics.median(x) / chunks for x in zip(*seconds, strict=True))
        ratio = statistics.median(b / a for a, b in seconds)
        print(
            f"{count:5} pods: {1e3 * without:.2f} ms a chunk of 10 updates, "
            f"{1e3 * selecting:.2f} ms with a selection before it, {ratio:.3f} times",
            flush=True,
        )


def _runner(agent, pods, env, config, selection) -> Callable[[int], float]:
    driver = Population(agent, pods, env, config, jax.devices()[:1], selection)
    state, program = driver.init(run_keys(pods)), driver.compile_in_thread().result()
    request = request_array(driver.mesh, Request.NONE, config.updates_per_chunk)

    def run(chunks: int) -> float:
        nonlocal state
        start = time.process_time()
        for _ in range(chunks):
            state, metrics = program(state, request)
            jax.device_get(metrics)
        return time.process_time() - start

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("what", choices=("learning", "cost"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--quick", action=Quick, const={"seeds": 1, "turns": 1, "chunks": 1})
    options = parser.parse_args()
    if options.what == "learning":
        learning(options.seeds, (None, *get_args(Rule))[: 2 if options.quick else None])
    else:
        cost(options.turns, options.chunks)
