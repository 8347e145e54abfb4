"""The worlds in which update rules are discovered: tabular and random grid worlds, delayed chains.

Oh et al. 2020, "Discovering Reinforcement Learning Algorithms" (arXiv 2007.08794, appendix), with
parameters, and kinds drawn at random, of GROOVE (Jackson et al. 2023, arXiv 2310.02782).
A world is a tuple of arrays of the same shapes, whatever its kind, so one program holds many.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import restart
from podracer.envs.common import check_known
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.ops.random import random_words, unit
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, PyTree, TimeStep

ACTIONS = 5  # up, down, left, right, stay
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
    "maze": Kind(9, 50, ((1, 1, 0),), walls=(0, 30)),
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


@struct
class World:
    """One world among C cells, of the largest grid that its program has, with K objects at most.

    Cells are numbered along the rows of that largest grid; -1 is nowhere.
    """

    kind: jax.Array  # i32, which of `Worlds.kinds`
    size: jax.Array  # i32, of the grid's side
    limit: jax.Array  # i32, steps after which an episode is cut
    start: jax.Array  # i32, a cell
    cells: jax.Array  # i32 [K], where objects are
    rewards: jax.Array  # f32 [K]
    ends: jax.Array  # f32 [K], P(terminal when collected)
    returns: jax.Array  # f32 [K], P(reappears, at each step)
    roams: jax.Array  # bool, start and objects are redrawn in each episode
    walls: jax.Array  # u32 [C / 32], a bit for each cell: states are copied at every step
    length: jax.Array  # i32, of the chain; 0 for a grid
    good: jax.Array  # i32, the branch of the chain that ends well, 0 or 1
    noisy: jax.Array  # bool


@struct
class WorldState:
    """State of an episode in its world."""

    world: World
    time: jax.Array  # i32, steps since the episode began; the limit where it has been cut
    cell: jax.Array  # i32, the agent's; in a chain the index of the state
    objects: jax.Array  # i32 [K], their cells, -1 for absent ones


@dataclasses.dataclass(frozen=True)
class Worlds:
    """Worlds of these kinds, any of `KINDS` and `FAMILIES`.

    Grids. Actions: up, down, left, right, stay; walls stop a move. An object is collected where the
    agent is after its move: it gives its reward, perhaps a terminal, and disappears; it may
    reappear after a later step. Observation: the index of the state, cell + size^2 * (bits of
    objects).

    Chains. The first action, 1 or another, takes one of two branches, whose rewards at the end are
    1 and -1. Observation: the index of the state, of time and branch. Rewards before the end are 0,
    in noisy chains 1 or -1 by chance.

    Where some kinds are random grids (`rand_...`) observations are dictionaries: `index`, 0 in
    random grids, and `picture`, f32 `[M, M, types + 1]`, the agent and the objects of each type,
    blank in the others.

    As an environment all copies are one world, drawn with the seed `layout`; `draw` and `enter`
    give others.
    """

    names: tuple[str, ...]
    layout: int = 0

    def __post_init__(self) -> None:
        valid = [*KINDS, *FAMILIES]
        for name in self.names:
            check_known(name, valid, "There is no world")
        if not self.names:
            raise ConfigError("Worlds needs the name of one kind at least.")
        if not isinstance(self.layout, int) or not 0 <= self.layout < 2**32:
            raise ConfigError(f"layout must be a whole number from 0 on, not {self.layout!r}.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that worlds are drawn from, equally likely; families as their members."""
        members = (FAMILIES.get(name, (name,)) for name in self.names)
        return tuple(dict.fromkeys(kind for family in members for kind in family))

    @property
    def spec(self) -> EnvironmentSpec:
        table = _table(self.kinds)
        observation: PyTree = ArraySpec((), np.int32, num_values=table.states)
        if table.types:
            picture = ArraySpec((table.side, table.side, table.types + 1))
            observation = {"index": observation, "picture": picture}
        return EnvironmentSpec(f"worlds:{'+'.join(self.names)}", observation, Discrete(ACTIONS))

    def draw(self, key: jax.Array) -> World:
        """Return a random world: its kind, its parameters, and its layout."""
        table = _table(self.kinds)
        words = random_words(key, table.side**2 + 7 + 3 * table.objects)
        u = unit(words[table.side**2 :])
        kind = (u[0] * len(self.kinds)).astype(jnp.int32)
        parameters = (jnp.asarray(x)[kind] for x in table.parameters)
        bounds, limit, objects, blocked, roams, noisy = parameters
        low, high = bounds.T
        # The product can round up to the number after the highest.
        samples = jnp.minimum(low + u[2:7] * (high - low + 1), high)
        size, count, walls, length, good = samples.astype(jnp.int32)
        low, high = objects[..., 0], objects[..., 1]
        u_objects = u[7:].reshape(low.shape)
        probabilities = _log_uniform(u_objects[:, 1:], low[:, 1:], high[:, 1:])

        row, column = jnp.divmod(jnp.arange(table.side**2), table.side)
        blocked = blocked | (row >= size) | (column >= size)
        # The start comes first, then the objects, then the walls.
        index = jnp.arange(table.drawn_cells)
        order = _free_cells(words[: table.side**2], ~blocked, len(index))
        blocked = blocked.at[order].max((index > count) & (index <= count + walls))
        return World(
            kind=kind,
            size=size,
            limit=jnp.round(_log_uniform(u[1], *limit)).astype(jnp.int32),
            start=order[0],
            cells=jnp.where(jnp.arange(table.objects) < count, order[1 : table.objects + 1], -1),
            rewards=(low + u_objects * (high - low))[:, 0],
            ends=probabilities[:, 0],
            returns=probabilities[:, 1],
            roams=roams,
            walls=_packed(blocked),
            length=length,
            good=good,
            noisy=noisy,
        )

    def enter(self, key: jax.Array, world: World) -> tuple[WorldState, TimeStep]:
        """Return the state and the first timestep of an episode in a world."""
        words = random_words(key, _table(self.kinds).side ** 2)
        start, cells = self._places(words, world, jnp.full(1, -1))
        state = WorldState(world, jnp.int32(0), start, cells)
        return state, restart(self._observe(state))

    def reset(self, key: jax.Array) -> tuple[WorldState, TimeStep]:
        return self.enter(key, self.draw(jax.random.key(self.layout)))

    def step(
        self, key: jax.Array, state: WorldState, action: jax.Array
    ) -> tuple[WorldState, TimeStep]:
        world, number = state.world, len(state.objects)
        words = random_words(key, number + 2 + _table(self.kinds).side ** 2)
        chance = unit(words[: number + 2])
        cut = state.time >= world.limit
        time = state.time + 1

        # A grid has the length 0, which the time never is, and a chain has no objects.
        branch = jnp.where(state.time == 0, action == 1, (state.cell + 1) & 1)
        cell = jnp.where(world.length > 0, 2 * time - 1 + branch, self._moved(state, action))
        is_collected = state.objects == cell
        reward = jnp.sum(jnp.where(is_collected, world.rewards, 0.0))
        reward += jnp.where(world.noisy, jnp.where(chance[-1] < 0.5, 1.0, -1.0), 0.0)
        is_chain_end = time == world.length
        reward = jnp.where(is_chain_end, jnp.where(branch == world.good, 1.0, -1.0), reward)
        end_chance = jnp.sum(jnp.where(is_collected, world.ends, 0.0))
        terminal = ~cut & (is_chain_end | (chance[-2] < end_chance))

        begins = terminal | cut
        occupied = jnp.append(state.objects, cell)
        start, homes = self._places(words[number + 2 :], world, jnp.where(begins, -1, occupied))
        reappears = (state.objects < 0) & (chance[:number] < world.returns)
        objects = jnp.where(is_collected, -1, jnp.where(reappears, homes, state.objects))
        state = WorldState(
            world,
            time=jnp.where(begins, 0, time),
            cell=jnp.where(begins, start, cell),
            objects=jnp.where(begins, homes, objects),
        )
        return state, TimeStep(
            observation=self._observe(state),
            reward=jnp.where(cut, 0.0, reward),
            discount=1.0 - terminal.astype(jnp.float32),
            first=begins,
            last=state.time >= world.limit,
        )

    def render(self, state: WorldState, scale: int = 16) -> np.ndarray:
        """Return an image, uint8 `[H, W, 3]`, of one size for all worlds; a chain is a row."""
        table, world = _table(self.kinds), jax.tree.map(np.asarray, state.world)
        longest = max(int(np.max(KINDS[kind].length)) for kind in self.kinds)
        image = np.full((table.side, max(table.side, longest + 1), 3), 40, np.uint8)
        if world.length:
            image[0, : world.length + 1] = 230
            image[0, state.time] = (90, 160, 250)
        else:
            cells = image[:, : table.side].reshape(-1, 3)
            cells[~np.asarray(_unpacked(world.walls, len(cells)))] = 230
            is_present = np.asarray(state.objects) >= 0
            good = world.rewards[is_present, None] > 0
            cells[state.objects[is_present]] = np.where(good, (80, 180, 90), (220, 90, 80))
            cells[state.cell] = (90, 160, 250)
            image[:, : table.side] = cells.reshape(table.side, table.side, 3)
        return image.repeat(scale, axis=0).repeat(scale, axis=1)

    def _moved(self, state: WorldState, action: jax.Array) -> jax.Array:
        """Return the cell after a move; everything outside of a grid is wall."""
        side = _table(self.kinds).side
        row, column = state.cell // side, state.cell % side
        row = jnp.clip(row + (action == 1) - (action == 0), 0, side - 1)
        column = jnp.clip(column + (action == 3) - (action == 2), 0, side - 1)
        cell = row * side + column
        wall = state.world.walls[cell // 32] >> (cell % 32).astype(jnp.uint32) & 1
        return jnp.where(wall == 1, state.cell, cell)

    def _places(
        self, words: jax.Array, world: World, occupied: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the start, i32, and the cells of objects that appear now, i32 `[K]`.

        In worlds that roam, random words `[C]` choose them outside of `occupied`, cells or -1.
        """
        table = _table(self.kinds)
        if not table.types:
            return world.start, world.cells
        cells = jnp.arange(len(words))
        is_empty = jnp.all(cells[:, None] != occupied[None], axis=1)
        free = ~_unpacked(world.walls, len(cells)) & is_empty
        random_cells = _free_cells(words, free, table.objects + 1)
        start = jnp.where(world.roams, random_cells[0], world.start)
        return start, jnp.where(world.roams & (world.cells >= 0), random_cells[1:], world.cells)

    def _observe(self, state: WorldState) -> PyTree:
        table, world = _table(self.kinds), state.world
        size, present = world.size, state.objects >= 0
        bits = jnp.sum(present << np.arange(table.objects), dtype=jnp.int32)
        cell = state.cell // table.side * size + state.cell % table.side
        index = jnp.where(world.length > 0, state.cell, cell + size * size * bits)
        if not table.types:
            return index
        cells = jnp.arange(table.side**2)[:, None]
        kinds = jnp.asarray(table.channels)[world.kind][:, None] == jnp.arange(table.types)[None]
        has_object = jnp.any((cells == state.objects[None])[..., None] & kinds[None], axis=1)
        picture = jnp.concatenate([cells == state.cell, has_object], axis=1) & world.roams
        return {
            "index": jnp.where(world.roams, 0, index),
            "picture": picture.reshape(table.side, table.side, -1).astype(jnp.float32),
        }


class _Table(NamedTuple):
    """Sizes that suffice for all kinds of a program, and the bounds of their parameters."""

    side: int
    objects: int
    drawn_cells: int  # start, objects and walls
    states: int  # indices
    types: int  # kinds of objects in random grids, the channels of their pictures; 0 without any
    channels: np.ndarray  # i32 [kinds, K], the type of each object
    parameters: tuple[np.ndarray, ...]  # [kinds, ...], see `Worlds.draw`


@functools.cache
def _table(names: tuple[str, ...]) -> _Table:
    kinds = [KINDS[name] for name in names]
    side = max(int(_pair(kind.size)[1]) for kind in kinds)
    objects = max(len(kind.objects) for kind in kinds)
    numbers, limits = np.zeros((len(kinds), 5, 2)), np.zeros((len(kinds), 2))
    object_bounds = np.zeros((len(kinds), objects, 3, 2))
    blocked = np.zeros((len(kinds), side, side))
    channels = np.full((len(kinds), objects), -1)
    for i, kind in enumerate(kinds):
        count = len(kind.objects) if kind.num_objects is None else kind.num_objects
        intervals = (kind.size, count, kind.walls, kind.length, (0, 1))
        numbers[i], limits[i] = [_pair(x) for x in intervals], _pair(kind.limit)
        types = list(dict.fromkeys(kind.objects))
        for j, object_kind in enumerate(kind.objects):
            object_bounds[i, j] = [_pair(interval) for interval in object_kind]
            channels[i, j] = types.index(object_kind)
        for cell in kind.blocked:
            blocked[i][cell] = 1
    roams, noisy = np.array([(kind.roams, kind.noisy) for kind in kinds]).T
    bounds = (x.astype(np.float32) for x in (numbers, limits, object_bounds))
    return _Table(
        side=side,
        objects=objects,
        drawn_cells=1 + objects + int(numbers[:, 2].max()),
        states=max(map(_states, kinds)),
        types=1 + int(channels[roams].max()) if roams.any() else 0,
        channels=channels.astype(np.int32),
        parameters=(*bounds, blocked.reshape(len(kinds), -1) > 0, roams, noisy),
    )


def _pair(interval: Interval) -> tuple[float, float]:
    return interval if isinstance(interval, tuple) else (interval, interval)


def _states(kind: Kind) -> int:
    """Return the number of state indices of the largest world of a kind."""
    if kind.roams:
        return 1
    length, size = int(_pair(kind.length)[1]), int(_pair(kind.size)[1])
    return 1 + 2 * length if length else size**2 * 2 ** len(kind.objects)


def _log_uniform(u: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Return `low (high / low)^u` to 12 bits of u, computed by roots and products.

    Unlike powers, these round equally in programs of any number of rows.
    """
    value, ratio = low, high / jnp.maximum(low, 1e-9)
    for _ in range(12):
        ratio, u = jnp.sqrt(ratio), 2 * u
        value = jnp.where(u >= 1, value * ratio, value)
        u = u % 1
    return value


def _free_cells(words: jax.Array, free: jax.Array, count: int) -> jax.Array:
    """Return distinct random cells, i32 `[count]`, from random words `[C]`; free ones `[C]` first.

    A few minima are faster than sorting.
    """
    cells = jnp.arange(len(words), dtype=jnp.uint32)
    scores = jnp.where(free, words >> 9, 2**23) << 8 | cells

    def next_one(left: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        least = jnp.min(left)
        return jnp.where(left == least, ~jnp.uint32(0), left), least

    _, lowest_scores = jax.lax.scan(next_one, scores, length=count)
    return (lowest_scores & 255).astype(jnp.int32)


def _packed(flags: jax.Array) -> jax.Array:
    """Return flags `[C]` as bits of u32 `[C / 32]`."""
    flags = jnp.pad(flags, (0, -len(flags) % 32)).reshape(-1, 32)
    return jnp.sum(flags.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None], axis=1)


def _unpacked(words: jax.Array, count: int) -> jax.Array:
    """Return the first flags `[count]` of packed bits."""
    flags = words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None] & 1
    return flags.reshape(-1)[:count] == 1
