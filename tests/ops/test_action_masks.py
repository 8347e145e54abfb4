"""A mask that allows no action is found by both drivers: no forbidden action trains silently."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS

import podracer
from podracer.agent import Blueprint
from podracer.agents.a2c import A2C
from podracer.checks.agent import check_agent
from podracer.checks.random_play import random_actions
from podracer.drivers.faults import Fault, fault_bits
from podracer.drivers.progress import to_progress
from podracer.drivers.sebulba.validator import TimestepValidator
from podracer.errors import ConfigError, EnvironmentFault
from podracer.ops.action_masks import epsilon_greedy, lacks_action, mask_logits
from podracer.types import (
    ACTION_MASK,
    ArraySpec,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    MultiDiscrete,
    Step,
    TimeStep,
    Trajectory,
)

OBSERVATION = {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((3,), np.bool_)}
KEY = jax.random.key(1)
SPEC = EnvironmentSpec("masked", OBSERVATION, Discrete(3))


def timestep(*masks, last=None):
    """Timesteps `[B]` with these masks, rows of a truth table."""
    mask = np.array(masks, bool)
    n = len(mask)
    false = np.zeros(n, bool)
    observation = {"x": np.zeros((n, 2), np.float32), ACTION_MASK: mask}
    ones = np.ones(n, np.float32)
    return TimeStep(observation, ones, ones, false, false if last is None else np.array(last))


@pytest.mark.parametrize(
    ("mask", "last", "fault"),
    [
        ([0, 1, 0], False, Fault(0)),
        ([0, 0, 0], False, Fault.ACTION_MASK),
        ([0, 0, 0], True, Fault(0)),  # the action is ignored there
    ],
)
def test_an_update_that_chose_among_no_actions_is_a_fault(mask, last, fault):
    first = timestep([1, 1, 1], mask, last=[False, last])
    final = dataclasses.replace(timestep([1, 1, 1], [1, 1, 1]), first=np.array([False, last]))
    steps = Step(TimeStep(**{k: _lead(v) for k, v in vars(first).items()}), jnp.zeros((1, 2)), ())
    agent = A2C().build(SPEC)
    bits = fault_bits(agent, Trajectory(steps, final, (), ()), LearnerState(()), {}, None)
    assert Fault(int(bits)) == fault


@pytest.mark.parametrize("agent", ["pqn", "q_lambda"])
def test_a_time_out_has_a_value_though_its_mask_allows_nothing(agent):
    """Where an episode ends there is no action, so the mask of its last timestep means nothing."""
    agent = AGENTS[agent].build(SPEC)
    state, carry = agent.init(jax.random.key(0), 2), agent.carry(2)
    steps = [timestep([1, 1, 0], [0, 1, 1]) for _ in range(4)]
    steps[2] = timestep([0, 0, 0], [0, 1, 1], last=[True, False])
    steps[3] = dataclasses.replace(steps[3], first=np.array([True, False]))
    keys = jax.random.split(KEY, 2)
    action, extras, _ = agent.act(agent.actor_params(state), carry, steps[0], keys, True)
    repeated = jax.tree.map(lambda x: jnp.stack([x] * 4), (action, extras))
    rollout = Step(jax.tree.map(lambda *x: np.stack(x), *steps), *repeated)
    rollout = Trajectory(rollout, steps[1], carry, carry)
    _, metrics = jax.jit(agent.learn, static_argnames="axis")(state, rollout, KEY, axis=None)
    assert 0.0 < float(metrics["loss"]) < 100.0


def test_a_mask_that_allows_nothing_leaves_the_values_as_they_are():
    values = jnp.arange(6.0).reshape(2, 3)
    masked = mask_logits(timestep([1, 0, 1], [0, 0, 0]).observation, values)
    np.testing.assert_array_equal(masked, [[0.0, -1e9, 2.0], [3.0, 4.0, 5.0]])


def _lead(tree):
    if isinstance(tree, dict):
        return {key: leaf[None] for key, leaf in tree.items()}
    return tree[None]


def test_that_fault_ends_the_run_in_one_sentence():
    with pytest.raises(EnvironmentFault, match="update 8: an action mask was all False") as fault:
        to_progress(10, {"fault": [Fault.ACTION_MASK, 7], "mean": {}}, SPEC, ())
    assert fault.value.exit_code == 72


def test_a_mask_within_an_observation_of_an_observation_holds():
    """As `model:` wraps the observations of its environment."""
    mask = jnp.array([[True, False, True], [False, False, False]])
    wrapped = {"observation": {"x": jnp.zeros((2, 2)), ACTION_MASK: mask}, "state": jnp.zeros(2)}
    logits = jnp.array([[1.0, 9.0, 2.0], [1.0, 9.0, 2.0]])
    np.testing.assert_array_equal(
        mask_logits(wrapped, logits), np.array([[1.0, -1e9, 2.0], [1.0, 9.0, 2.0]], np.float32)
    )


@pytest.mark.figure(8)
def test_a_row_of_the_host_without_actions_is_counted_and_does_not_train():
    validator = TimestepValidator(SPEC, np.zeros(3, bool))
    masks = [1, 1, 1], [0, 0, 0], [0, 0, 0]
    shown = validator.validate(timestep(*masks, last=[False, False, True]))
    assert shown.first.tolist() == [False, True, False]
    assert shown.last.tolist() == [False, True, True]
    assert validator.faults == {"no_action": 1}
    following = timestep([1, 1, 1], [0, 0, 0], [1, 1, 1])
    validator.validate(dataclasses.replace(following, first=np.array([False, False, True])))
    assert validator.faults == {"no_action": 1}  # until the row begins a new episode
    again = timestep([1, 1, 1], [0, 0, 0], [1, 1, 1])
    again = dataclasses.replace(again, first=np.array([False, True, False]))
    shown = validator.validate(again)
    assert shown.last.tolist() == [False, True, False]
    assert validator.faults == {"no_action": 2}


def test_each_of_several_agents_needs_an_action_of_its_own():
    spaces = {"blind": Discrete(2), "pair": MultiDiscrete((1, 2)), "one": Discrete(3)}
    masks = {
        "pair": np.array([[1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]], bool),
        "one": np.array([[0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]], bool),
    }
    seen = {name: {ACTION_MASK: ArraySpec((3,), np.bool_)} for name in masks}
    seen["blind"] = ArraySpec((2,))
    agents = {name: EnvironmentSpec(name, seen[name], space) for name, space in spaces.items()}
    spec = EnvironmentSpec("three", seen, MultiDiscrete((2, 1, 2, 3)), agents=agents)
    observation = {name: {ACTION_MASK: mask} for name, mask in masks.items()}
    observation["blind"] = np.zeros((4, 2), np.float32)
    last = np.array([False, False, False, True])
    shown = dataclasses.replace(timestep(*masks["one"], last=last), observation=observation)
    assert lacks_action(spec, shown).tolist() == [True, True, True, False]

    validator = TimestepValidator(spec, np.zeros(4, bool))
    assert validator.validate(shown).last.all()
    assert validator.faults == {"no_action": 3}
    steps = Step(jax.tree.map(lambda x: x[None], shown), jnp.zeros((1, 4, 4)), ())
    following = dataclasses.replace(shown, first=last)
    agent = dataclasses.replace(A2C().build(SPEC), spec=spec)
    bits = fault_bits(agent, Trajectory(steps, following, (), ()), LearnerState(()), {}, None)
    assert Fault(int(bits)) == Fault.ACTION_MASK

    for seed in range(9):
        actions = random_actions(np.random.default_rng(seed), spec, observation, 4)
        assert actions[[1, 2], 3].tolist() == [1, 1]
        assert actions[0, 2] == 1


@podracer.struct
class Mine(A2C):
    """A user's agent, whose choices are checked."""


@podracer.struct
class Deaf(A2C):
    """As if it knew of no agents, so of no masks."""

    def build(self, spec, context):
        agent = super().build(dataclasses.replace(spec, agents={}), context)
        return dataclasses.replace(agent, spec=spec)


def test_one_policy_of_several_agents_obeys_the_masks_of_each():
    masked = {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((3,), np.bool_)}
    seen = {"one": masked, "blind": ArraySpec((2,)), "pair": masked}
    spaces = {"one": Discrete(3), "blind": Discrete(4), "pair": MultiDiscrete((1, 2))}
    agents = {name: EnvironmentSpec(name, seen[name], space) for name, space in spaces.items()}
    spec = EnvironmentSpec("three", seen, MultiDiscrete((3, 4, 1, 2)), agents=agents)
    check_agent(Blueprint(Mine(), spec), num_envs=64)
    with pytest.raises(ConfigError, match=r"chose the action \[. . .\] where .* of three allows"):
        check_agent(Blueprint(Deaf(), spec), num_envs=64)
    seeing_one = A2C(actor_groups=("one",)).build(spec)
    assert set(seeing_one.policy_spec.observation) == set(seen)  # the masks of the others, too


def test_epsilon_greedy_explores_as_often_as_it_says():
    values = jnp.tile(jnp.asarray([[0.0, 3.0, 1.0, 2.0]]), (40_000, 1))
    keys = jax.random.split(jax.random.key(0), 40_000)
    for epsilon in (0.0, 0.1, 1.0):
        action = epsilon_greedy(values, None, keys, jnp.full(40_000, epsilon))
        share = np.bincount(np.asarray(action), minlength=4) / 40_000
        expected = np.full(4, epsilon / 4) + (1 - epsilon) * np.eye(4)[1]
        np.testing.assert_allclose(share, expected, atol=0.01)


@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_epsilon_greedy_keeps_to_the_mask_however_bad_its_values_are(scale):
    values = jnp.tile(jnp.asarray([[0.0, -3.0, -1.0, -2.0]]) * scale, (4000, 1))
    mask = jnp.tile(jnp.asarray([False, True, False, True]), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)
    best, drawn = (
        epsilon_greedy(values, {"action_mask": mask}, keys, jnp.float32(e)) for e in (0.0, 1.0)
    )
    assert set(np.asarray(best)) == {3}
    np.testing.assert_allclose(np.bincount(np.asarray(drawn)), [0, 2000, 0, 2000], atol=200)
