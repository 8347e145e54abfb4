"""How long a person waits: from `podracer train RECIPE` to the first update.

Each recipe starts twice in a process of its own, from an empty compile cache (cold) and from the
one that this left (warm), and stops after its first chunk, under Sebulba after its first update.
A column is the time at which something was done, counted from the start of the process:
configuration (flags read, recipe built), imports, the last program compiled, so that the first
update runs, and the end of the first chunk. "trace", "lower" and "compile" are the time within
JAX's phases of all programs until then, by the clock; what ran side by side counts once. CPU
seconds hold on a busy machine, too. Instructions are those of the programs in use by then.

    python benchmarks/start.py --only catch cartpole_ppo --repetitions 3
    python benchmarks/start.py --only catch --flags="--learning-rate 2e-3"

With `--flags`, the warm start gets flags that the cold one did not have, to see what they compile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

MARKS = ("configuration", "imports", "compiled", "first_chunk")
PHASES = {
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
}


# --- the process that is measured ----------------------------------------------------------------


def seconds_since_start() -> float:
    """Seconds since the kernel started this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class Marks:
    """Times of this process, and a sink of the run that takes the time of its first record."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}
        self.counts = Counter[str]()

    def mark(self, name: str) -> None:
        self.times[name] = seconds_since_start()
        self.times[f"{name}_cpu"] = time.process_time()

    def listen(self) -> None:
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._add)
        jax.monitoring.register_event_listener(self._count)

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if (name := event.rpartition("/")[2]) in PHASES:
            end = seconds_since_start()
            self.intervals[name].append((end - duration_secs, end))
            if "first_chunk" not in self.times:
                self.mark("compiled")

    def _count(self, event: str, **_: Any) -> None:
        self.counts[event.rpartition("/")[2]] += 1

    def write(self, record: dict[str, Any]) -> None:
        if "first_chunk" in self.times:
            return
        self.mark("first_chunk")
        import jax

        self.times |= {phase: covered(self.intervals[name]) for name, phase in PHASES.items()}
        self.times["programs"] = len(self.intervals["backend_compile_duration"])
        self.times["from_cache"] = self.counts["cache_hits"]
        executables = jax.devices()[0].client.live_executables()
        self.times["instructions"] = sum(
            module.to_string().count(" = ")
            for executable in executables
            for module in executable.hlo_modules()
        )

    def close(self) -> None:
        pass


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: phases nest, and run in several threads."""
    total, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def start(arguments: list[str]) -> None:
    """Be `podracer train`, and print the marks as the last line."""
    from podracer.cli import train as command

    marks = Marks()
    run = command.run

    def marked_run(*args: Any, **options: Any) -> int:
        marks.mark("configuration")
        from podracer.experiments import training

        marks.mark("imports")
        marks.listen()
        train = training.train

        def marked_train(experiment: Any, **options: Any) -> Any:
            return train(experiment, **{**options, "sinks": [*options["sinks"], marks]})

        training.train = marked_train
        return run(*args, **options)

    command.run = marked_run
    code = command.train(arguments)
    marks.mark("end")
    print(json.dumps({**marks.times, "code": code}), flush=True)
    os._exit(0)  # threads of environments may go on


# --- the benchmark -------------------------------------------------------------------------------


def measure(recipe: str, home: Path, directory: Path, flags: list[str]) -> dict[str, Any]:
    """Start a recipe in a process of its own, whose compile cache is below `home`."""
    command = [
        sys.executable, __file__, "--start", recipe, "--max-seconds", "0.001",
        "--run-dir", str(directory), "--devices", "1" if "--arch" not in flags else "0", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def show(recipe: str, cache: str, row: dict[str, Any]) -> str:
    times = "".join(f"{row[mark]:8.1f} {row[f'{mark}_cpu']:5.1f}" for mark in MARKS)
    phases = "".join(f"{row[phase]:8.1f}" for phase in PHASES.values())
    counts = f"{row['programs']:>6.0f}{row['from_cache']:>6.0f}{row['instructions']:>8.0f}"
    return f"{recipe:20} {cache:5}{times}{phases}{counts}"


def main() -> None:
    import harness

    from podracer.experiments import recipes

    made = harness.parser(__doc__)
    made.set_defaults(repetitions=1)
    made.add_argument("--only", nargs="+", default=list(recipes.RECIPES), help="these recipes")
    made.add_argument("--flags", default="", help="flags of the warm start alone")
    options = made.parse_args()
    columns = "".join(f"{mark[:12]:>14}" for mark in MARKS)
    phases = "".join(f"{phase:>8}" for phase in PHASES.values())
    print(f"\n{'seconds, CPU seconds':26}{columns}{phases} progs cache instrs\n")
    for recipe in ["catch"] if options.quick else options.only:
        rows: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
        try:
            for _ in range(options.repetitions):
                with tempfile.TemporaryDirectory() as folder:
                    place = Path(folder)
                    rows["cold"].append(measure(recipe, place, place / "cold", []))
                    flags = options.flags.split()
                    rows["warm"].append(measure(recipe, place, place / "warm", flags))
        except RuntimeError as error:
            print(f"{recipe:20} did not start: {error}", flush=True)
            continue
        for cache, turns in rows.items():
            row = medians(turns)
            print(show(recipe, cache, row), flush=True)
            about = {"benchmark": "start", "recipe": recipe, "cache": cache}
            if cache == "warm" and options.flags:
                about["flags"] = options.flags
            harness.append(options.out, {**about, **row, "repetitions": len(turns)})


if __name__ == "__main__":
    start(sys.argv[2:]) if sys.argv[1:2] == ["--start"] else main()
