"""Atari of ale-py against a slow game loop of its own, over the bare emulator."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from variants import variants

pytest.importorskip("ale_py.vector_env", exc_type=ImportError)

import ale_py
from ale_py import roms

from podracer import envs
from podracer.environment import HostEnvironments
from podracer.envs.host.atari import Atari, TimestepBuilder, impala, machado, row_seeds, sticky
from podracer.errors import ConfigError, EnvironmentFault

NATIVE = (210, 160)  # the emulator's own screen: nothing is resized
INDICES = np.array([5, 0])


class Slow:
    """One game, frame by frame, as the papers describe it. Without no-ops."""

    def __init__(self, setting: Atari, seed: int) -> None:
        self.setting = setting
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", setting.repeat_action_probability)
        self.ale.setInt("random_seed", seed)
        self.ale.loadROM(str(roms.get_rom_path(setting.game)))
        full = setting.full_action_set
        self.actions = self.ale.getLegalActionSet() if full else self.ale.getMinimalActionSet()
        self.begin()

    def screen(self) -> np.ndarray:
        if self.setting.grayscale:
            return self.ale.getScreenGrayscale()[..., None]
        return self.ale.getScreenRGB()

    def observation(self) -> np.ndarray:
        return np.concatenate(self.seen, axis=-1)

    def begin(self) -> tuple[Any, ...]:
        self.ale.reset_game()
        if self.setting.use_fire_reset and ale_py.Action.FIRE in self.actions:
            self.ale.act(ale_py.Action.FIRE)
        screen = self.screen()
        black = [np.zeros_like(screen)] * (self.setting.stack - 1)
        self.seen = collections.deque([*black, screen], maxlen=self.setting.stack)
        self.frames, self.lives, self.ended, self.fire = 0, self.ale.lives(), False, False
        return self.observation(), 0.0, 1.0, True, False

    def step(self, action: int) -> tuple[Any, ...]:
        if self.ended:
            return self.begin()
        reward, screens, fired = 0, [], self.fire
        pressed = ale_py.Action.FIRE if fired else self.actions[action]
        while len(screens) < self.setting.frame_skip and not self.ended:
            reward += self.ale.act(pressed)
            self.frames += 1
            screens.append(self.screen())
            self.ended = self.ale.game_over() or self.frames >= self.setting.max_frames
        pooled = screens[-2:] if self.setting.max_pool else screens[-1:]
        self.seen.append(functools.reduce(np.maximum, pooled))
        lost = 0 < self.ale.lives() < self.lives
        self.fire = self.setting.use_fire_reset and lost and not self.ended
        lost = lost and self.setting.life_loss_ends_episode
        self.lives = self.ale.lives()
        clipped = min(max(reward, -1), 1) if self.setting.clip_rewards else reward
        discount = 0.0 if self.ale.game_over() or lost else 1.0
        if self.setting.use_fire_reset and self.setting.life_loss_ends_episode:
            return (
                self.observation(),
                0.0 if fired else clipped,
                discount,
                fired,
                lost or self.ended,
            )
        return self.observation(), clipped, discount, lost and not self.ended, self.ended


SETTINGS = {  # the protocol, the steps, and what must at least have happened in them
    "life losses": (Atari("breakout", noop_max=0), 300, {"life": 8, "over": 2}),
    "clipped": (Atari("qbert", noop_max=0), 450, {"life": 3, "over": 1, "reward": 10}),
    "time-outs": (
        Atari("space_invaders", noop_max=0, max_frames=402),
        250,
        {"time": 4, "reward": 2},
    ),
    "fire": (Atari("breakout", noop_max=0, use_fire_reset=True), 180, {"over": 3}),
    "fire in whole games": (
        Atari("breakout", noop_max=0, use_fire_reset=True).for_evaluation(),
        220,
        {"over": 1},
    ),
    "sticky": (sticky("freeway"), 120, {}),
    "machado": (machado("freeway", max_frames=300), 61, {"time": 2}),
    "whole games": (Atari("qbert", noop_max=0).for_evaluation(), 350, {"over": 1, "large": 10}),
    "color": (Atari("ms_pacman", noop_max=0, grayscale=False, stack=2, frame_skip=3), 60, {}),
    "no pool": (Atari("asteroids", noop_max=0, max_pool=False, stack=1), 60, {}),
}


# By default lost lives, the end of a game, time-outs and large rewards, but once each.
LONG = (
    "life losses",
    "time-outs",
    "fire",
    "fire in whole games",
    "sticky",
    "whole games",
    "color",
)


@variants("name", [name for name in SETTINGS if name not in LONG], SETTINGS)
def test_equals_a_slow_game_loop(name: str) -> None:
    setting, steps, expected = SETTINGS[name]
    setting = dataclasses.replace(setting, size=NATIVE)
    batch = setting.make(len(INDICES), 2)
    slow = [Slow(setting, int(seed)) for seed in row_seeds(3, INDICES, 7)]
    shown = batch.reset(3, INDICES, 7)
    wanted = [game.begin() for game in slow]
    rng = np.random.default_rng(0)
    seen = collections.Counter()
    for t in range(steps):
        for row, want in enumerate(wanted):
            observation, *leaves = want
            got = shown.observation[row]
            assert got.shape == setting.spec.observation.shape == observation.shape
            cut = 1 if want[-1] else None  # ale-py leaves the last screen of a game out
            newest = -observation.shape[-1] // setting.stack if cut else None
            np.testing.assert_array_equal(got[..., :newest], observation[..., :newest], str(t))
            now = [shown.reward[row], shown.discount[row], shown.first[row], shown.last[row]]
            assert now == leaves, (t, row)
            seen.update(kind(*leaves))
        actions = rng.integers(0, len(slow[0].actions), len(slow))
        shown = batch.step(actions)
        wanted = [game.step(action) for game, action in zip(slow, actions, strict=True)]
    batch.close()
    assert seen >= collections.Counter(expected)


def kind(reward: float, discount: float, first: bool, last: bool) -> list[str]:
    ends = {(0, True, False): "life", (0, False, True): "over", (1, False, True): "time"}
    end = ends.get((discount, first, last), "none")
    return [end, *(["reward"] * (reward != 0)), *(["large"] * (abs(reward) > 1))]


def test_ends_that_fall_together_are_one() -> None:
    games = TimestepBuilder(4, life_loss_ends_episode=True, clip_rewards=True)
    yes, no = np.ones(4, bool), np.zeros(4, bool)
    shown = games.after_reset((), np.array([3, 3, 3, 1]))
    assert shown.first.all()
    # A lost life, one in the step of a time-out, a game over in it, and a last life not yet over.
    timeout, terminal = np.array([False, True, True, False]), np.array([False, False, True, False])
    shown = games.after_step((), np.full(4, -7), terminal, timeout, np.array([2, 2, 0, 0]))
    assert shown.reward.tolist() == [-1, -1, -1, -1]
    assert shown.discount.tolist() == [0, 0, 0, 1]
    assert shown.first.tolist() == [True, False, False, False]
    assert shown.last.tolist() == [False, True, True, False]
    shown = games.after_step(
        (), np.array([1, 0, 0, 1]), np.array([0, 0, 0, 1], bool), no, np.array([2, 1, 2, 2])
    )
    assert shown.first.tolist() == [False, True, True, False]
    assert shown.discount.tolist() == [1, 1, 1, 0]
    assert games.after_reset((), no + 3).first.all()
    shown = games.after_step((), yes + 1, yes, no, no + 0)
    assert shown.reward.tolist() == [1, 1, 1, 1]
    assert shown.last.all()


def play(setting: Atari, indices: list[int], steps: int, start: int = 0, before: int = 0) -> Any:
    """Timesteps `[steps + 1, B, ...]`, with actions that depend on the index and the step alone;
    `before` that the batch plays for some steps."""
    batch, kinds = setting.make(len(indices), 2), setting.spec.action.num_actions

    def run(steps: int, start: int) -> list[Any]:
        shown = [batch.reset(11, np.array(indices), start)]
        for t in range(steps):
            shown.append(batch.step(np.array([(i + t // 3) % kinds for i in indices])))
        return shown

    run(before, start + 1)
    shown = run(steps, start)
    batch.close()
    return jax.tree.map(lambda *leaves: np.stack(leaves), *shown)


@pytest.mark.parametrize(
    "setting", [impala("space_invaders"), sticky("pong")], ids=["impala", "sticky"]
)
@pytest.mark.slow
def test_a_row_depends_on_its_own_index_alone(setting: Atari) -> None:
    batch = play(setting, [7, 3, 9], 150, before=30)
    alone = play(setting, [3], 150)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, 1], y[:, 0]), batch, alone)
    later = play(setting, [3], 150, start=1)
    assert (alone.observation != later.observation).any()
    spec = setting.spec.observation
    assert batch.observation.shape == (151, 3, *spec.shape)
    assert batch.observation.dtype == spec.dtype == np.uint8
    assert (batch.reward.dtype, batch.discount.dtype) == (np.float32, np.float32)
    assert (batch.first.dtype, batch.last.dtype) == (bool, bool)


def test_seeds_differ_by_seed_index_and_start() -> None:
    runs = [(seed, start) for seed in (0, 1, 2**63) for start in (0, 1, 10**12)]
    seeds = np.stack([row_seeds(seed, np.arange(50), start) for seed, start in runs])
    assert len(np.unique(seeds)) == seeds.size
    assert 0 <= seeds.min() < seeds.max() < 2**31
    assert row_seeds(1, np.array([30]), 10**12) == seeds[runs.index((1, 10**12)), 30]


@pytest.mark.slow
def test_a_game_begins_with_up_to_noop_max_noops() -> None:
    setting = Atari("space_invaders", noop_max=3, size=NATIVE)
    game = Slow(setting, 0)
    openings = [game.screen()[..., 0]]
    for _ in range(4):
        game.ale.act(ale_py.Action.NOOP)
        openings.append(game.screen()[..., 0])
    rows = setting.make(12, 2)
    shown = rows.reset(0, np.arange(12), 0).observation
    rows.close()
    assert not shown[..., :3].any()
    drawn = [[k for k, o in enumerate(openings) if (o == row).all()] for row in shown[..., 3]]
    assert all(k and min(k) <= 3 for k in drawn)
    assert len({tuple(k) for k in drawn}) > 1
    assert any(3 in k for k in drawn)


def areas(size: int, source: int) -> np.ndarray:
    """`[size, source]`: the share of each source pixel in the average over an area."""
    edges = np.linspace(0, source, size + 1)
    left, right = np.arange(source), np.arange(source) + 1
    overlap = np.minimum(edges[1:, None], right) - np.maximum(edges[:-1, None], left)
    return np.maximum(overlap, 0) * size / source


def test_screens_are_averaged_over_areas() -> None:
    setting = Atari("ms_pacman", noop_max=0)
    large, small = (play(dataclasses.replace(setting, size=s), [1], 8) for s in (NATIVE, (84, 84)))
    planes = np.moveaxis(large.observation, -1, 2).astype(np.float64)
    want = np.moveaxis(areas(84, 210) @ planes @ areas(84, 160).T, 2, -1)
    assert np.abs(small.observation - want).max() < 1


def test_the_protocols_state_themselves() -> None:
    preprocessing = {
        "frame_skip": 4,
        "max_pool": True,
        "stack": 4,
        "size": (84, 84),
        "grayscale": True,
    }
    common = preprocessing | {
        "game": "pong",
        "use_fire_reset": False,
        "clip_rewards": True,
        "max_frames": 108_000,
    }
    assert dataclasses.asdict(impala("pong")) == common | {
        "noop_max": 30,
        "repeat_action_probability": 0.0,
        "life_loss_ends_episode": True,
        "full_action_set": False,
    }
    assert dataclasses.asdict(sticky("pong")) == common | {
        "noop_max": 0,
        "repeat_action_probability": 0.25,
        "life_loss_ends_episode": False,
        "full_action_set": True,
    }
    other = {"frame_skip": 5, "max_frames": 18_000}
    assert dataclasses.asdict(machado("pong")) == dataclasses.asdict(sticky("pong")) | other
    assert impala("pong").spec.action.num_actions == 6
    assert sticky("pong").spec.action.num_actions == 18
    dopamine = envs.make("atari-sticky:pong,full_action_set=false")
    assert dopamine == dataclasses.replace(sticky("pong"), full_action_set=False)
    for protocol in (impala("pong"), sticky("pong"), machado("pong")):
        whole = {"life_loss_ends_episode": False, "clip_rewards": False}
        assert protocol.for_evaluation() == dataclasses.replace(protocol, **whole)
        assert isinstance(protocol, HostEnvironments)
        assert protocol == Atari(**dataclasses.asdict(protocol))
    assert hash(impala("pong")) == hash(impala("pong"))


def test_an_action_that_does_not_exist_is_a_fault() -> None:
    batch = impala("pong").make(1, 1)
    batch.reset(0, np.arange(1), 0)
    for action in (-1, 6):
        with pytest.raises(EnvironmentFault, match="0 to 5"):
            batch.step(np.array([action]))
    batch.close()
    batch.close()


def test_several_games_play_in_one_batch() -> None:
    """Each row equals the row of its game alone, whatever the order of the rows is."""
    together = impala("pong+breakout+freeway", noop_max=5)
    assert together == envs.make("atari:pong+breakout+freeway,noop_max=5")
    assert together.spec.action.num_actions == 18
    indices = [4, 0, 3, 2]
    rows = play(together, indices, 20)
    for row, index in list(enumerate(indices))[:2]:
        game = together.games[index % 3]
        alone = play(dataclasses.replace(together, game=game), [index], 20)
        picture = rows.observation["picture"][:, row]
        np.testing.assert_array_equal(picture, alone.observation[:, 0])
        for name in ("reward", "discount", "first", "last"):
            assert (getattr(rows, name)[:, row] == getattr(alone, name)[:, 0]).all()
    assert (rows.observation["task"] == np.array(indices) % 3).all()
    assert len({picture.tobytes() for picture in rows.observation["picture"][-1]}) == 4
    for name, array in together.spec.observation.items():
        assert rows.observation[name].shape == (21, 4, *array.shape)
        assert rows.observation[name].dtype == array.dtype


def test_several_games_share_all_actions() -> None:
    with pytest.raises(ConfigError, match=r"pong\+qbert needs full_action_set=true, as games"):
        impala("pong+qbert", full_action_set=False)
    with pytest.raises(ConfigError, match="no game 'pon': did you mean pong"):
        sticky("qbert+pon")
