"""Learning curves as figures: several runs in one plot, seeds as their score with its interval.

Each figure is drawn twice, for a light and for a dark page.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from podracer.scores.runs import RunRecords
from podracer.scores.seeds import are_independent, count_seeds
from podracer.scores.statistics import (
    ENOUGH,
    SMOOTH,
    bootstrap_interval,
    running_mean,
    score_of_seeds,
)

COLORS = ("#3f8fdb", "#f28e2b", "#2ca58d", "#e15759", "#a06cd5", "#d4a72c", "#e377c2", "#7f8c8d")
POD, WINNER = COLORS[:2]  # of a population: all pods, and the best one with its ancestors
_THEMES = {"light": ("#1f2328", "#6b7280", "#d8dce2"), "dark": ("#e6e8eb", "#9aa3ad", "#3a4049")}
_POINTS = 1000  # drawn for one curve at most
_GRID = 200  # points at which the seeds of a group are compared


Groups = dict[str, list[RunRecords]]  # label to its runs
Curve = tuple[np.ndarray, np.ndarray]  # positions and values of a metric


class Panel(NamedTuple):
    """Contents of one pair of axes: a metric over frames or seconds, perhaps with dots."""

    title: str
    key: str
    over: str
    points: str = ""


def legend(entries: Iterable[tuple[str, str]], title: str = "") -> str:
    """Draw a legend of (label, color) pairs, below a title if it needs one."""
    swatch = '<li><i style="background:{}"></i>{}</li>'
    items = [swatch.format(color, html.escape(label)) for label, color in entries]
    head = [f"<li><b>{html.escape(title)}</b></li>"] if title else []
    return f'<ul class="legend">{"".join(head + items)}</ul>'


def panels_of(groups: Groups, panels: Sequence[Panel], width: float, height: float) -> str:
    """Draw panels of so many inches, side by side where the page has room, else in a column."""

    def draw(panel: Panel) -> str:
        return render(
            panel.title, height, lambda figure: _curves(figure.subplots(), groups, panel), width
        )

    # On a wide page a panel has 90 pixels an inch.
    pictures = "".join(map(draw, panels))
    return f'<div class="panels" style="--least: {90 * width:.0f}px">{pictures}</div>'


def render(alt: str, height: float, draw: Callable[[Figure], None], width: float = 10.8) -> str:
    """Render what `draw` puts on a figure of so many inches, for a light and a dark page."""
    pictures = {}
    for theme, style in _THEMES.items():
        with matplotlib.rc_context(_style(*style)):
            figure = Figure(figsize=(width, height), layout="constrained")
            draw(figure)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
        pictures[theme] = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    alt = html.escape(alt)
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{pictures["dark"]}">'
        f'<img alt="{alt}" src="{pictures["light"]}"></picture>'
    )


def _style(strong: str, soft: str, faint: str) -> dict[Any, Any]:
    return {
        "text.color": strong,
        "axes.labelcolor": soft,
        "xtick.color": soft,
        "ytick.color": soft,
        "axes.edgecolor": faint,
        "grid.color": faint,
        "grid.linewidth": 0.6,
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.titlepad": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "text.parse_math": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "figure.dpi": 160,
        "figure.constrained_layout.w_pad": 0.15,
    }


def _curves(axes: Axes, groups: Groups, panel: Panel) -> None:
    """Draw one curve for each group, over several seeds their score."""
    for color, runs in zip(itertools.cycle(COLORS), groups.values(), strict=False):
        members = count_seeds(runs)[0]
        lines, sound = seed_curves(members, panel)
        for x, y in lines:
            _line(axes, x, y, color, lone=len(lines) == 1)
        if len(sound) > 1:
            smooth = [(x, running_mean(y)) for x, y in sound]
            has_interval = len(sound) >= ENOUGH and are_independent(members)
            _score(axes, smooth, color, has_interval=has_interval)
        for run in members if panel.points else ():
            edge = matplotlib.rcParams["text.color"]
            x, y = run.series(panel.points, panel.over)
            if len(members) > 1:  # which dots belong together
                axes.plot(x, y, color=color, alpha=0.35, lw=0.7, ls=":")
            axes.scatter(x, y, s=15, color=color, edgecolors=edge, linewidths=0.7, zorder=3)
    axes.margins(x=0.02, y=0.08)
    style_axes(axes, panel.title, panel.over)


def seed_curves(members: Sequence[RunRecords], panel: Panel) -> tuple[list[Curve], list[Curve]]:
    """Return the curves of seeds, and of these the ones that are in their mean.

    A learner that met a fault has no part in it.
    """
    curves = [(run, *run.series(panel.key, panel.over)) for run in members]
    curves = [(run, x, y) for run, x, y in curves if len(x)]
    return (
        [(x, y) for _, x, y in curves],
        [(x, y) for run, x, y in curves if not run.has_diverged],
    )


def style_axes(axes: Axes, title: str, over: str) -> None:
    """Style axes: title, grid, and few round ticks."""
    axes.set(title=title, xlabel=over)
    axes.grid(axis="y")
    for axis, ticks in ((axes.xaxis, 6), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(tick_text))


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, *, lone: bool) -> None:
    some = slice(None, None, max(1, len(x) // _POINTS))
    if lone and len(x) >= 2 * SMOOTH:
        axes.plot(x[some], y[some], color=color, alpha=0.25, lw=0.7)
    alpha, width = (1.0, 1.6) if lone else (0.35, 0.7)
    marker = "." if len(x) == 1 else ""
    axes.plot(x[some], running_mean(y)[some], color=color, alpha=alpha, lw=width, marker=marker)


def _score(
    axes: Axes, series: list[tuple[np.ndarray, np.ndarray]], color: str, *, has_interval: bool
) -> None:
    """Draw the score over seeds, dashed where a run has ended: its last value counts on."""
    start, end = max(x[0] for x, _ in series), max(x[-1] for x, _ in series)
    if end > start:
        at = np.linspace(start, end, _GRID)
        values = np.stack([np.interp(at, x, y) for x, y in series])
        if has_interval:
            low, high = bootstrap_interval(values)
            axes.fill_between(at, low, high, color=color, alpha=0.2, lw=0)
        score, all_run = score_of_seeds(values), at <= min(x[-1] for x, _ in series)
        axes.plot(at[all_run], score[all_run], color=color, lw=1.8)
        axes.plot(at[~all_run], score[~all_run], color=color, lw=1.8, ls="--")


def tick_text(value: float, _: int | None) -> str:
    """Format a round number, without the trailing zeros that `compact` keeps for alignment."""
    if abs(value) < 1000:
        return f"{value:.4g}"
    power = min(int(math.log10(abs(value)) + 1e-9) // 3, 4)
    return f"{value / 1000**power:.4g}" + " kMBT"[power]


def logarithmic(axes: Axes) -> None:
    """Make the scale logarithmic; within a decade the ticks stay where they were."""
    even, form = axes.yaxis.get_major_locator(), axes.yaxis.get_major_formatter()
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)) if high > 10 * low else even)
    axes.yaxis.set_major_formatter(form)
    axes.yaxis.set_minor_locator(NullLocator())
