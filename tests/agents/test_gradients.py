"""Gradients of whole losses beside finite differences, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from differences import assert_gradient_equals_differences
from sequences import changed, drawn
from walk import ACTIONS, BOX, B, T, Walk, begin, built, doubled, methods_of, network, slow

from podracer.agents.muzero import MuZero
from podracer.agents.ppo import PPO
from podracer.agents.r2d2 import R2D2
from podracer.agents.stacx import Stacx
from podracer.environment import auto_reset
from podracer.networks import ResNet, TorsoNetwork
from podracer.replay import Replay
from podracer.types import ArraySpec, EnvironmentSpec, Trajectory

REPLAY = Replay(B * 40, warmup=0, prioritized=True)


@dataclasses.dataclass(frozen=True)
class Picture(Walk):
    """The walk as planes: a bright row, and its mirror image."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("picture", ArraySpec((5, 5, 2)), self.action)

    def observe(self, x: jax.Array) -> jax.Array:
        row = jax.nn.softmax(-8 * (x - jnp.linspace(-1.5, 1.5, 5)) ** 2)
        plane = row[:, None] * jnp.ones((1, 5))
        return jnp.stack([plane, plane[::-1]], axis=-1)


DISCRETE, CONTINUOUS, PICTURE = map(auto_reset, (Walk(), Walk(BOX), Picture()))


STOP = jax.lax.stop_gradient


# --- agents with a replay -------------------------------------------------------------------------


def muzero(network: TorsoNetwork, **fields: Any) -> MuZero:
    small = {"dynamics_hidden": (7,), "prediction_hidden": (8,), "latent_size": 6}
    searches = {"num_simulations": 3, "unroll_steps": 2, "n_step": 2, "support_size": 11}
    settings = {"network": network, "support_max": 3.0, "replay": REPLAY}
    return MuZero(**settings | small | searches | fields)


RESNET = TorsoNetwork(ResNet(channels=(4,), blocks=1))
REANALYZED = {"reanalyze_fraction": 0.5, "bootstrap": "search"}
RECURRENT = {"burn_in_length": 3, "unroll_length": 6, "n_step": 2}
TARGET_NETWORK_AGENTS = {
    "muzero": (muzero(network()), DISCRETE),
    "muzero-reanalyze": (muzero(network(), **REANALYZED), DISCRETE),
    "muzero-sampled": (muzero(network(), max_considered_actions=4, **REANALYZED), CONTINUOUS),
    "muzero-planes": (muzero(RESNET, dynamics_blocks=1), PICTURE),
    "muzero-planes-reanalyze": (muzero(RESNET, dynamics_blocks=1, **REANALYZED), PICTURE),
    "r2d2": (R2D2(network=network("lstm"), replay=REPLAY, **RECURRENT), DISCRETE),
    "r2d2-gru": (
        R2D2(network=network("gru"), replay=REPLAY, rescale_values=False, **RECURRENT),
        DISCRETE,
    ),
}


@pytest.mark.parametrize("name", [x if x == "r2d2-gru" else slow(x) for x in TARGET_NETWORK_AGENTS])
def test_losses_with_a_target_network(name, key):
    agent = built(*TARGET_NETWORK_AGENTS[name])
    drawing = drawn(agent, TARGET_NETWORK_AGENTS[name][1], methods_of(agent).buffer)
    with jax.enable_x64(True):
        learner, sample = jax.tree.map(doubled, drawing)
        params, target_params = changed(learner.params), changed(learner.params, 0.2)

        def loss(params: Any) -> jax.Array:
            return methods_of(agent).loss(params, target_params, sample, key)[0].total

        assert_gradient_equals_differences(loss, params)


# --- agents with rollouts -------------------------------------------------------------------------


def of_another_policy(trajectory: Trajectory) -> Trajectory:
    """Return the rollout with other log-probabilities, so that ratios are clipped and are not."""
    steps = trajectory.steps
    log_prob = steps.extras["log_prob"] + 0.4 * jnp.sin(jnp.arange(T * B)).reshape(T, B)
    steps = dataclasses.replace(steps, extras={**steps.extras, "log_prob": log_prob})
    return dataclasses.replace(trajectory, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("action", [ACTIONS, BOX], ids=["discrete", "continuous"])
def test_the_inner_and_the_outer_loss_of_stacx(action):
    """The inner one by the parameters of all heads, the outer one by the metaparameters, through
    a clipped inner update."""
    env = auto_reset(Walk(action))
    limits = {"clip_rho": 0.9, "clip_c": 0.8, "kl_cost": 3.0, "max_gradient_norm": 0.5}
    settings = Stacx(network=network(), num_heads=2, learning_rate=0.01, **limits)
    agent = built(settings, env)
    methods, beginning = methods_of(agent), begin(agent, env)
    with jax.enable_x64(True):
        state, trajectory = jax.tree.map(doubled, beginning)
        trajectory, learner = of_another_policy(trajectory), state.shared
        eta = changed(learner.metaparams)
        learner = dataclasses.replace(learner, params=changed(learner.params))

        def inner_loss(params: Any) -> jax.Array:
            policy, values = methods.unroll(params, trajectory)
            losses, _ = methods.losses(policy, values, trajectory, methods.constrain(eta))
            return jnp.sum(losses.total)

        def outer_loss(eta: Any) -> jax.Array:
            with mock.patch.object(jax.lax, "stop_gradient", STOP):  # within the inner gradient
                updated, aux = methods.inner_update(None, eta, learner, trajectory)
            aux = jax.tree.map(lambda x: x[None], aux)
            return methods.outer_loss(trajectory, eta, updated, aux)[0]

        assert_gradient_equals_differences(inner_loss, learner.params)
        assert_gradient_equals_differences(outer_loss, eta)


@pytest.mark.slow
@pytest.mark.parametrize("action", [ACTIONS, BOX], ids=["discrete", "continuous"])
def test_the_loss_of_ppo_with_a_memory(action):
    env = auto_reset(Walk(action))
    agent = built(PPO(network=network("gru")), env)
    methods, beginning = methods_of(agent), begin(agent, env)
    with jax.enable_x64(True):
        state, trajectory = jax.tree.map(doubled, beginning)
        batch = methods.make_batch(state.shared.params, of_another_policy(trajectory))
        moments = [jnp.mean(batch.advantage), jnp.var(batch.advantage)]

        def loss(params: Any) -> jax.Array:
            return methods.loss(0.5, params, batch, *moments)[0].total

        assert_gradient_equals_differences(loss, changed(state.shared.params, 0.1))
