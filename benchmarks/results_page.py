"""`docs/results.md` and its pictures, from the scores in `results/suite.jsonl`.

A comparison stands on the page if both sides were measured at the same task, for the same frames
and with the same evaluation. What was not measured does not appear.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import cells
import numpy as np
import records
import scores
from cells import Cell
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from podracer.reports.curves import COLORS, bootstrap_interval, interquartile_mean

Groups = dict[str, list[records.Row]]  # rows of each contender by its name
OUTCOMES = ("win", "tie", "loss")
LIBRARIES = {
    "sb3": "stable-baselines3", "sbx": "sbx", "rejax": "rejax", "purejaxrl": "PureJaxRL",
    "podracer": "podracer",
}  # fmt: skip
DASHES = {"podracer": "-", "rejax": "--", "purejaxrl": ":", "sb3": "--", "sbx": ":"}

HEAD = """\
# Results

What podracer's agents learn, beside other libraries at equal frames on the same machine. This page
is written by `python benchmarks/results_suite.py --page` from the scores in
[`suite.jsonl`](../benchmarks/results/suite.jsonl), which has a JSON object for each seed.

- The score of a seed is the mean return of its last evaluation. *Sampled* actions are drawn from
  the policy, *greedy* ones are its best; epsilon is the probability of a random action instead.
- **IQM** is the interquartile mean over seeds, with a 95 % bootstrap interval. **P** is the
  probability that a seed of podracer beats one of the reference, with the interval of a stratified
  bootstrap (Agarwal et al. 2021). A *win* has its interval above one half, a *loss* below it; the
  others are ties.
- **CPU s** are processor seconds of a seed, with start, compilation and evaluations, of the seeds
  that ran while the machine was quiet (load at most the number of processors and a half). Where no
  seed did, the two processors shared a core's caches and units with other work, and the seconds are
  an upper bound (≤). Seeds of podracer train as one program under Anakin, and one after another
  under Sebulba.
- References have the settings that their authors publish, or where there are none those that did
  best here; [`cells.py`](../benchmarks/cells.py) has them with their sources. Environment, frames
  and evaluation are those of the cell. Seeds begin at 100; recipes were tuned with others.
  PureJaxRL's scripts keep their last policy only: their curves are of training episodes and end
  with an evaluation.
"""


def write(source: Path, root: Path = records.ROOT) -> None:
    """Write the page and its pictures below `root`."""
    groups = records.newest(records.read(source))
    (root / "docs" / "images").mkdir(parents=True, exist_ok=True)
    families = list(dict.fromkeys(cell.family for cell in cells.CELLS))
    sections = [text for family in families for text in section(family, groups, root)]
    page = "\n".join([HEAD, *summary(groups), *sections])
    (root / "docs" / "results.md").write_text(page.rstrip() + "\n")


def pairs(family: str, groups: Groups) -> Iterator[tuple[Cell, str]]:
    """Yield the comparisons of a family that were measured: a cell and the name of a reference."""
    for cell in cells.CELLS:
        if family == cell.family and cell.name in groups:
            for reference in cell.reference_names:
                if reference in groups and alike(cell.name, reference, groups):
                    yield cell, reference


def alike(name: str, reference: str, groups: Groups) -> bool:
    """Whether two contenders can be compared; say so where they cannot."""
    first, second = groups[name][0], groups[reference][0]
    frames, other = first["frames"], second["frames"]
    equal = first["evaluation"] == second["evaluation"] and abs(frames - other) <= 0.03 * frames
    if not equal:
        print(f"left out: {name} and {reference} were not measured alike", file=sys.stderr)
    return equal


def values(rows: Sequence[records.Row]) -> np.ndarray:
    """Return the scores of all seeds, f64 `[seeds]`."""
    return np.array([row["score"] for row in rows])


def summary(groups: Groups) -> list[str]:
    """Count wins, ties and losses of each family, against other libraries."""
    lines = ["| | wins | ties | losses | P over all tasks |", "|---|---|---|---|---|"]
    for family in dict.fromkeys(cell.family for cell in cells.CELLS):
        comparisons = [pair for pair in pairs(family, groups) if "/podracer/" not in pair[1]]
        if not comparisons:
            continue
        candidate = [values(groups[cell.name]) for cell, _ in comparisons]
        baseline = [values(groups[reference]) for _, reference in comparisons]
        counts = Counter(map(scores.verdict, candidate, baseline))
        numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {family} | {numbers} | {probability(candidate, baseline)} |")
    return [*lines, ""] if len(lines) > 2 else []


def section(family: str, groups: Groups, root: Path) -> Iterator[str]:
    """Yield the lines about a family, nothing if none of its cells was measured."""
    family_cells = [cell for cell in cells.CELLS if cell.family == family and cell.name in groups]
    if not family_cells:
        return
    words = "".join(c if c.isalnum() else " " for c in family.lower()).split()
    picture = "-".join(["results", *words]) + ".png"
    draw(family, groups, root / "docs" / "images" / picture)
    yield from (f"## {family}", "", f"![Learning curves: {family}](images/{picture})", "")
    yield "| task | agent | seeds | frames | evaluation | IQM | CPU s | P | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    comparisons = list(pairs(family, groups))
    for cell in family_cells:
        rows = groups[cell.name]
        evaluation = describe_evaluation(rows[0])
        yield f"| {cell.task} | **{title(cell.name)}** | {figures(rows, evaluation)} | | |"
        for reference in (name for other, name in comparisons if other == cell):
            baseline = groups[reference]
            chance = probability([values(rows)], [values(baseline)])
            outcome = scores.verdict(values(rows), values(baseline))
            about = f"{title(reference)} | {figures(baseline, 'the same')}"
            yield f"| | {about} | {chance} | {outcome} |"
    yield ""
    for cell in (cell for cell in family_cells if cell.remark):
        yield from (f"{cell.task}, {cell.agent}: {cell.remark}", "")
    yield "```bash"
    for cell in family_cells:
        yield " ".join(["podracer", *cells.command_of(cell, cells.seeds_of(cell))])
    yield from ("```", "")


def figures(rows: Sequence[records.Row], evaluation: str) -> str:
    """Return the columns that all contenders have."""
    frames = compact(rows[0]["frames"])
    quiet = records.quiet(rows)
    seconds = f"{np.mean([row['cpu_seconds'] for row in quiet or rows]):,.0f}"
    seconds = seconds if quiet else f"≤ {seconds}"
    return f"{len(rows)} | {frames} | {evaluation} | {estimate(rows)} | {seconds}"


def title(name: str) -> str:
    """Return the name of a contender as it is shown."""
    _, library, agent = name.split("/")
    return f"{LIBRARIES[library]} {agent}"


def describe_evaluation(row: records.Row) -> str:
    """Return how a seed was evaluated, in words."""
    settings = row["evaluation"]
    epsilon = f", epsilon {settings['epsilon']:g}" if settings["epsilon"] else ""
    episodes = f"{settings['episodes']} episodes ({row['distinct_episodes']} distinct)"
    return f"{settings['policy']}{epsilon}, {episodes}"


def estimate(rows: Sequence[records.Row]) -> str:
    """Return the interquartile mean of the scores, and its interval if there are several."""
    mean = scores.interquartile_mean([values(rows)])
    if len(rows) < 2:
        return number(mean)
    low, high = scores.interquartile_interval([values(rows)])
    return f"{number(mean)} [{number(low)}, {number(high)}]"


def probability(candidate: scores.Scores, baseline: scores.Scores) -> str:
    low, high = scores.improvement_interval(candidate, baseline)
    return f"{scores.improvement(candidate, baseline):.2f} [{low:.2f}, {high:.2f}]"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def compact(frames: int) -> str:
    return f"{frames / 1e6:.3g} M" if frames >= 1e6 else f"{frames / 1e3:.3g} k"


# --- pictures -------------------------------------------------------------------------------------


def draw(family: str, groups: Groups, target: Path) -> None:
    """Draw the learning curves of a family, a panel for each of its tasks."""
    tasks: dict[str, list[str]] = {}
    for cell in cells.CELLS:
        if cell.family == family and cell.name in groups:
            references = [name for name in cell.reference_names if name in groups]
            names = [cell.name, *references]
            tasks[cell.task] = list(dict.fromkeys([*tasks.get(cell.task, []), *names]))
    columns = min(2, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure((5.4 * columns, 3.2 * rows), layout="constrained")
    for index, (task, names) in enumerate(tasks.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(task, fontsize=10)
        agents = dict.fromkeys(name.split("/")[2] for name in names)
        colors = dict(zip(agents, (*COLORS, *COLORS), strict=False))
        for name in names:
            _, library, agent = name.split("/")
            curve(axes, groups[name], title(name), colors[agent], DASHES[library])
        style(axes, [groups[name][0]["frames"] for name in names])
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def curve(axes: Axes, rows: Sequence[records.Row], label: str, color: str, dashes: str) -> None:
    """Draw the interquartile mean over seeds, with its bootstrap interval."""
    length = min(len(row["curve"]) for row in rows)
    points = np.array([row["curve"][:length] for row in rows], float)  # [seeds, evaluations, 2]
    frames, returns = points[..., 0].mean(axis=0), points[..., 1]
    low, high = bootstrap_interval(returns)
    axes.fill_between(frames, low, high, color=color, alpha=0.15, linewidth=0)
    mean = interquartile_mean(returns)
    axes.plot(frames, mean, dashes, color=color, label=f"{label} ({len(rows)})")


def style(axes: Axes, frames: Sequence[int]) -> None:
    if max(frames) > 4 * min(frames):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(fontsize=7, framealpha=0.7, edgecolor="none")
    axes.set_xlabel("frames", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
