"""The page of all figures: one self-contained HTML file, and the same as Markdown."""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.reproduce.figure import Axes, Curve, Figure, Outcome, Record, verdict
from podracer.reports.charts import COLORS, charts, trace
from podracer.reports.charts import figure as drawn_figure
from podracer.reports.page import page
from podracer.scores.format import clock

_MAX_POINTS = 8  # of a curve in a table
_MAX_MARKERS = 12  # longer curves are lines

INTRODUCTION = (
    "This page has each figure of the papers with our measurements. Published numbers state how "
    "they were read, ours state the machine and the commit. A laptop can show the shape of a rate "
    "but not the rate. A modeled point is computed from measured ones and marked."
)

_STYLE = """
.figure { margin-top: 3.2rem; border-top: 1px solid var(--line); padding-top: 1.2rem }
.figure h2 { margin: 0 0 .2rem; font-size: 1.25rem } .figure p { margin: .5rem 0 }
.badge { border: 1px solid currentColor; border-radius: 1em; padding: .05em .7em;
  font-size: .8rem; white-space: nowrap }
.good { color: #2ca58d } .part { color: #d4a72c } .bad { color: #e15759 }
.none { color: var(--soft) }
.overview td { padding: .3rem .8rem .3rem 0 } .overview a { color: inherit }
details { margin: .6rem 0 } summary { cursor: pointer; color: var(--soft) }
code { font: .8rem ui-monospace, Menlo, monospace } li p { margin: 0 }
@media (max-width: 700px) { body { margin-top: 1.5rem; padding: 0 1rem }
  .overview td:nth-child(2) { display: none } }
"""

_CLASSES = {
    Outcome.REPRODUCED: "good",
    Outcome.SHAPE: "part",
    Outcome.NOT_REPRODUCED: "bad",
    Outcome.NOT_POSSIBLE: "none",
    Outcome.NOT_RUN: "none",
}


def html_page(figures: Sequence[Figure], records: Sequence[Record]) -> str:
    """Return the HTML page."""
    rows = "".join(_overview_row(figure, records) for figure in figures)
    body = [
        f"<style>{_STYLE}</style>",
        f"<p>{html.escape(INTRODUCTION)}</p><p>{html.escape(counts(figures, records))}</p>",
        f'<div class="wide"><table class="overview">{rows}</table></div>',
        *(_section(figure, records) for figure in figures),
    ]
    return page("Published figures, reproduced or not", body)


def counts(figures: Sequence[Figure], records: Sequence[Record]) -> str:
    """Return how many figures have each outcome."""
    found = Counter(verdict(figure, records).outcome for figure in figures)
    parts = [f"{found[outcome]} {outcome.value}" for outcome in Outcome if found[outcome]]
    return f"{len(figures)} figures: {', '.join(parts)}."


def _badge(outcome: Outcome) -> str:
    return f'<span class="badge {_CLASSES[outcome]}">{outcome.value}</span>'


def _overview_row(figure: Figure, records: Sequence[Record]) -> str:
    title, paper = html.escape(figure.title), html.escape(figure.paper.name)
    badge = _badge(verdict(figure, records).outcome)
    return f'<tr><td><a href="#{figure.name}">{title}</a></td><td>{paper}</td><td>{badge}</td></tr>'


def _section(figure: Figure, records: Sequence[Record]) -> str:
    ours, judged = figure.our_curves(records), verdict(figure, records)
    lists = "".join(f"<li>{html.escape(text)}</li>" for text in figure.deviations)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in point_rows([*figure.published, *ours])
    )
    parts = [
        f"<h2>{html.escape(figure.title)}</h2><small>{html.escape(source(figure))}</small>",
        f"<p>{html.escape(figure.claim)}</p>",
        f"<p>{_badge(judged.outcome)} {_code(judged.reason)}</p>",
        *_charts(figure, ours),
        "" if figure.published else "<p><small>No number published or read.</small></p>",
        f"<p>{_code(figure.run)}</p>" if figure.run else "",
        f"<ul>{lists}</ul>" if lists else "",
        f'<details><summary>Points</summary><div class="wide"><table>{rows}</table></div></details>'
        if rows
        else "",
        _runs(figure, records),
    ]
    return f'<section class="figure" id="{figure.name}">{"".join(parts)}</section>'


def _code(text: str) -> str:
    """Return a text as HTML, with text in backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _charts(figure: Figure, ours: Sequence[Curve]) -> list[str]:
    """Return one chart, or two where ours does not share the published axes."""
    if figure.our_axes is None:
        return [_chart(figure.name, [*figure.published, *ours], figure.axes, figure.title)]
    own = _chart(f"{figure.name} ours", ours, figure.our_axes, f"{figure.title}, ours")
    return [_chart(figure.name, figure.published, figure.axes, figure.title), own]


def _chart(name: str, curves: Sequence[Curve], axes: Axes, title: str) -> str:
    """Return curves as a chart: published ones gray and dotted, modeled ones dashed."""
    colors = itertools.cycle(COLORS)
    color_of = {
        x.name: "#8a919a" if x.kind == "published" else next(colors)
        for x in {curve.name: curve for curve in curves if curve.points}.values()
    }
    dashes = {"published": "dot", "measured": "solid", "modeled": "dash"}
    traces = []
    for curve in (curve for curve in curves if curve.points):
        color, style = color_of[curve.name], {"dash": dashes[curve.kind]}
        about = [curve.name, *([str(curve.reading)] if curve.reading else [])]
        symbol = "circle" if curve.kind == "measured" else "circle-open"
        has_markers = len(curve.points) <= _MAX_MARKERS
        x, y = np.array(curve.points, float).T
        traces.append(
            trace(
                x,
                y,
                curve.name,
                name=curve.kind,
                text="\n".join(about),
                mode="lines+markers" if has_markers else "lines",
                line={"color": color, "width": 0.8 if curve.faint else 2, **style},
                marker={"symbol": symbol, "size": 7, "color": color},
                opacity=0.6 if curve.faint else 1,
            )
        )
    if not traces:
        return ""
    x_axis = {"type": "log" if axes.log_x else "linear"}
    y_axis = {"type": "log" if axes.log_y else "linear", "title": {"text": html.escape(axes.y)}}
    figure = drawn_figure(title, traces, axes.x, xaxis=x_axis, yaxis=y_axis, height=320)
    return charts(name, [figure], color_of, width=520)


def _runs(figure: Figure, records: Sequence[Record]) -> str:
    own = [record for record in records if record.figure == figure.name]
    if not own:
        return ""
    items = []
    for record in own:
        commands = record.context.get("commands") or ()
        code = "".join(f"<br><code>{html.escape(command)}</code>" for command in commands)
        items.append(f"<li>{html.escape(f'{record.case}: {origin(record)}')}{code}</li>")
    return f"<details><summary>Measurements</summary><ul>{''.join(items)}</ul></details>"


def source(figure: Figure) -> str:
    """Return paper, place and page of a figure."""
    page = f"page {figure.page}" if figure.page else ""
    return ", ".join(filter(None, (figure.paper.reference, figure.place, page)))


def point_rows(curves: Iterable[Curve]) -> list[list[str]]:
    """Return a row for each name of a curve: the name, the points, how they were read."""
    named: dict[str, list[Curve]] = {}
    for curve in curves:
        if curve.points:
            named.setdefault(curve.name, []).append(curve)
    return [[name, _points(group), group[0].reading or ""] for name, group in named.items()]


def _points(group: Sequence[Curve]) -> str:
    if len(group) > 1:
        ends = [curve.points[-1][1] for curve in group]
        return f"{len(group)} curves that end between {tick(min(ends))} and {tick(max(ends))}"
    shown = [f"{tick(x)}: {tick(y)}" for x, y in group[0].points]
    if len(shown) > _MAX_POINTS:
        shown = [f"{len(shown)} points from {shown[0]} to {shown[-1]}"]
    return "; ".join(shown)


def origin(record: Record) -> str:
    """Return where a record comes from: machine, commit, time, and what makes it doubtful."""
    about = record.context
    commit = str(about.get("commit") or "no commit").removesuffix("-dirty")[:9]
    parts = [about.get("machine", "unknown machine"), f"commit {commit}"]
    cores = about.get("cores")
    parts += [f"{cores} of its cores"] if cores else []
    parts += [f"JAX {about['jax']}"] if "jax" in about else []
    parts += [f"took {clock(about['seconds'])}"] if "seconds" in about else []
    parts += [about["note"]] if "note" in about else []
    parts += [f"others used {about['busy']:.0%} of the machine"] if record.is_busy else []
    parts += [record.error] if record.error else []
    return ", ".join(parts)


def markdown_page(figures: Sequence[Figure], records: Sequence[Record]) -> str:
    """Return the page as Markdown, without charts."""
    head = [
        "# Published figures, reproduced or not",
        "",
        INTRODUCTION,
        "",
        counts(figures, records),
        "",
        "`python -m benchmarks.reproduce` measures them and draws each published curve under ours.",
        "`python -m benchmarks.reproduce --page` writes this page from what has been measured.",
        "",
        "| figure | paper | verdict |",
        "|---|---|---|",
    ]
    for figure in figures:
        link = f"[{figure.title}](#{_anchor(figure.title)})"
        outcome = verdict(figure, records).outcome.value
        head.append(f"| {link} | {figure.paper.name} | {outcome} |")
    parts = ["\n".join(head), *(_markdown(figure, records) for figure in figures)]
    return "\n\n".join(parts) + "\n"


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in "-_ ")
    return kept.replace(" ", "-")


def _markdown(figure: Figure, records: Sequence[Record]) -> str:
    judged = verdict(figure, records)
    lines = [
        f"## {figure.title}",
        "",
        f"{source(figure)}. `{figure.name}`",
        "",
        figure.claim,
        "",
        f"**{judged.outcome.value.capitalize()}.** {judged.reason}",
    ]
    if not figure.published:
        lines += ["", "No number published or read."]
    if figure.run:
        lines += ["", figure.run]
    if figure.deviations:
        lines += ["", *(f"- {text}" for text in figure.deviations)]
    ours = figure.our_curves(records)
    if figure.our_axes is None:
        lines += _table([*figure.published, *ours], figure.axes)
    else:
        lines += [*_table(figure.published, figure.axes), *_table(ours, figure.our_axes)]
    origins: dict[str, list[str]] = {}
    for record in records:
        if record.figure == figure.name:
            origins.setdefault(origin(record), []).append(record.case)
    if origins:
        lines += ["", *(f"- {', '.join(cases)}: {text}" for text, cases in origins.items())]
    return "\n".join(lines)


def _table(curves: Sequence[Curve], axes: Axes) -> list[str]:
    rows = [f"| {' | '.join(row)} |" for row in point_rows(curves)]
    return ["", f"| points | {axes.x}: {axes.y} | read |", "|---|---|---|", *rows] if rows else []


def tick(value: float) -> str:
    """Format a number for an axis or a table: 0.62, 1,900, 12.5k, 4.41M, 2.6e+11."""
    size = abs(value)
    if size >= 1e12:
        return f"{value:.3g}"
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            unit = 1e3 if letter == "k" else unit
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
