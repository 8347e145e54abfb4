"""Charts: series become figures in plotly's form, with plotly's own legends and buttons.

`charts.js` hands them to plotly. A color `--name` is a variable of the page's style.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from podracer.scores.runs import RunRecords
from podracer.scores.seeds import are_independent, count_seeds
from podracer.scores.statistics import ENOUGH, bootstrap_interval, running_mean, score_of_seeds

COLORS = ("#3f8fdb", "#f28e2b", "#2ca58d", "#e15759", "#a06cd5", "#d4a72c", "#e377c2", "#7f8c8d")
POD, WINNER = COLORS[:2]  # all pods of a population, and the best one with its ancestors
TEXT = "--text"
AXES = ("frames", "updates", "seconds")
_POINTS = 1000  # in a curve at most
_ALL_POINTS = 50_000  # in a block, about; a page of six million bytes has room for two
_CURVES = 64  # runs shown in a block at most
_RAW = 8  # groups at most whose unsmoothed values are shown, too
_SETTINGS = 10  # under the pointer at most
_GRID = 200  # points at which the seeds of a group are compared

_FONT = {"family": "system-ui, Segoe UI, Helvetica, Arial, sans-serif", "size": 11}
_LAYOUT = {
    "paper_bgcolor": "--page",
    "plot_bgcolor": "--page",
    "font": {**_FONT, "color": "--soft"},
    "hovermode": "closest",
    "hoverlabel": {"align": "left", "namelength": -1},
}
_LINES = dict.fromkeys(("gridcolor", "zerolinecolor", "linecolor"), "--line")
_AXIS = {**_LINES, "automargin": True, "nticks": 6, "exponentformat": "B"}

Groups = dict[str, list[RunRecords]]  # label to its runs
Curve = tuple[np.ndarray, np.ndarray]  # positions and values of a metric
Settings = dict[str, dict[str, str]]  # values of the settings that differ, by a group's label
Figure = dict[str, Any]
Trace = dict[str, Any]
Legend = Mapping[str, str]  # color by label; a click switches the traces of a group on and off


class Panel(NamedTuple):
    """Contents of one chart of learning curves: a metric, perhaps with another one as dots."""

    title: str
    key: str
    points: str = ""
    parts: Sequence[str] = ()  # keys of the curves of a metric `[n]`, in place of its own
    unit: float = 1.0  # such as 2**30 for a metric in bytes and an axis in GiB


def trace(
    x: Any, y: Any, group: str = "", *, text: str | Sequence[str] = "", **style: Any
) -> Trace:
    """Return a trace of points `[n]`; `text` is plain and appears under the pointer."""
    texts = [text] if isinstance(text, str) else text
    escaped = [html.escape(part).replace("\n", "<br>") for part in texts]
    field, content = ("meta", escaped[0]) if isinstance(text, str) else ("text", escaped)
    shown = {field: content}
    if "hoverinfo" not in style:
        shown["hovertemplate"] = f"%{{{field}}}<br>%{{x}}: %{{y}}<extra></extra>"
    place = {"x": x, "y": y, "legendgroup": group, "showlegend": False}
    return {**place, **shown, "mode": "lines", **style}


def figure(title: str, traces: Sequence[Trace], x_title: str = "", **layout: Any) -> Figure:
    """Return a figure with a plain title, and with the name of its x axis."""
    heading = _heading(title)
    x_axis = {"title": {"text": html.escape(x_title)}, "showgrid": False, **layout.pop("xaxis", {})}
    place = {"x": 0.01, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 4}}
    top = 41 + 17 * heading["text"].count("<br>")
    return {
        "data": list(traces),
        "layout": {
            **_LAYOUT,
            "title": heading | place,
            "margin": {"l": 50, "r": 10, "b": 40, "t": top},
            "height": 270,
            **layout,
            "xaxis": _AXIS | x_axis,
            "yaxis": _AXIS | layout.get("yaxis", {}),
        },
    }


def _heading(title: str) -> dict[str, Any]:
    text = "<br>".join(map(html.escape, textwrap.wrap(title, 46)))
    return {"text": text, "font": {"size": 13, "color": TEXT}}


def charts(
    name: str, figures: Sequence[Figure], legend: Legend = MappingProxyType({}), *, width: int = 320
) -> str:
    """Return a block of figures as HTML, nothing without figures.

    Figures of `width` pixels or more stand beside each other. `name` tells the block from others of
    the page.
    """
    content = "".join(_chart(figure, legend) for figure in figures)
    block = f'<div class="charts" data-name="{html.escape(name)}" style="--least: {width}px">'
    return f"{block}{content}</div>" if content else ""


def _chart(figure: Figure, legend: Legend) -> str:
    groups = {trace["legendgroup"] for trace in figure["data"] if "legendgroup" in trace}
    names = [
        {"x": [None], "y": [None], "mode": "lines", "name": html.escape(label),
         "legendgroup": label, "line": {"color": color, "width": 3}, "showlegend": True}
        for label, color in legend.items() if label in groups
    ]  # fmt: skip
    place = {"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"}
    if "title" in figure["layout"]:  # the legend stands below it
        place |= {"yref": "paper", "yanchor": "bottom"}
    longest = max(map(len, legend), default=0)
    place |= {"entrywidth": 6 * longest, "font": {"color": TEXT}, "maxheight": 190}
    layout = {**figure["layout"], "showlegend": len(names) > 1, "legend": place}
    arrays: dict[str, int] = {}
    content = _shared({"data": [*figure["data"], *names], "layout": layout}, arrays)
    text = f'{{"arrays":[{",".join(arrays)}],{json.dumps(content)[1:]}'
    for character in "&<>":  # none that could end the script
        text = text.replace(character, f"\\u{ord(character):04x}")
    height = figure["layout"]["height"]
    script = f'<script type="application/json">{text}</script>'
    return f'<div class="chart" style="min-height: {height}px">{script}</div>'


def _shared(value: Any, arrays: dict[str, int]) -> Any:
    """Return JSON with a reference in place of each array; equal ones are stored once."""
    if isinstance(value, Mapping):
        return {key: _shared(x, arrays) for key, x in value.items()}
    if isinstance(value, np.ndarray):
        return {"@": arrays.setdefault(json.dumps(_numbers(value)), len(arrays))}
    return [_shared(x, arrays) for x in value] if isinstance(value, list | tuple) else value


def _numbers(values: np.ndarray) -> list[Any]:
    """Return an array as JSON with six digits; what is not finite is a gap."""
    if values.dtype.kind not in "biuf":
        return values.astype(str).tolist()
    return [
        None
        if not math.isfinite(x)
        else int(x)
        if abs(x) < 1e15 and x == int(x)
        else float(f"{x:.6g}")
        for x in values.astype(float).tolist()
    ]


# --- learning curves ------------------------------------------------------------------------------


def curves(name: str, groups: Groups, panels: Sequence[Panel], *, num_blocks: int = 1) -> str:
    """Draw panels of metrics that were logged, with a curve for each run.

    Groups of several seeds also have their score, with its interval where seeds are enough.
    `num_blocks` share the room that a page has.
    """
    limit = max(1, _CURVES // num_blocks)
    counted = {label: count_seeds(runs)[0] for label, runs in groups.items()}
    members = dict([*counted.items()][:limit])
    colors = dict(zip(members, itertools.cycle(COLORS), strict=False))
    shown = {label: runs[: max(1, limit // len(members))] for label, runs in members.items()}
    num_drawn, num_runs = (sum(map(len, x.values())) for x in (shown, counted))
    size = num_blocks * num_drawn * (sum(len(x.parts) or 1 for x in panels) + len(AXES))
    points = max(30, min(_POINTS, _ALL_POINTS // max(size, 1)))
    texts = {}
    for label, settings in differing_settings(members).items():
        lines = [text[:80] for text in settings_text(settings)]
        texts[label] = "\n".join(lines[:_SETTINGS] + ["..."] * (len(lines) > _SETTINGS))
    traces_by_title: dict[str, list[Trace]] = {}
    for panel in panels:
        traces = traces_by_title.setdefault(panel.title, [])
        for label, color in colors.items():
            for key, part_color in zip(panel.parts, itertools.cycle(COLORS), strict=False):
                part_color = part_color if len(colors) == 1 else color
                text = "\n".join(filter(None, [key.removeprefix(panel.key), texts[label]]))
                group = label, part_color, text, False
                traces += _runs(group, shown[label], Panel(panel.title, key), points)
            if not panel.parts:
                group = label, color, texts[label], len(shown) <= _RAW
                traces += _runs(group, shown[label], panel, points)
                traces += _score(label, color, members[label], panel)
    drawn_panels = {title: traces for title, traces in traces_by_title.items() if traces}
    legend = {label: colors[label] for label in shown} if len(shown) > 1 else {}
    block = charts(name, [_grid(drawn_panels)] if drawn_panels else [], legend, width=600)
    left_out = f"<small>{num_drawn} of {num_runs} runs are shown.</small>"
    return block + (left_out if block and num_drawn < num_runs else "")


def _grid(panels: Mapping[str, Sequence[Trace]]) -> Figure:
    """Return panels beside each other as one figure, with buttons for the x axis and for scales."""
    data, titles, axes = [], [], {}
    numbers = [str(i) if i > 1 else "" for i in range(1, len(panels) + 1)]
    corner = {"x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "align": "left"}
    for number, (title, traces) in zip(numbers, panels.items(), strict=True):
        data += [trace | {"xaxis": f"x{number}", "yaxis": f"y{number}"} for trace in traces]
        place = {"xref": f"x{number} domain", "yref": f"y{number} domain", "showarrow": False}
        titles.append(_heading(title) | corner | place)
        points = [y for trace in traces for _, y in trace["curves"].values()]  # NaN in gaps
        largest = max((np.nanmax(np.abs(y), initial=0.0) for y in points), default=0.0)
        axes[f"yaxis{number}"] = _AXIS | ({"exponentformat": "e"} if largest < 1e-3 else {})
    curves, empty = [trace.pop("curves") for trace in data], (np.zeros(0), np.zeros(0))
    used = [axis for axis in AXES if any(axis in x for x in curves)]
    buttons = []
    for axis in used:
        x, y = zip(*(curve.get(axis, empty) for curve in curves), strict=True)
        names = {f"xaxis{number}.title.text": axis for number in numbers}
        buttons.append({"label": axis, "method": "update", "args": [{"x": x, "y": y}, names]})
    for trace, x, y in zip(data, *buttons[0]["args"][0].values(), strict=True):
        trace |= {"x": x, "y": y}
    x_axis = _AXIS | {"showgrid": False, "title": {"text": used[0], "standoff": 4}}
    axes |= {f"xaxis{number}": x_axis for number in numbers}
    scales = [
        {"label": f"log {letter}", "method": "relayout",
         "args": [{f"{letter}axis{number}.type": "log" for number in numbers}],
         "args2": [{f"{letter}axis{number}.type": "linear" for number in numbers}]}
        for letter in "xy"
    ]  # fmt: skip
    menu = {
        "type": "buttons",
        "direction": "right",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 34},
        "showactive": False,
        "bgcolor": "--fill",
        "bordercolor": "--line",
    }
    menus = [
        menu | {"buttons": buttons, "x": 0, "xanchor": "left"},
        menu | {"buttons": scales, "x": 1, "xanchor": "right"},
    ]
    layout = {
        "grid": {"columns": len(panels), "rows": 1, "pattern": "independent", "xgap": 0.15},
        "annotations": titles,
        "updatemenus": menus,
        "height": 250,
        "margin": {"l": 50, "r": 10, "b": 40, "t": 90},
    }
    return {"data": data, "layout": {**_LAYOUT, **axes, **layout}}


def differing_settings(groups: Groups) -> Settings:
    """Return by label the settings in which groups differ, with their values as text."""
    tables = {label: members[0].configuration for label, members in groups.items()}
    keys = dict.fromkeys(key for values in tables.values() for key in values)
    differing = [key for key in keys if len({values.get(key) for values in tables.values()}) > 1]
    return {
        label: {key: values.get(key, "-") for key in differing} for label, values in tables.items()
    }


def settings_text(settings: Mapping[str, str], digits: int = 0) -> list[str]:
    """Return names, without their parts, and values; `digits` round long fractions."""

    def rounded(value: str) -> str:
        with contextlib.suppress(ValueError):
            if digits and len(value) > 8 and isinstance(number := json.loads(value), float):
                return f"{number:.{digits}g}"
        return value

    return [f"{key.rpartition('.')[2]} {rounded(value)}" for key, value in settings.items()]


def _runs(
    group: tuple[str, str, str, bool], runs: Sequence[RunRecords], panel: Panel, points: int
) -> Iterator[Trace]:
    """Yield the traces of a group's runs: curves, thin where there are several, and dots.

    The group has a label, a color, a text about its settings, and says if raw values are shown.
    """
    label, color, text, has_raw = group

    def drawn(run: RunRecords, curves_by_axis: Mapping[str, Curve], **style: Any) -> Trace:
        description = "\n".join(filter(None, dict.fromkeys([run.name, run.label, text])))
        return trace([], [], label, text=description, curves=curves_by_axis, **style)

    is_alone = len(runs) == 1
    width, opacity = (1.8, 1.0) if is_alone else (0.8, 0.5)
    line, thin = {"color": color, "width": width}, {"color": color, "width": 0.8}
    for run in runs:
        curve = _curves_of(run, panel.key, points, panel.unit)
        if not curve:
            continue
        is_dot = all(len(x) == 1 for x, _ in curve.values())
        style = {"mode": "markers", "marker": {"color": color}} if is_dot else {}
        if is_alone and has_raw:
            yield drawn(run, curve, line=thin, opacity=0.3, hoverinfo="skip", **style)
        smooth = {axis: (x, running_mean(y)) for axis, (x, y) in curve.items()}
        yield drawn(run, smooth, line=line, opacity=opacity, **style)
    for run in runs if panel.points else ():
        if dots := _curves_of(run, panel.points, points):
            mode = "markers" if is_alone else "lines+markers"
            marker = {"size": 6, "color": color, "line": {"width": 0.8, "color": "--page"}}
            line = {"color": color, "width": 0.6, "dash": "dot"}
            yield drawn(run, dots, mode=mode, line=line, marker=marker)


def _curves_of(run: RunRecords, key: str, points: int, unit: float = 1.0) -> dict[str, Curve]:
    """Return curves of few points by axis, each the mean of as many records up to its position."""
    curves = {}
    for axis in AXES:
        x, y = run.series(key, axis)
        if count := len(x):
            begins = np.arange(0, count, -(-count // points))
            counts = np.diff(np.append(begins, count))
            curves[axis] = x[begins + counts - 1], np.add.reduceat(y / unit, begins) / counts
    return curves


def _score(label: str, color: str, members: Sequence[RunRecords], panel: Panel) -> Iterator[Trace]:
    """Yield the score over seeds, dashed where a run has ended: its last value counts on.

    A learner that met a fault has no part in it.
    """
    parts: dict[str, dict[str, Curve]] = {"low": {}, "high": {}, "score": {}, "ended": {}}
    for axis in AXES if len(members) > 1 else ():
        series = [run.series(panel.key, axis) for run in members if not run.has_diverged]
        smoothed = [(x, running_mean(y / panel.unit)) for x, y in series if len(x)]
        start = max((x[0] for x, _ in smoothed), default=0.0)
        end = max((x[-1] for x, _ in smoothed), default=0.0)
        if len(smoothed) < 2 or end <= start:
            continue
        grid = np.linspace(start, end, _GRID)
        values = np.stack([np.interp(grid, x, y) for x, y in smoothed])
        score, all_run = score_of_seeds(values), grid <= min(x[-1] for x, _ in smoothed)
        parts["score"][axis] = grid[all_run], score[all_run]
        parts["ended"][axis] = grid[~all_run], score[~all_run]
        has_interval = len(smoothed) >= ENOUGH and are_independent(members)
        if has_interval and (axis != "seconds" or panel.points):  # intervals take long
            low, high = bootstrap_interval(values)
            parts["low"][axis], parts["high"][axis] = (grid, low), (grid, high)
    bound = {"line": {"width": 0}, "hoverinfo": "skip"}
    for part, style in (
        ("low", bound),
        ("high", {**bound, "fill": "tonexty", "fillcolor": f"{color}38"}),
        ("score", {"line": {"color": color, "width": 2.4}}),
        ("ended", {"line": {"color": color, "width": 2.4, "dash": "dash"}}),
    ):
        if any(len(x) for x, _ in parts[part].values()):
            yield trace([], [], label, text=label, name=part, curves=parts[part], **style)


# --- other figures --------------------------------------------------------------------------------


def joined(lines: Iterable[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return lines, each of some points, as one trace's x and y with a gap between each two."""
    points = [point for line in lines for point in (*line, (math.nan, math.nan))]
    x, y = np.array(points, float).reshape(-1, 2).T
    return x, y


def scale_of(hyperparameter: Iterable[float]) -> dict[str, str]:
    """Return the axis of a hyperparameter's values: logarithmic if possible, with ticks as 1e-4."""
    finite = [value for value in hyperparameter if math.isfinite(value)]
    return {"type": "log" if finite and min(finite) > 0 else "linear", "exponentformat": "e"}
