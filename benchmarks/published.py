"""Published learning curves of other projects, from the CSV files in `references/`.

Each becomes rows as in `suite.jsonl`, cut at the frames of a cell that names it.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import Cell
from records import Row

LIBRARY = "published"
AT = "@"  # parts the name of a published agent from that of the cell it stands beside
SOURCE = Path(__file__).parent / "references" / "simbav2.csv"


@functools.cache
def curves(path: Path = SOURCE) -> dict[tuple[str, str], dict[int, list[float]]]:
    """Return the scores of all seeds after numbers of frames, for each task and agent."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            scores = [float(score) for score in row["scores"].split()]
            found.setdefault((row["task"], row["agent"]), {})[int(row["frames"])] = scores
    return found


def names(cell: Cell) -> list[str]:
    """Return the names of the published contenders that are shown beside a cell."""
    return [f"{cell.task}/{LIBRARY}/{agent}{AT}{cell.agent}" for agent in cell.published]


def groups(all_cells: Sequence[Cell], measured: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the rows of published contenders beside the cells that were measured.

    A contender without a score within 3 % of the cell's frames is left out.
    """
    found: dict[str, list[Row]] = {}
    for cell in (cell for cell in all_cells if cell.name in measured):
        frames = measured[cell.name][0]["frames"]
        for name, agent in zip(names(cell), cell.published, strict=True):
            points = curves().get((cell.task, agent), {})
            points = {n: scores for n, scores in points.items() if n <= 1.03 * frames}
            if points and max(points) >= 0.97 * frames:
                found[name] = [
                    {
                        "library": LIBRARY,
                        "seed": seed,
                        "frames": max(points),
                        "score": points[max(points)][seed],
                        "curve": [[n, scores[seed]] for n, scores in points.items()],
                    }
                    for seed in range(min(map(len, points.values())))
                ]
    return found
