"""Hosts that average parameters instead of gradients: the cost in frames, the savings in messages.

    python benchmarks/host_averaging.py --seeds 3

Two processes on loopback learn CartPole by PPO under Sebulba, half of the environments each. Of two
hosts the neighbor in a ring or a hypercube is the other one, so peers are `all`. Bytes are those
that a host gives away: gradients at each optimizer step, or the floats of the learner's state at
each average. The score is the mean over all evaluations of a run, so that it counts how fast they
learn, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import catalog
from podracer.experiments import recipes
from podracer.io.sinks import read_metrics

RECIPE, HOSTS, EVALUATIONS = "cartpole_sebulba", 2, 8
CONTENDERS: tuple[tuple[str, int], ...] = (("gradients", 0), ("all", 4), ("all", 16))


def returns(peers: str, every: int, seed: int, frames: int) -> np.ndarray:
    """Train in two processes, and return the return of each evaluation."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        average = ["--average-hosts", peers, "--average-every", str(every)] if every else []
        command = [
            sys.executable, "-m", "podracer", "train", RECIPE, *average,
            "--frames", str(frames), "--seed", str(seed), "--target-return", "None",
            "--evaluations", str(EVALUATIONS), "--updates-per-chunk", "5", "--devices", str(HOSTS),
            "--run-dir", f"{directory}/run", "--save-seconds", "1e9", "--no-keep-best",
            "--coordinator", address, "--num-processes", str(HOSTS),
        ]  # fmt: skip
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        hosts = [
            subprocess.Popen([*command, "--process-id", str(i)], env=env, stdout=subprocess.DEVNULL)
            for i in range(HOSTS)
        ]
        if codes := [code for code in (host.wait() for host in hosts) if code]:
            raise SystemExit(f"{peers} every {every} ended with {codes}")
        records = read_metrics(Path(directory) / "run" / "metrics.jsonl")
    return np.array([r["evaluation_return"] for r in records if "evaluation_return" in r])


def bytes_sent(peers: str, every: int) -> float:
    """Return the bytes that a host gives away for an update."""
    run: Any = recipes.find(RECIPE)
    agent = dataclasses.replace(run.agent, spec=catalog.make(run.environment).spec)
    shared = jax.eval_shape(lambda key: agent.init(key, 1), jax.random.key(0)).shared
    if peers == "gradients":
        steps = agent.num_epochs * agent.num_minibatches
        return steps * sum(4 * x.size for x in jax.tree.leaves(shared.params))
    floats = [x for x in jax.tree.leaves(shared) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(4 * x.size for x in floats) / every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=200_000)
    options = parser.parse_args()
    print(f"{'peers':10} {'every':>5} {'kB an update':>13} {'mean return':>12}   seeds", flush=True)
    for peers, every in CONTENDERS:
        scores = [returns(peers, every, seed, options.frames) for seed in range(options.seeds)]
        means, ends = [x.mean() for x in scores], [x[-1] for x in scores]
        sent = bytes_sent(peers, every) / 1e3
        print(
            f"{peers:10} {every:>5} {sent:13.1f} {np.mean(means):12.0f}   {_text(means)}; "
            f"at the end {_text(ends)}",
            flush=True,
        )


def _text(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


if __name__ == "__main__":
    main()
