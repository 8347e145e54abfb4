"""Other libraries at the tasks of the results suite, for equal frames and with equal evaluations.

Each reference of `cells.py` runs in a Python that has its library, installed outside of the
repository, with the settings that its authors publish. Each seed that is finished is recorded in
`results/suite.jsonl`; run the same command again to continue.

    python benchmarks/references.py --list
    python benchmarks/references.py --python rejax=PYTHON sb3=PYTHON --only minatar-breakout/rejax

Tested installs: rejax 0.1.3 with gymnax 1.0.1, six and JAX 0.10.2; for purejaxrl the same with
flashbax, and `--repository purejaxrl=CHECKOUT`; stable-baselines3 2.9.2 and sbx-rl 0.28.0 with
gymnasium[mujoco] 1.3.0 and torch 2.13.0, and for podracer's own environments its dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cells
import records
from cells import Reference
from results_suite import add_flags, select


def arguments_of(reference: Reference) -> dict[str, Any]:
    """Return what the reference shares with its cell, and its own settings: all but the seeds."""
    experiment = cells.experiment_of(reference.cell().command)
    return {
        "library": reference.library,
        "agent": reference.agent,
        "environment": experiment.environment,
        "frames": experiment.frames,
        "evaluations": experiment.evaluations,
        **cells.evaluation_of(experiment),
        "settings": reference.settings,
    }


def measure(reference: Reference, options: argparse.Namespace, deadline: float) -> bool:
    """Run the seeds that have no scores yet; return whether all were finished in time."""
    arguments = arguments_of(reference)
    configuration = cells.digest(arguments)
    seeds = records.missing(
        records.read(options.out), reference.name, configuration, cells.seeds_of(reference.cell())
    )
    if not seeds:
        return True
    run = options.scratch / f"{reference.name.replace('/', '-')}-{configuration}"
    flags = {**arguments, "settings": json.dumps(reference.settings), "scratch": run}
    if reference.library in options.repository:
        flags["repository"] = options.repository[reference.library]
    script = Path(__file__).parent / reference.script
    command = [options.python[reference.library], str(script)]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    shared = {
        "task": reference.task,
        "library": reference.library,
        "agent": reference.agent,
        "environment": arguments["environment"],
        "evaluation": {name: arguments[name] for name in ("policy", "epsilon", "episodes")},
        "settings": reference.settings,
        "configuration": configuration,
    }
    for record in lines_of([*command, "--seeds", *map(str, seeds)], deadline):
        records.append(options.out, [{**shared, **record}])
        seeds.remove(record["seed"])
        print(f"{reference.name} seed {record['seed']}: {record['score']:.2f}", flush=True)
    return not seeds


def lines_of(command: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a process, which is ended at the deadline."""
    path = os.pathsep.join([str(records.ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}  # some take podracer's environments
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    seconds = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, process.terminate)
    timer.daemon = True
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    timer.cancel()
    if process.wait() and time.monotonic() < deadline:
        raise SystemExit(f"{command[1]} ended with code {process.returncode}")


def show(selection: Sequence[Reference], out: Path) -> None:
    """Print the references: seeds with scores, and CPU seconds, measured or expected."""
    rows = records.read(out)
    for reference in selection:
        seeds = cells.seeds_of(reference.cell())
        configuration = cells.digest(arguments_of(reference))
        finished = len(seeds) - len(records.missing(rows, reference.name, configuration, seeds))
        seconds = [row["cpu_seconds"] for row in rows if records.name_of(row) == reference.name]
        mean = sum(seconds) / len(seconds) if seconds else 60 * reference.cpu_minutes / len(seeds)
        total = f"{len(seeds) * mean:.0f}" if seconds else f"~{len(seeds) * mean:.0f}"
        print(f"{reference.name:38}{finished:>4}/{len(seeds):<3}{total:>10} CPU s")


def pairs_of(texts: Sequence[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--python", nargs="+", default=[], metavar="LIBRARY=PATH")
    parser.add_argument("--repository", nargs="+", default=[], metavar="LIBRARY=PATH")
    options = parser.parse_args()
    options.python, options.repository = pairs_of(options.python), pairs_of(options.repository)
    selection = select(cells.REFERENCES, options.only)
    if options.list:
        return show(selection, options.out)
    deadline = time.monotonic() + options.budget
    for reference in selection:
        if reference.library not in options.python:
            print(f"{reference.name}: no --python {reference.library}=PATH")
        elif not measure(reference, options, deadline):
            print("the budget is spent; run the same command again to continue")
            return


if __name__ == "__main__":
    main()
