"""Every figure that needs an accelerator, in one command of at most nine minutes.

    python benchmarks/accelerator.py                    # one NVIDIA H200 with 16 cores, say
    python benchmarks/accelerator.py --quick            # the same in small, on a CPU

It starts as commands of `podracer` do, with GPU kernels that sum in a fixed order, and records the
flags in `settings`; with `--fastest-kernels` XLA chooses.

The most valuable figures come first. Each one is appended to `--out` the moment it is measured, so
a cut loses nothing; started again, it leaves out what the file has for this commit, this device and
these settings of XLA. A case that fails is recorded with its error, and tried again next time.

Needed are the packages of `pip install -e . -e packages/plan -e packages/environments` (from
wheels, where there is no network) with a jaxlib for the device, and no network. The console script
need not be installed.
Used where they are: `gymnax` and `six` for MinAtar, else Catch on a board of the same shape stands
in; `ale_py` and `gymnasium`, or `envpool`, for Atari, else frames that were drawn beforehand.
Records name what ran.

`--seconds` is the time for everything: no case starts later, and one that still runs then is ended
with a traceback. `--only` takes the cases with one of these words in their names; `--list` shows
them. Compile times are those without a cache, but where a case says so. Some cases run this file
again with other settings of XLA, or the command line, in processes beside this one: each takes a
share of the device's memory (`XLA_CLIENT_MEM_FRACTION`, unless it is set).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name of the same
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.55")  # before JAX reads it

import jax
import records
from accelerator_cases import Case, Plan, all_cases
from machine import machine

from podracer.devices.startup import choose_gpu_kernels
from podracer.errors import ConfigError

RESULTS = Path(__file__).parent / "results" / "accelerator.jsonl"
SECONDS = 540.0
GRACE_SECONDS = 15.0  # beyond the limit, for a case that is about to end
KEYS = ("case", "commit", "device", "settings")


def context(commit: str | None) -> dict[str, Any]:
    """What every record says about its measurement."""
    return {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit or records.commit(),
    }


def measured(path: Path, about: dict[str, Any]) -> set[str]:
    """Names of the cases that have a figure here, of this commit, device and settings."""
    return {
        row["case"]
        for row in records.read(path)
        if "value" in row and all(row[key] == about[key] for key in KEYS[1:])
    }


def run(case: Case) -> dict[str, Any]:
    """Figures of a case, or its error."""
    began = time.perf_counter()
    try:
        figures = case.measure()
    except ConfigError as error:
        figures = {"left_out": str(error)}
    except Exception as error:  # one that fails must not cost the others their time
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}"[:2000]}
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "case": case.name,
        "unit": case.unit,
        "goal": case.goal,
        **figures,
        "case_seconds": time.perf_counter() - began,
        "process_peak_bytes": stats.get("peak_bytes_in_use"),
    }


def show(record: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{record['case']:34}"
    for reason in ("left_out", "error"):
        if reason in record:
            return f"{name} {reason.replace('_', ' ')}: {record[reason].splitlines()[0][:90]}"
    value, goal = record["value"], record["goal"]
    digits = 0 if value >= 100 else 2
    share = f"  {value / goal:6.1%} of the goal" if goal else ""
    compiled = record.get("compile_seconds")
    text = f"{name} {value:>14,.{digits}f} {record['unit']:24}"
    return f"{text}{'' if compiled is None else f'compiled in {compiled:5.1f} s'}{share}"


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure what is missing; return the new records."""
    options = parser().parse_args(arguments)
    if not options.fastest_kernels:
        choose_gpu_kernels()
    plan = Plan(options.quick, options.out, time.monotonic() + options.seconds, options.commit)
    cases = [
        case for case in all_cases(plan) if any(word in case.name for word in options.only or [""])
    ]
    if options.list:
        print("\n".join(case.name for case in cases))
        return []
    if not options.quick:
        faulthandler.dump_traceback_later(options.seconds + GRACE_SECONDS, exit=True)
        jax.config.update("jax_enable_compilation_cache", False)
    about = context(options.commit)
    done, new = measured(options.out, about), []
    print(f"{about['device']}, {about['machine']}, JAX {about['jax']}", flush=True)
    for case in cases:
        if case.name in done:
            continue
        if time.monotonic() > plan.deadline:
            print(f"{case.name:34} no time left", flush=True)
            continue
        record = {"benchmark": "accelerator", **run(case), **about}
        new.append(record)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(show(record), flush=True)
        gc.collect()  # the arrays of a case go before the next one begins
    if not options.quick:
        faulthandler.cancel_dump_traceback_later()
    return new


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it works")
    flags.add_argument("--seconds", type=float, default=SECONDS, help="for everything (540)")
    flags.add_argument("--out", type=Path, default=RESULTS, help="file of JSON lines")
    flags.add_argument("--only", nargs="+", metavar="WORD", help="cases with one of these words")
    flags.add_argument("--commit", help="of this code, where it is no checkout of git")
    flags.add_argument("--fastest-kernels", action="store_true", help="not those of commands")
    flags.add_argument("--list", action="store_true", help="print the names of the cases")
    return flags


if __name__ == "__main__":
    sys.exit(any("error" in record for record in main()))
