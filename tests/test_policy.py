"""Trained policies act as their agents do, one observation or many at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, CONTINUOUS, blueprint
from variants import variants
from walk import BOX, Walk

from podracer.errors import ConfigError
from podracer.ops.distributions import to_bounds
from podracer.policy import Policy
from podracer.types import (
    ACTION_MASK,
    ArraySpec,
    Discrete,
    EnvironmentSpec,
    MultiDiscrete,
    TimeStep,
)

STEPS, ROWS = 6, 3
OBSERVATIONS = np.random.default_rng(0).normal(size=(STEPS, ROWS, 2)).astype(np.float32)
REWARDS = np.random.default_rng(1).normal(size=(STEPS, ROWS)).astype(np.float32)
FIRST = np.zeros((STEPS, ROWS), bool)
FIRST[0], FIRST[3, 1], FIRST[4, 0] = True, True, True


def build(name, spec=None, **settings):
    """An agent, untrained but for larger weights, so that its actions differ; and its state."""
    space = MultiDiscrete((3, 2)) if name.endswith("multidiscrete") else Discrete(3)
    spec = spec or Walk(BOX if name in CONTINUOUS else space).spec
    fields = {key: x for key, x in settings.items() if hasattr(AGENTS[name], key)}
    agent = blueprint(dataclasses.replace(AGENTS[name], **fields), spec).build()
    state = agent.init(jax.random.key(1), 4)
    shared = jax.tree.map(lambda x: x * 3 if jnp.ndim(x) == 2 else x, state.shared)
    return agent, dataclasses.replace(state, shared=shared)


def expected_actions(agent, state):
    """Actions `[T, B, ...]` by the agent's own `act`."""
    carry, params, actions = agent.carry(ROWS), agent.actor_params(state), []
    keys = jax.random.split(jax.random.key(0), ROWS)
    for observation, reward, first in zip(OBSERVATIONS, REWARDS, FIRST, strict=True):
        ones, no = jnp.ones(ROWS), jnp.zeros(ROWS, bool)
        timestep = TimeStep(
            jnp.asarray(observation), jnp.asarray(reward), ones, jnp.asarray(first), no
        )
        action, _, carry = agent.act(params, carry, timestep, keys, False)
        actions.append(np.asarray(action))
    return np.stack(actions)


@variants("name", ["sac"], ["ppo-gru", "r2d2"])
def test_it_acts_as_the_agent_does_in_batches_and_alone(name):
    agent, state = build(name)
    expected = expected_actions(agent, state)
    assert len(np.unique(expected)) > 1
    batch, alone = Policy(agent, state), [Policy(agent, state) for _ in range(ROWS)]
    for t in range(STEPS):
        if t:
            batch.reset(FIRST[t])
        actions = batch(OBSERVATIONS[t], REWARDS[t])
        assert isinstance(actions, np.ndarray)
        np.testing.assert_allclose(actions, expected[t], rtol=1e-5)
        for row, policy in enumerate(alone):
            if FIRST[t, row]:
                policy.reset()
            action = policy(OBSERVATIONS[t, row], REWARDS[t, row])
            np.testing.assert_allclose(action, expected[t, row], rtol=1e-5)


SAMPLING = (
    "a2c", "impala", "stacx", "ppo", "ppo-gru", "ppo-multidiscrete", "sac", "sac-gru",
    "lpg_student", "disco",
)  # fmt: skip


@variants("name", SAMPLING, ["ppo-gtrxl", "disco-gru"])
def test_its_distribution_is_the_one_that_acting_samples_from(name):
    """For the same keys samples are the same actions, also of what an episode remembers."""
    agent, state = build(name, random_frames=0)
    policy = Policy(agent, state)
    carry, params = agent.carry(ROWS), agent.actor_params(state)
    keys = jax.random.split(jax.random.key(7), ROWS)
    for t in range(2):
        distribution = policy.distribution(OBSERVATIONS[t], REWARDS[t])
        sample = distribution.sample(keys)
        sample = to_bounds(agent.spec.action, sample[0] if isinstance(sample, tuple) else sample)
        timestep = TimeStep(
            jnp.asarray(OBSERVATIONS[t]), jnp.asarray(REWARDS[t]), jnp.ones(ROWS),
            jnp.full(ROWS, t == 0), jnp.zeros(ROWS, bool),
        )  # fmt: skip
        action, _, _ = agent.act(params, carry, timestep, keys, True)
        np.testing.assert_allclose(sample, action, rtol=1e-5)
        best, _, carry = agent.act(params, carry, timestep, keys, False)
        mode = to_bounds(agent.spec.action, distribution.mode())
        np.testing.assert_allclose(mode, best, rtol=1e-5)
        np.testing.assert_allclose(policy(OBSERVATIONS[t], REWARDS[t]), best, rtol=1e-5)


def test_a_distribution_of_one_observation_has_no_batch_and_changes_no_memory():
    agent, state = build("ppo-gru")
    policy, other = Policy(agent, state), Policy(agent, state)
    for observation in OBSERVATIONS[:, 0]:
        distribution = policy.distribution(observation)
        assert distribution.logits.shape == (3,)
        assert policy(observation) == other(observation) == distribution.mode()
    policy.reset()
    assert policy.distribution(OBSERVATIONS[0]).logits.shape == (ROWS, 3)
    assert policy(OBSERVATIONS[0, 0]) in range(3)  # no batch has begun


def test_sampled_actions_are_repeated_by_their_seed():
    agent, state = build("a2c")

    def actions(seed):
        policy = Policy(agent, state, sampled=True, seed=seed)
        return np.stack([policy(np.zeros((20, 2))) for _ in range(3)])

    assert (actions(0) == actions(0)).all()
    assert (actions(0) != actions(1)).any()
    assert len(np.unique(actions(0))) == 3


def test_calls_have_no_last_number():
    policy = Policy(*build("ppo"), sampled=True)
    policy._num_calls = 2**32 - 1
    actions = [policy(OBSERVATIONS[0]) for _ in range(2)]
    np.testing.assert_array_equal(actions[1], policy.copy()(OBSERVATIONS[0]))  # as at the start


def test_dictionaries_masks_and_arrays_of_jax():
    spec = EnvironmentSpec(
        "masked", {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((3,), np.bool_)}, Discrete(3)
    )
    policy = Policy(*build("a2c", spec))
    for allowed in range(3):
        mask = np.arange(3) == allowed
        assert policy({"x": np.zeros(2), ACTION_MASK: mask}) == allowed
    ended = {"x": np.zeros(2), ACTION_MASK: np.zeros(3, bool)}
    for call in (policy, policy.distribution):
        with pytest.raises(ConfigError, match="no action was allowed"):
            call(ended)
        call(jax.tree.map(lambda x: x[None], ended))  # the row's episode may be over
    batch = {"x": jnp.zeros((4, 2)), ACTION_MASK: jnp.ones((4, 3), bool)}
    assert isinstance(policy_actions := Policy(*build("a2c", spec))(batch), jax.Array)
    assert policy_actions.shape == (4,)


def test_what_does_not_fit_is_one_sentence():
    policy = Policy(*build("ppo-gru"))
    with pytest.raises(ConfigError, match=r"must be float32\[2\], or a batch of B .* \(5,\)"):
        policy(np.zeros(5))
    with pytest.raises(ConfigError, match=r"must be float32\[2\], but it is a dict"):
        policy({"x": np.zeros(2)})
    with pytest.raises(ConfigError, match="observations are float32, but these have larger"):
        policy(np.array([1e39, 0.0]))
    with pytest.raises(ConfigError, match="needs a call with a batch"):
        policy.reset([0])
    policy(np.zeros((3, 2)))
    with pytest.raises(ConfigError, match="with 3 observations and now with 1: call `reset`"):
        policy(np.zeros(2))
    policy.reset()
    policy([0.0, 1.0])
    with pytest.raises(ConfigError, match=r"reward has shape \(4,\): it must be \(\) or \(1,\)"):
        policy([0.0, 1.0], reward=np.zeros(4))


def test_what_is_not_finite_reaches_neither_an_action_nor_the_memory():
    policy = Policy(*build("ppo-gru"))
    same, observation = policy.copy(), OBSERVATIONS[0]
    policy(observation), same(observation)
    for wrong in (np.nan, np.inf):
        with pytest.raises(ConfigError, match="numbers that are not finite"):
            policy(np.where(np.arange(2) == 1, wrong, observation))
        with pytest.raises(ConfigError, match="the reward is not finite"):
            policy(observation, wrong)
    np.testing.assert_array_equal(policy(observation), same(observation))


@pytest.mark.parametrize("wrong", [1.5, 300, np.float32(0.25)])
def test_no_observation_is_silently_cut_to_an_integer(wrong):
    spec = EnvironmentSpec("picture", ArraySpec((2,), np.uint8), Discrete(3))
    policy = Policy(*build("a2c", spec))
    assert int(policy(np.array([1, 255]))) == int(policy(np.array([1.0, 255.0])))
    with pytest.raises(ConfigError, match="observations are uint8, but these"):
        policy(np.array([wrong, 0]))
    with pytest.raises(ConfigError, match="observations are uint8, but these"):
        policy(jnp.array([wrong, 0]))
    with pytest.raises(ConfigError, match="observations are uint8, but these are float32"):
        policy(jnp.zeros(2))


SHIFTED = EnvironmentSpec(
    "shifted",
    {"cell": ArraySpec((), np.int32, num_values=5), "x": ArraySpec((2,))},
    Discrete(3),
)


def numbered_from(start):
    """The same environment whose own numbers begin elsewhere."""
    observation = dict(SHIFTED.observation)
    observation["cell"] = dataclasses.replace(observation["cell"], start=start)
    return dataclasses.replace(SHIFTED, observation=observation, action=Discrete(3, start=-start))


@pytest.mark.parametrize("start", [1, -4])
def test_observations_and_actions_have_the_numbers_of_the_environment(start):
    """A policy's programs see and choose numbers from 0; who calls it need not know."""
    policies = [Policy(*build("a2c", spec)) for spec in (SHIFTED, numbered_from(start))]
    expected = []
    for cell in range(5):
        for x in OBSERVATIONS[:, 0]:
            inside = policies[0]({"cell": cell, "x": x})
            outside = policies[1]({"cell": cell + start, "x": x})
            assert outside == inside - start
            expected.append(int(inside))
    for cell in (start - 1, start + 5):
        with pytest.raises(ConfigError, match=f"observations are {start} to {start + 4}, but"):
            policies[1]({"cell": cell, "x": OBSERVATIONS[0, 0]})
    assert len(set(expected)) > 1
    space = MultiDiscrete((3, 2, 4), start=(0, 5, -2))
    agent, state = build("ppo", dataclasses.replace(SHIFTED, action=space))
    plain = dataclasses.replace(agent.spec, action=MultiDiscrete(space.num_actions))
    batch = {"cell": np.arange(5), "x": OBSERVATIONS[:5, 0]}
    inside = Policy(dataclasses.replace(agent, spec=plain), state)(batch)
    np.testing.assert_array_equal(Policy(agent, state)(batch), inside + np.array([[0, 5, -2]]))


def test_without_memory_any_number_of_observations_follows_any_other():
    policy = Policy(*build("a2c"))
    alone = [int(policy(x)) for x in OBSERVATIONS[0]]
    assert policy(OBSERVATIONS[0]).tolist() == alone
    assert int(policy(OBSERVATIONS[0, 0])) == alone[0]
