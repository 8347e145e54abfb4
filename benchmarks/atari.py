"""PPO on Atari Pong at CleanRL's settings, beside CleanRL's EnvPool script, stable-baselines3 and
Sample Factory.

Eight environments, rollouts of 128, four epochs of four minibatches, the Nature network, all cores.
Each is a process of its own, and they take turns. A rate is that of a run after its second update,
so that starting and compiling are left out. podracer runs on one CPU device, and on one for acting
and one for each core that learns (`--devices`). Sample Factory acts and learns asynchronously, in
processes, as it does by default. With `--network deep`, the residual network of IMPALA, beside
Sample Factory alone, as the others' scripts have the Nature network.

    python benchmarks/atari.py --cleanrl-python PYTHON --cleanrl CHECKOUT --sb3-python PYTHON
    python benchmarks/atari.py --network deep --sample-factory-python PYTHON
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import append, parse, parser

HERE = Path(__file__).parent
ENVIRONMENTS, LENGTH, SKIPPED = 8, 128, 2  # the first updates are not counted
STEPS = ENVIRONMENTS * LENGTH

Clock = list[tuple[float, float]]  # seconds and steps after each update


def podracer(devices: int, options: argparse.Namespace) -> Clock:
    """Run `podracer train` on some devices, and read its metrics."""
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "--environment": "atari:pong",
            "--devices": devices,
            "--threads-per-actor": 1,
            "--num-envs": ENVIRONMENTS,
            "--rollout-length": LENGTH,
            "--updates-per-chunk": 1,
            "--frames": options.updates * STEPS,
            "--evaluations": 0,
            "--save-seconds": 3600,
            "--run-dir": f"{directory}/run",
        }
        words = [str(word) for pair in flags.items() for word in pair]
        recipe = "atari_ppo" if options.network == "nature" else "atari_deep:ppo"
        _run([sys.executable, "-m", "podracer", "train", recipe, *words], HERE)
        lines = Path(f"{directory}/run/metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [(record["seconds"], record["frames"]) for record in records if "seconds" in record]


def cleanrl(options: argparse.Namespace) -> Clock:
    """Run CleanRL's script unchanged; it prints the mean rate since its start at each update."""
    words = f"--env-id Pong-v5 --no-cuda --num-envs {ENVIRONMENTS} --num-steps {LENGTH}"
    words += f" --total-timesteps {options.updates * STEPS}"
    script = Path(options.cleanrl) / "cleanrl" / "ppo_atari_envpool.py"
    with tempfile.TemporaryDirectory() as directory:
        out = _run([options.cleanrl_python, str(script.absolute()), *words.split()], directory)
    rates = [int(found) for found in re.findall(r"SPS: (\d+)", out)]
    return [(number * STEPS / rate, number * STEPS) for number, rate in enumerate(rates, 1)]


def stable_baselines3(options: argparse.Namespace) -> Clock:
    """Run it in `peers.py`, an update for each line."""
    words = f"--environment PongNoFrameskip-v4 --envs {ENVIRONMENTS} --length {LENGTH}"
    command = [options.sb3_python, str(HERE / "peers.py"), "sb3", *words.split()]
    laps = _run(command, stdin="\n" * options.updates).splitlines()[1:]
    clock, seconds = [], 0.0
    for number, lap in enumerate(laps, 1):
        seconds += json.loads(lap)["seconds"]
        clock.append((seconds, number * STEPS))
    return clock


def sample_factory(options: argparse.Namespace) -> Clock:
    """Run its EnvPool script with a worker process, and read the frames that it has learned from.

    It counts emulated frames, four for a step, and logs them every five seconds, so its turn has
    twice as many updates.
    """
    layers = {"nature": ("convnet_atari", 512), "deep": ("resnet_impala", 256)}
    network, hidden = layers[options.network]
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "env": "atari_pong", "device": "cpu", "train_dir": directory, "experiment": "run",
            "env_agents": ENVIRONMENTS, "num_workers": 1, "num_envs_per_worker": 1,
            "worker_num_splits": 1, "rollout": LENGTH, "batch_size": STEPS // 4,
            "num_batches_per_epoch": 4, "num_epochs": 4, "encoder_conv_architecture": network,
            "encoder_conv_mlp_layers": hidden,
            "train_for_env_steps": 4 * 2 * options.updates * STEPS,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        module = "sf_examples.envpool.atari.train_envpool_atari"
        _run([options.sample_factory_python, "-m", module, *words])
        log = Path(f"{directory}/run/sf_log.txt").read_text()
    line = re.compile(r"\[(\S+ \S+),\d+\].*Fps is .*Total num frames: (\d+)")
    found = [(datetime.datetime.fromisoformat(x), int(y) / 4) for x, y in line.findall(log)]
    clock = [(when.timestamp(), steps) for when, steps in found if steps >= SKIPPED * STEPS]
    return [clock[0]] * SKIPPED + clock[1:]


def _run(command: list[str], directory: str | Path | None = None, stdin: str = "") -> str:
    done = subprocess.run(
        command, cwd=directory, input=stdin, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def rate(clock: Clock) -> float:
    """Return steps a second after the first updates."""
    (began, before), (ended, after) = clock[SKIPPED - 1], clock[-1]
    return (after - before) / (ended - began)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    made = parser(__doc__, devices=1 + cores, updates=SKIPPED + 1)
    made.add_argument("--cleanrl-python", help="a Python with envpool, gym and torch")
    made.add_argument("--cleanrl", default="cleanrl", help="checkout of CleanRL")
    made.add_argument("--sb3-python", help="a Python with stable-baselines3 and ale-py")
    made.add_argument("--sample-factory-python", help="a Python with sample-factory and envpool")
    made.add_argument("--network", choices=("nature", "deep"), default="nature")
    made.add_argument("--updates", type=int, default=12, help="of a turn (default %(default)s)")
    options = parse(made)
    contenders: dict[str, Callable[[argparse.Namespace], Clock]] = {
        f"podracer, {devices} device(s)": partial(podracer, devices)
        for devices in sorted({options.devices, 1}, reverse=True)
    }
    if options.sample_factory_python:
        contenders["Sample Factory"] = sample_factory
    if options.cleanrl_python and options.network == "nature":
        contenders["CleanRL, EnvPool"] = cleanrl
    if options.sb3_python and options.network == "nature":
        contenders["stable-baselines3"] = stable_baselines3
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.repetitions):
        for name, run in contenders.items():
            began = time.perf_counter()
            rates[name].append(rate(run(options)))
            text = f"{rates[name][-1]:10,.0f} steps/s ({time.perf_counter() - began:.0f} s)"
            print(f"turn {turn + 1}: {name:22}{text}", flush=True)
    first, ours = next(iter(rates.items()))
    for name, found in rates.items():
        times = statistics.median(mine / its for mine, its in zip(ours, found, strict=True))
        print(f"{name:22}{statistics.median(found):10,.0f} steps/s, {first} is {times:.2f} times")
        record = {
            "benchmark": "ppo atari",
            "contender": name,
            "network": options.network,
            "environments": ENVIRONMENTS,
            "length": LENGTH,
            "steps_per_second": statistics.median(found),
            "repetitions": found,
            "first": first,
            "first_is_times_as_fast": times,
        }
        append(options.out, record)


if __name__ == "__main__":
    main()
