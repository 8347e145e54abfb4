"""Do long runs keep their size? Memory, open files, threads, processes and disk, under faults.

    python benchmarks/load.py sebulba --seconds 3600
    python benchmarks/load.py tournament --rounds 200

The command runs in a process of its own. Every `--fault-seconds` one of its processes is killed: a
worker that steps environments, or a pod. A quantity is flat if its median in the last quarter of
the samples is at most 5 % above that in the second quarter, and a few units. Exits with 1 if one
is not, if the run does not end with 0, or if its accounts do not close.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Quick, append

from podracer.tournament.events import Submitted
from podracer.tournament.leaderboard import read_events

# Units that a quantity may gain besides 5 %: what differs between two moments of one run.
SLACK = {"memory MiB": 16.0, "files": 3.0, "threads": 2.0, "processes": 2.0, "disk MiB": 2.0}


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Iterate over the processes below one, with their command lines."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child, Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                yield from descendants(child)


def sample(pid: int, directory: Path) -> dict[str, float]:
    """Return the size of the main process, its number of processes, and that of its checkpoints."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    disk = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            disk += path.stat().st_size if "checkpoints" in path.parts else 0
    return {
        "memory MiB": int(status["VmRSS"].split()[0]) / 1024,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "processes": 1 + len(list(descendants(pid))),
        "disk MiB": disk / 2**20,
    }


def watch(command: list[str], directory: Path, mark: str, options: Any) -> tuple[int, int, list]:
    """Run a command under faults; return its exit code, the number of kills, and the samples."""
    dice = random.Random(0)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    kills, samples, begin = 0, [], time.monotonic()
    next_fault = begin + options.fault_seconds
    while process.poll() is None:
        time.sleep(options.sample_seconds)
        with contextlib.suppress(OSError, KeyError):  # it may have ended since
            samples.append(sample(process.pid, directory))
        victims = [pid for pid, line in descendants(process.pid) if mark in line]
        if time.monotonic() > next_fault and victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(victims), signal.SIGKILL)
                kills += 1
            next_fault = time.monotonic() + options.fault_seconds
    return process.returncode, kills, samples


def quarters(samples: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """Return a quantity's median in the second and the last quarter, and its maximum."""
    values = [values[name] for values in samples]
    quarter = max(1, len(values) // 4)
    median = statistics.median
    return median(values[quarter : 2 * quarter]), median(values[-quarter:]), max(values)


def sebulba(directory: Path, options: Any) -> tuple[list[str], str]:
    flags = ("--frames", 6 * 10**10, "--max-seconds", options.seconds, "--evaluations", 0)
    return ["train", "cartpole_sebulba", "--run-dir", directory, *flags], "run_fork_server"


def tournament(directory: Path, options: Any) -> tuple[list[str], str]:
    flags = ("--pods", 2, "--rounds", options.rounds, "--round-frames", 40_960)
    command = ["tournament", "catch_a2c", "--run-dir", directory, *flags]
    return command, "podracer.tournament.process"


def closes(directory: Path, options: Any) -> bool:
    """Whether every step, or every round of every pod, was counted once."""
    if options.load == "sebulba":
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        parts = ("steps_learned", "steps_in_flight", "steps_dropped")
        return all(x["steps_collected"] == sum(x[part] for part in parts) for x in lines)
    events = [event for event in read_events(directory) if isinstance(event, Submitted)]
    rounds = Counter((event.pod, event.round) for event in events)
    return rounds == Counter((p, r) for p in range(2) for r in range(options.rounds))


QUICK = {"seconds": 40.0, "rounds": 3, "fault_seconds": 15.0, "sample_seconds": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("load", choices=["sebulba", "tournament"])
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the Sebulba run")
    parser.add_argument("--rounds", type=int, default=200, help="of each pod of the tournament")
    parser.add_argument("--fault-seconds", type=float, default=60.0, help="between two kills")
    parser.add_argument("--sample-seconds", type=float, default=5.0, help="between two samples")
    parser.add_argument("--out", type=Path, help="append the result as a JSON line")
    parser.add_argument("--quick", action=Quick, const=QUICK)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "run"
        arguments, mark = {"sebulba": sebulba, "tournament": tournament}[options.load](
            directory, options
        )
        command = [sys.executable, "-m", "podracer", *map(str, arguments)]
        code, kills, samples = watch(command, directory, mark, options)
        exact = code == 0 and closes(directory, options)
    print(f"exit code {code}, {kills} kills, {len(samples)} samples, accounts close: {exact}")
    result: dict[str, Any] = {"load": options.load, "kills": kills, "code": code, "exact": exact}
    flat = True
    for name, slack in SLACK.items():
        early, late, most = result[name] = quarters(samples, name)
        is_flat = late <= 1.05 * early + slack
        flat &= is_flat
        verdict = "flat" if is_flat else "GROWS"
        print(f"{name:12} {early:8.1f} -> {late:8.1f}, at most {most:8.1f}   {verdict}")
    append(options.out, result | {"flat": flat})
    sys.exit(not (exact and (flat or options.quick)))


if __name__ == "__main__":
    main()
