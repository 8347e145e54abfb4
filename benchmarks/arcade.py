"""Arcade games on the device beside ale-py on the host: steps of random play in a CPU second.

Contenders take turns. Steps are counted per second of the process's CPU time, so that other
programs on the machine count little; run it on one core:

    taskset -c 0 python benchmarks/arcade.py --repeats 5
    taskset -c 0 python benchmarks/arcade.py --only atari:pong ale_py ale_py.xla envpool:Pong-v5

The second command compares simulators of Atari (needs EnvPool): the adapter, ale-py's vector alone
with NumPy and as a program of XLA, and EnvPool's adapter, all under IMPALA's protocol.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from harness import Quick
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
SIMULATORS = {"atari:pong": 64, "ale_py": 64, "ale_py.xla": 64, "envpool:Pong-v5": 64}
QUICK = {"only": ["atari-sticky:pong", "ale_py"], "num_envs": 2, "repeats": 1}


def device(env: Any, num_envs: int, steps: int) -> Callable[[], Any]:
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))[0]
    run = program(env, num_envs, steps)
    carry = ((state, jax.random.key(1)), jax.numpy.float32(0))

    def turn() -> None:
        nonlocal carry
        carry = jax.block_until_ready(run(carry))

    return turn


def host(env: Any, num_envs: int, steps: int) -> Callable[[], Any]:
    batch, rng = env.make(num_envs, 1), np.random.default_rng(0)
    batch.reset(0, np.arange(num_envs), 0)
    actions = rng.integers(env.spec.action.num_actions, size=(steps, num_envs), dtype=np.int32)
    return lambda: [batch.step(action) for action in actions]


def ale_py(num_envs: int, steps: int, *, xla: bool) -> Callable[[], Any]:
    """Return a turn of ale-py's vector environment without an adapter."""
    from ale_py.vector_env import AtariVectorEnv

    env: Any = AtariVectorEnv(
        "pong", num_envs, num_threads=1, noop_max=31, use_fire_reset=False, reward_clipping=False
    )
    rng, seeds = np.random.default_rng(0), np.arange(num_envs)
    actions = rng.integers(6, size=(steps, num_envs), dtype=np.int32)
    if not xla:
        env.reset(seed=seeds)
        return lambda: [env.step(action) for action in actions]
    handle, reset, step = env.xla()
    handle, _ = jax.jit(reset)(handle, seeds)
    program, on_device = jax.jit(step), list(jax.device_put(actions))

    def turn() -> None:
        nonlocal handle
        for action in on_device:
            handle, timestep = program(handle, action)
            jax.block_until_ready(timestep)

    return turn


def main() -> None:
    steps_of = CONTENDERS | SIMULATORS
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=steps_of)
    made.add_argument("--num-envs", type=int, default=64)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--quick", action=Quick, const=QUICK)
    options = made.parse_args()
    turns: dict[str, Callable[[], Any]] = {}
    for name in options.only:
        if name.startswith("ale_py"):
            turns[name] = ale_py(options.num_envs, steps_of[name], xla=name.endswith("xla"))
        else:
            env = envs.make(name)
            make_turn = host if isinstance(env, HostEnvironments) else device
            turns[name] = make_turn(env, options.num_envs, steps_of[name])
        turns[name]()  # compiles
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(options.repeats):
        for name, turn in turns.items():
            start = time.process_time()
            turn()
            steps = steps_of[name] * options.num_envs
            rates[name].append(steps / (time.process_time() - start))
    for name, values in rates.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:28} {median:12,.0f} steps per CPU second [{low:,.0f}, {high:,.0f}]")


if __name__ == "__main__":
    main()
