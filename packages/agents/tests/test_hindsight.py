"""Goals in hindsight beside a slow search through all episodes, and what they make learnable."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.agents import DQN, R2D2
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.environment import auto_reset
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.types import ArraySpec, Step
from podracer_agents.goals import BitFlipping, Reach
from podracer_agents.hindsight import HindsightReplay
from podracer_testing.parity import check_parity

B, LENGTH = 4, 3  # two steps in a return
REPLAY = HindsightReplay(16 * 40, batch_size=16, updates_per_rollout=2, warmup=256, horizon=4)
SETTINGS = DQN(network=TorsoNetwork(MLP((16,))), replay=REPLAY)


def episodes(env: Any, num_steps: int) -> Step:
    """Return random play `[num_steps, B, ...]`."""

    def step(carry: Any, key: jax.Array) -> tuple[Any, Step]:
        state, timestep = carry
        action = jax.random.randint(key, (B,), 0, env.spec.action.num_actions)
        return jax.vmap(env.step)(jax.random.split(key, B), state, action), Step(
            timestep, action, ()
        )

    start = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), B))
    keys = jax.random.split(jax.random.key(1), num_steps)
    return jax.jit(partial(jax.lax.scan, step))(start, keys)[1]


@pytest.mark.parametrize("shows_terminals", [True, False])
def test_a_sample_has_a_goal_that_was_achieved_later_in_its_episode(shows_terminals):
    """And the reward and the end of that goal, in a ring that has wrapped."""
    bits = BitFlipping(3)
    env = auto_reset(bits, show_terminals=shows_terminals)
    steps = episodes(env, 60)
    buffer = dataclasses.replace(REPLAY, capacity=B * 40).build(env.spec, LENGTH)
    memory = buffer.init(B)
    for part in range(0, 60, 12):
        memory = buffer.add(memory, jax.tree.map(lambda x: x[part : part + 12], steps))  # noqa: B023
    sample = jax.jit(partial(buffer.sample, N=4000))(memory, jax.random.key(3))
    world = jax.device_get(steps.timestep)
    achieved = world.observation["achieved_goal"]
    got = jax.device_get(sample.trajectory.timesteps())
    rows, times = np.asarray(sample.rows), 20 + (np.asarray(sample.starts) - 20) % 40

    num_relabeled, num_open, distances, undone = 0, 0, set(), 0
    for n, (row, time) in enumerate(zip(rows, times, strict=True)):
        later = []
        for j in range(1, 5):
            if time + j >= 60 or world.first[time + j, row]:
                break
            later.append(achieved[time + j, row])
        window = slice(time, time + LENGTH)
        first, last = world.first[window, row], world.last[window, row]
        is_open = bool(later) and not (first[1:] & ~last[:-1]).any()
        old = world.observation["desired_goal"][window, row]
        goal = got.observation["desired_goal"][:, n]
        np.testing.assert_array_equal(got.observation["achieved_goal"][:, n], achieved[window, row])
        num_open += is_open
        if not is_open or (goal == old).all():
            np.testing.assert_array_equal(goal, old)
            np.testing.assert_array_equal(got.reward[:, n], world.reward[window, row])
            np.testing.assert_array_equal(got.discount[:, n], world.discount[window, row])
            continue
        num_relabeled += 1
        assert (goal == goal[0]).all()
        matches = {j for j, x in enumerate(later, 1) if (x == goal[0]).all()}
        assert matches
        distances |= matches if len(matches) == 1 else set()
        for i in range(LENGTH):
            if first[i]:
                continue
            success = (achieved[time + i, row] == goal[0]).all()
            assert got.reward[i, n] == (0 if success else -1)
            assert got.discount[i, n] == (0 if success else 1)
            undone += not success and world.discount[time + i, row] == 0
    assert distances == {1, 2, 3}
    assert (undone > 0) == shows_terminals
    # Sometimes the goal in hindsight is the old one.
    assert 0.6 < num_relabeled / num_open < 0.82


def test_without_goals_in_hindsight_samples_are_as_shown():
    env = make("bit_flipping", bits=3)
    steps = episodes(env, 30)
    buffer = dataclasses.replace(REPLAY, num_goals=0).build(env.spec, LENGTH)
    sample = buffer.sample(buffer.add(buffer.init(B), steps), jax.random.key(1), 64)
    shown = jax.tree.map(lambda x: x[sample.starts, sample.rows], steps.timestep)
    first = jax.tree.map(lambda x: x[0], sample.trajectory.steps.timestep)
    jax.tree.map(np.testing.assert_array_equal, first, shown)


def test_what_has_no_goals_is_refused():
    with pytest.raises(ConfigError, match="HindsightReplay needs goals, and catch has none"):
        SETTINGS.build(make("catch").spec)
    spec = dataclasses.replace(BitFlipping(3).spec, extension=None)
    with pytest.raises(ConfigError, match="must have the functions of"):
        SETTINGS.build(spec)
    with pytest.raises(ConfigError, match="the agent learns sequences"):
        R2D2(replay=REPLAY).build(BitFlipping(3).spec)
    buffer = REPLAY.build(BitFlipping(3).spec, LENGTH)
    searched = buffer.init(B, extras={"policy": ArraySpec((3,))})  # as MuZero's
    with pytest.raises(ConfigError, match="found when it acted for another goal"):
        buffer.sample(searched, jax.random.key(0), 1)


@pytest.mark.parametrize("name", ["bit_flipping:30", "point_reach:30", "point_reach,bits=30"])
def test_what_an_environment_of_goals_does_not_take_is_refused(name):
    with pytest.raises(ConfigError, match=r"takes 0 positional|there is no option 'bits'\.$"):
        make(name)


@pytest.mark.parametrize("bits", ["0", "2.5", "many", "true"])
def test_a_number_of_bits_is_a_whole_one(bits):
    with pytest.raises(ConfigError, match=r"bit_flipping\.bits must be "):
        make(f"bit_flipping,bits={bits}")


def test_the_point_reaches_goals_within_its_tolerance():
    reach = Reach()
    achieved = jnp.array([[0.0, 0.0], [0.0, 0.05], [0.2, 0.0]])
    reward = reach.compute_reward(achieved, jnp.zeros((3, 2)))
    np.testing.assert_array_equal(reward, [0, 0, -1])
    assert not reach.compute_terminated(achieved, achieved).any()


def test_lock_step_sebulba_equals_anakin():
    check_parity(SETTINGS, "bit_flipping,bits=4")


def test_a_run_is_resumed_exactly(tmp_path):
    experiment = Experiment(
        environment="bit_flipping,bits=4",
        agent=SETTINGS,
        driver=AnakinConfig(16, 4, 4),
        frames=3_000,
        evaluations=0,
    )
    podracer.train(experiment, run_dir=tmp_path / "whole")
    podracer.train(experiment, run_dir=tmp_path / "cut", frames=1_500)
    podracer.train(experiment, run_dir=tmp_path / "cut", resume=True)
    prints = [stored_fingerprint(tmp_path / name)[1] for name in ("whole", "cut")]
    assert prints[0] == prints[1]


@pytest.mark.slow
@pytest.mark.parametrize(("num_goals", "low", "high"), [(4, -6, -4), (0, -12, -11.5)])
def test_goals_in_hindsight_make_twelve_bits_learnable(num_goals, low, high, tmp_path):
    experiment = recipes.find("bit_flipping_dqn")
    replay = dataclasses.replace(experiment.agent.replay, num_goals=num_goals)
    experiment = dataclasses.replace(
        experiment,
        environment="bit_flipping,bits=12",
        agent=dataclasses.replace(experiment.agent, replay=replay),
        frames=60_000,
        evaluation_episodes=128,
        evaluations=1,
    )
    result = podracer.train(experiment, run_dir=tmp_path)
    assert low <= result.metrics["evaluation_return"] < high
