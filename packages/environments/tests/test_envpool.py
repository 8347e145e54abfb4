"""EnvPool's rows against pools of one row each, and against dynamics and algebra of our own."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
import pytest

from podracer.envs.host.atari import row_seeds
from podracer.types import ArraySpec, Continuous, Discrete
from podracer_environments.envpool import EnvPool, envpool

library = pytest.importorskip("envpool")

# gymnasium says so of the bounds that EnvPool gives for CartPole.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
INDICES = np.array([6, 2, 0])


def actions(setting: EnvPool, steps: int, indices: Any = INDICES) -> np.ndarray:
    """`[steps, B]` or `[steps, B, size]`: each row's depend on its index alone."""
    kind, columns = setting.spec.action, []
    for index in indices:
        rng = np.random.default_rng(index)
        if isinstance(kind, Discrete):
            columns.append(rng.integers(0, kind.num_actions, steps))
        else:
            columns.append(rng.uniform(kind.low, kind.high, (steps, kind.size)))
    return np.stack(columns, axis=1)


def play(setting: EnvPool, steps: int, indices: Any = INDICES, start: int = 0) -> Any:
    """Timesteps `[steps + 1, B, ...]`."""
    batch = setting.make(len(indices), 2)
    shown = [batch.reset(5, np.array(indices), start)]
    shown += [batch.step(action) for action in actions(setting, steps, indices)]
    batch.close()
    batch.close()
    return jax.tree.map(lambda *leaves: np.stack(leaves), *shown)


def slow(setting: EnvPool, steps: int, index: int, start: int = 0) -> Any:
    """One row, in a pool of its own: (observation, reward, discount, first, last)."""
    seed = int(row_seeds(5, np.array([index]), start)[0])
    pool = library.make_gymnasium(
        setting.task, num_envs=1, num_threads=1, seed=seed, **dict(setting.options)
    )
    observation, info = pool.reset()
    lives, ended = info.get("lives", [0])[0], False
    rows = [(observation[0], 0.0, 1.0, True, False)]
    for action in actions(setting, steps, [index]):
        observation, reward, terminated, truncated, info = pool.step(action)
        began, now = ended, info.get("lives", [0])[0]
        lost = setting.life_loss_ends_episode and not began and 0 < now < lives
        over = bool(info["terminated"][0]) if "terminated" in info else bool(terminated[0])
        lives, ended = now, bool(terminated[0] or truncated[0])
        shown = np.clip(reward[0], -1, 1) if setting.clip_rewards else reward[0]
        discount = float(not (over or lost))
        rows.append((observation[0], shown, discount, began or (lost and not ended), ended))
    return [np.stack(leaves) for leaves in zip(*rows, strict=True)]


SETTINGS = {  # the options, the steps, and the ends that must be among them
    "CartPole-v1": ({"max_episode_steps": 20}, 120, {"over", "time"}),
    "HalfCheetah-v4": ({"max_episode_steps": 25}, 80, {"time"}),
    "Hopper-v4": ({}, 80, {"over"}),
    "Breakout-v5": ({}, 250, {"life", "over"}),
    "Qbert-v5": ({"max_episode_steps": 90}, 200, {"life", "time"}),
}


@pytest.mark.parametrize("task", SETTINGS)
def test_rows_equal_pools_of_one(task: str) -> None:
    options, steps, expected = SETTINGS[task]
    setting = envpool(task, **options)
    shown = compared(setting, steps)
    assert {end for end, count in ends(shown).items() if count} == expected


def test_evaluation_shows_whole_games_and_their_rewards() -> None:
    training = envpool("Qbert-v5", max_episode_steps=90)
    clipped = compared(training, 200)
    shown = compared(training.for_evaluation(), 200)
    assert {end for end, count in ends(shown).items() if count} == {"time"}
    assert shown.reward.max() > 1
    jax.tree.map(np.testing.assert_array_equal, shown.observation, clipped.observation)
    np.testing.assert_array_equal(shown.reward.clip(-1, 1), clipped.reward)


def test_a_game_that_is_over_at_its_limit_is_over() -> None:
    shown = play(envpool("Breakout-v5"), 250, [2])
    at = int(np.flatnonzero(shown.last)[0])
    limited = play(envpool("Breakout-v5", max_episode_steps=at), at, [2])
    np.testing.assert_array_equal(limited.reward, shown.reward[: at + 1])
    assert np.flatnonzero(limited.last).tolist() == [at]
    assert (limited.last[at], limited.discount[at]) == (True, 0)
    cut = play(envpool("Breakout-v5", max_episode_steps=at - 1), at, [2])
    assert (cut.last[at - 1], cut.discount[at - 1]) == (True, 1)


def compared(setting: EnvPool, steps: int) -> Any:
    """Timesteps of a batch, after an exact comparison of each row with a pool of its own."""
    shown = play(setting, steps)
    spec = setting.spec.observation
    assert shown.observation.dtype == spec.dtype
    ours = [shown.reward, shown.discount, shown.first, shown.last]
    assert [leaf.dtype for leaf in ours] == [np.float32, np.float32, bool, bool]
    for row, index in enumerate(INDICES):
        observation, *leaves = slow(setting, steps, index)
        if observation.dtype == np.uint8:
            observation = np.moveaxis(observation, 1, -1)
        assert shown.observation.shape[2:] == spec.shape == observation.shape[1:]
        np.testing.assert_array_equal(shown.observation[:, row], observation.astype(spec.dtype))
        for got, want in zip(ours, leaves, strict=True):
            np.testing.assert_array_equal(got[:, row], want.astype(got.dtype))
    return shown


def ends(shown: Any) -> collections.Counter[str]:
    return collections.Counter(
        life=int(((shown.discount == 0) & shown.first & ~shown.last).sum()),
        over=int(((shown.discount == 0) & shown.last).sum()),
        time=int(((shown.discount == 1) & shown.last).sum()),
    )


@pytest.mark.parametrize("task", ["CartPole-v1", "SpaceInvaders-v5"])
def test_rows_depend_on_seed_index_and_start(task: str) -> None:
    one, same, later = (play(envpool(task), 12, [4], start) for start in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert (one.observation != later.observation).any()


def test_observations_may_be_dictionaries() -> None:
    setting = envpool("CheetahRun-v1")
    assert setting.spec.action == Continuous((-1.0,) * 6, (1.0,) * 6)
    wanted = {"position": ArraySpec((8,), np.float32), "velocity": ArraySpec((9,), np.float32)}
    assert setting.spec.observation == wanted
    shown = play(setting, 3)
    for name, array in wanted.items():
        assert shown.observation[name].shape == (4, 3, *array.shape)
        assert shown.observation[name].dtype == array.dtype
