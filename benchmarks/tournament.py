"""Does a tournament help? The same pods, rounds and frames under each rule of selection.

Each pod begins with a learning rate drawn from the same range. Rounds run one after another in this
process, so that rules differ in nothing but what they choose; the measure is the best held-out
score over the frames of all pods. JSON lines go to `--out`; `--draw FILE.png` draws such a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quick, append
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from podracer import recipes
from podracer.drivers.population import Hyperparameter, Pod
from podracer.drivers.selection import Range
from podracer.io.signals import StopSignals
from podracer.reports.charts import COLORS
from podracer.scores.statistics import bootstrap_interval, interquartile_mean
from podracer.tournament import selection
from podracer.tournament.config import Tournament
from podracer.tournament.engine import InlineEngine
from podracer.tournament.events import Submitted, accepted_entries
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer.tournament.orchestrator import Orchestrator

RANGE = Range("learning_rate", 1e-5, 1e-1)
RULES = {
    "independent": selection.Independent(),
    "softmax": selection.Softmax(),
    "population-based": selection.PopulationBased((RANGE,), fraction=0.34),
    "generational": selection.Generational(group_size=2, parents=1),
}

QUICK = {"rule": ["softmax"], "seeds": [0], "pods": 2, "rounds": 2, "round_frames": 2_048}


def play(name: str, recipe: str, seed: int, pods: int, rounds: int, frames: int) -> list[Any]:
    """Best score so far after each submission."""
    experiment = recipes.find(recipe)
    rng = np.random.default_rng(seed)
    # As populations of one: other learning rates then compile nothing anew.
    experiments = tuple(
        dataclasses.replace(
            experiment, devices=1,
            pods=(Pod(0, (Hyperparameter(RANGE.name, RANGE.draw(rng)),)),),
        )
        for _ in range(pods)
    )  # fmt: skip
    tournament = Tournament(
        experiments, RULES[name], pods, rounds, frames, size=pods, episodes=128, seed=seed
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with Leaderboard(directory, tournament.header()) as board:
            Orchestrator(tournament, board, InlineEngine(), StopSignals(), lambda state: None).run()
        events = read_events(directory)
        entries = accepted_entries(events)
    spent, best, lines = 0, -np.inf, []
    for event in events:
        if isinstance(event, Submitted):
            spent += frames
            best = max(best, event.score)
            place = f"p{event.pod}r{event.round}"
            lines.append({
                "rule": name, "recipe": recipe, "seed": seed, "frames": spent, "best": best,
                "score": event.score, "entry": place, "parents": entries[place].parents,
            })  # fmt: skip
    lines[-1]["seconds"] = time.perf_counter() - began
    return lines


def draw(source: Path, target: Path) -> None:
    """Best score and mean score of the pods, over the frames of all of them: interquartile mean
    over seeds, 95 % bootstrap."""
    runs: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in map(json.loads, source.read_text().splitlines()):
        runs[line["recipe"]][line["rule"]][line["seed"]].append(line)
    figure = Figure((10.8, 3.6 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 2, squeeze=False)
    for (recipe, rules), row in zip(runs.items(), panels, strict=True):
        for color, (rule, seeds) in zip(COLORS, rules.items(), strict=False):
            frames = np.array([line["frames"] for line in next(iter(seeds.values()))])
            best = np.array([[line["best"] for line in lines] for lines in seeds.values()])
            pods = len({line["entry"].split("r")[0] for line in next(iter(seeds.values()))})
            scores = np.array([[line["score"] for line in lines] for lines in seeds.values()])
            # Pods take turns, so the last score of each is that of the last so many lines.
            mean = np.stack(
                [scores[:, i - pods : i].mean(1) for i in range(pods, len(frames) + 1)], axis=1
            )
            for axes, x, y in ((row[0], frames, best), (row[1], frames[pods - 1 :], mean)):
                low, high = bootstrap_interval(y)
                axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
                axes.plot(x, interquartile_mean(y), color=color, label=f"{rule} ({len(y)} seeds)")
        for axes, what in zip(row, ("best so far", "mean of the pods"), strict=True):
            axes.set(title=f"{recipe}: {what}", xlabel="frames of all pods", ylabel="score")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(target, dpi=110, metadata={"Software": None})


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--recipe", default="cartpole_ppo")
    made.add_argument("--rule", action="append", choices=list(RULES))
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    made.add_argument("--pods", type=int, default=6)
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--round-frames", type=int, default=10_240)
    made.add_argument("--out", type=Path)
    made.add_argument("--draw", type=Path)
    made.add_argument("--quick", action=Quick, const=QUICK)
    options = made.parse_args()
    if options.draw:
        draw(options.out, options.draw)
        return
    for seed in options.seeds:
        for rule in options.rule or RULES:
            lines = play(
                rule, options.recipe, seed, options.pods, options.rounds, options.round_frames
            )
            print(
                f"{rule:18} seed {seed}: best {lines[-1]['best']:.1f} after "
                f"{lines[-1]['frames']:,} frames, {lines[-1]['seconds']:.0f} s",
                flush=True,
            )
            for line in lines:
                append(options.out, line)


if __name__ == "__main__":
    main()
