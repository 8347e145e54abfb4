"""Compile every recipe for accelerators that are not here: memory, kernels, collectives.

    python benchmarks/compiled.py                        compile what is missing, write the page
    python benchmarks/compiled.py --recipes catch lpg    these recipes only
    python benchmarks/compiled.py --against FILE         compare kernels with other records

It needs the package `packages/plan` with its extras `tpu` and `cuda`. Records are kept in
`results/compiled.jsonl`, one for each recipe and target with the commit of the package. What the
file has of this commit is not compiled again, so an interrupted run goes on. The page is
`benchmarks/compiled.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quick

from podracer import recipes
from podracer.agents.rules.disco.rule_file import layer_shapes, stored_shape

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks/results/compiled.jsonl"
TARGETS = ("tpu-v3:2x2", "tpu-v5e:4x4", "h100", "h100:8")
SLICES = {
    "tpu-v3:2x2": "8 cores of v3",
    "tpu-v3:8x16": "256 cores of v3",
    "tpu-v3:32x32": "2,048 cores of v3",
    "tpu-v5e:16x16": "256 chips of v5e",
}
SCALED = ("cartpole_ppo", "catch", "lpg", "cartpole_dqn", "catch_muzero", "cartpole_sebulba")
SECONDS = 900
ERROR_CHARACTERS = 200  # of each on the page; the records have all
DISCO = {"predictions": 600, "units": 256, "lifetime_units": 128}  # sizes of Disco103
SETTINGS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # those of the tests, for a CPU

Records = dict[tuple[str, str], dict[str, Any]]


def compile_one(recipe: str, target: str) -> dict[str, Any]:
    """Return the facts of `podracer compile`, or why there are none."""
    flags = ["--size", "laptop", "--target", target, "--json"]
    command = [sys.executable, "-m", "podracer", "compile", recipe, *flags]
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    with tempfile.TemporaryDirectory() as directory:
        if recipe.endswith("_disco"):
            command += ["--update-rule", write_rule(Path(directory))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, env=env
            )
        except subprocess.TimeoutExpired:
            return {"recipe": recipe, "target": target, "error": f"took over {SECONDS} s"}
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if x.startswith("podracer: ")]
        error = (lines or done.stderr.splitlines() or ["no message"])[-1].removeprefix("podracer: ")
        return {"recipe": recipe, "target": target, "error": error}
    return json.loads(done.stdout.splitlines()[-1]) | {"recipe": recipe}


def write_rule(directory: Path) -> str:
    """Write a rule with the shapes of Disco103, all zero, and return its file."""
    arrays = {}
    for name, shape in layer_shapes(**DISCO).items():
        arrays[f"{name}/w"] = np.zeros(stored_shape(name, shape), np.float32)
        arrays[f"{name}/b"] = np.zeros(shape[1:], np.float32)
    np.savez(directory / "rule.npz", **arrays)
    return str(directory / "rule.npz")


def summary(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts as they are recorded: no loops, and equal collectives together."""
    if "error" in facts:
        return facts
    programs = [summary(x) for x in facts.get("programs", [])[1:]]
    counts = Counter((x["kind"], x["bytes"]) for x in facts["collectives_per_update"])
    collectives = [
        {"kind": kind, "bytes": size, "times": times} for (kind, size), times in counts.items()
    ]
    omitted = ("loops", "programs")
    return {
        **{name: value for name, value in facts.items() if name not in omitted},
        "collectives_per_update": collectives,
        **({"programs": programs} if programs else {}),
    }


def read(path: Path) -> Records:
    """Return the records of a file by recipe and target."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {(record["recipe"], record["target"]): record for record in records}


def page(records: Records) -> str:
    """Return the page: what each recipe takes, and collectives by the number of devices."""
    commits = sorted({x.get("commit", "unknown") for x in records.values()})
    errors = {key: x["error"] for key, x in sorted(records.items()) if "error" in x}
    valid = {key: x for key, x in records.items() if key not in errors}
    names = sorted({recipe for (recipe, target) in valid if target in TARGETS})
    lines = [
        "# Recipes on accelerators, compiled here",
        "",
        "`python benchmarks/compiled.py` writes this page with the accelerators' own compilers and "
        "no device. Each device has the recipe's number of environments for a laptop. Numbers are "
        "those of one device, and of one update of it, or of one call of Sebulba's learner. "
        "Nothing was run. So there are no times. `benchmarks/results/compiled.jsonl` has all "
        "figures. "
        f"Commit {', '.join(commits)}.",
        "",
        "## Memory, in MiB",
        "",
        *_table(names, TARGETS, lambda recipe, target: _memory(valid.get((recipe, target)))),
        "",
        "## Kernels of an update",
        "",
        *_table(names, TARGETS, lambda recipe, target: _kernels(valid.get((recipe, target)))),
        "",
        "## The plan's memory beside the compiler's",
        "",
        "A plan adds up the arguments of the first program by their shapes, temporaries, and "
        "results, padding and code. Their difference from what the compiler counts for that "
        "program, in % of the latter. Under Sebulba a device also holds what waits beside a "
        "call, the rollouts of the next update: in % of what the compiler counts. Only records "
        "with all of these figures count.",
        "",
        *_differences(valid),
        "",
        "## CPU seconds to trace and compile",
        "",
        *_times(valid),
        "",
        "## Collectives by the number of devices",
        "",
        "First the number of an update's all-reduces, then their KiB together. Under Sebulba half "
        "of the devices are learners.",
        "",
        *_slices(valid),
    ]
    if errors:
        lines += ["", "## What was not compiled", ""]
        texts: dict[tuple[str, str], list[str]] = {}
        for (recipe, target), text in errors.items():
            text = re.sub(r"^the compiler for \S+ ", "the compiler ", text)[:ERROR_CHARACTERS]
            texts.setdefault((recipe, text), []).append(target)
        lines += [f"- `{recipe}`, {', '.join(x)}: {text}" for (recipe, text), x in texts.items()]
    return "\n".join([*lines, ""])


def _table(
    names: Sequence[str], titles: Sequence[str], cell: Callable[[str, str], str]
) -> list[str]:
    """Return a table with a row for each recipe; `cell` takes the recipe and a column's title."""
    head = ["recipe", *titles]
    rows = [[name, *(cell(name, title) for title in titles)] for name in names]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _times(records: Records) -> list[str]:
    lines = ["| target | recipes | all | the slowest | its seconds |", "|---|---|---|---|---|"]
    for name in TARGETS:
        times = {recipe: x["compile_seconds"] for (recipe, y), x in records.items() if y == name}
        if times:
            slowest = max(times, key=lambda recipe: times[recipe])
            total = f"{sum(times.values()):,.0f}"
            lines.append(f"| {name} | {len(times)} | {total} | {slowest} | {times[slowest]} |")
    return lines


def _differences(records: Records) -> list[str]:
    head = ["target", "driver", "recipes", "median", "largest", "its recipe", "most that waits"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for arch in ("anakin", "sebulba"):
        for target in TARGETS:
            valid = [
                x
                for (_, y), x in records.items()
                if y == target and x["arch"] == arch and "compiler_bytes" in x
                if arch == "anakin" or "waiting_bytes" in x
            ]
            if valid:
                largest = max(valid, key=_difference)
                median = statistics.median(map(_difference, valid))
                waits = max(100 * x.get("waiting_bytes", 0) / x["compiler_bytes"] for x in valid)
                texts = [target, arch.capitalize(), str(len(valid)), f"{median:.3f}"]
                texts += [f"{_difference(largest):.3f}", largest["recipe"], f"{waits:.1f}"]
                lines.append(f"| {' | '.join(texts)} |")
    return lines


def _difference(x: dict[str, Any]) -> float:
    total = x["state_bytes"] + x["temporary_bytes"] + x["bytes_beside"]
    return 100 * abs(total - x["compiler_bytes"]) / x["compiler_bytes"]


def _memory(x: dict[str, Any] | None) -> str:
    if x is None:
        return ""
    size = x["state_bytes"] + x["temporary_bytes"] + x.get("waiting_bytes", 0)
    return f"{size / 2**20:,.1f}"


def _kernels(x: dict[str, Any] | None) -> str:
    return f"{x['kernels_per_update']:,}" if x else ""


def _slices(records: Records) -> list[str]:
    def number(recipe: str, title: str) -> str:
        target = next(x for x, name in SLICES.items() if name == title.removeprefix("KiB, "))
        collectives = records.get((recipe, target), {}).get("collectives_per_update", [])
        if not title.startswith("KiB"):
            return str(sum(x.get("times", 1) for x in collectives) or "")
        size = sum(x.get("times", 1) * x["bytes"] for x in collectives)
        return f"{size / 2**10:,.1f}" if size else ""

    titles = (*SLICES.values(), *(f"KiB, {title}" for title in SLICES.values()))
    return _table(SCALED, titles, number)


def compare(records: Records, others: Path) -> int:
    """Print changes of kernels and temporaries; return 1 where one grew by more than 2 %."""
    worse = False
    for key, old in sorted(read(others).items()):
        new = records.get(key, {})
        for name in ("kernels_per_update", "temporary_bytes"):
            if name in old and name in new and old[name] != new[name]:
                print(*key, name, old[name], "->", new[name])
                worse |= new[name] > 1.02 * old[name]
    return int(worse)


QUICK = {"recipes": ["catch"], "targets": ["h100"]}
QUICK |= {"records": Path("/dev/null"), "page": Path("/dev/null")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=list(recipes.RECIPES))
    parser.add_argument("--targets", nargs="*", default=[*TARGETS, *SLICES])
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks/compiled.md")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--quick", action=Quick, const=QUICK)
    options = parser.parse_args()
    command = ["git", "log", "-1", "--format=%h", "--", "podracer"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    commit, records = done.stdout.strip(), read(options.records)
    for target in dict.fromkeys(options.targets):
        for recipe in options.recipes if target in TARGETS else SCALED:
            record = records.get((recipe, target), {})
            if recipe not in options.recipes:
                continue
            if record.get("commit") == commit and "error" not in record:
                continue
            record = summary(compile_one(recipe, target)) | {"commit": commit}
            records[recipe, target] = record
            texts = [json.dumps(records[key], sort_keys=True) for key in sorted(records)]
            options.records.write_text("".join(f"{text}\n" for text in texts))
            print(recipe, target, record.get("error", record.get("kernels_per_update")), flush=True)
    options.page.write_text(page(records))
    return compare(records, options.against) if options.against else 0


if __name__ == "__main__":
    sys.exit(main())
