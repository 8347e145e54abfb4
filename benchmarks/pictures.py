"""Pictures and tables of `results/` for README.md: contests with others, growth, cold starts.

    python benchmarks/pictures.py

A contest is the newest in the file. Its bar is the median ratio of the turns, its line the smallest
and the largest. The tables are printed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
AHEAD, BEHIND = "#2a6f97", "#c1121f"
COLD_GOAL = 30.0  # seconds, on two cores
KNEE = 0.9  # share of the best rate, as in growth.py


class Contest(NamedTuple):
    """What to show of a file: records of these values, of podracer and of another."""

    label: str
    file: str
    where: dict[str, Any]
    other: str  # contender


LARGE, SMALL = {"benchmark": "ppo cartpole-large"}, {"benchmark": "ppo cartpole-small"}
MINATAR, ATARI = {"benchmark": "ppo breakout"}, {"benchmark": "ppo atari"}
CONTESTS = (
    Contest(
        "Catch, the notebook's settings, two devices",
        "catch",
        {"benchmark": "catch", "devices": 2},
        "notebook structure",
    ),
    *(
        Contest(f"PPO, {task}", "ppo", where, other)
        for task, where, others in (
            ("CartPole, 1024 environments", LARGE, ("rejax", "purejaxrl", "stable-baselines3")),
            ("CartPole, 4 environments", SMALL, ("rejax", "purejaxrl", "stable-baselines3")),
            ("MinAtar Breakout, 64 environments", MINATAR, ("rejax", "purejaxrl")),
        )
        for other in others
    ),
    *(
        Contest("PPO, Atari Pong, Nature network, two cores", "atari", ATARI, other)
        for other in ("CleanRL, EnvPool", "stable-baselines3")
    ),
    *(
        Contest(
            f"{agent}, {hidden}",
            "agents",
            {"benchmark": f"{agent} against sbx", "hidden": hidden},
            "sbx",
        )
        for agent in ("SAC", "DQN")
        for hidden in ("256 x 256", "64 x 64")
    ),
    *(
        Contest(f"replay, {case}", "replay", {"benchmark": f"Replay, {case}"}, "flashbax")
        for case in ("vectors, transitions", "vectors, sequences", "frames, 3 steps")
    ),
    *(
        Contest(
            f"64 learners of {recipe}, {envs} environments each, as one program",
            "population",
            {"benchmark": "population", "recipe": recipe, "envs": envs, "pods": 64},
            "one after another",
        )
        for recipe, envs in (("catch_a2c", 4), ("cartpole_ppo", 32))
    ),
)  # fmt: skip


def read(file: str) -> list[dict[str, Any]]:
    """Return the records of a file, none if there is no file."""
    path = RESULTS / f"{file}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def turns(contest: Contest) -> tuple[list[float], list[float]]:
    """Return the rates of podracer and of the other in each turn, none if they did not meet."""
    first: dict[str, Any] = {}
    found: tuple[list[float], list[float]] = [], []
    for record in read(contest.file):
        if any(record.get(name) != value for name, value in contest.where.items()):
            continue
        if record["contender"] == record["first"]:
            first = record
        elif record["contender"] == contest.other:
            found = rates(first), rates(record)
    return found


def ratios(contest: Contest) -> list[float]:
    """Return how many times as fast podracer was in each turn."""
    return [ours / its for ours, its in zip(*turns(contest), strict=True)]


def rates(record: dict[str, Any]) -> list[float]:
    """Return the rate of each turn."""
    if "repetitions" in record:
        return record["repetitions"]
    median = statistics.median(record["seconds"])
    name = next(name for name in record if name.endswith("s_per_second"))
    return [record[name] * median / seconds for seconds in record["seconds"]]


def draw_contests(target: Path) -> None:
    """Draw a bar for each contest."""
    found = {f"{contest.label}: {contest.other}": ratios(contest) for contest in CONTESTS}
    rows = {label: turns for label, turns in reversed(found.items()) if turns}
    figure = Figure((9, 0.32 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot()
    for row, turns in enumerate(rows.values()):
        middle = statistics.median(turns)
        color = AHEAD if middle >= 1 else BEHIND
        axes.barh(row, middle - 1, left=1, color=color, alpha=0.75)
        axes.plot([min(turns), max(turns)], [row, row], color="black", linewidth=1)
        axes.text(max(turns) * 1.05, row, f"{middle:.2g}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("podracer is so many times as fast as the other", fontsize=9)
    axes.set_xlim(0.5, axes.get_xlim()[1] * 1.5)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def print_contests() -> None:
    """Print a row of a table for each contest."""
    for contest in CONTESTS:
        if found := ratios(contest):
            ours, its = (EngFormatter(places=2)(statistics.median(x)) for x in turns(contest))
            times = f"{statistics.median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"
            print(f"| {contest.label} | {ours} | {contest.other} {its} | {times} |")


def growth() -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Return what grew, and the newest rate at each size."""
    found: dict[str, dict[int, float]] = {}
    for record in read("growth"):
        found.setdefault(record["grows"], {})[record["size"]] = record["steps_per_second"]
    for name, points in found.items():
        yield name, sorted(points.items())


def draw_growth(target: Path) -> None:
    """Draw the rate over each size, with the knee marked."""
    panels: dict[str, list[tuple[str, list[tuple[int, float]]]]] = {}
    for name, points in growth():
        size, _, what = name.partition(", ")
        panels.setdefault(size, []).append((what, points))
    columns = 3
    rows = -(-len(panels) // columns)
    figure = Figure((9, 2.6 * rows), layout="constrained")
    for place, (size, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(size, fontsize=10)
        for what, points in lines:
            draw_line(axes, what, points)
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=7, which="both")
        axes.legend(fontsize=7, framealpha=0.7, edgecolor="none")
        axes.grid(alpha=0.3)
    figure.supylabel("steps a second, one device (a ring marks the knee)", fontsize=8)
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def print_growth() -> None:
    """Print the knee of each size, and how much slower the largest is than the best."""
    for name, points in growth():
        (low, _), (high, last) = points[0], points[-1]
        slower = max(rate for _, rate in points) / last
        print(f"| {name} | {low:,} to {high:,} | {knee(points)[0]:,} | {slower:.2f} |")


def knee(points: list[tuple[int, float]]) -> tuple[int, float]:
    """Return the smallest size that is nearly the best, and its rate."""
    best = max(rate for _, rate in points)
    return next(point for point in points if point[1] >= KNEE * best)


def draw_line(axes: Axes, what: str, points: list[tuple[int, float]]) -> None:
    """Draw the rates over a size, and a ring around the smallest that is nearly the best."""
    (line,) = axes.plot(*zip(*points, strict=True), marker=".", markersize=4, label=what)
    axes.plot(
        *knee(points), marker="o", markersize=9, markerfacecolor="none", color=line.get_color()
    )


def cold_starts() -> list[tuple[str, dict[str, Any]]]:
    """Return the newest cold start of each recipe, the slowest first."""
    newest = {row["recipe"]: row for row in read("start") if row["cache"] == "cold"}
    return sorted(newest.items(), key=lambda item: -item[1]["compiled"])


def draw_starts(target: Path) -> None:
    """Draw, for each recipe, the seconds until its first update from an empty compile cache."""
    starts = cold_starts()
    figure = Figure((9, 0.17 * len(starts) + 1), layout="constrained")
    axes = figure.add_subplot()
    seconds = [row["compiled"] for _, row in starts]
    colors = [BEHIND if value > COLD_GOAL else AHEAD for value in seconds]
    axes.barh(range(len(starts)), seconds, color=colors, height=0.7)
    axes.axvline(COLD_GOAL, color="#666666", lw=1, ls="--")
    axes.set_yticks(range(len(starts)), [name for name, _ in starts], fontsize=7)
    axes.set(xlabel="seconds from the command to the first update", ylim=(len(starts), -1))
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def print_starts() -> None:
    """Print the cold starts as a table in Markdown: wall seconds, processor seconds, size."""
    for name, row in cold_starts():
        figures = (row["compiled"], row["compiled_cpu"], row["trace"], row["compile"])
        texts = " | ".join(f"{value:.1f}" for value in figures)
        print(f"| `{name}` | {texts} | {row['instructions']:,.0f} |")


def main() -> None:
    draw_contests(IMAGES / "contests.png")
    draw_growth(IMAGES / "growth.png")
    draw_starts(IMAGES / "starts.png")
    print_contests()
    print_growth()
    print_starts()


if __name__ == "__main__":
    main()
