"""Several discrete actions at once: the distribution by brute force, agents, masks, refusals."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import B, T, Walk, close, slow

from podracer.agent import Blueprint
from podracer.agents.a2c import A2C
from podracer.agents.dqn import DQN
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.stacx import Stacx
from podracer.checks import check_agent, check_environment, check_spec
from podracer.drivers.faults import Fault, fault_bits
from podracer.drivers.sebulba.validator import TimestepValidator
from podracer.environment import auto_reset
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.distributions import Categorical, MultiCategorical, num_outputs, policy, to_bounds
from podracer.rollout import init_actor, rollout
from podracer.types import (
    ACTION_MASK,
    ArraySpec,
    EnvironmentSpec,
    LearnerState,
    MultiDiscrete,
    Step,
    TimeStep,
    Trajectory,
)

SIZES = (3, 2, 5)
SPACE = MultiDiscrete(SIZES)
JOINT = np.array(list(itertools.product(*map(range, SIZES))))  # all 30 actions
LEARNERS = {"a2c": A2C, "impala": Impala, "ppo": PPO, "stacx": Stacx}


# --- the distribution ----------------------------------------------------------------------------


def joint_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of all actions, f64 `[30]`: products of softmaxes, written out."""
    parts = np.split(np.exp(logits.astype(np.float64)), np.cumsum(SIZES)[:-1])
    parts = [part / part.sum() for part in parts]
    return np.array([np.prod([p[i] for p, i in zip(parts, a, strict=True)]) for a in JOINT])


def distributions(seed: int = 0) -> tuple[np.ndarray, MultiCategorical]:
    logits = np.random.default_rng(seed).normal(size=sum(SIZES)).astype(np.float32)
    return logits, policy(SPACE, jnp.asarray(logits))  # type: ignore[return-value]


def test_formulas_are_sums_over_all_joint_actions():
    logits, distribution = distributions()
    other_logits, other = distributions(1)
    p, q = joint_probabilities(logits), joint_probabilities(other_logits)
    assert p.sum() == pytest.approx(1)
    repeated = MultiCategorical(jnp.tile(distribution.logits, (len(JOINT), 1)), SIZES)
    close(repeated.log_prob(jnp.asarray(JOINT)), np.log(p), atol=1e-5)
    close(distribution.entropy(), -np.sum(p * np.log(p)), atol=1e-5)
    close(distribution.divergence(other), np.sum(p * np.log(p / q)), atol=1e-5)
    np.testing.assert_array_equal(distribution.mode(), JOINT[p.argmax()])
    assert num_outputs(SPACE) == 10
    assert to_bounds(SPACE, distribution.mode()) is not None


def test_samples_follow_the_joint_probabilities():
    logits, distribution = distributions()
    count = 20_000
    repeated = MultiCategorical(jnp.tile(distribution.logits, (count, 1)), SIZES)
    actions = jax.jit(lambda d, k: d.sample(k))(
        repeated, jax.random.split(jax.random.key(0), count)
    )
    assert actions.dtype == jnp.int32
    assert actions.shape == (count, 3)
    numbers = np.ravel_multi_index(np.asarray(actions).T, SIZES)
    expected = count * joint_probabilities(logits)
    chi_square = np.sum((np.bincount(numbers, minlength=30) - expected) ** 2 / expected)
    assert chi_square <= 29 + 5 * np.sqrt(2 * 29)


def test_one_component_is_a_categorical_to_the_bit():
    logits = jax.random.normal(jax.random.key(0), (64, 7))
    one, many = Categorical(logits), MultiCategorical(logits, (7,))
    keys = jax.random.split(jax.random.key(1), 64)
    np.testing.assert_array_equal(many.sample(keys)[:, 0], one.sample(keys))
    np.testing.assert_array_equal(many.log_prob(many.mode()), one.log_prob(one.mode()))
    np.testing.assert_array_equal(many.entropy(), one.entropy())


# --- agents --------------------------------------------------------------------------------------


MASK = np.array([1, 0, 1, 0, 1, 0, 0, 1, 1, 0], bool)


@dataclasses.dataclass(frozen=True)
class Masked(Walk):
    """The walk, in which half of the actions of each component are forbidden."""

    @property
    def spec(self) -> EnvironmentSpec:
        seen = {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((10,), np.bool_)}
        return EnvironmentSpec("masked", seen, SPACE)

    def observe(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"x": super().observe(x), ACTION_MASK: jnp.asarray(MASK)}


@pytest.mark.parametrize("name", ["ppo", slow("a2c"), slow("impala"), slow("stacx")])
def test_actions_are_in_range_and_allowed(name):
    env = auto_reset(Masked(SPACE))
    check_environment(env)
    plan = Blueprint(LEARNERS[name](network=TorsoNetwork(MLP((8,)))), env.spec)
    check_agent(plan, num_envs=4)
    agent = plan.build()
    params = agent.actor_params(agent.init(jax.random.key(0), B))
    keys = jax.random.split(jax.random.key(2), (2, T, B))
    actor = init_actor(agent, env, jax.random.split(jax.random.key(1), B))
    actions = np.asarray(rollout(agent, env, params, actor, *keys)[1].steps.action)
    assert actions.shape == (T, B, 3)
    allowed = np.split(MASK, np.cumsum(SIZES)[:-1])
    for i, part in enumerate(allowed):
        assert part[actions[..., i]].all()
        assert len(np.unique(actions[..., i])) > 1 or part.sum() == 1


def test_an_array_of_one_action_is_no_single_action():
    spec = EnvironmentSpec("joint", ArraySpec((2,)), MultiDiscrete((4,)))
    with pytest.raises(ConfigError, match="an action of joint is an array of 1, which A2C"):
        DQN().build(spec)


# --- specifications and masks --------------------------------------------------------------------


def test_a_mask_needs_an_entry_for_each_action_of_each_component():
    seen = {ACTION_MASK: ArraySpec((30,), np.bool_)}
    spec = EnvironmentSpec("joint", seen, SPACE)
    with pytest.raises(ConfigError, match=r"must be bool\[10\], an entry for each action"):
        check_spec(dataclasses.make_dataclass("E", [("spec", EnvironmentSpec)])(spec))


@pytest.mark.parametrize(("forbidden", "is_fault"), [((), False), ((3, 4), True), ((0, 5), False)])
def test_a_component_without_an_allowed_action_is_a_fault(forbidden, is_fault):
    mask = np.ones((2, 10), bool)
    mask[1, list(forbidden)] = False
    ones, false = np.ones(2, np.float32), np.zeros(2, bool)
    spec = EnvironmentSpec("masked", {ACTION_MASK: ArraySpec((10,), np.bool_)}, SPACE)
    shown = TimeStep({ACTION_MASK: mask}, ones, ones, false, false)
    validator = TimestepValidator(spec, np.zeros(2, bool))
    assert validator.validate(shown).last.tolist() == [False, is_fault]

    steps = Step(jax.tree.map(lambda x: x[None], shown), jnp.zeros((1, 2, 3)), ())
    agent = A2C().build(spec)
    bits = fault_bits(agent, Trajectory(steps, shown, (), ()), LearnerState(()), {}, None)
    assert Fault(int(bits)) == (Fault.ACTION_MASK if is_fault else Fault(0))
