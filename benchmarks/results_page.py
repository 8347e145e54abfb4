"""`benchmarks/results.md` and its pictures, from the scores in `results/suite.jsonl`.

A comparison stands on the page if both sides were measured at the same task, for the same frames
and with the same evaluation. Cells and references that were not measured are listed at its end.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cells
import numpy as np
import published
import records
import scores
from cells import Cell
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from podracer import recipes
from podracer.reports.charts import COLORS
from podracer.scores.statistics import ENOUGH, bootstrap_interval, interquartile_mean

Groups = dict[str, list[records.Row]]  # rows of each contender by its name
OUTCOMES = ("win", "tie", "loss")
LIBRARIES = {
    "sb3": "stable-baselines3", "sbx": "sbx", "rejax": "rejax", "purejaxrl": "PureJaxRL",
    "podracer": "podracer", published.LIBRARY: "published",
}  # fmt: skip
LIBRARY_COLORS: dict[str, str] = dict(
    zip(("podracer", "rejax", "purejaxrl", "sb3", "sbx"), COLORS, strict=False)
)
COMPILED = records.SUITE.parent / "compiled.jsonl"
FLAT = 0.3  # of the largest value: a range below it shows zero, too

HEAD = """\
# Results

This page compares the returns of podracer's agents with other libraries at frames that are equal
within 3 %. Most were measured on one or two CPU cores, some on an accelerator.
`python benchmarks/results_suite.py --page` writes it from the scores in
[`suite.jsonl`](results/suite.jsonl), which has a JSON object for each seed.

- The score of a seed is the mean return of its last evaluation. *Sampled* actions are drawn from
  the policy, *greedy* ones are its best; epsilon is the probability of a random action instead.
  The number of distinct episodes of a seed is a range over seeds. podracer's episodes differ in
  return, length or actions. Other libraries show only returns and lengths, so their numbers are
  lower bounds.
- The settings of podracer and of the references differ. podracer uses its recipes. A reference uses
  the settings that its authors publish, or if there are none the best ones here.
  [`cells.py`](cells.py) has them with their sources. A win therefore belongs to a
  library and its settings together. Environment, frames and evaluation are equal within a cell.
  Seeds begin at 100; recipes were tuned with others. Some recipes were changed after a first
  measurement with these seeds and [measured again](#measured-again). PureJaxRL's scripts keep their
  last policy only: their curves are training episodes, dashed, and a dot is the last evaluation.
- **Score** is the interquartile mean over seeds, with a 95 % bootstrap interval in brackets. The
  score of each seed is in parentheses if seeds are in two groups, parted by a gap of more than
  half of their range and a fifth of the largest score: the mean then belongs to the larger group.
  With fewer than five seeds the score is their mean, and each one is in parentheses, too.
- **Last tenth** is the same mean of a seed's mean over the evaluations in the last tenth of its
  frames: an agent that keeps what it learned has it near the score.
- **Best** is the same mean of the best evaluation of each seed. It is above the score even where
  only chance moves evaluations; where it is far above, the last policy has collapsed.
- **P** is the probability that a seed of podracer beats one of the reference, with the interval of
  a stratified bootstrap (Agarwal et al. 2021). A *win* has its interval above one half, a *loss*
  below it; the others are ties. If either side has fewer than five seeds there is no P, and
  neither a win nor a loss; the last column has the number of seeds. Rows that compare two of
  podracer's agents are not among the wins, ties and losses below. Their P is the probability that
  the agent in bold beats the other one.
- *Published* rows and dotted curves are results that authors have published, of 5 or 10 seeds with
  Gymnasium's robots of version 4, here at version 5, and with the authors' evaluation. They count
  among no wins, ties and losses. [`references/`](references/README.md) has the
  numbers and their sources.
- **Pictures** show the same mean and interval at each evaluation, or with fewer than five seeds the
  mean and, thin, each seed.
- **CPU s** are processor seconds of a seed, with start, compilation and evaluations, of the seeds
  that ran while the machine was quiet (load at most the number of processors and a half). If no
  seed did, the two processors shared a core's caches and units with other work, and the seconds are
  an upper bound (≤). Where an accelerator is named they are seconds of it instead, and an upper
  bound, as several runs shared it. Under Anakin seeds of podracer train as one program and share
  its start and compilation; under Sebulba they train one after another. No conclusion about speed
  follows: paired timings are in [`benchmarks/`](README.md).
"""


def write(source: Path, root: Path = records.ROOT) -> None:
    """Write the page and its pictures below `root`."""
    rows = records.read(source)
    groups = records.newest(rows)
    groups |= published.groups(cells.CELLS, groups)
    for folder in ("benchmarks", "docs/images"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    families = list(dict.fromkeys(cell.family for cell in cells.CELLS))
    sections = [text for family in families for text in section(family, groups, root)]
    rest = (*measured_again(rows, groups), *spent(groups), *unmeasured(groups))
    page = "\n".join([HEAD, *summary(groups), *sections, *rest])
    (root / "benchmarks" / "results.md").write_text(page.rstrip() + "\n")


def measured_again(rows: Sequence[records.Row], groups: Groups) -> Iterator[str]:
    """Yield the lines about cells whose settings were changed after a first measurement."""
    lines = []
    for cell in (cell for cell in cells.CELLS if cell.name in groups):
        newest = {row["configuration"] for row in groups[cell.name]}
        before = [row for row in rows if records.name_of(row) == cell.name]
        before = [row for row in before if row["configuration"] not in newest]
        if before:  # only the last of several
            last = records.newest(before)[cell.name]
            before_and_now = f"{estimate(last)} | {estimate(groups[cell.name])}"
            lines.append(f"| {cell.task} | {title(cell.name)} | {len(last)} | {before_and_now} |")
    if lines:
        yield from ("## Measured again", "")
        yield "These settings were changed after a measurement with these seeds. The table has the"
        yield "earlier scores and the scores above. The rows of both are in `suite.jsonl`."
        yield from ("", "| task | agent | seeds | before | now |", "|---" * 5 + "|", *lines, "")


def spent(groups: Groups) -> Iterator[str]:
    """Yield the lines about the frames and the hours of all measured seeds."""
    lines = []
    for family in dict.fromkeys(cell.family for cell in cells.CELLS):
        names = {name for cell in cells.CELLS if cell.family == family for name in names_of(cell)}
        rows = [row for name in names for row in groups.get(name, ())]
        ours = [row for row in rows if row["library"] == "podracer"]
        others = [row for row in rows if row["library"] not in ("podracer", published.LIBRARY)]
        if ours:
            lines.append(f"| {family} | {effort(ours)} | {effort(others)} |")
    if lines:
        yield from ("## What was spent", "")
        yield "All seeds of the tables above, with start, compilation and evaluations. Hours of"
        yield "seeds that ran beside other work are upper bounds. Hours of accelerators are apart;"
        yield "commands ran there, whose kernels repeat"
        yield "([numerics](../docs/numerics.md#the-same-bytes))."
        head = "| | seeds | frames | CPU hours | other libraries' seeds | frames | CPU hours |"
        yield from ("", head, "|---" * 7 + "|", *lines, "")


def effort(rows: Sequence[records.Row]) -> str:
    """Return the columns with the number of seeds, their frames and the hours that they took."""
    frames = sum(row["frames"] for row in rows)
    seconds = {"": 0.0}  # by accelerator, "" for processors
    for row in rows:
        device = accelerator(row)
        seconds[device] = seconds.get(device, 0.0) + row["seconds" if device else "cpu_seconds"]
    hours = f"{seconds.pop('') / 3600:.1f}"
    hours += "".join(f", {x / 3600:.1f} of one {device}" for device, x in seconds.items())
    return f"{len(rows)} | {compact(frames)} | {hours}" if rows else "| |"


def accelerator(row: records.Row) -> str:
    """Return the name of the accelerator that trained a seed, "" for processors alone."""
    device = row.get("device", {"platform": "cpu"})
    return "" if device["platform"] == "cpu" else device["kind"]


def names_of(cell: Cell) -> list[str]:
    """Return the names of a cell and of its references in other libraries."""
    ours = {other.name for other in cells.CELLS}
    return [cell.name, *(name for name in cell.reference_names if name not in ours)]


def unmeasured(groups: Groups) -> Iterator[str]:
    """Yield the lines about cells and references that lack seeds, and how long these would take."""
    references = {reference.name: reference for reference in cells.REFERENCES}
    planned: dict[str, tuple[int, float, float | None]] = {}
    for cell in cells.CELLS:
        planned[cell.name] = cell.seeds, cell.cpu_minutes, least_seconds(cell)
        for name in cell.reference_names:
            if name in references:
                planned[name] = cell.seeds, references[name].cpu_minutes, None
    tasks: dict[str, list[str]] = {}
    for name, (seeds, minutes, least) in planned.items():
        lacking = seeds - len(groups.get(name, ()))
        if lacking > 0:
            hours = minutes * lacking / seeds / 60
            bound = "" if least is None else f"{least:.2g}"
            about = f"{title(name)} | {seeds - lacking} of {seeds} | {hours:.1f} | {bound}"
            tasks.setdefault(about, []).append(name.split("/")[0])
    if tasks:
        yield from ("## Not measured", "")
        yield "These are in the table of `cells.py`, but were not run, or not with all seeds. Hours"
        yield "count all lacking seeds of one task on one core here, and are estimated. The seconds"
        yield "are the least that a seed alone takes on an H100, by the kernels and FLOPs of the"
        yield "recipe's program in its own environment, [compiled for it](compiled.md), where the"
        yield "networks are the recipe's; a host environment adds its own."
        head = "| agent | seeds | CPU hours | H100 seconds of a seed, at least | tasks |"
        yield from ("", head, "|---" * 5 + "|")
        yield from (f"| {about} | {', '.join(names)} |" for about, names in tasks.items())
        yield ""


# Settings of an agent that decide how much an update computes.
NETWORKS = ("network", "critic_network", "dueling", "stream_hidden")


def least_seconds(cell: Cell) -> float | None:
    """Return the seconds below which no H100 trains a seed of a cell, None if not compiled.

    The recipe's program stands for those of cells with its networks.
    """
    recipe = cell.command.split()[0]
    agents = cells.experiment_of(cell.command).agent, recipes.find(recipe).agent
    networks, own = ([getattr(agent, name, None) for name in NETWORKS] for agent in agents)
    if networks != own:
        return None
    compiled = [row for row in records.read(COMPILED) if row["recipe"] == recipe]
    bounds = [
        row["update_seconds_at_least"] / row["steps_per_update"]
        for row in compiled
        if row["target"] == "h100" and row.get("update_seconds_at_least")
    ]
    frames = cells.experiment_of(cell.command).frames
    return frames * bounds[-1] if bounds else None


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


def enough(*contenders: Sequence[records.Row]) -> bool:
    """Whether each contender has the seeds for an interval."""
    return min(map(len, contenders)) >= ENOUGH


def summary(groups: Groups) -> list[str]:
    """Count wins, ties and losses of each family, against other libraries."""
    families = list(dict.fromkeys(cell.family for cell in cells.CELLS))
    found = {
        family: [
            (groups[cell.name], groups[reference])
            for cell, reference in pairs(family, groups)
            if "/podracer/" not in reference
        ]
        for family in families
    }
    lines = [f"| {family} | {counted(found[family])} |" for family in families if found[family]]
    if not lines:
        return []
    head = ("| | wins | ties | losses | too few seeds | P over the tasks |", "|---" * 6 + "|")
    together = f"| together | {counted(list(itertools.chain(*found.values())))} |"
    return [*head, *lines, *([together] if len(lines) > 1 else []), ""]


def counted(comparisons: Sequence[tuple[Sequence[records.Row], Sequence[records.Row]]]) -> str:
    """Return the columns of the summary for comparisons of ours with others."""
    judged = [
        (values(ours), values(theirs)) for ours, theirs in comparisons if enough(ours, theirs)
    ]
    counts = Counter(scores.verdict(*pair) for pair in judged)
    numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
    chance = probability(*zip(*judged, strict=True)) if judged else ""
    return f"{numbers} | {len(comparisons) - len(judged)} | {chance}"


def section(family: str, groups: Groups, root: Path) -> Iterator[str]:
    """Yield the lines about a family, nothing if none of its cells was measured."""
    family_cells = [cell for cell in cells.CELLS if cell.family == family and cell.name in groups]
    if not family_cells:
        return
    words = "".join(c if c.isalnum() else " " for c in family.lower()).split()
    picture = "-".join(["results", *words]) + ".png"
    draw(family, groups, root / "docs" / "images" / picture)
    yield from (f"## {family}", "", f"![Learning curves: {family}](../docs/images/{picture})", "")
    yield "| task | agent | seeds | frames | evaluation | score | last tenth | best | CPU s | P | |"
    yield "|---" * 11 + "|"
    comparisons = list(pairs(family, groups))
    for cell in family_cells:
        rows = groups[cell.name]
        evaluation = describe_evaluation(rows)
        yield f"| {cell.task} | **{title(cell.name)}** | {figures(rows, evaluation)} | | |"
        for reference in (name for other, name in comparisons if other == cell):
            baseline = groups[reference]
            chance, outcome = comparison(rows, baseline)
            about = f"{title(reference)} | {figures(baseline, f'the same ({distinct(baseline)})')}"
            yield f"| | {about} | {chance} | {outcome} |"
        for name in (name for name in published.names(cell) if name in groups):
            others = groups[name]
            chance, _ = comparison(rows, others)
            about = f"{title(name)} | {len(others)} | {compact(others[0]['frames'])}"
            yield f"| | {about} | the authors' | {estimate(others)} | | | | {chance} | |"
    yield ""
    for cell in (cell for cell in family_cells if cell.remark):
        yield from (f"{cell.task}, {cell.agent}: {cell.remark}", "")
    if older := [measured_before(cell, groups) for cell in family_cells if is_older(cell, groups)]:
        yield from (f"Measured with settings of an earlier commit: {', '.join(older)}.", "")
    yield "```bash"
    for cell in family_cells:
        command, *others = cells.command_of(cell, cells.seeds_of(cell)), *cells.seeds_of(cell)[1:]
        once = command[0] == "train" and others  # a sweep trains all of them
        also = f"  # and with --seed {', '.join(map(str, others))}" if once else ""
        yield " ".join(["podracer", *command]) + also
    yield from ("```", "")


def is_older(cell: Cell, groups: Groups) -> bool:
    """Return whether a cell's command has other settings today than when it was measured."""
    today = cells.configuration_of(cells.experiment_of(cell.command))
    return groups[cell.name][0]["configuration"] != today


def measured_before(cell: Cell, groups: Groups) -> str:
    """Return the words that say at which commit a cell was measured."""
    return f"{cell.task} {cell.agent} ({groups[cell.name][0]['commit'][:8]})"


def figures(rows: Sequence[records.Row], evaluation: str) -> str:
    """Return the columns that all contenders have."""
    frames = compact(rows[0]["frames"])
    if device := accelerator(rows[0]):
        seconds = f"≤ {np.mean([row['seconds'] for row in rows]):,.0f} of one {device}"
    else:
        quiet = records.quiet(rows)
        seconds = f"{np.mean([row['cpu_seconds'] for row in quiet or rows]):,.0f}"
        seconds = seconds if quiet else f"≤ {seconds}"
    last_tenth, best = over_evaluations(rows, mean_of_last_tenth), over_evaluations(rows, highest)
    kept = f"{estimate(rows)} | {last_tenth} | {best}"
    return f"{len(rows)} | {frames} | {evaluation} | {kept} | {seconds}"


def title(name: str) -> str:
    """Return the name of a contender as it is shown."""
    _, library, agent = name.split("/")
    return f"{LIBRARIES[library]} {agent.partition(published.AT)[0]}"


def describe_evaluation(rows: Sequence[records.Row]) -> str:
    """Return how seeds were evaluated, in words."""
    settings = rows[0]["evaluation"]
    epsilon = f", epsilon {settings['epsilon']:g}" if settings["epsilon"] else ""
    episodes = f"{settings['episodes']} episode{'s' * (settings['episodes'] > 1)}"
    return f"{settings['policy']}{epsilon}, {episodes} ({distinct(rows)})"


def distinct(rows: Sequence[records.Row]) -> str:
    """Return how many of a seed's episodes differ, as the range over seeds."""
    counts = [row["distinct_episodes"] for row in rows if row["distinct_episodes"] is not None]
    if not counts:
        return "distinct unknown"
    low, high = min(counts), max(counts)
    return f"{low} distinct" if low == high else f"{low} to {high} distinct"


def comparison(rows: Sequence[records.Row], baseline: Sequence[records.Row]) -> tuple[str, str]:
    """Return the probability of improvement and its verdict, without them the number of seeds."""
    if not enough(rows, baseline):
        few = min(len(rows), len(baseline))
        return "", f"{few} seed{'s' * (few > 1)}"
    chance = probability([values(rows)], [values(baseline)])
    return chance, scores.verdict(values(rows), values(baseline))


def estimate(rows: Sequence[records.Row]) -> str:
    """Return the interquartile mean of the scores and its interval.

    The score of each seed follows where these are in two groups, and where seeds are few.
    """
    mean = number(scores.interquartile_mean([values(rows)]))
    if len(rows) == 1:
        return mean
    each = ", ".join(
        score if (times := len(list(equal))) == 1 else f"{times} x {score}"
        for score, equal in itertools.groupby(map(number, np.sort(values(rows))))
    )
    if not enough(rows):
        return f"{mean} ({each})"
    low, high = scores.interquartile_interval([values(rows)])
    interval = f"{mean} [{number(low)}, {number(high)}]"
    return f"{interval} ({each})" if scores.is_split(values(rows)) else interval


def over_evaluations(
    rows: Sequence[records.Row], summary: Callable[[list[tuple[float, float]]], float]
) -> str:
    """Return the interquartile mean of a summary of each seed's curve, "" for unknown ones."""
    if any(row.get("curve_of") == "training episodes" for row in rows):
        return ""
    returns = [summary(row["curve"]) for row in rows]
    return number(scores.interquartile_mean([np.array(returns)]))


def highest(curve: Sequence[tuple[float, float]]) -> float:
    return max(value for _, value in curve)


def mean_of_last_tenth(curve: Sequence[tuple[float, float]]) -> float:
    """Return the mean of the evaluations in the last tenth of a curve's frames."""
    return float(np.mean([value for frames, value in curve if frames > 0.9 * curve[-1][0]]))


def probability(candidate: scores.Scores, baseline: scores.Scores) -> str:
    low, high = scores.improvement_interval(candidate, baseline)
    return f"{scores.improvement(candidate, baseline):.2f} [{low:.2f}, {high:.2f}]"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def compact(frames: int) -> str:
    return f"{frames / 1e6:.3g} M" if frames >= 1e6 else f"{frames / 1e3:.3g} k"


# --- pictures -------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Curves of one pair of axes: names of contenders, with their labels and colors."""

    title: str
    labels: dict[str, str]
    colors: dict[str, str]


def panels(family: str, groups: Groups) -> Iterator[Panel]:
    """Yield a panel for each agent with a reference, and one for the other agents of a task."""
    drawn = [cell for cell in cells.CELLS if cell.family == family and cell.name in groups]
    names = [name for cell in drawn for name in (*cell.reference_names, cell.name)]
    agents = dict.fromkeys(name.split("/")[-1] for name in names if "/podracer/" in name)
    colors = dict(zip(agents, itertools.cycle(COLORS), strict=False))
    for task in dict.fromkeys(cell.task for cell in drawn):
        labels: dict[str, str] = {}  # agents of podracer that no other library stands beside
        for cell in (cell for cell in drawn if cell.task == task):
            names = [*cell.reference_names, *published.names(cell)]
            references = [name for name in names if name in groups]
            if others := [name for name in references if "/podracer/" not in name]:
                yield beside(f"{task}: {cell.agent}", [cell.name, *others])
            else:
                names = [*references, cell.name]
                labels |= {name: name.split("/")[-1] for name in names}
        if len(labels) == 1:
            (name, agent), *_ = labels.items()
            yield beside(f"{task}: {agent}", [name])
        elif labels:
            yield Panel(
                f"{task}: podracer's agents",
                labels,
                {name: colors[agent] for name, agent in labels.items()},
            )


def beside(heading: str, names: Sequence[str]) -> Panel:
    """Return a panel with a color for each library."""
    libraries = {name: name.split("/")[1] for name in names}
    labels = {name: LIBRARIES[library] for name, library in libraries.items()}
    colors = {name: LIBRARY_COLORS.get(library, COLORS[-1]) for name, library in libraries.items()}
    for i, name in enumerate(x for x, library in libraries.items() if library == published.LIBRARY):
        labels[name], colors[name] = title(name), COLORS[-1 - i]
    return Panel(heading, labels, colors)


def draw(family: str, groups: Groups, target: Path) -> None:
    """Draw the learning curves of a family."""
    found = list(panels(family, groups))
    columns = min(3 if len(found) > 4 else 2, len(found))
    rows = -(-len(found) // columns)
    figure = Figure((11 if columns > 1 else 5.5, 3.3 * rows), layout="constrained")
    for index, (heading, labels, colors) in enumerate(found):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(heading, fontsize=10)
        for name, label in labels.items():
            curve(axes, groups[name], label, colors[name])
        style(axes, [groups[name][0]["frames"] for name in labels])
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})


def curve(axes: Axes, rows: Sequence[records.Row], label: str, color: str) -> None:
    """Draw the interquartile mean over seeds with its bootstrap interval, of few seeds each one."""
    length = min(len(row["curve"]) for row in rows)
    points = np.array([row["curve"][:length] for row in rows], float)  # [seeds, evaluations, 2]
    frames, returns = points[..., 0].mean(axis=0), points[..., 1]
    line, label = "-", f"{label} ({len(rows)} seed{'s' * (len(rows) > 1)})"
    if rows[0].get("curve_of") == "training episodes":  # only its last point is an evaluation
        last = interquartile_mean(returns[:, -1:])
        axes.plot(frames[-1:], last, "o", color=color, markersize=4)
        frames, returns = frames[:-1], returns[:, :-1]
        line, label = "--", f"{label}, training"
    if rows[0]["library"] == published.LIBRARY:
        line = ":" if length > 1 else "o"
    if enough(rows):
        low, high = bootstrap_interval(returns)
        axes.fill_between(frames, low, high, color=color, alpha=0.15, linewidth=0)
    else:
        axes.plot(frames, returns.T, color=color, alpha=0.4, linewidth=0.7)
    axes.plot(frames, interquartile_mean(returns), line, color=color, label=label)


def style(axes: Axes, frames: Sequence[int]) -> None:
    """Label the axes; the legend stands below them, where it hides no curve."""
    if max(frames) > 4 * min(frames):
        axes.set_xscale("log")
    low, high = axes.get_ylim()
    if high - low < FLAT * max(abs(low), abs(high)):  # show small changes as small
        axes.set_ylim(min(1.1 * low, 0), max(1.1 * high, 0))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    columns = 2 if len(axes.lines) > 1 else 1
    axes.legend(
        fontsize=8, frameon=False, ncols=columns, handlelength=1.2, columnspacing=1.0,
        loc="upper center", bbox_to_anchor=(0.5, -0.17),
    )  # fmt: skip
    axes.set_xlabel("frames", fontsize=8)
    axes.set_ylabel("return", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
