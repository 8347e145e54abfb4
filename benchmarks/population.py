"""Pods in one program against the same pods one after another, and against one process for each.

Warm: a repetition gives every pod one chunk; *one after another* runs the program of a single
learner on each pod's state in turn. Then whole, with `--processes N`: pods per second of N runs of
`podracer train`, two at a time, starting and compiling included, beside one `podracer sweep`.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
from anakin_parts import Timing
from harness import Contender, append, compare, here, parse, parser

from podracer import recipes
from podracer.agent import Blueprint, Context
from podracer.devices.mesh import find_devices, make_mesh
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.anakin import make_chunk as make_single
from podracer.drivers.common import Request, request_array
from podracer.drivers.population import Pod, init_states, make_chunk, population_mesh, stack_agents
from podracer.envs import make
from podracer.networks import MLP, TorsoNetwork

# Recipe, hidden units, environments of a pod, rollout, updates in a chunk
CASES = (
    ("catch_a2c", 16, 1, 8, 200),
    ("catch_a2c", 16, 4, 8, 200),
    ("cartpole_ppo", 16, 4, 32, 20),
    ("cartpole_ppo", 64, 32, 32, 5),
)


def one_program(agent: Any, env: Any, config: AnakinConfig, pods: Sequence[Pod]) -> Contender:
    """All pods at once."""
    mesh = population_mesh(jax.devices(), len(pods))
    agents = stack_agents(agent, pods)
    request = request_array(mesh, Request.NONE, config.updates_per_chunk)
    program = make_chunk(env, mesh, config)
    began = time.perf_counter()
    states = jax.block_until_ready(init_states(agent, pods, env, mesh, config))
    init_seconds = time.perf_counter() - began
    together = jax.jit(lambda states: program(agents, states, request)[0], donate_argnums=0)
    steps = len(pods) * config.steps_per_update * config.updates_per_chunk
    return here("one program", together, states, steps, init_seconds=init_seconds)


def one_after_another(agent: Any, env: Any, config: AnakinConfig, pods: Sequence[Pod]) -> Contender:
    """The program of a single learner, on each pod's state in turn."""
    mesh, [device] = population_mesh(jax.devices(), len(pods)), find_devices(1)
    request = request_array(make_mesh([device]), Request.NONE, config.updates_per_chunk)
    single = partial(make_single(env, make_mesh([device]), config), agent)
    step = jax.jit(lambda state: single(state, request)[0], donate_argnums=0)
    first_states = init_states(agent, pods, env, mesh, config)
    states = [jax.tree.map(lambda x, i=i: x[i], first_states) for i in range(len(pods))]
    states = jax.device_put(states, jax.sharding.SingleDeviceSharding(device))
    began = time.perf_counter()
    compiled = step.lower(states[0]).compile()
    compile_seconds = time.perf_counter() - began

    def lap() -> Timing:
        began, used = time.perf_counter(), time.process_time()
        for index, state in enumerate(states):
            states[index] = jax.block_until_ready(compiled(state))
        return Timing(time.perf_counter() - began, time.process_time() - used)

    lap()
    steps = len(pods) * config.steps_per_update * config.updates_per_chunk
    return Contender("one after another", steps, compile_seconds, lap)


def whole(count: int, pods: int, out: Path | None) -> None:
    """Seconds of `count` processes of one pod, and of one sweep over `pods`."""
    flags = ("cartpole_ppo", "--frames", "40960", "--evaluations", "1")
    target = "from podracer.cli.main import main; main()"

    def run(name: str, *arguments: str) -> None:
        command = [sys.executable, "-c", target, *arguments, "--run-dir", f"{folder}/{name}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory() as folder:
        run("warm", "train", *flags)  # fills the cache of compiled programs
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            each = [
                pool.submit(run, f"{i}", "train", *flags, "--seed", f"{i}") for i in range(count)
            ]
            for future in each:
                future.result()
        processes = count / (time.perf_counter() - began)
        run("warm-sweep", "sweep", *flags, "--seeds", str(pods))
        began = time.perf_counter()
        run("sweep", "sweep", *flags, "--seeds", str(pods))
        sweep = pods / (time.perf_counter() - began)
    print(
        f"\nwhole runs: {sweep:.2f} pods/s in a sweep of {pods}; {processes:.2f} in a process "
        f"each, two at a time ({count} of them): {sweep / processes:.1f}x"
    )
    append(out, {
        "benchmark": "population, whole runs", "pods": pods, "sweep_pods_per_second": sweep,
        "processes": count, "process_pods_per_second": processes,
    })  # fmt: skip


def main() -> None:
    made = parser(__doc__, devices=2, pods=[2], processes=1)
    made.add_argument("--pods", type=int, nargs="+", default=[64])
    made.add_argument("--processes", type=int, default=8, help="0 to leave whole runs out")
    options = parse(made)
    for recipe, hidden, envs, length, updates in CASES:
        experiment = recipes.find(recipe)
        env = make(experiment.environment)
        settings = dataclasses.replace(experiment.agent, network=TorsoNetwork(MLP((hidden,))))
        agent = Blueprint(settings, env.spec, Context(length))
        config = AnakinConfig(envs, length, updates)
        for count in options.pods:
            pods = [Pod(seed) for seed in range(count)]
            settings = {
                "recipe": recipe, "pods": count, "hidden": hidden, "envs": envs, "length": length
            }  # fmt: skip
            contenders = [
                part(agent, env, config, pods) for part in (one_program, one_after_another)
            ]
            compare("population", settings, contenders, options)
    if options.processes:
        whole(options.processes, max(options.pods), options.out)


if __name__ == "__main__":
    main()
