"""Munchausen targets beside a loop, and spectral normalization beside a decomposition."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import COMMON, EXPLORING, PROBE_REPLAY
from walk import ACTIONS, B, Walk, built, close, methods_of, slow

from podracer.agents.common import off_policy
from podracer.agents.dqn import DQN
from podracer.environment import auto_reset
from podracer.errors import ConfigError
from podracer.networks import CNN, MLP, Head, ResNet, TorsoNetwork
from podracer.networks.convolutions import Convolution
from podracer.ops.action_masks import mask_logits
from podracer.ops.action_values import Atoms, Mean, Quantiles
from podracer.replay import Replay
from podracer.types import ACTION_MASK, ArraySpec, TimeStep
from podracer_agents.munchausen import MunchausenDQN, bonus, soft_policy
from podracer_agents.spectral import Spectral, normalize, spectral_norm
from podracer_testing.contract import check_contract
from podracer_testing.parity import check_parity
from podracer_testing.probes import check_probe
from podracer_testing.reset_steps import check_reset_steps_of_replay

TEMPERATURE, WEIGHT, CLIP = 0.5, 0.8, -0.6
NETWORK = TorsoNetwork(MLP((8,), "tanh"))


def settings(value: Any = Mean(), **fields: Any) -> MunchausenDQN:  # noqa: B008
    soft = {"temperature": TEMPERATURE, "log_policy_weight": WEIGHT, "log_policy_clip": CLIP}
    return MunchausenDQN(**{"network": NETWORK, "value": value, **soft, **fields})


# --- Munchausen targets --------------------------------------------------------------------------


def random_params(network: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


def transition_of(count: int) -> off_policy.Transition:
    rng = np.random.default_rng(0)
    ones = jnp.ones(count)

    def timestep() -> TimeStep:
        observation = jnp.asarray(rng.normal(size=(count, 2)), jnp.float32)
        return TimeStep(observation, ones, ones, ones < 0, ones < 0)

    return off_policy.Transition(
        timestep=timestep(),
        action=jnp.asarray(rng.integers(0, 3, count), jnp.int32),
        n_step_return=jnp.asarray(rng.normal(size=count), jnp.float32),
        bootstrap_discount=jnp.asarray(rng.choice([0.0, 0.9], count), jnp.float32),
        next_timestep=timestep(),
        mask=ones,
        weight=ones,
    )


def targets_of(settings: DQN) -> tuple[Any, ...]:
    """Returns and bootstrap outputs of transitions, and what they are made of."""
    agent = methods_of(built(settings))
    online, target = (random_params(agent.network, seed) for seed in (1, 2))
    transition, mean = transition_of(16), settings.value.mean

    @jax.jit
    def compute(online: Any, target: Any, transition: Any) -> tuple[Any, ...]:
        no_noise = (None, None)
        got = agent.targets(online, target, transition, no_noise)
        before = agent.outputs(target, transition.timestep, None)
        after = agent.outputs(target, transition.next_timestep, None)
        return got, after, mean(before), mean(after)

    got, after, q, next_q = compute(online, target, transition)
    return got, transition, after, q, next_q


def slow_log_policy(q: np.ndarray) -> np.ndarray:
    """Logarithms of softmax(q / temperature), of one state."""
    scaled = np.asarray(q, np.float64) / TEMPERATURE
    return scaled - np.log(np.sum(np.exp(scaled)))


def slow_targets(transition: Any, after: Any, q: Any, next_q: Any, n: int) -> np.ndarray:
    """Equation 4 of Vieillard et al. 2020 for sample n, for each output `[Z]`: a loop over a'."""
    log_policy_of_action = TEMPERATURE * slow_log_policy(q[n])[int(transition.action[n])]
    total = np.zeros(after.shape[-1]) + float(transition.n_step_return[n])
    total += WEIGHT * max(log_policy_of_action, CLIP)
    for action, log_policy in enumerate(slow_log_policy(next_q[n])):
        soft = np.asarray(after[n, action], np.float64) - TEMPERATURE * log_policy
        total += float(transition.bootstrap_discount[n]) * np.exp(log_policy) * soft
    return total


@pytest.mark.parametrize("value", [Mean(), slow(Quantiles(7))])
def test_targets_are_those_of_the_paper(value):
    (returns, bootstrap), transition, after, q, next_q = targets_of(settings(value))
    got = returns[:, None] + transition.bootstrap_discount[:, None] * bootstrap
    for n in range(16):
        expected = slow_targets(transition, after, q, next_q, n)
        np.testing.assert_allclose(got[n], expected, rtol=1e-4, atol=1e-5)
    log_policy = np.asarray(jax.nn.log_softmax(q / TEMPERATURE)) * TEMPERATURE
    assert (log_policy < CLIP).any()
    assert (log_policy > CLIP).any()


def test_targets_of_c51_are_a_mixture_over_the_next_actions():
    (returns, bootstrap), transition, after, q, next_q = targets_of(settings(Atoms(-5.0, 5.0, 11)))
    got = np.asarray(jax.nn.softmax(bootstrap))
    for n in range(16):
        log_policy = slow_log_policy(next_q[n])
        atoms = np.exp(np.asarray(jax.nn.log_softmax(after[n]), np.float64))
        expected = sum(p * z for p, z in zip(np.exp(log_policy), atoms, strict=True))
        np.testing.assert_allclose(got[n], expected, rtol=1e-4, atol=1e-6)
        entropy = -TEMPERATURE * np.sum(np.exp(log_policy) * log_policy)
        of_action = TEMPERATURE * slow_log_policy(q[n])[int(transition.action[n])]
        total = float(transition.n_step_return[n]) + WEIGHT * max(of_action, CLIP)
        total += float(transition.bootstrap_discount[n]) * entropy
        np.testing.assert_allclose(returns[n], total, rtol=1e-4, atol=1e-5)


def test_without_a_reward_and_nearly_cold_they_are_those_of_q_learning():
    soft = targets_of(settings(temperature=1e-5, log_policy_weight=0.0))[0]
    hard = targets_of(DQN(network=NETWORK, double=False))[0]
    close(soft, hard, atol=1e-3)


def test_forbidden_actions_have_no_part_in_soft_targets():
    mask = jnp.asarray([[True, False, True]])
    q = mask_logits({ACTION_MASK: mask}, jnp.asarray([[1.0, 9.0, 2.0]]))
    policy, entropy = soft_policy(q, 0.03)
    assert policy[0, 1] == 0
    few_policy, few_entropy = soft_policy(q[:, ::2], 0.03)
    close((policy[:, ::2], entropy), (few_policy, few_entropy))
    close(bonus(MunchausenDQN(), q, jnp.asarray([0])), jnp.asarray([-0.9]))


# --- spectral normalization ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 3, 16, 16), slow((5, 9)), slow((1, 1))])
def test_the_spectral_norm_is_the_largest_singular_value(shape):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    matrix = weight.reshape(-1, shape[-1]).astype(np.float64)
    left, singular_values, right = np.linalg.svd(matrix, full_matrices=False)
    norm, slope = jax.jit(jax.value_and_grad(spectral_norm))(jnp.asarray(weight))
    np.testing.assert_allclose(norm, singular_values[0], rtol=1e-3)
    expected = np.outer(left[:, 0], right[0]).reshape(shape)
    np.testing.assert_allclose(slope, expected, atol=0.05)


@pytest.mark.parametrize("ratio", [0.9, 0.98, 0.995, 0.9999])
def test_close_singular_values_make_the_spectral_norm_half_a_percent_too_small_at_most(ratio):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 16)))[0] for n in (144, 16))
    singular_values = np.array([1.0, ratio, *rng.uniform(0.1, 0.9, 14)])
    weight = jnp.asarray((left * singular_values) @ right.T, jnp.float32)
    assert 0.995 < spectral_norm(weight) < 1 + 1e-6


@pytest.mark.parametrize("blocks", [1, 3])  # 3 and more are stacked
def test_convolutions_of_residual_blocks_have_norm_one_and_others_stay(blocks):
    network = TorsoNetwork(ResNet((4, 4), blocks, hidden=0))
    params = network.build(ArraySpec((5, 6, 2)), {"y": Head(2)}).init(jax.random.key(0))
    params = jax.tree.map(lambda x: 5.0 * x, params)
    layers, normalized = (
        jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Convolution))
        for tree in (params, normalize(params))
    )
    pairs = [
        pair for pair in zip(layers, normalized, strict=True) if isinstance(pair[0], Convolution)
    ]
    assert len(pairs) == 6
    for first in pairs[::3]:  # of each of the two stages
        close(*first)
    for old, new in pairs[1::3] + pairs[2::3]:
        for weight in new.weight.reshape(-1, *new.weight.shape[-4:]):
            singular_values = np.linalg.svd(np.reshape(weight, (-1, 4)), compute_uv=False)
            np.testing.assert_allclose(singular_values[0], 1.0, rtol=1e-3)
        close(old.bias, new.bias)


def test_spectral_normalization_without_residual_blocks_is_refused():
    with pytest.raises(ConfigError, match="residual blocks, which a CNN has not"):
        Spectral(TorsoNetwork(CNN())).build(ArraySpec((84, 84, 4)), {"y": Head(2)})


def test_a_spectral_network_does_not_depend_on_the_scale_of_its_blocks_weights():
    network = Spectral(TorsoNetwork(ResNet((4,), blocks=1, hidden=0)))
    network = network.build(ArraySpec((5, 6, 2)), {"y": Head(2)})
    params = network.init(jax.random.key(0))
    place = lambda params: params["shared"].layers[0][0][1].weight  # noqa: E731
    larger = eqx.tree_at(place, params, 5.0 * place(params))
    x, first = jax.random.normal(jax.random.key(1), (1, 2, 5, 6, 2)), jnp.zeros((1, 2), bool)
    close(network.apply(params, (), x, first)[0], network.apply(larger, (), x, first)[0])


# --- what every agent must do --------------------------------------------------------------------

ENV = auto_reset(Walk(ACTIONS))
SMALL = MunchausenDQN(
    network=NETWORK,
    replay=Replay(B * 40, batch_size=64, warmup=0, prioritized=True),
    value=Atoms(-5.0, 5.0, 11),
    dueling=True,
    noisy=True,
    n_step=2,
)


def test_it_keeps_the_contract():
    check_contract(SMALL, ENV)


@pytest.mark.parametrize("learners", [1, slow(2)])
def test_lock_step_equals_anakin_to_the_bit(learners):
    replay = Replay(16 * 40, batch_size=16, updates_per_rollout=2, warmup=16 * 16)
    check_parity(MunchausenDQN(network=NETWORK, replay=replay), "catch", learners)


@pytest.mark.parametrize("length", [1, slow(5)])
def test_steps_that_only_reset_teach_nothing(length):
    check_reset_steps_of_replay(SMALL, length, env=ENV)


def test_it_learns_the_probe_of_actions():
    def values(agent, learner, timestep, carry, extras):
        return methods_of(agent).outputs(learner.shared.params, timestep, None)[..., 0].max(-1)

    agent = MunchausenDQN(**COMMON, **EXPLORING, replay=PROBE_REPLAY)
    check_probe(agent, "action", 300, values=values)
