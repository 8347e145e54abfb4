"""Torch simulators on the device that learns: milliseconds a step of 4,096 environments.

    python benchmarks/device_simulators.py            # on a GPU, with torch for its CUDA
    python benchmarks/device_simulators.py --quick    # 256 environments, on a CPU

The simulators are those of `examples/extensions/batched_simulator.py`. `simulator_ms` is a step of
the simulator alone, `acting_ms` a step with inference, DLPack and the trajectory, and `ours` the
share of the second in which the simulator does not step. `training_ms` includes updates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sebulba_parts as sebulba
from machine import machine

from podracer.agents.ppo import PPO
from podracer.checks.random_play import random_actions
from podracer.devices.mesh import find_devices
from podracer.devices.startup import choose_gpu_kernels
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.errors import ConfigError
from podracer_plan import trials

TASKS = ("CartPoles", "PointMasses")
MOST_MS, MOST_SHARE = 1.0, 0.2  # the goals on a GPU


def measure(task: str, num_envs: int, seconds: float, device: str = "cuda") -> dict[str, Any]:
    """Return figures of a task, `value` among them: milliseconds of a step with inference."""
    sys.path.append(str(Path(__file__).parents[1] / "examples" / "extensions"))
    try:
        import batched_simulator  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(f"{task} needs the package {error.name}: pip install torch.") from error
    env = getattr(batched_simulator, task)(device)
    config = SebulbaConfig(num_envs=num_envs, rollout_length=32)
    driver = Sebulba(PPO(), env, config, find_devices(1))
    simulator_ms = _simulator_ms(env, num_envs, seconds)
    acting_ms = 1e3 * num_envs / sebulba.measure_acting(driver, seconds)
    steps_per_second, metrics = trials.measure(driver, seconds)
    return {
        "value": acting_ms,
        "simulator_ms": simulator_ms,
        "acting_ms": acting_ms,
        "ours": 1 - simulator_ms / acting_ms,
        "training_ms": 1e3 * num_envs / steps_per_second,
        "steps_per_second": steps_per_second,
        "meets_goals": acting_ms < MOST_MS and 1 - simulator_ms / acting_ms < MOST_SHARE,
        "num_envs": num_envs,
        "simulator": f"torch on {device}",
        **{name: seconds for name, seconds in metrics.items() if "_time_" in name},
    }


def _simulator_ms(env: Any, num_envs: int, seconds: float) -> float:
    """Return milliseconds of a step alone, to the end of its work on the device."""
    import torch  # pyright: ignore[reportMissingImports]

    wait = torch.cuda.synchronize if env.device == "cuda" else lambda: None
    generator = np.random.default_rng(0)
    actions = [random_actions(generator, env.spec, None, num_envs) for _ in range(16)]
    actions = jax.block_until_ready(jax.device_put(actions, jax.devices()[0]))
    batch = env.make(num_envs, 1)
    batch.reset(0, np.arange(num_envs, dtype=np.uint32), 0)
    for warm_up in (True, False):
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < (seconds / 4 if warm_up else seconds):
            batch.step(actions[steps % len(actions)])
            wait()
            steps += 1
    return 1e3 * (time.perf_counter() - start) / steps


def main() -> None:
    flags = argparse.ArgumentParser(description="Torch simulators on the device that learns.")
    flags.add_argument("--quick", action="store_true", help="tiny sizes on a CPU")
    flags.add_argument("--seconds", type=float, default=10.0, help="of each of three measurements")
    options = flags.parse_args()
    choose_gpu_kernels()  # as commands do
    size, seconds, device = (256, 0.5, "cpu") if options.quick else (4096, options.seconds, "cuda")
    for task in TASKS:
        print(json.dumps({"task": task, **machine(), **measure(task, size, seconds, device)}))


if __name__ == "__main__":
    main()
