"""Beyond The Rainbow: Munchausen targets, implicit quantiles and its network."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import built, close, methods_of, slow

from podracer import recipes
from podracer.agents.common import off_policy, value_based
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.dqn import DQN
from podracer.devices.mesh import DATA, REPLICATED, SHARDED, find_devices, make_mesh
from podracer.devices.reductions import global_grad
from podracer.errors import ConfigError
from podracer.fields import check_ranges
from podracer.networks import MLP, Head, ResNet, TorsoNetwork
from podracer.networks.layers import Convolution, QuantileEmbedding
from podracer.ops.action_masks import mask_logits
from podracer.ops.action_values import Atoms, ImplicitQuantiles, Mean, Munchausen, Quantiles
from podracer.ops.spectral import spectral_norm
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec, TimeStep

VALUES = {
    "mean": Mean(),
    "c51": Atoms(-5.0, 5.0, 11),
    "qr": Quantiles(7),
    "iqn": ImplicitQuantiles(3, 4, 5, cosines=6),
}
SOFT = Munchausen(temperature=0.5, weight=0.8, clip=-0.6)


def agent_with(value: Any, **fields: Any) -> DQN:
    return DQN(network=TorsoNetwork(MLP((8,), "tanh")), value=value, **fields)


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
    transition = transition_of(16)

    @jax.jit
    def compute(online: Any, target: Any, transition: Any) -> tuple[Any, ...]:
        draws = value_based.draws_of_learning(settings.value, False, jax.random.key(2), 16)
        outputs = agent.outputs(online, transition.timestep, draws[0])
        got = agent.targets(online, target, transition, outputs, *draws[1:])
        after = agent.outputs(target, transition.next_timestep, draws[1])
        if settings.double:
            policies = outputs, agent.outputs(online, transition.next_timestep, draws[2])
        else:
            policies = agent.outputs(target, transition.timestep, draws[2]), after
        return got, after, *map(settings.value.mean, policies)

    got, after, q, next_q = compute(online, target, transition)
    return got, transition, after, q, next_q


def slow_log_policy(q: np.ndarray) -> np.ndarray:
    """Logarithms of softmax(q / temperature), of one state."""
    scaled = np.asarray(q, np.float64) / SOFT.temperature
    return scaled - np.log(np.sum(np.exp(scaled)))


def slow_targets(transition: Any, after: Any, q: Any, next_q: Any, n: int) -> np.ndarray:
    """Equation 4 of Vieillard et al. 2020 for sample n, for each output `[Z]`: a loop over a'."""
    bonus = SOFT.temperature * slow_log_policy(q[n])[int(transition.action[n])]
    total = np.zeros(after.shape[-1]) + float(transition.n_step_return[n])
    total += SOFT.weight * max(bonus, SOFT.clip)
    for action, log_policy in enumerate(slow_log_policy(next_q[n])):
        soft = np.asarray(after[n, action], np.float64) - SOFT.temperature * log_policy
        total += float(transition.bootstrap_discount[n]) * np.exp(log_policy) * soft
    return total


@pytest.mark.parametrize(
    ("name", "double"), [("iqn", True), slow("mean", False), slow("qr", False)]
)
def test_munchausen_targets_are_those_of_their_paper(name, double):
    (returns, bootstrap), transition, after, q, next_q = targets_of(
        agent_with(VALUES[name], double=double, munchausen=SOFT)
    )
    got = returns[:, None] + transition.bootstrap_discount[:, None] * bootstrap
    for n in range(16):
        expected = slow_targets(transition, after, q, next_q, n)
        np.testing.assert_allclose(got[n], expected, rtol=1e-4, atol=1e-5)
    log_policy = np.asarray(jax.nn.log_softmax(q / SOFT.temperature)) * SOFT.temperature
    assert (log_policy < SOFT.clip).any()
    assert (log_policy > SOFT.clip).any()


@pytest.mark.slow
def test_munchausen_targets_of_c51_are_a_mixture_over_the_next_actions():
    value = VALUES["c51"]
    (returns, bootstrap), transition, after, q, next_q = targets_of(
        agent_with(value, double=False, munchausen=SOFT)
    )
    got = np.asarray(jax.nn.softmax(bootstrap))
    for n in range(16):
        log_policy = slow_log_policy(next_q[n])
        atoms = np.exp(np.asarray(jax.nn.log_softmax(after[n]), np.float64))
        expected = sum(p * z for p, z in zip(np.exp(log_policy), atoms, strict=True))
        np.testing.assert_allclose(got[n], expected, rtol=1e-4, atol=1e-6)
        entropy = -SOFT.temperature * np.sum(np.exp(log_policy) * log_policy)
        bonus = SOFT.temperature * slow_log_policy(q[n])[int(transition.action[n])]
        total = float(transition.n_step_return[n]) + SOFT.weight * max(bonus, SOFT.clip)
        total += float(transition.bootstrap_discount[n]) * entropy
        np.testing.assert_allclose(returns[n], total, rtol=1e-4, atol=1e-5)


def test_without_a_reward_and_nearly_cold_they_are_those_of_q_learning():
    cold = Munchausen(temperature=1e-5, weight=0.0)
    soft, hard = (
        targets_of(agent_with(Mean(), munchausen=munchausen))[0]
        for munchausen in (cold, Munchausen())
    )
    close(soft, hard, atol=1e-3)


def test_forbidden_actions_have_no_part_in_soft_targets():
    mask = jnp.asarray([[True, False, True]])
    q = mask_logits({ACTION_MASK: mask}, jnp.asarray([[1.0, 9.0, 2.0]]))
    munchausen = Munchausen(temperature=0.03)
    policy, entropy = jax.jit(munchausen.policy)(q)
    assert policy[0, 1] == 0
    few_policy, few_entropy = jax.jit(munchausen.policy)(q[:, ::2])
    close((policy[:, ::2], entropy), (few_policy, few_entropy))
    close(munchausen.bonus(q, jnp.asarray([0])), jnp.asarray([-0.9]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "munchausen.temperature must be at least 0"),
        ({"weight": 1.5}, r"munchausen.weight must lie in \[0, 1\]"),
        ({"clip": 0.5}, r"munchausen.clip must lie in \[-inf, 0\]"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_ranges(agent_with(Mean(), munchausen=Munchausen(**settings)), "")


# --- implicit quantiles --------------------------------------------------------------------------


def test_probabilities_multiply_features_by_cosines():
    """Equation 4 of Dabney et al. 2018b, one row and one probability after another."""
    layer = QuantileEmbedding(5, 4, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    x, taus = rng.normal(size=(3, 4)).astype(np.float32), rng.uniform(size=(3, 2))
    got = layer(jnp.asarray(x), jnp.asarray(taus, jnp.float32))
    weight, bias = np.asarray(layer.layer.weight), np.asarray(layer.layer.bias)
    for n in range(3):
        for k in range(2):
            cosines = np.array([np.cos(np.pi * i * taus[n, k]) for i in range(5)])
            expected = x[n] * np.maximum(cosines @ weight + bias, 0.0)
            np.testing.assert_allclose(got[2 * n + k], expected, rtol=1e-4, atol=1e-5)


def test_each_quantile_is_that_of_its_probability_alone():
    """With the noise of its row, and of all heads together."""
    heads = {"advantage": Head(3, noisy=True, hidden=(6,), cosines=5)}
    heads["value"] = dataclasses.replace(heads["advantage"], size=1)
    network = TorsoNetwork(MLP((4,))).build(ArraySpec((2,)), heads)
    params = random_params(network, 0)
    observation = jax.random.normal(jax.random.key(1), (1, 2, 2))
    first, keys = jnp.zeros((1, 2), bool), jax.random.split(jax.random.key(2), (1, 2))
    taus = jax.random.uniform(jax.random.key(3), (1, 2, 4))
    apply = jax.jit(network.apply)
    together, _ = apply(params, (), observation, first, keys, taus)
    for name, head in heads.items():
        alone = [
            apply(params, (), observation, first, keys, taus[..., k : k + 1])[0][name]
            for k in range(4)
        ]
        got = together[name].reshape(1, 2, head.size, 4)
        close(got, jnp.stack(alone, axis=-1))
        assert np.abs(got[..., 0] - got[..., 1]).max() > 0.01


def test_probabilities_are_drawn_for_each_environment_sample_and_pass():
    value = ImplicitQuantiles(3, 4, 5)
    keys = jax.random.split(jax.random.key(0), 1000)
    acting = value_based.draws_of_acting(value, True, keys, True)
    learning = value_based.draws_of_learning(value, True, jax.random.key(1), 1000)
    assert acting.noise is not None
    drawn = [np.asarray(draws.taus) for draws in (acting, *learning)]
    assert [x.shape for x in drawn] == [(1000, 5), (1000, 3), (1000, 4), (1000, 5)]
    for taus in drawn:
        assert 0 <= taus.min() < 0.01 < 0.99 < taus.max() < 1
        assert len(np.unique(taus)) > 0.99 * taus.size
        np.testing.assert_allclose(taus.mean(0), 0.5, atol=0.05)
    correlations = np.corrcoef(np.concatenate(drawn, axis=1).T)
    assert np.abs(correlations - np.eye(17)).max() < 0.15
    evaluating = value_based.draws_of_acting(value, True, keys[:2], False)
    assert evaluating.noise is None
    np.testing.assert_allclose(evaluating.taus, np.tile([[0.1, 0.3, 0.5, 0.7, 0.9]], (2, 1)))


# --- the network ---------------------------------------------------------------------------------


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


def test_a_spectral_convolution_does_not_depend_on_the_scale_of_its_weights():
    layer = Convolution(2, 3, 3, 1, True, True, key=jax.random.key(0))
    plain = Convolution(2, 3, 3, 1, True, key=jax.random.key(0))
    larger = eqx.tree_at(lambda x: x.weight, layer, 5.0 * layer.weight)
    x = jax.random.normal(jax.random.key(1), (2, 5, 5, 2))
    y, y_of_plain, y_of_larger = jax.jit(lambda x: (layer(x), plain(x), larger(x)))(x)
    close(y, y_of_plain / np.sqrt(2))  # initial weights are orthogonal
    close(y, y_of_larger)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_several_devices_have_the_gradient_of_one(devices):
    """Each computes the same norms, as they depend on the weights alone."""
    torso = ResNet((4,), blocks=1, hidden=0, spectral_norm=True, pooled_size=2)
    network = TorsoNetwork(torso).build(ArraySpec((5, 6, 2)), {"y": Head(2, cosines=3)})
    params = network.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 5, 6, 2))
    taus = jax.random.uniform(jax.random.key(2), (8, 4))

    def loss(params: Any, x: Any, taus: Any) -> Any:
        first = jnp.zeros((1, x.shape[0]), bool)
        outputs, _ = network.apply(params, (), x[None], first, None, taus[None])
        return jnp.mean(outputs["y"] ** 2), ()

    def step(axis: str | None) -> Any:
        return lambda *args: global_grad(loss, *args, axis=axis)[0]

    specs = (REPLICATED, SHARDED, SHARDED)
    sharded = jax.shard_map(
        step(DATA),
        mesh=make_mesh(find_devices(devices)),
        in_specs=specs,
        out_specs=REPLICATED,
        check_vma=False,
    )
    one, many = (jax.jit(f)(params, x, taus) for f in (step(None), sharded))
    close(many, one)
    residual = one["shared"].layers[0][0][1]
    assert np.abs(residual.weight).max() > 1e-3


def test_an_image_that_is_smaller_than_its_pool_is_refused():
    torso = ResNet(channels=(4,), pooled_size=6)
    with pytest.raises(ConfigError, match=r"pooled_size is 6, but the last .* 5x5"):
        TorsoNetwork(torso).build(ArraySpec((10, 10, 4)), {"value": Head(1)})


# --- the recipes ---------------------------------------------------------------------------------


def test_beyond_the_rainbow_on_atari_is_that_of_its_paper():
    """Clark et al. 2024, in steps of four frames: 200 M frames of 64 games, an update a step."""
    experiment = recipes.find("atari_btr")
    agent, driver = experiment.agent, experiment.driver
    assert (experiment.frames, driver.num_envs) == (50_000_000, 64)
    assert driver.rollout_length == agent.replay.updates_per_rollout
    assert (agent.learning_rate, agent.optimizer) == (1e-4, Optimizer("adam", 1.953125e-5))
    assert (agent.discount, agent.n_step, agent.target_update_period) == (0.997, 3, 500)
    assert (agent.double, agent.dueling, agent.noisy, agent.noise_scale) == (False, True, True, 0.5)
    assert agent.munchausen == Munchausen(temperature=0.03, weight=0.9, clip=-1.0)
    assert agent.value == ImplicitQuantiles(8, 8, 8, cosines=64)
    replay = agent.replay
    assert (replay.capacity, replay.batch_size, replay.warmup) == (2**20, 256, 200_000)
    assert (replay.priority_exponent, replay.importance_exponent) == (0.2, 0.2)  # as in their code
    screens = ArraySpec((84, 84, 4), np.uint8, frame_stack=True)
    network = methods_of(agent.build(EnvironmentSpec("atari", screens, Discrete(6)))).network
    trunk = jax.eval_shape(network.init, jax.random.key(0))["shared"]
    stages, dense = trunk.layers
    assert [stage[0].weight.shape[-1] for stage in stages] == [32, 64, 64]
    assert [conv.spectral for conv in stages[0]] == [False, True, True, True, True]
    assert dense == ()
    assert trunk.embedding.layer.weight.shape == (64, 6 * 6 * 64)
    for stream, outputs in (("value", 1), ("advantage", 6)):
        scales = [layer.weight_scale.shape for layer in trunk.heads[stream].layers]
        assert scales == [(2304, 512), (512, outputs)]
