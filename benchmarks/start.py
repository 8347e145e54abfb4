"""How long a person waits: from `podracer train RECIPE` to the first update.

Each recipe starts twice in a process of its own, from an empty compile cache (cold) and from the
one that this left (warm), and stops after its first chunk, under Sebulba after its first update;
with `--compile-only` before it, as a chunk that is meant for an accelerator does not end here.
A column is the time at which something was done, counted from the start of the process:
configuration (flags read, recipe built), imports, the last program compiled, so that the first
update runs, and the end of the first chunk. "trace", "lower" and "compile" are the time within
JAX's phases of all programs until then, by the clock; what ran side by side counts once. CPU
seconds hold on a busy machine, too: those after the imports are of tracing (and whatever Python
does besides), of lowering, and of compiling, which is all that other threads do. Instructions are
those of the programs in use by then.

    python benchmarks/start.py --only catch cartpole_ppo --repetitions 3
    python benchmarks/start.py --only catch --flags="--learning-rate 2e-3"
    python benchmarks/start.py --only lpg_paper --caches cold --compile-only --programs

With `--flags`, the warm start gets flags that the cold one did not have, to see what they compile.
With `--programs` every program is listed, with the seconds for which it compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
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

    def __init__(self, compile_only: bool) -> None:
        self.compile_only = compile_only
        self.times: dict[str, Any] = {}
        self.intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}
        self.counts = Counter[str]()
        self.programs: list[tuple[str, float]] = []  # and the seconds that each compiled
        self.main_cpu = dict.fromkeys(PHASES.values(), 0.0)  # of the main thread, by phase
        self.main_until = 0.0  # its CPU seconds at its last event

    def mark(self, name: str) -> None:
        self.times[name] = seconds_since_start()
        self.times[f"{name}_cpu"] = time.process_time()

    def listen(self) -> None:
        import jax

        self.main_until = time.thread_time()
        jax.monitoring.register_event_duration_secs_listener(self._add)
        jax.monitoring.register_event_listener(self._count)

    def _add(self, event: str, duration_secs: float, **about: Any) -> None:
        name = event.rpartition("/")[2]
        if name not in PHASES or "first_chunk" in self.times:
            return
        end = seconds_since_start()
        self.intervals[name].append((end - duration_secs, end))
        if threading.current_thread() is threading.main_thread():
            cpu = time.thread_time()
            self.main_cpu[PHASES[name]] += cpu - self.main_until
            self.main_until = cpu
        if name == "backend_compile_duration":
            self.programs.append((str(about.get("fun_name", "")), round(duration_secs, 2)))
        self.mark("compiled")

    def _count(self, event: str, **_: Any) -> None:
        self.counts[event.rpartition("/")[2]] += 1

    def ready(self) -> None:
        """Take the time before the first update; end the process where nothing else is asked."""
        self.main_cpu["trace"] += time.thread_time() - self.main_until  # Python since
        self.main_until = time.thread_time()
        self.mark("compiled")
        if self.compile_only:
            self.write({})
            self.end(0)

    def write(self, record: dict[str, Any]) -> None:
        if "first_chunk" in self.times:
            return
        self.mark("first_chunk")
        import jax

        self.times |= {phase: covered(self.intervals[name]) for name, phase in PHASES.items()}
        python = {f"{phase}_cpu": self.main_cpu[phase] for phase in ("trace", "lower")}
        total = self.times["compiled_cpu"] - self.times["imports_cpu"]
        self.times |= {**python, "compile_cpu": total - sum(python.values())}
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

    def end(self, code: int) -> None:
        self.mark("end")
        print(json.dumps({**self.times, "code": code, "compiled_programs": self.programs}))
        sys.stdout.flush()
        os._exit(0)  # threads of environments may go on


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

    marks = Marks("--compile-only" in arguments)
    run = command.run

    def marked_run(*args: Any, **options: Any) -> int:
        marks.mark("configuration")
        from podracer.run import training

        marks.mark("imports")
        marks.listen()
        train = training.train

        def marked_train(experiment: Any, **options: Any) -> Any:
            return train(experiment, **{**options, "callbacks": [*options["callbacks"], marks]})

        training.train = marked_train
        training.make_driver = partial(marked_driver, marks, training.make_driver)
        return run(*args, **options)

    command.run = marked_run
    marks.end(command.train([flag for flag in arguments if flag != "--compile-only"]))


def marked_driver(marks: Marks, make_driver: Any, *args: Any) -> Any:
    """Return the driver of a run, which marks the time before its first update."""
    from podracer.drivers.sebulba import Sebulba
    from podracer.drivers.sebulba.actor_pool import ActorPool

    driver, start = make_driver(*args), ActorPool.start
    run = driver.run

    def marked_run(state: Any, orders: Any) -> Any:
        driver.compile_in_thread().result()
        marks.ready()
        yield from run(state, orders)

    def marked_start(self: Any) -> None:
        marks.ready()
        start(self)

    if isinstance(driver, Sebulba):
        ActorPool.start = marked_start
    else:
        driver.run = marked_run
    return driver


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


def starts(recipe: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the starts of a recipe by cache; a warm one follows a cold one."""
    rows: dict[str, list[dict[str, Any]]] = {cache: [] for cache in options.caches}
    always = ["--compile-only"] if options.compile_only else []
    for _ in range(options.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            cold = measure(recipe, place, place / "cold", always)
            programs = cold.pop("compiled_programs")
            if options.programs:
                for name, seconds in sorted(programs, key=lambda program: -program[1]):
                    print(f"{seconds:10.2f} s {name}", flush=True)
            if "cold" in rows:
                rows["cold"].append(cold)
            if "warm" in rows:
                flags = [*options.flags.split(), *always]
                rows["warm"].append(measure(recipe, place, place / "warm", flags))
                del rows["warm"][-1]["compiled_programs"]
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def show(recipe: str, cache: str, row: dict[str, Any]) -> str:
    names = (*MARKS, *PHASES.values())
    times = "".join(f"{row[name]:8.1f} {row[f'{name}_cpu']:5.1f}" for name in names)
    counts = f"{row['programs']:>6.0f}{row['from_cache']:>6.0f}{row['instructions']:>8.0f}"
    return f"{recipe:22} {cache:5}{times}{counts}"


def main() -> None:
    import harness

    from podracer import recipes

    made = harness.parser(__doc__)
    made.set_defaults(repetitions=1)
    made.add_argument("--only", nargs="+", default=list(recipes.RECIPES), help="these recipes")
    made.add_argument("--flags", default="", help="flags of the warm start alone")
    made.add_argument("--caches", nargs="+", default=["cold", "warm"], choices=["cold", "warm"])
    made.add_argument("--compile-only", action="store_true", help="end before the first update")
    made.add_argument("--programs", action="store_true", help="list the programs of a cold start")
    options = made.parse_args()
    columns = "".join(f"{name[:12]:>14}" for name in (*MARKS, *PHASES.values()))
    print(f"\n{'seconds, CPU seconds':28}{columns} progs cache  instrs\n")
    for recipe in ["catch"] if options.quick else options.only:
        try:
            rows = starts(recipe, options)
        except RuntimeError as error:
            print(f"{recipe:22} did not start: {error}", flush=True)
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
