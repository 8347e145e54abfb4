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
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from averaging import print_table
from harness import Quick

from podracer import recipes
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--quick", action=Quick, const={"seeds": 1, "frames": 20_000})
    options = parser.parse_args()

    def scores(peers: str, every: int) -> list[np.ndarray]:
        return [returns(peers, every, seed, options.frames) for seed in range(options.seeds)]

    print_table(recipes.find(RECIPE), CONTENDERS, scores)


if __name__ == "__main__":
    main()
