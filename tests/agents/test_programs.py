"""Updates of agents in programs of Anakin: on any number of devices, and fused."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from on_policy import ON_POLICY, blueprint, learner, small
from programs import request
from walk import (
    BOX,
    WALK,
    B,
    T,
    Walk,
    advance,
    built,
    close,
    enter,
    fresh,
    gradient,
    slow,
    values_of,
)

from podracer.devices.mesh import find_devices, make_mesh
from podracer.devices.reductions import global_grad
from podracer.drivers.anakin import AnakinConfig, make_chunk
from podracer.drivers.state import TrainState, abstract_state, make_init
from podracer.environment import auto_reset
from podracer.networks import MLP, TorsoNetwork
from podracer.rollout import ActorState, rollout
from podracer.schedules import Linear
from podracer.types import Trajectory


def case(name: str, env: Any = WALK, **fields: Any) -> tuple[Any, Any, AnakinConfig]:
    return blueprint(small(name, **fields), env), env, AnakinConfig(16, T, 1)


CASES = {
    "a2c": case("a2c"),
    "impala": case("impala", auto_reset(Walk(BOX))),
    "pqn": case("pqn", num_epochs=1, num_minibatches=1),
    "q_lambda": case("q_lambda"),
    "stacx": case("stacx", auto_reset(Walk(BOX))),
    "ppo": case(
        "ppo",
        auto_reset(Walk(BOX)),
        num_epochs=1,
        num_minibatches=1,
        normalize_observations=True,
        normalize_rewards=True,
    ),
}


@functools.cache
def first_state(name: str) -> TrainState:
    agent, env, config = CASES[name]
    return make_init(agent, env, make_mesh(find_devices(1)), config)[1](jax.random.key(0))


@functools.cache
def one_update(name: str, devices: int) -> Any:
    """The learner's state and the metrics after one update on the same 16 environments."""
    agent, env, config = CASES[name]
    mesh = make_mesh(find_devices(devices))
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(agent, env, mesh, config))
    state = jax.device_put(jax.tree.map(jnp.copy, first_state(name)), shardings)
    chunk = make_chunk(env, mesh, config)
    state, metrics = chunk(agent, state, request(devices))
    return jax.device_get((state.learner, metrics["mean"]))


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        slow(name, devices)
        for name in ("a2c", "impala", "stacx", "q_lambda", "ppo", "pqn")
        for devices in (2, 4, 8)
    ],
)
def test_shards_learn_what_one_device_learns(name, devices):
    """The same run key: D shards of B environments against one of D x B."""
    (many, many_metrics), (one, one_metrics) = one_update(name, devices), one_update(name, 1)
    close(gradient(many), gradient(one), atol=2e-6)
    close(many_metrics, one_metrics, atol=1e-5)
    learners = [dataclasses.replace(s.shared, optimizer_state=()) for s in (many, one)]
    close(*learners, atol=1e-5)
    close(many.local, one.local)


def gradients(agent: Any, reuse: bool, length: int, params: Any, actor: ActorState) -> Any:
    """Through the rollout and its forward pass, or by a second one over its trajectory."""

    def collect(params: Any) -> Trajectory:
        keys = jax.random.split(jax.random.key(2), (2, length, B))
        return rollout(agent, WALK, params, actor, *keys)[1]

    def fused(params: Any) -> Any:
        return agent.learn.loss(params, state, collect(params), True)

    state = fresh(agent)
    if reuse:
        grads, metrics = global_grad(fused, params, axis=None)
    else:
        inputs = (params, state, collect(params), False)
        grads, metrics = global_grad(agent.learn.loss, *inputs, axis=None)
    return grads, values_of(metrics)


FUSED = pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("a2c", "none"),
        ("q_lambda", "none"),
        slow("a2c", "gru"),
        slow("a2c", "lstm"),
        slow("q_lambda", "gru"),
        slow("q_lambda", "lstm"),
    ],
)


@FUSED
def test_the_gradient_through_the_rollout_is_that_of_a_second_pass(name, memory):
    """From within episodes and across their ends."""
    agent = built(learner(name, memory))
    params = agent.actor_params(fresh(agent))
    actor, _ = advance(agent, WALK, params, enter(agent), 1)
    both_forms = jax.jit(
        lambda *args: [gradients(agent, reuse, T, *args) for reuse in (True, False)]
    )
    fused, two_pass = both_forms(params, actor)
    close(fused, two_pass, atol=2e-6)
    assert optax.tree.norm(fused[0]) > 0.01


def test_the_fused_program_learns_what_the_other_learns():
    agent, env, config = CASES["q_lambda"]
    fused = dataclasses.replace(config, fused=True)
    chunk = make_chunk(env, make_mesh(find_devices(1)), fused)
    state = jax.tree.map(jnp.copy, first_state("q_lambda"))
    state, metrics = chunk(agent, state, request(1))
    two_pass, expected = one_update("q_lambda", 1)
    close(gradient(state.learner), gradient(two_pass), atol=2e-6)
    close(metrics["mean"], expected, atol=1e-5)


def test_a_schedule_in_the_fused_program():
    most = 2 * 16 * T
    agent, env, config = case("a2c", entropy_cost=Linear(0.5, 0.0, frames=most))
    mesh = make_mesh(find_devices(1))
    state = make_init(agent, env, mesh, config)[1](jax.random.key(0))
    chunk = make_chunk(env, mesh, dataclasses.replace(config, fused=True))
    for _ in range(4):
        cost = 0.5 * (1 - min(1.0, int(state.learner.shared.frames) / most))
        state, metrics = chunk(agent, state, request(1))
        mean = values_of(metrics["mean"])
        parts = mean["policy_loss"] + agent.settings.value_cost * mean["value_loss"]
        close(mean["loss"], parts - cost * mean["entropy"])
    assert cost == 0


@pytest.mark.parametrize(("name", "memory"), [("a2c", "none"), slow("q_lambda", "lstm")])
def test_the_fused_update_computes_less(name, memory, monkeypatch):
    """Without loops, of which XLA counts one turn only."""
    monkeypatch.setattr(jax.lax, "scan", partial(jax.lax.scan, unroll=True))
    wide = TorsoNetwork(MLP((64,)), memory=memory, memory_size=32)
    agent = built(ON_POLICY[name](network=wide))
    params = jax.eval_shape(lambda: agent.actor_params(fresh(agent)))
    actor = jax.eval_shape(lambda: enter(agent))

    def flops(reuse: bool) -> float:
        lowered = jax.jit(partial(gradients, agent, reuse, 1)).lower(params, actor)
        return lowered.compile().cost_analysis()["flops"]

    assert flops(True) < 0.9 * flops(False)
