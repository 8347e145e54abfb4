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
from pathlib import Path
from typing import Any

import jax
from anakin_parts import Timing
from harness import Contender, append, compare, here, parse, parser

from podracer import recipes
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.population import Pod, Population, make_chunk, run_keys, stack_agents
from podracer.drivers.progress import Request, request_array
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
    driver = Population(agent, pods, env, config, jax.devices())
    agents = stack_agents(driver.blueprint, pods)
    request = request_array(driver.mesh, Request.NONE, config.updates_per_chunk)
    program = make_chunk(env, driver.mesh, config)
    began = time.perf_counter()
    states = jax.block_until_ready(driver.init(run_keys(pods)))
    init_seconds = time.perf_counter() - began
    together = jax.jit(lambda states: program(agents, states, request)[0], donate_argnums=0)
    steps = len(pods) * config.steps_per_update * config.updates_per_chunk
    return here("one program", together, states, steps, init_seconds=init_seconds)


def one_after_another(agent: Any, env: Any, config: AnakinConfig, pods: Sequence[Pod]) -> Contender:
    """The program of a single learner, on each pod's state in turn."""
    driver = Anakin(agent, env, config, find_devices(1))
    request = request_array(driver.mesh, Request.NONE, config.updates_per_chunk)
    states = [driver.init(key) for key in run_keys(pods)]
    program = driver.compile_in_thread().result()

    def lap() -> Timing:
        began, used = time.perf_counter(), time.process_time()
        for index, state in enumerate(states):
            states[index] = jax.block_until_ready(program(state, request)[0])
        return Timing(time.perf_counter() - began, time.process_time() - used)

    lap()
    steps = len(pods) * config.steps_per_update * config.updates_per_chunk
    return Contender("one after another", steps, driver.compile_in_thread.seconds, lap)


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
        agent = dataclasses.replace(experiment.agent, network=TorsoNetwork(MLP((hidden,))))
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
