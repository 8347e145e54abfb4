"""Arcade games on the device beside ale-py on the host: steps of random play in a CPU second.

Contenders take turns. Steps are counted per second of the process's CPU time, so that other
programs on the machine count little; run it on one core:

    taskset -c 0 python benchmarks/arcade.py --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from resets import program

from podracer import envs
from podracer.environment import HostEnvironments

# Each with the number of steps of a turn.
CONTENDERS = {
    "octax:brix": 64,
    "jaxtari:pong": 64,
    "jaxtari:pong,objects=true": 20_000,
    "atari-sticky:pong": 64,
}


def device(env: Any, num_envs: int, steps: int) -> Callable[[], Any]:
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))[0]
    run = program(env, num_envs, steps)
    carry = ((state, jax.random.key(1)), jax.numpy.float32(0))

    def turn() -> None:
        nonlocal carry
        carry = jax.block_until_ready(run(carry))

    return turn


def host(env: HostEnvironments, num_envs: int, steps: int) -> Callable[[], Any]:
    batch, rng = env.make(num_envs, 1), np.random.default_rng(0)
    batch.reset(0, np.arange(num_envs), 0)
    actions = rng.integers(env.spec.action.num_actions, size=(steps, num_envs), dtype=np.int32)
    return lambda: [batch.step(action) for action in actions]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    made.add_argument("--num-envs", type=int, default=64)
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    turns: dict[str, Callable[[], Any]] = {}
    for name in options.only:
        env = envs.make(name)
        make_turn = host if isinstance(env, HostEnvironments) else device
        turns[name] = make_turn(env, options.num_envs, CONTENDERS[name])
        turns[name]()  # compiles
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(options.repeats):
        for name, turn in turns.items():
            start = time.process_time()
            turn()
            steps = CONTENDERS[name] * options.num_envs
            rates[name].append(steps / (time.process_time() - start))
    for name, values in rates.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:28} {median:12,.0f} steps per CPU second [{low:,.0f}, {high:,.0f}]")


if __name__ == "__main__":
    main()
