"""Reduce the published results of other projects to the CSV files beside this script.

    python benchmarks/references/reduce.py --simbav2 REPO --dopamine REPO \\
        --cleanba REPO --fasttd3 REPO

Each REPO is a clone of the repository that `README.md` names, at its commit; `git show` reads the
files. Sources that are not given keep their CSV.
"""

from __future__ import annotations

import argparse
import collections
import csv
import io
import itertools
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Rows = Iterator[tuple[Any, ...]]

# Agent -> file of SimBaV2's `results/`; TD-MPC2 and SimBa there have no MuJoCo.
MUJOCO = {
    "sac": "baseline/sac", "crossq": "baseline/crossq", "bro-utd2": "baseline/bro_utd2",
    "bro-utd10": "baseline/bro_utd10", "mrq": "baseline/mrq",
    "simbav2-utd1": "simbaV2_utd1", "simbav2-utd2": "baseline/simbaV2_utd2",
}  # fmt: skip
ROBOTS = ("HalfCheetah", "Walker2d", "Ant", "Humanoid", "Hopper")
MUJOCO_FRAMES = (50_000, 100_000, 200_000, 300_000, 500_000, 1_000_000)
GAMES = ("BattleZone", "DoubleDunk", "NameThisGame", "Phoenix", "Qbert", "Pong", "Breakout")
ATARI_AGENTS = ("DQN", "Rainbow", "IQN")
ATARI_FRAMES = tuple(n * 1_000_000 for n in (3, 5, 10, 20, 40, 100, 200))
WINDOW = 3  # iterations of 1 M frames whose mean is a score


def show(repository: str, path: str) -> str:
    """Return a file at the repository's HEAD."""
    command = ["git", "-C", repository, "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def joined(scores: Iterable[float]) -> str:
    return " ".join(f"{score:.5g}" for score in scores)


def simbav2(repository: str) -> Rows:
    """Yield the evaluation of each seed that is nearest to some numbers of frames, within 2 %."""
    for agent, path in MUJOCO.items():
        curves: dict[str, dict[str, dict[float, float]]] = {}
        for row in csv.DictReader(io.StringIO(show(repository, f"results/{path}.csv"))):
            robot = row["env_name"].replace("_", "-").removesuffix("-v4")
            if robot in ROBOTS and row["metric"] == "avg_return":
                seeds = curves.setdefault(robot, collections.defaultdict(dict))
                seeds[row["seed"]][float(row["env_step"])] = float(row["value"])
        for robot, frames in itertools.product(ROBOTS, MUJOCO_FRAMES):
            scores = []
            for curve in curves.get(robot, {}).values():
                nearest = min(curve, key=lambda step: abs(step - frames))
                if abs(nearest - frames) <= 0.02 * frames:
                    scores.append(curve[nearest])
            if scores:
                yield robot.lower(), agent, frames, joined(scores)


def dopamine(repository: str) -> Rows:
    """Yield the mean of the last iterations before some numbers of frames, for each seed."""
    for game, network in itertools.product(GAMES, ("CNN", "Impala")):
        rows = json.loads(show(repository, f"baselines/atari/data/{game.lower()}_{network}.json"))
        for agent, frames in itertools.product(ATARI_AGENTS, ATARI_FRAMES):
            last = frames // 1_000_000
            window: list[Sequence[float]] = [
                [row["Value"] for row in rows if (row["Agent"], row["Iteration"]) == (agent, i)]
                for i in range(last - WINDOW, last)
            ]
            scores = [sum(values) / len(values) for values in zip(*window, strict=False)]
            if scores:
                name = f"{agent.lower()}-{'nature' if network == 'CNN' else 'impala'}"
                yield game.lower(), name, frames, joined(scores)


def cleanba(repository: str) -> Rows:
    """Yield mean and deviation of each game after 200 M frames."""
    for row in csv.DictReader(io.StringIO(show(repository, "static/cleanba/main_10CPU.csv"))):
        game = row.pop("").removesuffix("-v5")
        for agent, score in row.items():
            mean, deviation = (float(part) for part in score.split("±"))
            yield game.lower(), agent.split(",")[0], 200_000_000, f"{mean:.5g}", f"{deviation:.5g}"


def fasttd3(repository: str) -> Rows:
    """Yield a tenth of the points of each curve, the last one among them."""
    for suite in ("playground", "isaaclab", "humanoidbench"):
        tasks = json.loads(show(repository, f"data/{suite}_result.json"))
        for task, agents in tasks.items():
            agents = {"FastTD3": agents} if "time" in agents else agents
            for agent, curve in agents.items():
                length = len(curve["return"])
                for i in sorted({round(k * (length - 1) / 10) for k in range(1, 11)}):
                    numbers = (curve[name][i] for name in ("return", "return_min", "return_max"))
                    name = "PPO" if agent == "null" else agent
                    frames, seconds = round(curve["env_step"][i]), round(curve["time"][i])
                    yield task, name, frames, seconds, *(f"{x:.5g}" for x in numbers)


SOURCES = {
    "simbav2": (simbav2, ("task", "agent", "frames", "scores")),
    "dopamine": (dopamine, ("task", "agent", "frames", "scores")),
    "cleanba": (cleanba, ("task", "agent", "frames", "mean", "deviation")),
    "fasttd3": (fasttd3, ("task", "agent", "frames", "seconds", "mean", "low", "high")),
}


def main() -> None:
    """Write the CSV of each source that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in SOURCES:
        parser.add_argument(f"--{name}", metavar="REPO")
    for name, repository in vars(parser.parse_args()).items():
        if repository:
            reduce, columns = SOURCES[name]
            with (HERE / f"{name}.csv").open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerows([columns, *reduce(repository)])


if __name__ == "__main__":
    main()
