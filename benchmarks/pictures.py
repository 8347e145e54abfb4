"""Pictures and tables of `results/` for README.md: contests with others, growth, cold starts, and
who waits for whom under Sebulba.

    python benchmarks/pictures.py

A contest is the newest in the file. Its bar is the median ratio of the turns, its line the smallest
and the largest. The tables are printed.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from podracer.scores.runs import RunRecords

ROOT = Path(__file__).parents[1]
OWN = {  # programs of our own, not rivals
    "notebook structure": "the notebook's structure",
    "one after another": "one after another on one device",
}
NAMES = OWN | {
    "purejaxrl": "PureJaxRL",
    "CleanRL, EnvPool": "CleanRL with EnvPool",
    "stoix, 1 device(s)": "Stoix",
    "stoix, 2 device(s)": "Stoix, two devices",
}
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
AHEAD, BEHIND = "#2a6f97", "#c1121f"
COLD_GOAL = 30.0  # seconds, on two cores
KNEE = 0.9  # share of the best rate, as in growth.py
SIZES = {  # what the x axes of growth count
    "environments": "environments",
    "rollout": "timesteps of a rollout",
    "updates in a chunk": "updates of a compiled chunk",
    "pods": "learners in one program",
    "replay": "timesteps that the replay holds",
}

# Stages from the bottom up: key, label, color. Warm colors are for waiting.
ACTOR_STAGES = (
    ("actor_time_environment", "steps environments", "#3f8fdb"),
    ("actor_time_inference", "chooses actions", "#2ca58d"),
    ("actor_time_transfer", "sends trajectories", "#a99be6"),
    ("actor_time_parameters", "waits for parameters", "#f5bf57"),
    ("actor_time_queue", "waits for the learner", "#e8746d"),
)
LEARNER_STAGES = (
    ("learner_time_learn", "learns", "#3f8fdb"),
    ("learner_time_report", "reports and saves", "#8fa3b8"),
    ("learner_time_collect", "waits for trajectories", "#e8746d"),
)
BINS = 150  # in one chart at most


class Contest(NamedTuple):
    """What to show of a file: records of these values, of podracer and of another."""

    label: str
    file: str
    where: dict[str, Any]
    other: str  # contender
    ours: str = ""  # contender of podracer, if not the first


LARGE, SMALL = {"benchmark": "ppo cartpole-large"}, {"benchmark": "ppo cartpole-small"}
MINATAR = {"benchmark": "ppo breakout"}
PPO_TASKS = (
    ("CartPole, 1024 environments", LARGE),
    ("CartPole, 4 environments", SMALL),
    ("MinAtar Breakout, 64 environments", MINATAR),
)
PPO_PEERS = ("rejax", "purejaxrl", "stoix, 1 device(s)", "stable-baselines3")
TWO_DEVICES = "podracer, 2 device(s)"
PONG_DEVICES = (
    ("three devices", "podracer, 3 device(s)"),
    ("one device", "podracer, 1 device(s)"),
)
NATURE, DEEP = ({"benchmark": "ppo atari", "network": name} for name in ("nature", "deep"))
CONTESTS = (
    Contest(
        "Catch, the notebook's settings, two devices",
        "catch",
        {"benchmark": "catch", "devices": 2},
        "notebook structure",
    ),
    *(
        Contest(f"PPO, {task}", "ppo", where, other)
        for task, where in PPO_TASKS
        for other in PPO_PEERS
    ),
    *(
        Contest(f"PPO, {task}, two devices", "ppo", where, "stoix, 2 device(s)", TWO_DEVICES)
        for task, where in PPO_TASKS
    ),
    *(
        Contest(f"PPO, Atari Pong, Nature network, {devices}", "atari", NATURE, other, ours)
        for devices, ours in PONG_DEVICES
        for other in ("CleanRL, EnvPool", "stable-baselines3", "Sample Factory")
    ),
    *(
        Contest(
            f"PPO, Atari Pong, IMPALA's deep network, {devices}",
            "atari",
            DEEP,
            "Sample Factory",
            ours,
        )
        for devices, ours in PONG_DEVICES
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
            f"64 learners of {recipe}, {envs} environments each, as one program on two devices",
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
    found: dict[str, list[float]] = {}
    met: tuple[list[float], list[float]] = [], []
    for record in read(contest.file):
        if any(record.get(name) != value for name, value in contest.where.items()):
            continue
        if record["contender"] == record["first"]:
            found = {"": rates(record)}
        found[record["contender"]] = rates(record)
        if contest.ours in found and contest.other in found:
            met = found[contest.ours], found[contest.other]
    return met


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
    """Draw a bar for each contest, those with programs of our own in a panel of their own."""
    found = [(contest, turns) for contest in CONTESTS if (turns := ratios(contest))]
    parts = {
        "beside other libraries": [item for item in found if item[0].other not in OWN],
        "beside other programs of podracer": [item for item in found if item[0].other in OWN],
    }
    heights = [len(items) + 1.5 for items in parts.values()]
    figure = Figure((9, 0.33 * sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(parts), 1, sharex=True, height_ratios=heights)
    for axes, (heading, items) in zip(panels, parts.items(), strict=True):
        draw_ratios(axes, items)
        axes.set_title(heading, fontsize=10, loc="left")
    panels[0].set_xlim(0.5, 1.5 * max(max(turns) for _, turns in found))
    panels[-1].set_xlabel(
        "times as fast as the other: median of the turns, and their range",
        fontsize=9,
    )
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def draw_ratios(axes: Axes, items: list[tuple[Contest, list[float]]]) -> None:
    """Draw a bar for each contest, the first on top."""
    names = [f"{contest.label}: {NAMES.get(contest.other, contest.other)}" for contest, _ in items]
    labels = [textwrap.fill(name, 58, break_on_hyphens=False) for name in names]
    for row, (_, turns) in enumerate(items):
        middle = statistics.median(turns)
        color = AHEAD if middle >= 1 else BEHIND
        axes.barh(row, middle - 1, left=1, color=color, alpha=0.75)
        axes.plot([min(turns), max(turns)], [row, row], color="black", linewidth=1)
        right = max(1, *turns)
        axes.text(right * 1.04, row, f"{middle:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(items)), labels, fontsize=8)
    axes.set_ylim(len(items) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def print_contests() -> None:
    """Print a row of a table for each contest."""
    for contest in CONTESTS:
        if found := ratios(contest):
            ours, its = (EngFormatter(places=2)(statistics.median(x)) for x in turns(contest))
            times = f"{statistics.median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"
            other = NAMES.get(contest.other, contest.other)
            print(f"| {contest.label} | {ours} | {other} {its} | {times} |")


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
    figure = Figure((10, 2.9 * rows), layout="constrained")
    for place, (size, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(size, fontsize=10)
        for what, points in lines:
            draw_line(axes, what, points)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel(SIZES[size], fontsize=8)
        axes.set_ylabel("samples a second" if size == "replay" else "steps a second", fontsize=8)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.margins(y=0.12)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, framealpha=0.7, edgecolor="none")
        axes.grid(alpha=0.3)
    figure.suptitle("One CPU device; a ring marks the knee", fontsize=10)
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
    axes.set_title(
        f"Cold starts: empty compile cache, two CPU cores; dashed: the goal, {COLD_GOAL:.0f} s",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def print_starts() -> None:
    """Print the cold starts as a table in Markdown: wall seconds, processor seconds, size."""
    for name, row in cold_starts():
        figures = (row["compiled"], row["compiled_cpu"], row["trace"], row["compile"])
        texts = " | ".join(f"{value:.1f}" for value in figures)
        print(f"| `{name}` | {texts} | {row['instructions']:,.0f} |")


def _metrics(run: RunRecords, keys: Sequence[str]) -> np.ndarray:
    """Return metrics as f64 `[records, keys]`; missing and non-finite values are 0."""
    rows = [[record.get(key) for key in keys] for record in run.records]
    return np.nan_to_num(np.array(rows, float).reshape(-1, len(keys)), posinf=0, neginf=0)


def segments(run: RunRecords, keys: Sequence[str]) -> list[tuple[np.ndarray, ...]]:
    """Split a run into contiguous stretches of bins: start `[n]`, end `[n]`, seconds `[n, keys]`.

    A record describes the time before its evaluation, as long as the learner's stages in it took.
    """
    seconds = _metrics(run, keys)
    lengths = _metrics(run, [key for key, *_ in LEARNER_STAGES]).sum(axis=1)
    end = _metrics(run, ["seconds"])[:, 0] - _metrics(run, ["time_evaluate"])[:, 0]
    recorded = seconds.any(axis=1) & (end > 0)
    if not recorded.any():
        return []
    end, seconds, lengths = end[recorded], seconds[recorded], lengths[recorded]
    previous_end = np.concatenate([[0.0], end[:-1]])
    start = np.maximum(previous_end, end - np.where(lengths > 0, lengths, np.inf))
    width = end[-1] / (BINS - 0.5)  # the last record is within the last bin
    gap = start - previous_end > width
    start = np.where(gap, start, previous_end)
    first = np.flatnonzero(gap | (np.diff(np.floor(end / width), prepend=-1) != 0))
    last = np.append(first[1:], len(end)) - 1
    bins = start[first], end[last], np.add.reduceat(seconds, first)
    cuts = np.flatnonzero(gap[first])
    return list(zip(*(np.split(column, cuts[cuts > 0]) for column in bins), strict=True))


def draw_waits(target: Path) -> None:
    """Draw the shares of time of actors and learner in half an hour of PPO on Atari Pong."""
    run = RunRecords("pong_ppo", {}, read("pong_ppo"), {})
    last = run.last("seconds") / 60
    figure = Figure((10, 3.6), layout="constrained")
    sides = (("Actors", ACTOR_STAGES), ("Learner", LEARNER_STAGES))
    for axes, (side, stages) in zip(figure.subplots(1, 2), sides, strict=True):
        for begin, end, seconds in segments(run, [key for key, *_ in stages]):
            edges = np.stack([begin, end], axis=1).ravel() / 60
            shares = np.repeat(seconds / seconds.sum(axis=1, keepdims=True), 2, axis=0)
            axes.stackplot(edges, 100 * shares.T, colors=[color for *_, color in stages], lw=0)
        axes.set_title(f"{side}: share of time", fontsize=10)
        axes.set(xlabel="minutes", ylabel="%", ylim=(0, 100), xlim=(0, last))
        patches = [Patch(color=color, label=words) for _, words, color in stages]
        axes.legend(
            handles=patches, fontsize=8, frameon=False, ncols=2,
            loc="upper center", bbox_to_anchor=(0.5, -0.2),
        )  # fmt: skip
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def main() -> None:
    draw_waits(IMAGES / "who-waits.png")
    draw_contests(IMAGES / "contests.png")
    draw_growth(IMAGES / "growth.png")
    draw_starts(IMAGES / "starts.png")
    print_contests()
    print_growth()
    print_starts()


if __name__ == "__main__":
    main()
