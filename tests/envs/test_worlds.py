"""Worlds against slow references in plain Python; lifetimes: who shares what, and when it ends."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants

from podracer.checks import check_environment
from podracer.devices.mesh import SHARDED, make_mesh
from podracer.envs import make
from podracer.envs.lifetimes import shared_by_group, where_any
from podracer.envs.worlds import FAMILIES, KINDS, World
from podracer.ops.random import random_words, unit
from podracer.rollout import environment_keys
from podracer.types import ArraySpec

GRIDS = tuple(name for name in FAMILIES["all"] if not name.startswith("chain"))
SIDE = 13  # of the largest grid: cells are numbered along its rows
MOVES = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1), 4: (0, 0)}


def run(env: Any, keys: jax.Array, steps: int, world: World | None = None, seed: int = 0) -> Any:
    """States and timesteps `[steps + 1, B]` and actions `[steps, B]` at random, in numpy."""

    def body(carry: Any, inputs: Any) -> Any:
        state, _ = carry
        carry = jax.vmap(env.step)(inputs[0], state, inputs[1])
        return carry, carry

    @jax.jit
    def play(keys: jax.Array, actions: jax.Array, world: World | None) -> Any:
        opening = jax.vmap(env.reset)(keys) if world is None else jax.vmap(env.enter)(keys, world)
        _, rest = jax.lax.scan(body, opening, (step_keys(keys, steps), actions))
        return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), opening, rest)

    shape = steps, len(keys)
    actions = jax.random.randint(jax.random.key(seed), shape, 0, env.spec.action.num_actions)
    states, shown = jax.device_get(play(keys, actions, world))
    return states, shown, np.asarray(actions)


def step_keys(keys: jax.Array, steps: int) -> jax.Array:
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return jax.vmap(fold, (None, 0))(keys, jnp.arange(steps))


def batch(number: int, seed: int = 0) -> jax.Array:
    return environment_keys(
        jax.random.key(seed), jnp.arange(number, dtype=jnp.uint32), jnp.zeros(1, jnp.uint32)
    )[0]


@functools.cache
def drawn(name: str) -> World:
    """Worlds of an environment, `[4096]`, enough to have hundreds of each kind."""
    return jax.device_get(jax.jit(jax.vmap(make(name).draw))(batch(4096, 7)))


def of_kind(name: str, kind: str, number: int) -> World:
    """The first of them of this kind, `[number]`."""
    which = np.flatnonzero(drawn(name).kind == make(name).kinds.index(kind))
    return lane(drawn(name), which[:number])


def together(*worlds: World) -> World:
    return jax.tree.map(lambda *x: np.concatenate(x), *worlds)


def lane(tree: Any, *where: Any) -> Any:
    return jax.tree.map(lambda x: x[where], tree)


def grid(world: World) -> np.ndarray:
    """Which cells of one world are walls, bool `[size, size]`."""
    bits = world.walls[:, None] >> np.arange(32, dtype=np.uint32) & 1
    walls = bits.ravel()[: SIDE * SIDE].reshape(SIDE, SIDE) == 1
    size = int(world.size)
    assert walls[size:].all()
    assert walls[:, size:].all()
    return walls[:size, :size]


def check_episodes(shown: Any) -> None:
    """What holds where lives end, too: only there a timestep is `last` and something else."""
    terminal = shown.discount == 0
    assert np.isin(shown.discount, (0, 1)).all()
    assert shown.first[0].all()
    assert (shown.first[1:] == (terminal[1:] | shown.last[:-1])).all()
    after = shown.last[:-1]
    assert not shown.reward[1:][after].any()
    assert not terminal[1:][after].any()


@functools.cache
def tabular_run() -> Any:
    """Two worlds of each kind of grid and twenty of each chain, side by side in one program."""
    name = "worlds:all"
    grids = [of_kind(name, kind, 2) for kind in GRIDS]
    worlds = together(*grids, *(of_kind(name, kind, 20) for kind in FAMILIES["chains"]))
    keys = batch(len(worlds.kind))
    states, shown, actions = run(make(name), keys, 550, worlds)
    words = random_words(step_keys(keys, 550).reshape(-1), worlds.cells.shape[1] + 2)
    return worlds, states, shown, actions, np.asarray(unit(words)).reshape(550, len(keys), -1)


# --- grids ---------------------------------------------------------------------------------------


class Grid:
    """The rules of a tabular grid world, one step at a time."""

    def __init__(self, world: World):
        self.world, self.walls, self.size = world, grid(world), int(world.size)
        self.homes = [divmod(int(c), SIDE) if c >= 0 else None for c in world.cells]
        self.start = divmod(int(world.start), SIDE)
        self.begin()

    def begin(self) -> None:
        self.at, self.time, self.cut = self.start, 0, False
        self.there = [home is not None for home in self.homes]

    def index(self) -> int:
        bits = sum(2**i for i, there in enumerate(self.there) if there)
        return self.at[0] * self.size + self.at[1] + self.size**2 * bits

    def step(self, action: int, chance: np.ndarray) -> tuple[float, float, bool, bool]:
        if self.cut:
            self.begin()
            return 0.0, 1.0, True, False
        row, column = self.at[0] + MOVES[action][0], self.at[1] + MOVES[action][1]
        if 0 <= row < self.size and 0 <= column < self.size and not self.walls[row, column]:
            self.at = (row, column)
        reward, terminal = 0.0, False
        for i, home in enumerate(self.homes):
            if self.there[i] and home == self.at:
                self.there[i] = False
                reward += float(self.world.rewards[i])
                terminal |= bool(chance[-2] < self.world.ends[i])
            elif home is not None and chance[i] < self.world.returns[i]:
                self.there[i] = True
        self.time += 1
        if terminal:
            self.begin()
            return reward, 0.0, True, False
        self.cut = self.time == self.world.limit
        return reward, 1.0, False, self.cut


def test_grids_against_a_python_loop() -> None:
    worlds, _, shown, actions, chance = tabular_run()
    check_episodes(shown)
    said = shown.reward, shown.discount, shown.first, shown.last, shown.observation
    for b in range(2 * len(GRIDS)):
        reference = Grid(lane(worlds, b))
        got = list(zip(*(x[:, b].tolist() for x in said), strict=True))
        assert got[0] == (0.0, 1.0, True, False, reference.index())
        for t, action in enumerate(actions[:, b].tolist()):
            expected = reference.step(action, chance[t, b])
            assert got[t + 1] == (*expected, reference.index()), (b, t)
        assert b % 2 or (shown.reward[:, b : b + 2] != 0).any(), worlds.kind[b]
    grids = slice(None), slice(2 * len(GRIDS))
    assert shown.last[grids].any(axis=0).sum() > 4
    assert (shown.discount[grids] == 0).any(axis=0).sum() > 4


@pytest.mark.parametrize("name", [*GRIDS, *FAMILIES["random"]])
def test_what_grids_are_drawn_from(name: str) -> None:
    """Numbers within their bounds; start and objects on cells of their own, outside of walls."""
    kind, worlds = KINDS[name], of_kind("worlds:sparse+all+random", name, 200)
    assert len(worlds.kind) > 150

    def within(values: Any, span: Any) -> bool:
        """Inside, and some in the last quarters."""
        low, high = np.broadcast_to(np.float32(span), 2)
        near = (high - low) / 4 + np.abs(high) * np.float32(1e-6)
        ends = low - 1e-6 <= values.min() <= low + near, high - near <= values.max() <= high + near
        return all(ends)

    assert within(worlds.size, kind.size)
    assert within(worlds.limit, kind.limit)
    assert not worlds.length.any()
    assert within((worlds.cells >= 0).sum(1), kind.num_objects or len(kind.objects))
    for i, (reward, ends, returns) in enumerate(kind.objects):
        assert within(worlds.rewards[:, i], reward)
        assert within(worlds.ends[:, i], ends)
        assert within(worlds.returns[:, i], returns)
    each = [lane(worlds, b) for b in range(50)]
    layouts = [[int(c) for c in (world.start, *world.cells) if c >= 0] for world in each]
    assert len(set(map(tuple, layouts))) > 45
    assert all(len(set(layout)) == len(layout) for layout in layouts)
    walls = [grid(world) for world in each]
    for walled, layout in zip(walls, layouts, strict=True):
        assert not any(walled[divmod(cell, SIDE)] for cell in layout)
    if kind.blocked:
        assert np.argwhere(walls[0]).tolist() == sorted(map(list, set(kind.blocked)))
    else:
        assert within(np.array([walled.sum() for walled in walls]), kind.walls)


def test_walls_of_the_papers_grids() -> None:
    def picture(name: str) -> list[str]:
        walls = grid(lane(of_kind("worlds:all", name, 1), 0))
        return ["".join(".#"[wall] for wall in row) for row in walls.astype(int)]

    gap, wall = ".........", "....#...."
    assert picture("longer") == [wall, gap, *5 * [wall], gap, wall]
    column, across, gap = ".....#.....", "##.#####.##", "..........."
    assert picture("long_dense") == [
        *(gap, column, column, column, across, column, column),
        *(gap, column, column, column),
    ]


@functools.cache
def random_run() -> Any:
    """Twelve worlds of each kind of random grid and some others, side by side in one program."""
    name, kinds = "worlds:sparse+all+random", (*FAMILIES["random"], "sparse", "chain_short")
    worlds = together(*(of_kind(name, kind, 12) for kind in kinds))
    return worlds, *run(make(name), batch(12 * len(kinds)), 200, worlds)


def test_random_grids_move_their_objects_and_show_a_picture() -> None:
    env = make("worlds:sparse+all+random")
    assert env.spec.observation["picture"] == ArraySpec((SIDE, SIDE, 4))
    worlds, states, shown, _ = random_run()
    check_episodes(shown)
    roams = np.array([KINDS[env.kinds[kind]].roams for kind in worlds.kind])
    picture, index = shown.observation["picture"], shown.observation["index"]
    assert not picture[:, ~roams].any()
    assert not index[:, roams].any()
    assert (index[:, ~roams] > 0).any()

    for b in np.flatnonzero(roams):
        things = KINDS[env.kinds[worlds.kind[b]]].objects
        types, walls = list(dict.fromkeys(things)), grid(lane(worlds, b))
        for t in range(0, 201, 20):
            expected = np.zeros((SIDE, SIDE, 4), np.float32)
            expected[divmod(int(states.cell[t, b]), SIDE)][0] = 1
            for i, cell in enumerate(states.objects[t, b]):
                if cell >= 0:
                    assert not walls[divmod(int(cell), SIDE)]
                    expected[divmod(int(cell), SIDE)][1 + types.index(things[i])] = 1
            assert (picture[t, b] == expected).all()

    agent, places, first = states.cell[:, roams], states.objects[:, roams], shown.first[:, roams]
    absent = -1 - np.arange(places.shape[-1])
    apart = np.where(places < 0, absent, places)
    apart = np.sort(np.concatenate([apart, agent[..., None]], axis=-1), axis=-1)
    assert (np.diff(apart, axis=-1) > 0).all()  # agent and objects on cells of their own
    going = ~first[1:, :, None]
    before, after = places[:-1], places[1:]
    assert (before == after)[(before >= 0) & (after >= 0) & going].all()
    back = (before < 0) & (after >= 0) & going
    assert back.sum() > 50
    assert len(np.unique(after[back])) > 30
    assert len(np.unique(agent[first])) > 30


# --- chains --------------------------------------------------------------------------------------


def test_chains() -> None:
    worlds, _, shown, actions, _ = tabular_run()
    kinds = make("worlds:all").kinds
    assert not shown.last[:, 2 * len(GRIDS) :].any()
    noise: dict[str, list[float]] = {name: [] for name in FAMILIES["chains"]}
    for b in range(2 * len(GRIDS), len(worlds.kind)):
        name, length, good = kinds[worlds.kind[b]], worlds.length[b], worlds.good[b]
        time, branch = 0, 0
        for t, action in enumerate(actions[:200, b]):
            assert shown.observation[t, b] == (0 if time == 0 else 2 * time - 1 + branch)
            branch = int(action == 1) if time == 0 else branch
            time += 1
            reward, over = shown.reward[t + 1, b], time == length
            assert (shown.discount[t + 1, b] == 0) == shown.first[t + 1, b] == over
            if over:
                assert reward == (1 if branch == good else -1)
                time = 0
            else:
                noise[name].append(reward)
    assert set(noise["chain_noisy"]) == {-1, 1}
    assert abs(np.mean(noise["chain_noisy"])) < 5 / np.sqrt(len(noise["chain_noisy"]))
    assert not any(noise["chain"] + noise["chain_short"] + noise["chain_long"])


# --- worlds as environments ----------------------------------------------------------------------


@variants("name", ["dense", "tabular", "sparse+chain_short+rand_small"], [*KINDS, *FAMILIES])
def test_every_kind_is_an_environment(name: str) -> None:
    env = make(f"worlds:{name}")
    spec = check_environment(env)
    assert spec.name == f"worlds:{name}"
    assert hash(env) == hash(make(f"worlds:{name}"))
    check_environment(make(f"lifetimes:worlds:{name}"))


@pytest.mark.parametrize(
    ("name", "states"),
    [("dense", 1936), ("longer", 81 * 128), ("large", 3200), ("all", 81 * 128), ("rand_dense", 1)],
)
def test_as_many_states_as_the_largest_world_has(name: str, states: int) -> None:
    observation = make(f"worlds:{name}").spec.observation
    leaf = observation["index"] if name.startswith("rand") else observation
    assert leaf == ArraySpec((), np.int32, num_values=states)


def test_one_layout_for_all_copies() -> None:
    def world(layout: int) -> World:
        env = make(f"worlds:dense+small,layout={layout}")
        return jax.device_get(jax.jit(jax.vmap(env.reset))(batch(3)))[0].world

    one, other = world(3), world(4)
    assert all((x == x[:1]).all() for x in jax.tree.leaves(one))
    assert (one.cells != other.cells).any()


@pytest.mark.slow
def test_lives_end_and_begin_in_new_worlds() -> None:
    env, number, steps = make("lifetimes:worlds:all,envs=4,steps=60"), 90, 200
    states, shown, _ = run(env, batch(number), steps)
    check_episodes(shown)
    life, limit = shown.observation["task_count"], states.inner.world
    world = shown.observation["task"]
    ended = states.age == 60
    assert shown.last[ended].all()
    cut = states.inner.time >= states.inner.world.limit
    assert (shown.last == (ended | cut)).all()
    assert (cut & ~ended).any()

    first = 4 * (np.arange(number) // 4)  # the last group has two
    for x in (life, states.age, *jax.tree.leaves(states.inner.world)):
        assert (x == x[:, first]).all()
    assert (world == limit.kind).all()
    assert len(np.unique(world[0])) > 5
    ages = states.age[0, ::4]
    assert 0 <= ages.min() < 20 < 40 < ages.max() < 60
    assert len(np.unique(ages)) > 12

    assert not life[0].any()
    assert (life[-1] >= 3).all()
    over = ended[:-1]
    assert (life[1:] - life[:-1] == over).all()
    assert (states.age[1:] == np.where(over, 0, states.age[:-1] + 1)).all()
    changed = (limit.start[1:] != limit.start[:-1]) | (world[1:] != world[:-1])
    assert not changed[~over].any()
    assert changed[over].mean() > 0.8
    fresh = lane(states.inner, 1 + np.argwhere(over)[:, 0], np.argwhere(over)[:, 1])
    assert not fresh.time.any()
    assert (fresh.cell == fresh.world.start).all()
    assert (fresh.objects == fresh.world.cells).all()


def test_a_life_may_end_with_a_terminal() -> None:
    """Nine steps an episode, so that every ninth life's end is one; Catch has one world."""
    _, shown, _ = run(make("lifetimes:catch,envs=2,steps=9"), batch(16), 40)
    check_episodes(shown)
    both = shown.last & (shown.discount == 0)
    assert both.any()
    assert shown.first[both].all()
    assert (shown.reward[both] != 0).all()
    assert not shown.observation["task"].any()
    balls = shown.observation["observation"][0, :, 0].argmax(-1)
    assert len(np.unique(balls)) > 2
    assert (balls[::2] != balls[1::2]).any()  # a group shares no start


# --- lifetimes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_lives_in_any_kind_of_batch() -> None:
    """Over two shards, and as one of two populations."""
    env, steps = make("lifetimes:worlds:small,envs=4,steps=9"), 30
    keys = jnp.stack([batch(16, 0), batch(16, 1)])
    actions = jax.random.randint(jax.random.key(3), (2, steps, 16), 0, 5)

    def play(env: Any, keys: jax.Array, step_keys: jax.Array, actions: jax.Array) -> Any:
        state, opening = env.reset(keys)
        rest = jax.lax.scan(lambda s, x: env.step(x[0], s, x[1]), state, (step_keys, actions))
        return opening, rest

    class Batch:
        reset, step = jax.vmap(env.reset), jax.vmap(env.step)

    def same(left: Any, right: Any) -> None:
        wanted = jax.tree_util.tree_leaves_with_path(right)
        for got, (path, want) in zip(jax.tree.leaves(left), wanted, strict=True):
            np.testing.assert_array_equal(got, want, jax.tree_util.keystr(path))

    inputs = keys, jax.jit(jax.vmap(lambda k: step_keys(k, steps)))(keys), actions
    pods = jax.jit(jax.vmap(partial(play, Batch)))(*inputs)
    expected = lane(pods, 0)
    assert (
        pods[1][1].observation["observation"][0] != pods[1][1].observation["observation"][1]
    ).any()

    along = jax.sharding.PartitionSpec(None, "data")
    sharded = jax.shard_map(
        partial(play, Batch),
        mesh=make_mesh(jax.devices()[:2]),
        in_specs=(SHARDED, along, along),
        out_specs=(SHARDED, (SHARDED, along)),
        check_vma=False,
    )
    same(jax.jit(sharded)(*lane(inputs, 0)), expected)


def test_a_group_shares_one_result() -> None:
    keys = batch(10)
    made = jax.jit(
        jax.vmap(lambda key: shared_by_group(partial(jax.random.bits, shape=(2,)), key, 4))
    )(keys)
    expected = np.stack([jax.random.bits(keys[i // 4 * 4], (2,)) for i in range(10)])
    np.testing.assert_array_equal(made, expected)
    assert shared_by_group(jax.random.bits, keys[1], 4) == jax.random.bits(
        keys[1]
    )  # without a batch


def test_where_any() -> None:
    """As `where`, but a batch may compute nothing."""
    calls = []

    def count(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    choose = jax.jit(jax.vmap(lambda c, x: where_any(c, count, (x,), 10 * x), (0, None)))
    for condition in ([False, False], [False, True]):
        got = choose(jnp.array(condition), jnp.int32(3))
        np.testing.assert_array_equal(got, np.where(condition, 4, 30))
        jax.effects_barrier()
        assert bool(calls) == any(condition)
    assert where_any(jnp.bool_(True), count, (jnp.int32(3),), jnp.int32(30)) == 4
    assert where_any(jnp.bool_(False), count, (jnp.int32(3),), jnp.int32(30)) == 30
