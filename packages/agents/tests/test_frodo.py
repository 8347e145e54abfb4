"""FRODO: what its learned targets read, its gradient through the inner updates, and shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import RECURRENT, SMALL
from jax.flatten_util import ravel_pytree
from walk import (
    B,
    T,
    begin,
    built,
    close,
    doubled,
    learn,
    meta_gradient,
    methods_of,
    network,
    slow,
    trained,
    with_rewards,
)

from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.impala import Impala
from podracer.types import LearnerState, Trajectory
from podracer_agents.frodo import Frodo, split_environments
from podracer_testing.contract import check_greedy
from podracer_testing.parity import check_parity
from podracer_testing.reset_steps import check_reset_steps


def make(**fields: Any) -> Frodo:
    defaults = {
        "network": network(),
        "learning_rate": 0.01,
        "inner_updates": 2,
        "units": 4,
        "optimizer": Optimizer(),
        "max_gradient_norm": 40.0,
    }
    return Frodo(**defaults | fields)


AGENT = built(make())
METHODS = methods_of(AGENT)


def targets(state: LearnerState, trajectory: Trajectory) -> jax.Array:
    learner = state.shared
    log_prob, _, values = METHODS.outputs(learner.params, trajectory)
    return METHODS.targets(learner.metaparams, log_prob, values, trajectory)


def test_a_target_is_of_what_follows_in_the_same_episode():
    state, trajectory = begin(AGENT)
    before = np.asarray(targets(state, trajectory))
    ends = np.asarray(
        (trajectory.next_timesteps().discount == 0) | trajectory.next_timesteps().last
    )
    for t in range(T):
        other = with_rewards(trajectory, lambda reward, t=t: reward.at[t + 1].add(1.0))
        changed = np.asarray(targets(state, other)) != before
        for b in range(B):
            # The reward after step t is an input of all steps of its episode up to t.
            begins = max((s + 1 for s in range(t) if ends[s, b]), default=0)
            expected = np.zeros(T, bool)
            expected[begins : t + 1] = True
            valid = np.asarray(trajectory.valid())[:, b]
            np.testing.assert_array_equal(changed[valid, b], expected[valid])


def test_inconsistency_by_hand():
    _, trajectory = begin(AGENT)
    after, valid = trajectory.next_timesteps(), np.asarray(trajectory.valid())
    targets = np.random.default_rng(0).normal(size=(T, B)).astype(np.float32)
    total, count = 0.0, 0
    for t in range(T - 1):
        for b in range(B):
            is_terminal = after.discount[t, b] == 0
            if valid[t, b] and (is_terminal or valid[t + 1, b]):
                later = after.reward[t, b] + (0 if is_terminal else 0.99 * targets[t + 1, b])
                total, count = total + 0.5 * (later - targets[t, b]) ** 2, count + 1
    mean = METHODS.inconsistency(jnp.asarray(targets), trajectory)
    close((mean.value, mean.total), (total / count, total / ((T - 1) * B)))

    steps = jax.tree.map(lambda x: x[:1], trajectory.steps)  # no target of one step has a later one
    short = dataclasses.replace(trajectory, steps=steps)
    assert METHODS.inconsistency(jnp.asarray(targets[:1]), short).value == 0.0


def test_each_environment_is_held_out_in_turn():
    _, trajectory = begin(AGENT)
    number = jnp.broadcast_to(jnp.arange(B), (T, B))
    trajectory = dataclasses.replace(
        trajectory, steps=dataclasses.replace(trajectory.steps, action=number)
    )
    held_out = [
        split_environments(trajectory, 3, jnp.uint32(shift)).steps.action[-1, 0]
        for shift in range(3)
    ]
    assert sorted(np.concatenate(held_out).tolist()) == list(range(B))


def vtrace_loss(settings: Frodo, model: ActorCritic, *arguments: Any) -> Any:
    """IMPALA's loss, with the settings of the outer one."""
    names = ("discount", "value_cost", "entropy_cost")
    return Impala(**{name: getattr(settings, name) for name in names}).loss(model, *arguments)


@pytest.mark.slow
def test_the_metaparameters_follow_the_outer_loss():
    """Its gradient is that of V-trace's loss at the new parameters, on the environments held out,
    times how these move with each of its parameters: by finite differences."""
    settings = make(consistency_cost=0.0)
    agent = built(settings)
    model = methods_of(agent).model
    state, trajectory = trained(agent, 4)
    with jax.enable_x64(True):  # finite differences lose half of all digits
        state, trajectory = jax.tree.map(doubled, (state, trajectory))
        new_state, _ = learn(agent, state, trajectory)
        held_out = jax.tree.map(
            lambda x: x[-1], split_environments(trajectory, 3, state.shared.frames // (T * B))
        )

        def outer_loss(params: Any) -> jax.Array:
            return vtrace_loss(settings, model, params, held_out, jnp.uint32(0))[0].total

        outer = ravel_pytree(jax.jit(jax.grad(outer_loss))(new_state.shared.params))[0]
        eta, unravel = ravel_pytree(state.shared.metaparams)

        def along_outer(eta: np.ndarray) -> float:
            changed = dataclasses.replace(state.shared, metaparams=unravel(jnp.asarray(eta)))
            params = learn(agent, LearnerState(changed), trajectory)[0].shared.params
            return float(jnp.vdot(ravel_pytree(params)[0], outer))

        got = ravel_pytree(meta_gradient(new_state))[0]
        assert np.abs(got).max() > 1e-6
        some = np.random.default_rng(0).choice(eta.size, 24, replace=False)
        steps = 1e-4 * np.eye(eta.size)[some]
        expected = [(along_outer(eta + s) - along_outer(eta - s)) / 2e-4 for s in steps]
        np.testing.assert_allclose(got[some], expected, rtol=1e-4, atol=1e-9)


# --- what every agent must do ---------------------------------------------------------------------

FRODO = Frodo(network=SMALL, inner_updates=1, units=8)


def test_without_exploring_the_keys_do_not_matter():
    check_greedy(AGENT)


@pytest.mark.parametrize(("memory", "learners"), [(False, 1), slow(False, 2), slow(True, 2)])
def test_lock_step_equals_anakin_to_the_bit(memory, learners):
    """With a memory the two programs are rounded otherwise on two devices (docs/numerics.md)."""
    settings = dataclasses.replace(FRODO, network=RECURRENT) if memory else FRODO
    environment, rtol = ("pendulum", 1e-5) if memory else ("catch", 0.0)
    check_parity(settings, environment, learners, rtol=rtol)


@pytest.mark.parametrize("length", [2, slow(5)])
def test_steps_that_only_reset_change_no_metric(length):
    """The losses divide by all steps on purpose."""
    check_reset_steps(FRODO, length, of_all_steps=("gradient_norm", "outer", "inconsistency"))
