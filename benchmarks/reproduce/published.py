"""Published papers, figures that cannot be measured here, and curves recovered point by point."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.reproduce.figure import Axes, Curve, Figure, Paper, Points, Reading

_FOLDER = Path(__file__).parent
_DATA = tomllib.loads((_FOLDER / "published.toml").read_text(encoding="utf-8"))

PAPERS = {key: Paper(**entry) for key, entry in _DATA["papers"].items()}
"""Papers by their key in `published.toml`, in the order of the page."""


def published_figures() -> list[Figure]:
    """Return the figures of `published.toml`, each with its reason why it cannot be measured."""
    return [_figure(**entry) for entry in _DATA["figures"]]


def _figure(
    paper: str, axes: dict[str, Any], published: list[dict[str, Any]], **texts: Any
) -> Figure:
    curves = tuple(_curve(**entry) for entry in published)
    return Figure(paper=PAPERS[paper], axes=Axes(**axes), published=curves, **texts)


def _curve(
    label: str,
    reading: str,
    points: list[list[float]] | None = None,
    csv: str = "",
    column: str = "",
    faint: bool = False,
) -> Curve:
    """Return a published curve, whose points stand here or in a column of a CSV file."""
    found = tuple((x, y) for x, y in points) if points else published_columns(csv)[column]
    return Curve(label, found, "published", Reading[reading], faint)


def published_columns(name: str) -> dict[str, Points]:
    """Return the columns of a CSV file by name, each as points over the first column."""
    with (_FOLDER / "published" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return {
        column: tuple((float(row[0]), float(row[i])) for row in rows)
        for i, column in enumerate(head[1:], 1)
    }
