"""Charts as inline SVG, in the colors of a light and of a dark page.

Published points are gray and hollow, ours filled, and modeled ones hollow and dashed.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

from benchmarks.reproduce.figure import Axes, Curve
from podracer.reports.curves import COLORS

_WIDTH, _HEIGHT = 360, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 36
_MAX_MARKERS = 12  # longer curves are lines
_GRAYS = (0.4, 0.55, 0.75, 1.0)  # of published curves, the last one the strongest

STYLE = """
.chart { width: 100%; max-width: 34rem; display: block; font: 11px system-ui, sans-serif }
.chart text { fill: var(--soft) } .chart .grid { stroke: var(--line); stroke-width: .7 }
.chart .published { stroke: var(--soft); fill: var(--page); stroke-width: 1.2 }
.chart .measured { stroke-width: 2.2 } .chart .modeled { stroke-width: 1.4; fill: var(--page) }
.chart polyline { fill: none !important; stroke-linejoin: round }
.chart polyline.modeled { stroke-dasharray: 4 3 }
.chart .faint { opacity: .5; stroke-width: .6 } .chart text.label { font-size: 8.5px }
.marks { list-style: none; padding: 0; font-size: .85rem; display: flex; flex-wrap: wrap;
  gap: .2rem 1.2rem; margin: .4rem 0 }
.marks i { display: inline-block; width: .55em; height: .55em; border-radius: 50%;
  border: 2px solid var(--soft); margin-right: .4em }
.marks i.modeled { border-style: dashed }
"""


def chart(curves: Sequence[Curve], axes: Axes, title: str) -> str:
    """Return curves as an SVG with its legend, nothing if none of them has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    x_axis = _Axis([x for c in curves for x, _ in c.points], axes.log_x, _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis([y for c in curves for _, y in c.points], axes.log_y, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(x_axis, y_axis, axes)]
    styles = _styles(curves)
    parts += [_curve(curve, *styles[curve.name], x_axis, y_axis) for curve in curves]
    parts += _labels([curve for curve in curves if curve.kind == "published"], x_axis, y_axis)
    entries = "".join(
        f'<li><i class="{curve.kind}" style="{_mark(curve, *styles[curve.name])}"></i>'
        f"{html.escape(curve.name)}{_reading(curve)}</li>"
        for curve in {curve.name: curve for curve in curves}.values()
    )
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg><ul class="marks">{entries}</ul>'
    )


class _Axis:
    """Positions and ticks of one axis."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        self.log = log and min(values) > 0
        low, high = min(values), max(values)
        if self.log:
            low, high = math.log10(low), math.log10(high)
        elif low > 0 and low < 0.5 * high:
            low = 0.0
        room = 0.06 * (high - low) or (0.5 if self.log else 0.5 * abs(high) or 0.5)
        self.low, self.high = low - (room if low else 0), high + room
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        """Return the position of a value."""
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values, about five."""
        if self.log:
            steps = (1,) if self.high - self.low > 2 else (1, 2, 5)
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [m * 10.0**p for p in powers for m in steps]
            shown = [v for v in values if self.low <= math.log10(v) <= self.high]
            if len(shown) > 1:
                return shown[:: -(-len(shown) // 7)]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        rough = (high - low) / 5
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough)
        first = math.ceil(low / step)
        return [i * step for i in range(first, math.floor(high / step) + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis, axes: Axes) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{tick(value)}')
        parts.append("</text>")
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick(value)}')
        parts.append("</text>")
    x_name, y_name = html.escape(axes.x), html.escape(axes.y)
    parts.append(f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">{x_name}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 3}">{y_name}</text>')
    return "".join(parts)


def _styles(curves: Sequence[Curve]) -> dict[str, tuple[str, float]]:
    """Return color and opacity of each curve's name."""
    styles: dict[str, tuple[str, float]] = {}
    strong = {curve.name for curve in curves if curve.kind == "published" and not curve.faint}
    colors, grays = itertools.cycle(COLORS), itertools.cycle(_GRAYS[-len(strong) :])
    for curve in curves:
        if curve.name in styles:
            continue
        if curve.kind == "published":
            styles[curve.name] = ("var(--soft)", 1.0 if curve.faint else next(grays))
        else:
            styles[curve.name] = (next(colors), 1.0)
    return styles


def _mark(curve: Curve, color: str, opacity: float) -> str:
    filled = f"background:{color};" if curve.kind == "measured" else ""
    return f"{filled}border-color:{color};opacity:{0.35 if curve.faint else opacity}"


def _labels(curves: Sequence[Curve], x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """Return the names of published curves, which share their gray, at the ends of each."""
    named = {curve.label: curve for curve in reversed(curves)}
    if len(named) < 2:
        return []
    labels, taken = [], list[float]()
    for label, curve in named.items():
        x, y = x_axis.at(curve.points[-1][0]), y_axis.at(curve.points[-1][1]) - 6
        if curve.faint or any(abs(y - other) < 9 for other in taken):
            continue  # the legend has it
        taken.append(y)
        anchor = "end" if x > _WIDTH / 2 else "start"
        labels.append(
            f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{html.escape(label)}</text>"
        )
    return labels


def _reading(curve: Curve) -> str:
    return f"<small>: {html.escape(curve.reading)}</small>" if curve.reading else ""


def _curve(curve: Curve, color: str, opacity: float, x_axis: _Axis, y_axis: _Axis) -> str:
    style = f'class="{curve.kind}{" faint" if curve.faint else ""}"'
    paint = f'stroke="{color}" style="opacity:{opacity}"' if not curve.faint else ""
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline {style} {paint} points="{path}"/>'] if len(places) > 1 else []
    if len(places) <= _MAX_MARKERS:
        fill = f'fill="{color}"' if curve.kind == "measured" else ""
        for (x, y), point in zip(places, curve.points, strict=True):
            about = html.escape(f"{curve.name}: {tick(point[0])}, {tick(point[1])}")
            parts.append(
                f'<circle {style} {paint} {fill} cx="{x:.1f}" cy="{y:.1f}" r="3.2">'
                f"<title>{about}</title></circle>"
            )
    return "".join(parts)


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
