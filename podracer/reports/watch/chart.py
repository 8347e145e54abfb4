"""Charts as SVG: for any width, in the colors of the page that they stand in."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from podracer.reports.curves import tick_text

WIDTH, HEIGHT = 440, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 26, 32
_POINTS = 300  # of a line
_LINES = 4000  # of one mark; of more some are left out, evenly


class Chart:
    """Axes, and marks in their coordinates.

    Args:
        title, over: what is drawn, and over what; plain text.
        x, y: range of the axes; one without an extent is widened.
        height: in pixels, for a chart that is `WIDTH` pixels wide.
        names: text for each of these heights in place of the ticks of numbers.
        whole: whether numbers below the chart are whole ones.
    """

    def __init__(
        self,
        title: str,
        over: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        height: float = HEIGHT,
        names: dict[float, str] | None = None,
        whole: bool = False,
    ) -> None:
        self._title, self._height = title, height
        self._x, self._y = _widened(*x), _widened(*y)
        marks = {tick: tick_text(tick, None) for tick in _ticks(*self._y, 5)}
        self._parts = [
            f'<text x="4" y="13" class="title">{html.escape(title)}</text>',
            f'<text x="{WIDTH - _RIGHT}" y="{height - 4}" class="end">{html.escape(over)}</text>',
        ]
        for tick, text in (marks if names is None else names).items():
            (_,), (at,) = self._place([0], [tick])
            line = f'<path class="grid" d="M{_LEFT},{at:.1f}H{WIDTH - _RIGHT}"/>'
            label = f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" class="end">{html.escape(text)}</text>'
            self._parts.append((line if names is None else "") + label)
        for tick in _ticks(*self._x, 5, least=1.0 if whole else 0.0):
            (at,), _ = self._place([tick], [0])
            text = tick_text(tick, None)
            self._parts.append(
                f'<text x="{at:.1f}" y="{height - _BOTTOM + 15}" class="middle">{text}</text>'
            )

    def line(
        self,
        x: Any,
        y: Any,
        color: str,
        *,
        width: float = 1.6,
        opacity: float = 1.0,
        steps: bool = False,
    ) -> None:
        """Draw a line through points `[n]`, or steps from each to the next."""
        if len(x) < 2:
            self.dots(x, y, color)
            return
        some = np.append(np.arange(0, len(x) - 1, max(1, len(x) // _POINTS)), len(x) - 1)
        first, *others = zip(*self._place(np.asarray(x)[some], np.asarray(y)[some]), strict=True)
        between = "H{:.1f}V{:.1f}" if steps else "L{:.1f},{:.1f}"
        path = "M{:.1f},{:.1f}".format(*first) + "".join(between.format(*p) for p in others)
        self._parts.append(
            f'<path class="curve" d="{path}" stroke="{color}" stroke-width="{width}" '
            f'opacity="{opacity}"/>'
        )

    def lines(self, ends: np.ndarray, color: str, width: float, opacity: float = 1.0) -> None:
        """Draw straight lines, given by the x and y of their ends `[n, 2 ends, 2]`, as one mark."""
        if not len(ends):
            return
        some = ends[:: -(-len(ends) // _LINES)]
        places = np.stack(self._place(some[..., 0], some[..., 1]), axis=-1).reshape(-1, 4)
        path = "".join("M{:.1f},{:.1f}L{:.1f},{:.1f}".format(*place) for place in places)
        self._parts.append(
            f'<path class="curve" d="{path}" stroke="{color}" stroke-width="{width}" '
            f'opacity="{opacity}"/>'
        )

    def link(
        self, start: tuple[float, float], end: tuple[float, float], color: str, width: float
    ) -> None:
        """Draw a line that starts and ends horizontally, so that crossings can be followed."""
        (x, x_end), (y, y_end) = self._place(*zip(start, end, strict=True))
        ease = max((x_end - x) / 2, 8.0)
        self._parts.append(
            f'<path class="curve" d="M{x:.1f},{y:.1f}C{x + ease:.1f},{y:.1f} '
            f'{x_end - ease:.1f},{y_end:.1f} {x_end:.1f},{y_end:.1f}" stroke="{color}" '
            f'stroke-width="{width}"/>'
        )

    def dots(
        self,
        x: Any,
        y: Any,
        colors: str | Sequence[str],
        *,
        radius: float = 3.0,
        texts: Sequence[str] | None = None,
    ) -> None:
        """Draw points `[n]` of one color or of one each; `texts` appear under the pointer."""
        for index, (across, down) in enumerate(zip(*self._place(x, y), strict=True)):
            color = colors if isinstance(colors, str) else colors[index]
            text = f"<title>{html.escape(texts[index])}</title>" if texts else ""
            self._parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{radius}" fill="{color}">'
                f"{text}</circle>"
            )

    def bar(
        self, start: float, end: float, low: float, high: float, color: str, text: str = ""
    ) -> None:
        """Fill a rectangle, at least a pixel wide; `text` appears under the pointer."""
        (left, right), (bottom, top) = self._place([start, end], [low, high])
        text = f"<title>{html.escape(text)}</title>" if text else ""
        self._parts.append(
            f'<rect x="{left:.1f}" y="{min(top, bottom):.1f}" width="{max(right - left, 1):.1f}" '
            f'height="{abs(bottom - top):.1f}" fill="{color}">{text}</rect>'
        )

    def shares(self, start: Any, end: Any, parts: Any, colors: Sequence[str]) -> None:
        """Stack the shares of parts `[n, parts]` in intervals `[n]` to the whole."""
        total = parts.sum(axis=1, keepdims=True)
        edges = np.repeat(np.cumsum(parts / np.where(total > 0, total, 1), axis=1), 2, axis=0)
        x = np.stack([start, end], axis=1).ravel()
        lower = np.zeros(len(x))
        for upper, color in zip(edges.T, colors, strict=True):
            there, back = self._place(x, upper), self._place(x[::-1], lower[::-1])
            points = " ".join(
                f"{across:.1f},{down:.1f}"
                for side in (there, back)
                for across, down in zip(*side, strict=True)
            )
            self._parts.append(f'<polygon points="{points}" fill="{color}"/>')
            lower = upper

    def svg(self) -> str:
        """Return the chart as a part of a page."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._height:g}" role="img" '
            f'aria-label="{html.escape(self._title)}">{"".join(self._parts)}</svg>'
        )

    def _place(self, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        (left, right), (low, high) = self._x, self._y
        across = (np.asarray(x, float) - left) / (right - left)
        up = (np.asarray(y, float) - low) / (high - low)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            self._height - _BOTTOM - up * (self._height - _TOP - _BOTTOM),
        )


def extent(arrays: Iterable[np.ndarray], margin: float = 0.0) -> tuple[float, float]:
    """Return the range of the values of arrays that may be empty, wider by a share of it."""
    filled = [array for array in arrays if len(array)]
    if not filled:
        return 0.0, 1.0
    low, high = float(min(map(np.min, filled))), float(max(map(np.max, filled)))
    return low - margin * (high - low), high + margin * (high - low)


def _widened(low: float, high: float) -> tuple[float, float]:
    if abs(high - low) > 1e-9 * max(abs(low), abs(high), 1e-30):
        return low, high
    margin = 0.1 * abs(low) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return at most about this many round numbers within two, `least` or more apart."""
    exact = max(abs(high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(power * x for x in (1, 2, 2.5, 5, 10) if power * x >= exact * (1 - 1e-9))
    first, last = math.ceil(min(low, high) / step), math.floor(max(low, high) / step)
    return [step * index for index in range(first, last + 1)]
