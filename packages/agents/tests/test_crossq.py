"""CrossQ, SimBaV2 and FlashSAC beside their papers' equations in float64, on several devices."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import BOXED, PRIORITIZED, REPLAY, drawn
from walk import begin, built, close, learn, methods_of, slow

from podracer.devices.mesh import DATA, REPLICATED, SHARDED, find_devices, make_mesh
from podracer.devices.reductions import global_grad
from podracer.errors import ConfigError
from podracer.networks import Head
from podracer.ops.action_values import Atoms
from podracer.ops.distributions import SquashedNormal
from podracer.replay import Replay
from podracer.schedules import Linear
from podracer.types import ArraySpec
from podracer_agents.batch_norm import WARMUP_BATCHES, BatchNorm
from podracer_agents.networks import NormalizedMLP
from podracer_agents.sac import crossq, flash_sac, simbav2
from podracer_agents.scaled_rewards import ScaledReplay, reward_scale, scaled
from podracer_agents.spherical import RMSNorm, UnitLinear, to_unit_norm
from podracer_testing.contract import check_contract
from podracer_testing.parity import check_parity

BATCH_NORM, SPHERICAL = {"batch_norm": True}, {"spherical": True}
VALUES = {"return_distribution": Atoms(-5.0, 5.0, 11), "learning_rate": 1e-3}
SETTINGS = {
    "crossq": crossq(
        network=NormalizedMLP((8,), "tanh", **BATCH_NORM),
        critic_network=NormalizedMLP((12,), "tanh", **BATCH_NORM),
        replay=PRIORITIZED,
        random_frames=0,
    ),
    "simbav2": simbav2(
        **VALUES,
        network=NormalizedMLP((8,), **SPHERICAL, residual_blocks=1, parts=2),
        critic_network=NormalizedMLP((12,), **SPHERICAL, residual_blocks=2),
        replay=REPLAY,
        random_frames=0,
    ),
    "flash_sac": flash_sac(
        **VALUES,
        network=NormalizedMLP((8,), **SPHERICAL, **BATCH_NORM, residual_blocks=1, parts=2),
        critic_network=NormalizedMLP((12,), **SPHERICAL, **BATCH_NORM, residual_blocks=2),
        replay=REPLAY,
        random_frames=0,
    ),
}


def agent_and_env(name: str, **fields: Any) -> tuple[Any, Any]:
    return built(dataclasses.replace(SETTINGS[name], **fields), BOXED), BOXED


MASK = np.repeat([1.0, 0.0, 1.0, 1.0], 8).astype(np.float32)
KEYS = jax.random.split(jax.random.key(5), len(MASK))


def replaced(layer: Any, **arrays: jax.Array) -> Any:
    """A layer with other arrays."""
    names = list(arrays)
    where = lambda x: [getattr(x, name) for name in names]  # noqa: E731
    return eqx.tree_at(where, layer, list(arrays.values()))


def scattered(tree: Any, seed: int = 0) -> Any:
    """A tree of parameters with running moments that lie apart from each other and the batch's."""
    rng = np.random.default_rng(seed)

    def change(layer: Any) -> Any:
        if not isinstance(layer, BatchNorm):
            return jnp.asarray(layer + 0.3 * rng.normal(size=layer.shape), jnp.float32)
        size = layer.mean.shape
        return replaced(
            layer,
            scale=jnp.asarray(rng.uniform(0.5, 2.0, size), jnp.float32),
            shift=jnp.asarray(rng.normal(size=size), jnp.float32),
            mean=jnp.asarray(rng.normal(size=size), jnp.float32),
            variance=jnp.asarray(rng.uniform(0.01, 2.0, size), jnp.float32),
        )

    return jax.tree.map(change, tree, is_leaf=lambda x: isinstance(x, BatchNorm))


def with_batches(tree: Any, batches: int) -> Any:
    def change(layer: Any) -> Any:
        is_norm = isinstance(layer, BatchNorm)
        return replaced(layer, batches=jnp.float32(batches)) if is_norm else layer

    return jax.tree.map(change, tree, is_leaf=lambda x: isinstance(x, BatchNorm))


def in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def batch_norm(
    layer: Any, x: np.ndarray, weights: np.ndarray | None, epsilon: float = 1e-3
) -> tuple[np.ndarray, Any]:
    """Ioffe 2017, algorithm 1, one feature after another; without weights as in acting.

    With another epsilon than CrossQ's it is batch normalization (Ioffe and Szegedy 2015).
    """
    y, means, variances = np.zeros_like(x), [], []
    for i, (mean, variance) in enumerate(zip(layer.mean, layer.variance, strict=True)):
        if weights is not None:
            counted = x[weights > 0, i]
            batch_mean, batch_variance = counted.mean(), counted.var()
            means.append(0.99 * mean + 0.01 * batch_mean)
            variances.append(0.99 * variance + 0.01 * batch_variance)
            r, d = 1.0, 0.0
            if layer.batches >= WARMUP_BATCHES and epsilon == 1e-3:
                r = np.clip(np.sqrt((batch_variance + 1e-3) / (variance + 1e-3)), 1 / 3, 3)
                d = np.clip((batch_mean - mean) / np.sqrt(variance + 1e-3), -5, 5)
            mean = batch_mean - d * np.sqrt(batch_variance) / r
            variance = batch_variance / r**2
        y[:, i] = (x[:, i] - mean) / np.sqrt(variance + epsilon) * layer.scale[i] + layer.shift[i]
    return y, (np.array(means), np.array(variances))


def crossq_network(params: Any, x: np.ndarray, weights: np.ndarray | None) -> tuple[Any, list[Any]]:
    """The outputs of a network with one hidden layer, and the running moments after it."""
    first, hidden, second = params.layers
    (head,) = next(iter(params.heads.values())).layers
    x, before = batch_norm(first, x, weights)
    x, behind = batch_norm(second, np.tanh(x @ hidden.weight + hidden.bias), weights)
    return x @ head.weight + head.bias, [before, behind]


def policy_in_numpy(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, log_scale = np.split(np.asarray(outputs, np.float32), 2, axis=-1)
    return SquashedNormal(jnp.asarray(mean), jnp.asarray(np.clip(log_scale, -5, 2))).sample(KEYS)


def running(tree: Any) -> list[Any]:
    is_norm = lambda x: isinstance(x, BatchNorm)  # noqa: E731
    layers = [x for x in jax.tree.leaves(tree, is_leaf=is_norm) if is_norm(x)]
    return [(layer.mean, layer.variance) for layer in layers]


@pytest.mark.parametrize("batches", [3, WARMUP_BATCHES])
def test_crossq_has_the_losses_of_its_paper(batches):
    """One joint batch, no targets; the policy by its own moments under critics as in acting."""
    agent, env = agent_and_env("crossq")
    shared, transition = drawn(agent, env)
    transition = dataclasses.replace(transition, mask=jnp.asarray(MASK))
    actor, critics = with_batches(scattered(shared.params), batches)
    state = dataclasses.replace(shared, params=shared.params._replace(actor=actor, critics=critics))
    agent, key = methods_of(agent), jax.random.key(5)
    policy, double = in_float64(actor.policy), in_float64(critics)
    obs, next_obs = (
        np.asarray(x.observation, np.float64)
        for x in (transition.timestep, transition.next_timestep)
    )

    acting, _ = crossq_network(policy, next_obs, None)
    next_action, log_prob = map(np.asarray, policy_in_numpy(acting))
    pairs = np.concatenate(
        [
            np.concatenate([np.asarray(transition.action), obs], axis=1),
            np.concatenate([next_action, next_obs], axis=1),
        ]
    )
    outputs = [crossq_network(critic, pairs, np.tile(MASK, 2)) for critic in double]
    q, next_q = np.split(np.stack([x[0][:, 0] for x in outputs]), 2, axis=1)
    temperature = np.exp(float(actor.log_temperature))
    target = np.asarray(transition.n_step_return) + np.asarray(transition.bootstrap_discount) * (
        next_q.min(axis=0) - temperature * log_prob
    )
    weights = np.asarray(transition.weight) * MASK / MASK.sum()
    expected = np.sum(weights * 0.5 * (target - q) ** 2)

    loss, (_, _, new_critics) = jax.jit(agent.critic_loss)(critics, state, transition, key)
    np.testing.assert_allclose(loss.value, expected, 1e-5)
    for got, (_, moments) in zip(new_critics, outputs, strict=True):
        close(running(got), moments, atol=1e-6)

    learning, moments = crossq_network(policy, obs, MASK)
    action, log_prob = map(np.asarray, policy_in_numpy(learning))
    pairs = np.concatenate([action, obs], axis=1)
    q = np.stack([crossq_network(critic, pairs, None)[0][:, 0] for critic in double])
    expected = np.sum(MASK * (temperature * log_prob - q.min(axis=0))) / MASK.sum()
    _, (metrics, new_actor) = jax.jit(agent.actor_loss)(actor, state, transition, key)
    np.testing.assert_allclose(metrics["actor_loss"].value, expected, 1e-5)
    close(running(new_actor), moments, atol=1e-6)


def test_running_moments_move_and_the_policy_waits():
    """Critics normalize each batch they learn, the policy every third; neither is a gradient's."""
    agent, env = agent_and_env("crossq")
    state, trajectory = begin(agent, env)
    counts = []
    for _ in range(4):
        state, _ = learn(agent, state, trajectory)
        actor, critics = state.shared.params
        counts.append(
            [
                {float(layer.batches) for layer in tree.layers[::2]}
                for tree in (actor.policy, *critics)
            ]
        )
    assert counts == [[{k}, {n}, {n}] for n, k in ((1, 0), (2, 0), (3, 1), (4, 1))]
    assert state.shared.target_params == ()
    timestep = trajectory.steps.timestep
    timestep = jax.tree.map(lambda x: x[0], timestep)

    def act(params):
        keys = jax.random.split(jax.random.key(0), 6)
        return agent.act(agent.actor_params(params), (), timestep, keys, False)[0]

    shifted = jax.tree.map(
        lambda x: replaced(x, mean=x.mean + 1.0) if isinstance(x, BatchNorm) else x,
        state,
        is_leaf=lambda x: isinstance(x, BatchNorm),
    )
    assert (np.asarray(act(state)) != np.asarray(act(shifted))).all()


def test_a_constant_feature_has_a_finite_gradient():
    layer = with_batches(BatchNorm(2), WARMUP_BATCHES)
    x = jnp.stack([jnp.full(4, 0.7), jnp.arange(4.0)], axis=1)
    gradient = jax.grad(lambda x: jnp.sum(layer.learn(x, jnp.ones(4), None)[0] ** 3))(x)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[:, 1]).max() > 0


def test_two_devices_normalize_the_whole_batch():
    """Gradients and running moments of the joint batch, parts of which have other masks."""
    agent, env = agent_and_env("crossq")
    shared, transition = drawn(agent, env)
    mask = jnp.asarray(np.repeat([1.0, 0.0, 1.0, 1.0], [16, 6, 4, 6]), jnp.float32)
    transition = dataclasses.replace(transition, mask=mask)
    critics = with_batches(scattered(shared.params.critics), WARMUP_BATCHES)
    next_action = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, transition.action.shape))
    methods = methods_of(agent)

    def loss(critics: Any, transition: Any, next_action: jax.Array) -> Any:
        outputs, next_outputs, new = methods.joint_outputs(transition, next_action, DATA, critics)
        return methods.networks.loss(critics, next_outputs, transition, outputs=outputs)[0], new

    def results(devices: int) -> Any:
        return jax.jit(
            jax.shard_map(
                partial(global_grad, loss, axis=DATA),
                mesh=make_mesh(find_devices(devices)),
                in_specs=(REPLICATED, SHARDED, SHARDED),
                out_specs=REPLICATED,
                check_vma=False,
            )
        )(critics, transition, next_action)

    one, two = results(1), results(2)
    close(two, one, atol=1e-5)
    assert max(np.abs(x).max() for x in jax.tree.leaves(one[0])) > 0.1


# --- SimBaV2 -------------------------------------------------------------------------------------


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def simbav2_network(params: Any, x: np.ndarray) -> np.ndarray:
    """Lee et al. 2025, section 4, with the scales and shares of its table of hyperparameters."""
    (layers,) = params.layers
    x = unit(np.concatenate([x, np.full((len(x), 1), 3.0)], axis=1))
    x = unit(layers.scale * (x @ layers.embedding.weight))
    width, blocks = x.shape[1], len(layers.blocks)
    for block in layers.blocks:
        hidden = np.maximum(block.scale * (x @ block.inner.weight), 0) + 1e-8
        target = unit(hidden @ block.outer.weight)
        share = block.share * np.sqrt(width) / (blocks + 1)
        x = unit((1 - share) * x + share * target)
    head = next(iter(params.heads.values()))
    outputs = [(x @ a.weight * scale) @ b.weight for a, scale, b in head.parts]
    return np.concatenate(outputs, axis=1) + head.bias


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def sampled(outputs: np.ndarray) -> list[np.ndarray]:
    """Actions and their log-probabilities, of a policy whose scales are squashed."""
    mean, log_scale = np.split(outputs.astype(np.float32), 2, axis=-1)
    log_scale = -10 + 6 * (1 + np.tanh(log_scale))
    return list(map(np.asarray, SquashedNormal(*map(jnp.asarray, (mean, log_scale))).sample(KEYS)))


SUPPORT = np.linspace(-5, 5, 11)


def cross_entropies(
    following: Any, predicted: Any, transition: Any, penalty: np.ndarray
) -> np.ndarray:
    """The losses of log-probabilities `[critics][N, 11]`, towards those of the smaller value."""
    values = np.stack([np.exp(x) @ SUPPORT for x in following])
    losses = np.zeros(len(MASK))
    for n in range(len(MASK)):
        probabilities = np.exp(following[int(values[:, n].argmin())][n])
        target = np.zeros(11)
        for atom, probability in zip(SUPPORT, probabilities, strict=True):
            value = float(transition.n_step_return[n]) + float(transition.bootstrap_discount[n]) * (
                atom - penalty[n]
            )
            place = np.clip(value, -5, 5) + 5
            below = int(place)
            target[below] += probability * (below + 1 - place)
            target[min(below + 1, 10)] += probability * (place - below)
        losses[n] = -sum(target @ x[n] for x in predicted)
    return losses


def test_simbav2_has_the_losses_of_its_paper():
    agent, env = agent_and_env("simbav2")
    shared, transition = drawn(agent, env)
    params = scattered(shared.params)
    state = dataclasses.replace(shared, params=params)
    agent, key = methods_of(agent), jax.random.key(5)
    policy, targets, critics = in_float64((params.actor.policy, shared.target_params, params[1]))
    obs, next_obs = (
        np.asarray(x.observation, np.float64)
        for x in (transition.timestep, transition.next_timestep)
    )
    next_action, log_prob = sampled(simbav2_network(policy, next_obs))
    temperature = np.exp(float(params.actor.log_temperature))

    def log_probabilities(critic: Any, action: np.ndarray, obs: np.ndarray) -> np.ndarray:
        return log_softmax(simbav2_network(critic, np.concatenate([action, obs], axis=1)))

    following = [log_probabilities(critic, next_action, next_obs) for critic in targets]
    predicted = [log_probabilities(critic, transition.action, obs) for critic in critics]
    losses = cross_entropies(following, predicted, transition, temperature * log_prob)
    mask, weight = np.asarray(transition.mask), np.asarray(transition.weight)
    loss, _ = jax.jit(agent.critic_loss)(params.critics, state, transition, key)
    np.testing.assert_allclose(loss.value, np.sum(weight * mask * losses) / mask.sum(), 1e-5)

    action, log_prob = sampled(simbav2_network(policy, obs))
    q = np.stack([np.exp(log_probabilities(critic, action, obs)) @ SUPPORT for critic in critics])
    expected = np.sum(mask * (temperature * log_prob - q.min(axis=0))) / mask.sum()
    _, (metrics, _) = jax.jit(agent.actor_loss)(params.actor, state, transition, key)
    np.testing.assert_allclose(metrics["actor_loss"].value, expected, 1e-5, 1e-6)


@pytest.mark.slow
def test_rewards_are_divided_by_the_deviation_or_the_largest_of_returns():
    """The discounted sums of an environment's rewards, across rollouts, and none past an end."""
    agent, env = agent_and_env("simbav2", discount=0.9)
    state, trajectory = begin(agent, env)
    new, _ = learn(agent, state, trajectory)
    new, _ = learn(agent, new, trajectory)
    following, valid = trajectory.next_timesteps(), np.asarray(trajectory.valid())
    reward, ends = (
        np.asarray(following.reward),
        np.asarray(following.last | (following.discount == 0)),
    )
    goes_on = np.asarray(trajectory.steps.timestep.discount)  # not where its first step began anew
    sums, total = [], np.zeros(reward.shape[1])
    for _ in range(2):
        for t in range(len(reward)):
            total = reward[t] + 0.9 * goes_on[t] * total
            sums += list(total[valid[t]])
            total = np.where(ends[t], 0.0, total)
    returns = new.shared.returns
    np.testing.assert_allclose(returns.moments.variance, np.var(sums), 1e-5)
    np.testing.assert_allclose(returns.largest, np.abs(sums).max(), 1e-6)
    assert isinstance(new.local, ScaledReplay)
    np.testing.assert_allclose(new.local.reward_sums, total, 1e-5, 1e-6)
    np.testing.assert_allclose(reward_scale(returns, 5.0), np.std(sums), 1e-5)
    np.testing.assert_allclose(reward_scale(returns, 0.5), np.abs(sums).max() / 0.5, 1e-6)

    methods = methods_of(agent)
    sample = methods.learner.buffer.sample(new.local.replay, jax.random.key(1), 8)
    raw = methods.learner.transition(sample, new.shared.obs_moments)
    by_deviation = scaled(raw, returns, 5.0)
    np.testing.assert_allclose(
        by_deviation.n_step_return * np.std(sums), raw.n_step_return, 1e-4, 1e-6
    )


@pytest.mark.parametrize("options", [BATCH_NORM, SPHERICAL])
def test_bytes_that_are_no_pixels_are_taken_as_they_are(options):
    x = np.array([[[1, 0, 2], [0, 3, 1]]], np.uint8)
    builder, first, results = NormalizedMLP((8,), **options), jnp.zeros((1, 2), bool), []
    for numbers in (x, x.astype(np.float32)):
        network = builder.build(ArraySpec((3,), numbers.dtype), {"y": Head(2)})
        params, observation = network.init(jax.random.key(0)), jnp.asarray(numbers)
        results.append(network.apply(params, (), observation, first)[0]["y"][0])
        if network.apply_batch is not None:
            batch = network.apply_batch(params, observation[0], jnp.ones(2), None)
            results[-1] = (results[-1], batch)
    close(*results)


def test_parts_that_do_not_divide_the_outputs_are_refused():
    """With simbav2's policy network as that of its critics, whose atoms are 101."""
    with pytest.raises(ConfigError, match="parts is 2, but must divide the outputs: 101 of q"):
        simbav2(critic_network=None).build(BOXED.spec)


# --- FlashSAC ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_return_to_the_unit_sphere():
    """After each step, also of another agent's optimizer; targets are averages and lie inside."""
    agent, env = agent_and_env("simbav2", learning_rate=0.1, target_update_rate=0.5)
    state, trajectory = begin(agent, env)
    new, _ = learn(agent, state, trajectory)

    def norms(tree: Any) -> list[np.ndarray]:
        is_unit = lambda x: isinstance(x, UnitLinear)  # noqa: E731
        layers = [x for x in jax.tree.leaves(tree, is_leaf=is_unit) if is_unit(x)]
        assert len(layers) > 8
        return [np.linalg.norm(layer.weight, axis=0) for layer in layers]

    for norm in (*norms(state.shared.params), *norms(new.shared.params)):
        np.testing.assert_allclose(norm, 1.0, 1e-5)
    assert any((norm < 0.999).any() for norm in norms(new.shared.target_params))


def flash_network(params: Any, x: np.ndarray, weights: np.ndarray | None) -> tuple[Any, list[Any]]:
    """Kim et al. 2026, figure 2: outputs, and running moments; without weights as in acting."""
    norm, embedding, *blocks, last = params.layers
    x, moments = batch_norm(norm, x, weights, 1e-5)
    x, moments = x @ embedding.weight, [moments]
    for block in blocks:
        y, inner = batch_norm(block.inner_norm, x @ block.inner.weight, weights, 1e-5)
        y = np.maximum(y, 0) @ block.outer.weight
        y, outer = batch_norm(block.outer_norm, y, weights, 1e-5)
        x, moments = x + np.maximum(y, 0), [*moments, inner, outer]
    x = last.scale * x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6)
    head = next(iter(params.heads.values()))
    return np.concatenate([x @ part.weight for (part,) in head.parts], axis=1) + head.bias, moments


def test_flash_sac_has_the_losses_of_its_paper():
    """Targets of a joint batch in target critics; the policy in a joint batch of observations."""
    agent, env = agent_and_env("flash_sac")
    shared, transition = drawn(agent, env)
    transition = dataclasses.replace(transition, mask=jnp.asarray(MASK))
    params = with_batches(scattered(shared.params), WARMUP_BATCHES)
    targets = scattered(shared.target_params, seed=1)
    state = dataclasses.replace(shared, params=params, target_params=targets)
    agent, key = methods_of(agent), jax.random.key(5)
    policy, targets, critics = in_float64((params.actor.policy, targets, params.critics))
    obs, next_obs = (
        np.asarray(x.observation, np.float64)
        for x in (transition.timestep, transition.next_timestep)
    )
    temperature, both = np.exp(float(params.actor.log_temperature)), np.tile(MASK, 2)
    next_action, log_prob = sampled(flash_network(policy, next_obs, None)[0])
    pairs = np.concatenate(
        [
            np.concatenate([np.asarray(transition.action), obs], axis=1),
            np.concatenate([next_action, next_obs], axis=1),
        ]
    )
    outputs = [flash_network(critic, pairs, both) for critic in critics]
    predicted = [log_softmax(x)[: len(MASK)] for x, _ in outputs]
    following = [log_softmax(flash_network(x, pairs, both)[0])[len(MASK) :] for x in targets]
    losses = cross_entropies(following, predicted, transition, temperature * log_prob)
    weights = np.asarray(transition.weight) * MASK / MASK.sum()
    loss, (_, _, new_critics) = jax.jit(agent.critic_loss)(params.critics, state, transition, key)
    np.testing.assert_allclose(loss.value, np.sum(weights * losses), 1e-5)
    for got, (_, moments) in zip(new_critics, outputs, strict=True):
        close(running(got), moments, atol=1e-6)

    learning, moments = flash_network(policy, np.concatenate([obs, next_obs]), both)
    action, log_prob = sampled(learning[: len(MASK)])
    pairs = np.concatenate([action, obs], axis=1)
    q = np.stack([np.exp(log_softmax(flash_network(x, pairs, None)[0])) @ SUPPORT for x in critics])
    expected = np.sum(MASK * (temperature * log_prob - q.min(axis=0))) / MASK.sum()
    _, (metrics, new_actor) = jax.jit(agent.actor_loss)(params.actor, state, transition, key)
    np.testing.assert_allclose(metrics["actor_loss"].value, expected, 1e-5)
    close(running(new_actor), moments, atol=1e-6)


def test_weights_and_scales_of_flash_sac_return_to_their_norms():
    agent, env = agent_and_env("flash_sac")
    params = to_unit_norm(scattered(drawn(agent, env)[0].params))
    kinds = (UnitLinear, BatchNorm, RMSNorm)
    is_layer = lambda x: isinstance(x, kinds)  # noqa: E731
    layers = [x for x in jax.tree.leaves(params, is_leaf=is_layer) if is_layer(x)]
    assert {type(layer) for layer in layers} == set(kinds)
    for layer in layers:
        if isinstance(layer, UnitLinear):
            np.testing.assert_allclose(np.linalg.norm(layer.weight, axis=0), 1.0, 1e-5)
            continue
        vectors = [layer.scale, *([layer.shift] if isinstance(layer, BatchNorm) else [])]
        square = sum(np.sum(np.square(x)) for x in vectors)
        np.testing.assert_allclose(square, layer.scale.size, 1e-5)


# --- what every agent must do ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["crossq", slow("simbav2"), slow("flash_sac")])
def test_they_keep_the_contract(name):
    check_contract(dataclasses.replace(SETTINGS[name], policy_period=1), BOXED)


@pytest.mark.parametrize(
    ("name", "learners", "rtol"),
    [
        ("crossq", 1, 1e-5),
        slow("crossq", 2, 1e-5),
        slow("simbav2", 1, 0.0),
        slow("simbav2", 2, 1e-3),
    ],
)
def test_lock_step_equals_anakin(name, learners, rtol):
    """But for rounding where XLA compiles the two programs otherwise (docs/numerics.md)."""
    replay = Replay(16 * 40, batch_size=16, updates_per_rollout=2, warmup=16 * 16)
    rate = Linear(1e-4, 5e-5, 2000.0) if name == "simbav2" else 1e-3
    fields = {"replay": replay, "random_frames": 400, "learning_rate": rate}
    check_parity(dataclasses.replace(SETTINGS[name], **fields), "pendulum", learners, rtol=rtol)
