"""Gradients through updates: exact, on one device and on several; and what STACX makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from walk import (
    WALK,
    B,
    T,
    begin,
    built,
    close,
    doubled,
    fresh,
    gradient,
    learn,
    meta_gradient,
    methods_of,
    network,
    trained,
)

from podracer.agents.common import actor_critic
from podracer.agents.common.meta import clip_by_global_norm, meta_grad
from podracer.agents.common.optimizers import CountedState, Optimizer
from podracer.agents.impala import Impala
from podracer.agents.stacx import Stacx
from podracer.networks import MLP, TorsoNetwork
from podracer.types import LearnerState, Trajectory

LINEAR = TorsoNetwork(MLP(()))


# --- the gradient --------------------------------------------------------------------------------


def towards(rate: jax.Array, x: jax.Array, aim: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step down half the squared distance to an aim."""
    return x - rate * (x - aim), x


def test_two_updates_by_hand():
    x, (a, b), rate, goal = 0.5, (2.0, -1.0), 0.3, 1.5
    one = x - rate * (x - a)
    two = one - rate * (one - b)
    slope = (1 - rate) * -(x - a) - (one - b)

    def objective(rate: jax.Array, x: jax.Array, aux: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 0.5 * (x - goal) ** 2 + rate, aux

    for recompute in (False, True):
        grad, (learner, inputs) = meta_grad(
            towards,
            objective,
            jnp.float32(rate),
            jnp.float32(x),
            jnp.array([a, b]),
            recompute=recompute,
        )
        np.testing.assert_allclose(learner, two, rtol=1e-6)
        np.testing.assert_allclose(inputs, [x, one], rtol=1e-6)
        np.testing.assert_allclose(grad, (two - goal) * slope + 1.0, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_through_three_steps_of_adam_is_that_of_finite_differences(recompute):
    """Of a network that is regressed on targets which the metaparameters bend."""
    optimizer = optax.chain(clip_by_global_norm(0.5), optax.adam(0.1, eps_root=1e-8))
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.random.normal(keys[0], (4, 2))
    batches, meta = jax.random.normal(keys[1], (3, 8, 4)), jax.random.normal(keys[2], (2,))

    def update(meta: jax.Array, learner: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(batch @ params) - jnp.sin(meta)[None]) ** 2)

        value, grads = jax.value_and_grad(loss)(learner[0])
        updates, state = optimizer.update(grads, learner[1])
        return (learner[0] + updates, state), value

    def objective(meta: jax.Array, learner: Any, losses: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = jnp.sum(jnp.tanh(learner[0]) ** 3) + jnp.sum(losses)
        return value, value

    @jax.jit
    def differentiate(meta: jax.Array) -> Any:
        learner = (params, optimizer.init(params))
        return meta_grad(update, objective, meta, learner, batches, recompute=recompute)

    grad, (_, value) = differentiate(meta)
    assert np.isfinite(value)
    assert np.abs(grad).min() > 0.01
    for i, step in enumerate(1e-2 * np.eye(2, dtype=np.float32)):
        difference = differentiate(meta + step)[1][1] - differentiate(meta - step)[1][1]
        np.testing.assert_allclose(grad[i], difference / 2e-2, rtol=0.01)


def test_clipping_is_that_of_optax_and_has_a_derivative_at_zero():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    for limit in (1.0, 5.5):
        clip, theirs = clip_by_global_norm(limit), optax.clip_by_global_norm(limit)
        state = theirs.init(grads)
        close(clip.update(grads, clip.init(grads))[0], theirs.update(grads, state)[0])
    slope = jax.jacobian(lambda g: clip.update(g, clip.init(g))[0])(jnp.zeros(2))
    np.testing.assert_array_equal(slope, np.eye(2))


# --- STACX ---------------------------------------------------------------------------------------


def make(**fields: Any) -> Stacx:
    defaults = {
        "network": network(),
        "learning_rate": 0.01,
        "trace_lambda": 0.95,
        "optimizer": Optimizer(),
        "max_gradient_norm": 40.0,
    }
    return Stacx(**defaults | fields)


@pytest.mark.slow
@pytest.mark.parametrize("torso", [LINEAR, network()], ids=["linear", "tanh"])
def test_the_metaparameters_follow_the_outer_loss(torso):
    """Their gradient is that of IMPALA's loss, and of a divergence, at the new parameters, times
    how these move with each of them: by finite differences, where what was learned from is of
    another policy and the inner gradient is clipped."""
    limits = {"clip_rho": 0.9, "clip_c": 0.8, "kl_cost": 3.0, "max_gradient_norm": 0.5}
    settings = make(network=torso, num_heads=2, **limits)
    agent = built(settings)
    state, trajectory = trained(agent, 5)
    old = trajectory.steps.extras["log_prob"] + 0.4 * jnp.sin(jnp.arange(T * B)).reshape(T, B)
    extras = {**trajectory.steps.extras, "log_prob": old}
    steps = dataclasses.replace(trajectory.steps, extras=extras)
    trajectory = dataclasses.replace(trajectory, steps=steps)

    with jax.enable_x64(True):  # finite differences lose half of all digits
        state, trajectory = jax.tree.map(doubled, (state, trajectory))
        new_state, metrics = learn(agent, state, trajectory)
        assert metrics["gradient_norm"] > 0.5
        outer = outer_gradient(settings, state.shared.params, new_state.shared.params, trajectory)
        meta, unravel = ravel_pytree(state.shared.metaparams)

        def along_outer(meta: jax.Array) -> float:
            changed = LearnerState(dataclasses.replace(state.shared, metaparams=unravel(meta)))
            params = main_head(learn(agent, changed, trajectory)[0].shared.params)
            return float(jnp.vdot(ravel_pytree(params)[0], ravel_pytree(outer)[0]))

        steps = 1e-4 * np.eye(meta.size)
        expected = [(along_outer(meta + s) - along_outer(meta - s)) / 2e-4 for s in steps]
        got = ravel_pytree(meta_gradient(new_state))[0]
        assert np.abs(got).min() > 1e-8
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-9)


def main_head(params: Any) -> Any:
    """Of a network with several pairs of heads, what one with a single pair has."""
    heads = params["shared"].heads
    return eqx.tree_at(
        lambda p: p["shared"].heads, params, {name: heads[name] for name in ("policy", "value")}
    )


def outer_gradient(
    settings: Stacx, old_params: Any, new_params: Any, trajectory: Trajectory
) -> Any:
    """The gradient of IMPALA's loss plus a divergence, at the parameters `next_timesteps`."""
    names = (
        "discount",
        "trace_lambda",
        "clip_rho",
        "clip_c",
        "entropy_cost",
        "optimizer",
        "network",
    )
    chosen = {name: getattr(settings, name) for name in names}
    impala = built(Impala(**chosen, max_gradient_norm=1e9))
    fresh_state = jax.tree.map(doubled, fresh(impala)).shared
    impala_state = LearnerState(dataclasses.replace(fresh_state, params=main_head(new_params)))
    net = actor_critic.build_network(settings.network, WALK.spec)
    timestep, valid = trajectory.steps.timestep, trajectory.valid()

    def divergence(params: Any) -> jax.Array:
        old, new = (
            jax.nn.log_softmax(net.apply(x, (), timestep.observation, timestep.first)[0]["policy"])
            for x in (main_head(old_params), params)
        )
        return jnp.sum(jnp.exp(old) * (old - new), where=valid[..., None]) / valid.size

    one = gradient(learn(impala, impala_state, trajectory)[0])  # a mean over valid steps
    two = jax.jit(jax.grad(divergence))(main_head(new_params))
    share = jnp.mean(valid)
    return jax.tree.map(lambda a, b: share * a + settings.kl_cost * b, one, two)


@pytest.mark.slow
def test_with_one_head_it_begins_as_impala():
    """The metaparameters begin at the objective's own settings: same loss, same gradient, but that
    STACX divides by all steps."""
    settings = {
        "trace_lambda": 0.9,
        "entropy_cost": 0.5,
        "value_cost": 0.7,
        "max_gradient_norm": 1e9,
        "optimizer": Optimizer(),
    }
    agent = built(make(num_heads=1, meta_learning_rate=0.0, **settings))
    impala = built(Impala(network=network(), learning_rate=0.01, **settings))
    state, trajectory = begin(agent)
    impala_state = LearnerState(
        CountedState(state.shared.params, state.shared.optimizer_state, state.shared.frames)
    )
    new_state, metrics = learn(agent, state, trajectory)
    expected, expected_metrics = learn(impala, impala_state, trajectory)
    share = jnp.mean(trajectory.valid())
    close(gradient(new_state), jax.tree.map(lambda x: share * x, gradient(expected)), atol=1e-6)
    close(metrics["gradient_norm"], share * expected_metrics.pop("gradient_norm"))
    close(new_state.shared.params, expected.shared.params, atol=1e-5)
    close({name: metrics[name] for name in expected_metrics}, expected_metrics, atol=1e-6)
    close(new_state.shared.metaparams, state.shared.metaparams)
    close(
        [metrics[f"meta_{n}"] for n in ("discount", "trace_lambda", "value_cost")], [0.99, 0.9, 0.7]
    )


def test_metaparameters_move_and_stay_within_their_bounds():
    agent = built(make(meta_learning_rate=0.5))
    _, trajectory = begin(agent)
    state, first = learn(agent, fresh(agent), trajectory)
    bounds = {"policy_cost": 2.0, "value_cost": 1.0, "entropy_cost": 0.02}
    names = [name for name in first if name.startswith("meta_") and "gradient" not in name]
    assert len(names) == 7 * 3
    for update in range(20):
        state, metrics = learn(agent, state, trajectory)
        for name in names:
            bound = bounds.get(name.removeprefix("meta_").rstrip("_12"), 1.0)
            assert 0 <= metrics[name] <= bound
            # The trajectory was the first main policy's own: of its clips nothing leaked.
            unchanged = update == 0 and name in ("meta_alpha_rho", "meta_alpha_c")
            assert (metrics[name] == first[name]) == unchanged, name


def test_the_outer_loss_truncates_a_ratio_that_overflows():
    """Of its truncations nothing leaks: 0 times infinity would be no number."""
    agent = built(make())
    state, trajectory = begin(agent)
    extras = trajectory.steps.extras
    unlikely = {**extras, "log_prob": extras["log_prob"] - 100.0}
    steps = dataclasses.replace(trajectory.steps, extras=unlikely)
    trajectory = dataclasses.replace(trajectory, steps=steps)
    stacx, learner = methods_of(agent), state.shared
    policy = jax.tree.map(lambda x: x[:, :1], stacx.unroll(learner.params, trajectory)[0])
    aux = jax.tree.map(lambda x: x[None], (policy, {}))
    loss, _ = stacx.outer_loss(trajectory, learner.metaparams, learner, aux)
    assert jnp.isfinite(loss)
