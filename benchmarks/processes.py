"""Runs that are resumed with another number of processes: exact, correct or refused.

    python benchmarks/processes.py --out results.jsonl

Each run trains with some processes of one device on the loopback, and is resumed with every other
number of them. It is exact if its state equals, to the bit, the state of a run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Quick, append

from podracer.io.checkpoint import stored_fingerprint
from podracer.io.sinks import read_metrics

NUMBERS = (1, 2, 3, 4, 8)
UPDATES, STEPS = 10, 16 * 8
FLAGS = (
    *("--num-envs", "16", "--rollout-length", "8", "--updates-per-chunk", "5"),
    *("--hidden", "16", "--evaluations", "0"),
)
RUNS = {
    "catch_a2c": ("catch_a2c",),
    "cartpole_ppo": ("cartpole_ppo",),
    "catch under Sebulba, lock-step": ("catch", "--arch", "sebulba", "--policy-lag", "0"),
}


def together(number: int, *command: str) -> tuple[set[int | None], str]:
    """Run a command in some processes; return their exit codes and what process 0 reported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    call = [sys.executable, "-m", "podracer", *command]
    flags = ["--coordinator", address, "--num-processes", str(number), "--process-id"]
    processes = [
        subprocess.Popen(
            [*call, *flags, str(i)] if number > 1 else call,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(number)
    ]
    texts = [process.communicate(timeout=600)[1] for process in processes]
    return {process.returncode for process in processes}, texts[0]


def outcome(run: Path, number: int, frames: int, alone: Path) -> dict[str, Any]:
    """Resume a run with some processes, and compare it with the run that was left alone."""
    codes, text = together(number, "resume", str(run), "--frames", str(frames))
    message = text.strip().splitlines()[-1] if text.strip() else ""
    if codes == {78}:
        return {"outcome": "refused", "message": message}
    if codes != {0}:
        return {"outcome": "failed", "codes": sorted(map(str, codes)), "message": message}
    updates = [record["updates"] for record in read_metrics(run / "metrics.jsonl")]
    assert updates == sorted(set(updates))
    assert updates[-1] == 2 * UPDATES
    if stored_fingerprint(run)[1] == stored_fingerprint(alone)[1]:
        return {"outcome": "exact"}
    return {"outcome": "correct", "is_said": "not bit-exact" in text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--quick", action=Quick, const={"runs": ["catch_a2c"]})
    options = parser.parse_args()
    numbers = NUMBERS[:2] if options.quick else NUMBERS
    for name in options.runs:
        folder = Path(tempfile.mkdtemp(prefix="processes-"))
        train = ("train", *RUNS[name], *FLAGS)
        for before in (n for n in numbers if 16 % n == 0):
            first, alone = folder / f"first{before}", folder / f"alone{before}"
            for run, updates in ((first, UPDATES), (alone, 2 * UPDATES)):
                frames = ("--frames", str(updates * STEPS), "--run-dir", str(run))
                codes, text = together(before, *train, *frames)
                assert codes == {0}, text
            for after in numbers:
                run = folder / f"{before}to{after}"
                shutil.copytree(first, run)
                row = {"run": name, "before": before, "after": after}
                row |= outcome(run, after, 2 * UPDATES * STEPS, alone)
                print(json.dumps(row), flush=True)
                append(options.out, row)
                shutil.rmtree(run)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
