"""Architecture search by pods: asynchronous and synchronous reinforcement learning, random search.

    python examples/architecture_search/search.py --folder searches      # three tournaments
    python examples/architecture_search/search.py --folder searches --draw search.png

A pod is a controller, PPO, whose actions build networks (`builder.py`). After each round it may go
on from a better pod. Asynchronous pods do so at once. Synchronous ones wait for their generation.
Random search is pods that do not learn. The questions are those of Balaprakash et al. 2019,
"Scalable Reinforcement-Learning-Based Neural Architecture Search for Cancer Deep Learning
Research": how busy are the pods, and how soon do they find good networks?
"""

from __future__ import annotations

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from builder import Builder

import podracer
from podracer import recipes
from podracer.tournament.config import Tournament
from podracer.tournament.orchestrator import run_tournament
from podracer.tournament.selection import Generational, Independent, Truncation

RULES = {
    "asynchronous": Truncation(fraction=0.5),
    "synchronous": Generational(parents=2),
    "random": Independent(),
}


def controller(name: str, learning_rate: float) -> podracer.Experiment:
    """Return a pod's experiment, whose networks are written to a file in the working directory."""
    return podracer.Experiment(
        recipe=name,
        environment=podracer.Gymnasium(partial(Builder, log=f"{name}.jsonl"), workers=0),
        agent=podracer.PPO(learning_rate=learning_rate, discount=1.0, entropy_cost=0.01),
        driver=podracer.SebulbaConfig(
            num_envs=8, rollout_length=10, updates_per_chunk=8, threads_per_actor=1
        ),
        frames=10_000,
        evaluations=1,
        evaluation_episodes=16,
        evaluation_policy="sampled",
    )


# Pods import these by name: each is a recipe.
asynchronous = partial(controller, "asynchronous", 3e-3)
synchronous = partial(controller, "synchronous", 3e-3)
random = partial(controller, "random", 0.0)


def search(name: str, **settings: Any) -> None:
    """Run one search in the working directory, or what is left of it."""
    recipe = f"search:{name}"
    experiment = recipes.find(recipe)
    tournament = Tournament((experiment,), selection=RULES[name], **settings)
    run_tournament(tournament, name, recipes=[recipe])


# --- what they did --------------------------------------------------------------------------------


def networks(log: Path) -> list[dict[str, Any]]:
    """Return all networks that a search trained, in the order of their ends."""
    return sorted(map(json.loads, log.read_text().splitlines()), key=lambda x: x["end"])


def utilization(trained: list[dict[str, Any]], pods: int, edges: np.ndarray) -> np.ndarray:
    """Return the share of pods that train a network, f64 `[n]`, between each two of `edges`."""
    busy = np.zeros(len(edges) - 1)
    for x in trained:
        start, end = np.clip(x["start"], *edges[[0, -1]]), np.clip(x["end"], *edges[[0, -1]])
        busy += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)
    return busy / np.diff(edges) / pods


def seconds_waited(leaderboard: Path) -> float:
    """Return the seconds that pods waited for others between two of their rounds, in sum."""
    waited, ends = 0.0, {}
    for event in map(json.loads, leaderboard.read_text().splitlines()):
        if event["event"] == "submitted":
            ends[event["pod"]] = event["time"]
        elif event["event"] == "started" and event["pod"] in ends:
            waited += event["time"] - ends[event["pod"]]
    return waited


def summary(folder: Path, name: str, pods: int) -> str:
    """Return a row of Markdown about a search."""
    trained = networks(folder / f"{name}.jsonl")
    scores = np.array([x["score"] for x in trained])
    times = np.array([min(x["start"] for x in trained), trained[-1]["end"]])
    cells = [
        f"{len(scores)} | {np.ptp(times):.0f} | {utilization(trained, pods, times)[0]:.2f}",
        f"{seconds_waited(folder / name / 'leaderboard.jsonl'):.1f} | {scores.mean():.3f}",
        f"{scores[-len(scores) // 4 :].mean():.3f} | {np.sort(scores)[-10:].mean():.3f}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def draw(folder: Path, pods: int, picture: Path) -> None:
    """Draw utilization and scores over time, and print a table."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    print("| search | networks | seconds | utilization | waited | R² | last quarter | best ten |")
    print("|---" * 8 + "|")
    for name in RULES:
        trained = networks(folder / f"{name}.jsonl")
        print(summary(folder, name, pods))
        begin, end = min(x["start"] for x in trained), trained[-1]["end"]
        edges = np.linspace(begin, end, 41)
        left.step(edges[1:] - begin, utilization(trained, pods, edges), where="pre", label=name)
        scores, times = np.array([(x["score"], x["end"] - begin) for x in trained]).T
        width = max(1, len(scores) // 20)
        means = np.convolve(scores, np.ones(width) / width, "valid")
        right.plot(times[width - 1 :], means, label=name)
    left.set(title="pods that train a network", xlabel="seconds", ylim=(0, 1))
    right.set(title="R², mean of the newest networks", xlabel="seconds")
    right.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("searches"))
    parser.add_argument("--searches", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--engine", default="local", choices=("local", "ray"))
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--round-frames", type=int, default=2_560, help="a fifth as many networks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, help="draw what the folder has, and search nothing")
    options = parser.parse_args()
    if options.draw:
        draw(options.folder, options.pods, options.draw)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    names = ("engine", "pods", "rounds", "round_frames", "seed")
    with contextlib.chdir(options.folder):
        for name in options.searches:
            search(name, **{x: getattr(options, x) for x in names}, episodes=16)


if __name__ == "__main__":
    main()
