"""What agents learn: three seeds of each recipe, evaluations over frames.

Each run is `podracer train RECIPE --seed S` without an early end. Evaluations go to `--out` as JSON
lines; `--draw FILE.png` draws all of such a file: the mean of the middle half over the seeds, and a
bootstrap interval of it. `--arch sebulba` trains the same in environments of the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quick, append
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

import podracer
from podracer import recipes
from podracer.reports.charts import COLORS
from podracer.scores.statistics import bootstrap_interval, interquartile_mean

RECIPES = (
    "catch_impala",
    "catch_stacx",
    "cartpole_impala",
    "cartpole_stacx",
    "cartpole_dqn",
    "cartpole_rainbow",
    "cartpole_muzero",
    "catch_muzero",
    "memory_r2d2",
    "memorychain_r2d2",
    "memorychain_dqn",
    "breakout_dqn",
    "breakout_rainbow",
    "pendulum_ddpg",
    "pendulum_td3",
    "pendulum_sac",
    "pendulum_qt_opt",
    "pendulum_muzero",
    "pendulum_ppo",
)

QUICK = {"recipe": ["catch_impala", "pendulum_sac"], "seeds": [0], "frames": 20_480}


def train(recipe: str, seed: int, arch: str | None, frames: int | None) -> list[dict[str, Any]]:
    """The evaluations of one run."""
    experiment = recipes.find(recipe)
    experiment = dataclasses.replace(
        experiment.with_arch(arch or experiment.arch),
        seed=seed,
        frames=frames or experiment.frames,
        target_return=None,
        evaluations=20,
    )
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        podracer.train(experiment, run_dir=run)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    about = {
        "recipe": recipe,
        "arch": experiment.arch,
        "environment": experiment.environment,
        "seed": seed,
        "policy": experiment.evaluation_policy,
        "epsilon": experiment.evaluation_epsilon,
    }
    names = ("frames", "seconds", "evaluation_return", "evaluation_distinct_episodes")
    return [
        {**about, **{name: line[name] for name in names}}
        for line in lines
        if line.get("evaluation_return") is not None
    ]


def draw(source: Path, target: Path) -> None:
    """One panel for each environment."""
    panels: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in map(json.loads, source.read_text().splitlines()):
        name = line["recipe"] + (", Sebulba" if line["arch"] == "sebulba" else "")
        panels[line["environment"]][name][line["seed"]].append(line)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure((5.4 * columns, 2.9 * rows), layout="constrained")
    for index, (environment, groups) in enumerate(sorted(panels.items())):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(environment, fontsize=10)
        lengths = []
        for color, (name, seeds) in zip(COLORS, groups.items(), strict=False):
            count = min(map(len, seeds.values()))
            runs = [lines[:count] for lines in seeds.values()]
            frames = np.mean([[line["frames"] for line in lines] for lines in runs], axis=0)
            returns = np.array([[line["evaluation_return"] for line in lines] for lines in runs])
            low, high = bootstrap_interval(returns)
            axes.fill_between(frames, low, high, color=color, alpha=0.15, linewidth=0)
            label = f"{name} ({len(runs)} seeds)"
            axes.plot(frames, interquartile_mean(returns), color=color, label=label)
            lengths.append(frames[-1])
        if max(lengths) > 4 * min(lengths):  # else the short runs would be a line at the left
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(fontsize=7, framealpha=0.7, edgecolor="none")
        axes.set_xlabel("frames", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--recipe", action="append", help="default: all that take minutes")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--arch", choices=["anakin", "sebulba"], help="default: the recipe's own")
    made.add_argument("--frames", type=int, help="default: the recipe's own")
    made.add_argument("--out", type=Path)
    made.add_argument("--draw", type=Path)
    made.add_argument("--quick", action=Quick, const=QUICK)
    options = made.parse_args()
    if options.draw:
        draw(options.out, options.draw)
        return
    for recipe in options.recipe or RECIPES:
        for seed in options.seeds:
            lines = train(recipe, seed, options.arch, options.frames)
            last = lines[-1]
            best = max(line["evaluation_return"] for line in lines)
            print(
                f"{recipe:20}{last['arch']:9}seed {seed}: {last['evaluation_return']:9.2f} at the "
                f"end, best {best:9.2f}, {last['frames']:,} frames, {last['seconds']:.0f} s",
                flush=True,
            )
            for line in lines:
                append(options.out, line)


if __name__ == "__main__":
    main()
