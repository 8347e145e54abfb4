"""Kinds of worlds in which update rules are learned, and families of them; see `envs/worlds.py`.

Tabular grids and chains of Oh et al. 2020 (arXiv 2007.08794, appendix); parameters, and kinds drawn
at random, of GROOVE (Jackson et al. 2023, arXiv 2310.02782).
"""

from __future__ import annotations

from typing import NamedTuple

FOREVER = 2**30  # steps, the limit of chains, whose episodes end earlier

Interval = float | tuple[float, float]  # a number, or the bounds to draw one between, inclusive
# Reward, probability of a terminal when collected, probability to come back at each step.
ObjectKind = tuple[Interval, Interval, Interval]


class Kind(NamedTuple):
    """Parameters of the worlds of one name: a grid has objects and a limit, a chain a length."""

    size: Interval = 1
    limit: Interval = FOREVER  # drawn log-uniformly
    objects: tuple[ObjectKind, ...] = ()
    num_objects: Interval | None = None  # only the first ones; None for all
    walls: Interval = 0  # number of cells, drawn for each world
    blocked: tuple[tuple[int, int], ...] = ()  # walls of every world, (row, column)
    roams: bool = False  # objects and start move at random; observed as a picture
    length: Interval = 0
    noisy: bool = False


def _random_objects(number: int) -> tuple[ObjectKind, ...]:
    """Return objects with random parameters, of which the first has a positive reward."""
    probabilities: tuple[Interval, Interval] = ((0.01, 1), (0.001, 0.1))
    return (((0, 1), *probabilities), *(number - 1) * [((-1, 1), *probabilities)])


_DENSE: tuple[ObjectKind, ...] = ((1, 0, 0.05), (1, 0, 0.05), (-1, 0.5, 0.1), (-1, 0, 0.5))
_LONG: tuple[ObjectKind, ...] = (*2 * [(1, 0, 0.01)], *2 * [(-1, 0.5, 1)])
_COLUMN_4 = tuple((row, 4) for row in range(9) if row not in (1, 7))
_COLUMN_5 = tuple((row, 5) for row in range(11) if row not in (0, 7))
_ROW_4 = tuple((4, column) for column in range(11) if column not in (2, 8))

KINDS = {
    "dense": Kind(11, 500, _DENSE),
    "sparse": Kind(13, 50, ((1, 1, 0), (-1, 1, 0))),
    "long": Kind(11, 1000, _LONG),
    "longer": Kind(9, 2000, (*2 * [(1, 0.1, 0.01)], *5 * [(-1, 0.8, 1)]), blocked=_COLUMN_4),
    "long_dense": Kind(11, 2000, tuple(4 * [(1, 0, 0.005)]), blocked=_COLUMN_5 + _ROW_4),
    "small": Kind((4, 6), (20, 100), _random_objects(3), (1, 3), walls=(0, 7)),
    "medium": Kind((6, 8), (100, 250), _random_objects(4), (2, 4), walls=10),
    "large": Kind((8, 10), (250, 750), _random_objects(5), (2, 5), walls=15),
    "rand_dense": Kind(11, 500, _DENSE, roams=True),
    "rand_long": Kind(11, 1000, _LONG, roams=True),
    "rand_small": Kind(7, 500, (*2 * [(1, 0, 0.05)], *2 * [(-1, 0.5, 0.1)]), walls=2, roams=True),
    "rand_sparse": Kind(7, 50, ((1, 1, 1), (-1, 1, 1), (-1, 1, 1)), roams=True),
    "rand_very_dense": Kind(11, 2000, ((1, 0, 1),), roams=True),
    "chain": Kind(length=(5, 30)),
    "chain_short": Kind(length=5),
    "chain_long": Kind(length=30),
    "chain_noisy": Kind(length=(5, 30), noisy=True),
}
_TABULAR = ("dense", "sparse", "long", "longer", "long_dense")
_CHAINS = tuple(name for name in KINDS if name.startswith("chain"))
FAMILIES = {
    "tabular": _TABULAR,
    "random": tuple(name for name in KINDS if name.startswith("rand_")),
    "chains": _CHAINS,
    "all": (*_TABULAR, "small", "medium", "large", *_CHAINS),
}
