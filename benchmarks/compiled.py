"""Compile every recipe for accelerators that are not here: memory, kernels, collectives.

    python benchmarks/compiled.py                        compile what is missing, write the page
    python benchmarks/compiled.py --recipes catch lpg    these recipes anew
    python benchmarks/compiled.py --against FILE         compare kernels with other records

It needs the packages of the extras `compile-tpu` and `compile-cuda`. Records are kept in
`results/compiled.jsonl`, one for each recipe and target, so an interrupted run goes on; the page is
`docs/compiled.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks/results/compiled.jsonl"
PAGE = ROOT / "docs/compiled.md"
TARGETS = ("tpu-v3:2x2", "tpu-v5e:4x4", "h100", "h100:8")
PODS = {"tpu-v3:32x32": ("catch", "cartpole_ppo"), "tpu-v5e:16x16": ("catch", "cartpole_ppo")}
SECONDS = 600


def compile_one(recipe: str, target: str) -> dict[str, Any]:
    """Return the facts of `podracer compile`, or why there are none."""
    flags = ["--size", "laptop", "--target", target, "--json"]
    command = [sys.executable, "-m", "podracer", "compile", recipe, *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"recipe": recipe, "target": target, "error": f"took over {SECONDS} s"}
    if done.returncode:
        said = [x for x in done.stderr.splitlines() if x.startswith("podracer: ")]
        error = (said or done.stderr.splitlines() or ["no message"])[-1].removeprefix("podracer: ")
        return {"recipe": recipe, "target": target, "error": error}
    return json.loads(done.stdout.splitlines()[-1])


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the records of a file by recipe and target."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {(record["recipe"], record["target"]): record for record in records}


def write(records: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write the records in the order of their keys."""
    lines = [json.dumps(records[key], sort_keys=True) for key in sorted(records)]
    RECORDS.write_text("".join(f"{line}\n" for line in lines))


def page(records: dict[tuple[str, str], dict[str, Any]], commit: str) -> str:
    """Return the page with a row for each recipe and target."""
    lines = [
        "# Recipes on accelerators, compiled here",
        "",
        "`python benchmarks/compiled.py` writes this page with the accelerators' own compilers and "
        "no device. Each device has the recipe's number of environments for a laptop. Memory, "
        "kernels and all-reduces are those of one device and one update. Nothing was run, so there "
        f"are no times. Commit {commit}.",
        "",
        "| recipe | target | state | temporary | kernels | kernels of a step | all-reduces "
        "| largest | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (recipe, target), x in sorted(records.items()):
        if "error" in x:
            lines.append(f"| {recipe} | {target} | {x['error']} | | | | | | |")
            continue
        reductions = [y["bytes"] for y in x["collectives_per_update"]]
        lines.append(
            f"| {recipe} | {target} | {_mib(x['state_bytes'])} | {_mib(x['temporary_bytes'])} "
            f"| {x['kernels_per_update']:,} | {x['kernels_per_step']} | {len(reductions)} "
            f"| {_kib(max(reductions, default=0))} | {x['compile_seconds']} |"
        )
    return "\n".join([*lines, ""])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _kib(size: int) -> str:
    return f"{size / 2**10:,.1f} KiB" if size else ""


def compare(records: dict[tuple[str, str], dict[str, Any]], others: Path) -> int:
    """Print changes of kernels and temporaries; return 1 where one grew by more than 2 %."""
    worse = False
    for key, old in sorted(read(others).items()):
        new = records.get(key, {})
        for name in ("kernels_per_update", "temporary_bytes"):
            if name in old and name in new and old[name] != new[name]:
                print(*key, name, old[name], "->", new[name])
                worse |= new[name] > 1.02 * old[name]
    return int(worse)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=[])
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    from podracer import recipes

    records = read(RECORDS)
    names = options.recipes or list(recipes.RECIPES)
    wanted = [(name, target) for target in options.targets for name in names]
    wanted += [(name, target) for target, mains in PODS.items() for name in mains if name in names]
    for key in wanted:
        if options.recipes or "error" in records.get(key, {"error": ""}):
            records[key] = compile_one(*key)
            write(records)
            print(
                *key, records[key].get("error", records[key].get("kernels_per_update")), flush=True
            )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    PAGE.write_text(page(records, commit))
    return compare(records, options.against) if options.against else 0


if __name__ == "__main__":
    sys.exit(main())
