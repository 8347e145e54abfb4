"""Agents of their own: what each learns beside what it would learn alone, and the example."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podracer
from podracer import ArraySpec, Continuous, Discrete
from podracer.agents import A2C, DQN, PPO, R2D2, SAC
from podracer.cli.main import main
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.rollout import init_actor, rollout
from podracer.types import LearnerState
from podracer_agents.independent import IndependentLearners, joint_spec
from podracer_testing.parity import check_parity

EXAMPLES = Path(__file__).parents[3] / "examples"
KEY, SMALL = jax.random.key(0), TorsoNetwork(MLP((8,)))


@podracer.struct
class Pair(IndependentLearners):
    speaker: Any = A2C(network=SMALL)
    listener: Any = PPO(network=SMALL)


def learn(agent: podracer.Agent, *args: Any) -> Any:
    return jax.jit(partial(agent.learn, axis=None))(*args)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import speaker_listener

    return speaker_listener


def test_each_has_flags_metrics_and_a_policy_of_its_own(example, monkeypatch, tmp_path):
    monkeypatch.setattr("podracer.cli.train.initialize_devices", lambda *_: None)  # they are
    flags = "--speaker.learning-rate 0.001 --listener.num-epochs 2 --frames 20480 --devices 1"
    with pytest.raises(SystemExit, match="0"):
        main(["train", "speaker_listener:naming", "--run-dir", str(tmp_path), *flags.split()])
    config = json.loads((tmp_path / "config.json").read_text())["experiment"]["agent"]
    assert (config["speaker"]["learning_rate"], config["listener"]["learning_rate"]) == (1e-3, 3e-3)
    assert config["listener"]["num_epochs"] == 2
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"speaker_entropy", "listener_entropy", "listener_clip_fraction"} <= record.keys()
    assert "speaker_clip_fraction" not in record

    def policy(agent: str | None) -> podracer.Policy:
        return podracer.load_policy(tmp_path, recipe="speaker_listener:naming", agent=agent)

    seen = np.eye(5, dtype=np.float32)
    actions = policy(None)({"speaker": seen, "listener": seen})
    np.testing.assert_array_equal(actions[:, 0], policy("speaker")(seen))
    np.testing.assert_array_equal(actions[:, 1], policy("listener")(seen))
    assert (actions[:, 0] != actions[:, 1]).any()
    with pytest.raises(ConfigError, match="no agent 'hearer': it has "):
        policy("hearer")


def test_the_listener_learns_what_it_would_learn_without_the_speaker(example):
    """From its own part of the rollout, with the keys that it gets."""
    env = podracer.auto_reset(example.Naming())
    pair, context = Pair(), podracer.Context(8)
    agent, alone = pair.build(env.spec), pair.listener.build(env.spec.agents["listener"])
    state = agent.init(jax.random.key(0), 4)
    actor = init_actor(agent, env, jax.random.split(jax.random.key(1), 4))
    keys = jax.random.split(jax.random.key(2), (2, context.rollout_length, 4))
    trajectory = jax.jit(partial(rollout, agent, env))(agent.actor_params(state), actor, *keys)[1]
    key = jax.random.key(3)
    new, metrics = learn(agent, state, trajectory, key)

    def heard(timestep: Any) -> Any:
        return dataclasses.replace(timestep, observation=timestep.observation["listener"])

    steps = trajectory.steps
    own = podracer.types.Step(heard(steps.timestep), steps.action[..., 1], steps.extras["listener"])
    part = podracer.Trajectory(own, heard(trajectory.final), (), ())
    listener = LearnerState(state.shared["listener"])
    expected, parts = learn(alone, listener, part, jax.random.fold_in(key, 1))
    jax.tree.map(np.testing.assert_array_equal, new.shared["listener"], expected.shared)
    assert float(metrics["listener_loss"].value) == float(parts["loss"].value)
    louder = dataclasses.replace(pair, speaker=A2C(learning_rate=1.0, network=SMALL))
    other, _ = learn(louder.build(env.spec), state, trajectory, key)
    jax.tree.map(np.testing.assert_array_equal, new.shared["listener"], other.shared["listener"])
    before, after = (jax.tree.leaves(x.shared["speaker"].params) for x in (new, other))
    assert any((x != y).any() for x, y in zip(before, after, strict=True))


def test_actions_are_joined_in_turn():
    place, box = ArraySpec((3,)), Continuous((-2.0,), (2.0,))
    spec = joint_spec(
        "arms", speaker=(place, box), listener=(place, Continuous((0.0,) * 2, (1.0,) * 2))
    )
    assert spec.action == Continuous((-2.0, 0.0, 0.0), (2.0, 1.0, 1.0))
    agent = Pair(speaker=SAC(network=SMALL)).build(spec)
    params = jax.eval_shape(lambda key: agent.actor_params(agent.init(key, 4)), KEY)
    timestep, keys = podracer.types.blank_timestep(spec, 4), jax.random.split(KEY, 4)
    act = partial(agent.act, timestep=timestep, keys=keys, explore=True)
    assert jax.eval_shape(act, params, agent.carry(4))[0].shape == (4, 3)
    discrete = joint_spec(
        "words", a=(place, Discrete(3)), b=(place, podracer.MultiDiscrete((2, 4)))
    )
    assert discrete.action.num_actions == (3, 2, 4)
    masked = {"observation": place, "action_mask": ArraySpec((2,), bool)}
    with pytest.raises(ConfigError, match=r"two.b: .* must be bool\[3\], an entry for each action"):
        joint_spec("two", a=(place, Discrete(3)), b=(masked, Discrete(3)))
    with pytest.raises(ConfigError, match="all discrete or all continuous"):
        joint_spec("mixed", a=(place, Discrete(3)), b=(place, box))
    with pytest.raises(ConfigError, match="has the agents speaker, listener, and words has a, b"):
        Pair().build(discrete)
    with pytest.raises(ConfigError, match="and catch has none"):
        Pair().build(podracer.make("catch").spec)


@pytest.mark.slow
@pytest.mark.parametrize("speaker", [A2C(network=SMALL), DQN(network=SMALL), R2D2()])
def test_lock_step_sebulba_equals_anakin(speaker, example):
    check_parity(Pair(speaker=speaker), podracer.auto_reset(example.Naming()))


@pytest.mark.slow
def test_they_agree_on_a_language(example, tmp_path):
    result = podracer.train(example.naming(), run_dir=tmp_path, devices=1)
    assert result.metrics["evaluation_return"] > 0.75
