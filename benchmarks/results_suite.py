"""The results suite: podracer's agents at the tasks of `cells.py`, and the page of all results.

Each cell is a `podracer sweep` of its seeds, or under Sebulba a `podracer train` for each of them,
in a directory outside the repository. A cell whose scores are in `results/suite.jsonl` is skipped,
one that was interrupted continues. `references.py` runs other libraries at the same tasks.

    python benchmarks/results_suite.py --list                 the cells, and how long each takes
    python benchmarks/results_suite.py --only minatar --budget 3600
    python benchmarks/results_suite.py --only dqn-cnn --seeds 3    the first three of each cell
    python benchmarks/results_suite.py --queue benchmarks/queue.txt    long runs, in its order
    python benchmarks/results_suite.py --page                 write benchmarks/results.md
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cells
import records
from cells import Cell

from podracer.config.experiment import Experiment
from podracer.io.sinks import read_metrics

INTERRUPTED = (75, 130, -signal.SIGTERM)  # exit codes of a run that can continue
SCRATCH = Path.home() / ".cache" / "podracer" / "results-suite"


def measure(cell: Cell, options: argparse.Namespace, deadline: float) -> bool:
    """Run a cell and record its scores; return whether it was finished before the deadline."""
    experiment = cells.experiment_of(cell.command)
    configuration = cells.configuration_of(experiment)
    rows = records.read(options.out)
    wanted = cells.seeds_of(cell)[: options.seeds]
    seeds = records.missing(rows, cell.name, configuration, wanted)
    together = experiment.arch == "anakin" and len(seeds) > 0
    for group in [seeds] if together else [[seed] for seed in seeds]:
        name = f"{cell.task}-{cell.agent}-{configuration}-s{group[0]}x{len(group)}"
        run = options.scratch / name
        command = cells.command_of(cell, group)
        flags = ["--run-dir", str(run), "--devices", str(options.devices if together else 1)]
        arguments = ["resume", str(run)] if (run / "config.json").exists() else [*command, *flags]
        code = run_podracer(arguments, run, deadline)
        if code in INTERRUPTED:
            return False
        if code:
            raise SystemExit(f"{cell.name} ended with code {code}: see {run}.log")
        records.append(options.out, rows_of(cell, experiment, run, group))
    return True


def run_podracer(arguments: Sequence[str], run: Path, deadline: float) -> int:
    """Run a command until the deadline, at which it is saved; return its exit code.

    Beside the run's directory lie its output and the seconds that it has taken so far.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    start, cpu_start = time.monotonic(), _cpu_seconds_of_children()
    with run.with_name(run.name + ".log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "podracer", *arguments],
            cwd=records.ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when told to end: what was spent is written down
            if process.poll() is None:
                process.terminate()
            code = process.wait()
            cpu_seconds = _cpu_seconds_of_children() - cpu_start
            with run.with_name(run.name + ".spent").open("a") as file:
                print(time.monotonic() - start, cpu_seconds, file=file)
    return code


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def rows_of(
    cell: Cell, experiment: Experiment, run: Path, seeds: Sequence[int]
) -> list[records.Row]:
    """Return the rows of a finished run, one for each seed."""
    evaluations = evaluations_of(run, len(seeds))
    config = json.loads((run / "config.json").read_text())
    lines = run.with_name(run.name + ".spent").read_text().splitlines()
    seconds, cpu_seconds = (sum(float(line.split()[i]) for line in lines) for i in (0, 1))
    shared = {
        "task": cell.task,
        "library": "podracer",
        "agent": cell.agent,
        "environment": experiment.environment,
        "evaluation": cells.evaluation_of(experiment),
        "seconds": seconds / len(seeds),
        "cpu_seconds": cpu_seconds / len(seeds),
        "seeds_together": len(seeds),
        "command": cell.command,
        "configuration": cells.configuration_of(experiment),
        "versions": config["versions"],
        "device": config["device"],
    }
    rows = []
    for index, seed in enumerate(seeds):
        curve = [[evaluation["frames"], evaluation["returns"][index]] for evaluation in evaluations]
        if any(value is None for _, value in curve):
            raise SystemExit(f"{cell.name}, seed {seed}, met a fault: see {run}")
        frames, score = curve[-1]
        distinct = int(evaluations[-1]["distinct"][index])
        rows.append({
            **shared, "seed": seed, "frames": frames, "score": score,
            "distinct_episodes": distinct, "curve": [[f, round(r, 4)] for f, r in curve],
        })  # fmt: skip
    return rows


def evaluations_of(run: Path, seeds: int) -> list[dict[str, Any]]:
    """Return for each evaluation the frames of a seed, and the return and the number of distinct
    episodes of each seed."""
    metrics = {record["updates"]: record for record in read_metrics(run / "metrics.jsonl")}
    pods = run / "pods.jsonl"
    evaluations = []
    for record in read_metrics(pods) if pods.exists() else metrics.values():
        returns = record.get("evaluation_return")
        if returns is not None:
            distinct = record["evaluation_distinct_episodes"]
            evaluations.append({
                "frames": round(metrics[record["updates"]]["frames"] / seeds),
                "returns": returns if isinstance(returns, list) else [returns],
                "distinct": distinct if isinstance(distinct, list) else [distinct],
            })  # fmt: skip
    return evaluations


def show(selection: Sequence[Cell], out: Path) -> None:
    """Print the cells: seeds with scores, and CPU seconds, measured or expected."""
    rows = records.read(out)
    groups = records.newest(rows)
    print(f"{'cell':38}{'seeds':>8}{'CPU s':>10}  podracer")
    for cell in selection:
        configuration = cells.configuration_of(cells.experiment_of(cell.command))
        finished = cell.seeds - len(
            records.missing(rows, cell.name, configuration, cells.seeds_of(cell))
        )
        total = sum(row["cpu_seconds"] for row in groups.get(cell.name, ()))
        seconds = f"{total:.0f}" if finished == cell.seeds else f"~{60 * cell.cpu_minutes:.0f}"
        is_old = cell.name in groups and not finished
        changed = "  (changed since it was measured)" if is_old else ""
        print(f"{cell.name:38}{finished:>4}/{cell.seeds:<3}{seconds:>10}  {cell.command}{changed}")


def select(items: Sequence[Any], parts: Sequence[str]) -> list[Any]:
    """Return what bears one of the names, or has one of the parts in its name; everything where
    none is given."""
    names = {item.name for item in items}

    def is_meant(part: str, name: str) -> bool:
        return part == name if part in names else part in name

    selection = [
        item for item in items if not parts or any(is_meant(part, item.name) for part in parts)
    ]
    if not selection:
        raise SystemExit(f"nothing is named like {' or '.join(parts)}: see --list")
    return selection


def queued(path: Path) -> list[Cell]:
    """Return the cells of a queue in its order, each with the number of seeds in its line.

    A line is the name of a cell and a number; text behind `#` is a comment. The next line with a
    missing seed is what a queue that was stopped goes on with.
    """
    named = {cell.name: cell for cell in cells.CELLS}
    lines = (line.partition("#")[0].split() for line in path.read_text().splitlines())
    return [named[name]._replace(seeds=int(seeds)) for name, seeds in filter(None, lines)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that this script and `references.py` share."""
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="names or parts of them"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where runs are kept")
    parser.add_argument("--out", type=Path, default=records.SUITE, help="file of the scores")
    parser.add_argument("--list", action="store_true", help="show what there is, and run nothing")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--devices", type=int, default=cores, help="of a sweep; on a GPU 1")
    parser.add_argument("--seeds", type=int, help="only so many seeds of a cell, from its first")
    parser.add_argument("--queue", type=Path, help="file of cells and seeds, most valuable first")
    parser.add_argument("--page", action="store_true", help="write results.md, run nothing")
    options = parser.parse_args()
    if options.page:
        import results_page

        return results_page.write(options.out)
    selection = select(cells.CELLS, options.only)
    if options.queue:
        selection = queued(options.queue)
    if options.list:
        return show(selection, options.out)
    deadline = time.monotonic() + options.budget
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C
    for cell in selection:
        start = time.monotonic()
        finished = measure(cell, options, deadline)
        print(f"{cell.name}: {time.monotonic() - start:.0f} s", flush=True)
        if not finished:
            print("the budget is spent; run the same command again to continue")
            return


if __name__ == "__main__":
    main()
