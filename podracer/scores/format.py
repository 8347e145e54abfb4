"""Numbers and durations as people read them."""

from __future__ import annotations

import math


def compact(value: float | None) -> str:
    """Format a count or a rate in at most five characters: 950, 1.23k, 45.6M, 7.00B.

    What is too large for that is in scientific notation.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 999.5:
        return str(value) if isinstance(value, int) else f"{value:.3g}"
    power = int(math.log10(abs(value) / 0.9995)) // 3
    if power > 4:
        return f"{value:.2e}"
    return f"{value / 1000**power:#.3g}".rstrip(".") + " kMBT"[power]


def number(value: float | None) -> str:
    """Format a measurement with three significant digits: 0.930, 21.0, 4,210, 1.50e-05."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return compact(value)
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def percent(share: float | None) -> str:
    """Format a fraction as a percentage: 0 %, 58 %."""
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def clock(seconds: float | None) -> str:
    """Format a duration in seconds: 0:42, 12:03, 3:04:05, 2d 03:04."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
