"""The adapter of JAXtari: sprites, the contract, frames, sticky actions and ends. Needs jaxtari.

Its sprites are plain rectangles of our own, which JAXtari takes in place of those that it has its
user download.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from episodes import play

from podracer.checks import check_environment
from podracer.envs import make

jaxtari = pytest.importorskip("jaxtari")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of jaxtari, when a game is made
    pytest.mark.usefixtures("lenient_ranks"),
]

BALL_X, PLAYER_Y = 16, 1  # among the numbers of Pong: eight of each object


@pytest.fixture(scope="module", autouse=True)
def sprites(tmp_path_factory):
    """Rectangles for Pong, where JAXtari looks for sprites."""
    home = tmp_path_factory.mktemp("data")
    folder = home / "jaxtari" / "sprites" / "pong"
    folder.mkdir(parents=True)
    (home / "jaxtari" / ".alternative_sprites_installed").touch()
    (home / "jaxtari" / "sprites" / ".version").write_text("1")
    sizes = {"background": (210, 160), "player": (16, 4), "enemy": (16, 4), "ball": (4, 2)}
    sizes |= {f"{who}_score_{i}": (20, 2 + i) for who in ("player", "enemy") for i in range(10)}
    for number, (name, size) in enumerate(sizes.items()):
        np.save(folder / name, np.full((*size, 4), (40 * number % 256, 90, 20, 255), np.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home))
        yield home


@pytest.mark.parametrize("name", ["jaxtari:pong", "jaxtari:pong,objects=true"])
def test_keeps_the_contract(name):
    env = make(name)
    assert check_environment(env).name == "jaxtari:pong"
    assert env == make(name)
    assert hash(env) == hash(make(name))


def test_games_and_time_outs_end_episodes():
    timesteps, _ = play(make("jaxtari:pong,objects=true"), 2500, 4)
    ends = timesteps.discount == 0
    assert ends.any(axis=0).all()
    assert (timesteps.first[1:] == ends[1:]).all()
    assert not timesteps.last.any()
    for row, end in enumerate(np.argmax(ends, axis=0)):  # random play loses 21 points to few
        assert -21 <= timesteps.reward[: end + 1, row].sum() < -10
        assert set(np.unique(timesteps.reward[:, row])) <= {-1.0, 0.0, 1.0}
    timesteps, _ = play(make("jaxtari:pong,objects=true,max_frames=40"), 21, 2)
    assert np.flatnonzero(timesteps.last[:, 0]).tolist() == [10, 21]
    assert np.flatnonzero(timesteps.first[:, 0]).tolist() == [0, 11]
    assert (timesteps.discount == 1).all()


def test_a_sticky_action_is_the_previous_one():
    up = jnp.int32(2)
    heights = {}
    for probability in (0.0, 0.5, 1.0):
        env = make(f"jaxtari:pong,objects=true,repeat_action_probability={probability}")
        timesteps, _ = play(env, 4, 64, lambda _: up)
        heights[probability] = timesteps.observation[-1, :, PLAYER_Y, -1]
    assert (heights[0.0] == heights[0.0][0]).all()
    assert heights[0.0][0] < heights[1.0][0] == 96.0  # no-ops for ever
    assert len(np.unique(heights[0.5])) > 2


def test_frames_are_skipped_pooled_and_stacked():
    every, _ = play(make("jaxtari:pong,objects=true,frame_skip=1,stack=1"), 96, 1, lambda _: 0)
    fourth, _ = play(make("jaxtari:pong,objects=true"), 24, 1, lambda _: 0)
    numbers = every.observation[:, 0, :, 0]
    assert len(np.unique(numbers[:, BALL_X])) > 20
    np.testing.assert_array_equal(fourth.observation[:, 0, :, -1], numbers[::4])
    timesteps, _ = play(make("jaxtari:pong"), 24, 1, lambda _: 0)
    pictures = timesteps.observation[:, 0]
    assert (pictures[0] == pictures[0, ..., :1]).all()
    np.testing.assert_array_equal(pictures[1:, ..., :-1], pictures[:-1, ..., 1:])
    assert (pictures[-1, ..., -1] != pictures[-1, ..., -2]).any()
    assert 0 < pictures.min() <= pictures.max() < 256


@pytest.mark.parametrize("objects", [False, True])
def test_observations_and_rewards_are_those_of_jaxtaris_own_wrappers(objects):
    wrappers = pytest.importorskip("jaxtari.wrappers")
    env = make("jaxtari:pong", objects=objects, repeat_action_probability=0.0)
    timesteps, actions = play(env, 120, 1)
    peer = wrappers.AtariWrapper(
        jaxtari.make("pong"), sticky_actions=0, episodic_life=False, first_fire=False, noop_max=0
    )
    if objects:
        peer = wrappers.ObjectCentricWrapper(peer)
    else:
        peer = wrappers.PixelObsWrapper(peer, do_pixel_resize=True, grayscale=True)
    observation, state = peer.reset(jax.random.PRNGKey(0))
    for t, action in enumerate(actions[:, 0]):
        expected = np.asarray(observation, np.float32).reshape(4, *env.spec.observation.shape[:-1])
        difference = np.moveaxis(expected, 0, -1) - timesteps.observation[t, 0]
        assert np.abs(difference).max() <= (0 if objects else 1)  # they cut fractions off
        observation, state, reward, _, _, _ = peer.step(state, action)
        assert reward == timesteps.reward[t + 1, 0]
    assert timesteps.reward.any()
