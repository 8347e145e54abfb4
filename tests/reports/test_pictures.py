"""Pictures of observations, and where `podracer play` is worth a hint."""

import sys

import jax
import numpy as np
import pytest

import podracer
from podracer.envs.cartpole import CartPole
from podracer.errors import ConfigError
from podracer.reports.recording import draw_observation, has_picture, record_frames
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec


def spec_of(observation):
    return EnvironmentSpec("test", observation, Discrete(2))


def test_an_image_is_enlarged_and_shown_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (4, 8, 3), np.uint8)
    picture = draw_observation(image, spec_of(ArraySpec((4, 8, 3), np.uint8)))
    np.testing.assert_array_equal(picture, image.repeat(20, axis=0).repeat(20, axis=1))


def test_a_stack_of_frames_shows_the_newest():
    stack = np.arange(2 * 2 * 4, dtype=np.uint8).reshape(2, 2, 4)
    picture = draw_observation(stack, spec_of(ArraySpec((2, 2, 4), np.uint8, frame_stack=True)))
    np.testing.assert_array_equal(picture[::80, ::80, 0], stack[..., -1])


def test_planes_have_a_color_each():
    board = np.zeros((3, 3, 2), bool)
    board[0, 0, 0] = board[1, 1, 1] = True
    observation = {"board": board, ACTION_MASK: np.ones(2, bool)}
    spec = spec_of(
        {"board": ArraySpec((3, 3, 2), np.bool_), ACTION_MASK: ArraySpec((2,), np.bool_)}
    )
    picture = draw_observation(observation, spec)[::54, ::54]
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == 3
    assert not picture[2].any()


@pytest.mark.parametrize(
    ("observation", "image"),
    [
        (ArraySpec((10, 5)), True),
        (ArraySpec((4,)), False),
        (ArraySpec((), np.int32, num_values=16), False),
        ({"x": ArraySpec((4, 4)), "y": ArraySpec((4, 4))}, False),  # which of them?
    ],
)
def test_what_is_an_image(observation, image):
    assert has_picture(observation) == image


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (
            lambda: {}["color"],
            r"cartpole.render failed: KeyError: 'color' \(test_pictures.py, line",
        ),
        (lambda: sys.exit(0), "cartpole.render failed: SystemExit: 0"),
        (lambda: np.zeros((4, 4)), r"render must return uint8 \[H, W, 3\], .* float64\[4, 4\]\."),
    ],
)
def test_a_render_that_cannot_draw_is_named(draw, sentence):
    class Faulty(CartPole):
        def render(self, state):
            return draw()

    env = Faulty()
    agent = podracer.agents.PPO().build(env.spec)
    params = agent.actor_params(agent.init(jax.random.key(0), 1))
    with pytest.raises(ConfigError, match=sentence):
        record_frames(agent, env, params, jax.random.key(0), max_steps=1)
