"""Published curves that were recovered point by point, in CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

_FOLDER = Path(__file__).parent / "published"
Points = tuple[tuple[float, float], ...]


def published_columns(name: str) -> dict[str, Points]:
    """Return the columns of a file by name, each as points over the first column."""
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return {
        column: tuple((float(row[0]), float(row[i])) for row in rows)
        for i, column in enumerate(head[1:], 1)
    }
