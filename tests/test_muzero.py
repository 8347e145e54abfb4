"""MuZero's convolutional model, and what it searches anew in its replay."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax
import pytest
from agents import PROBE_AGENTS
from walk import B, Walk, begin, close, learn

from podracer.agents.common import planning
from podracer.agents.common.muzero_model import Model, ModelParams
from podracer.agents.muzero import MuZero
from podracer.checks import check_agent
from podracer.drivers.anakin import AnakinConfig, anakin
from podracer.drivers.common import init_state
from podracer.environment import auto_reset
from podracer.envs.probes import PROBES, Probe
from podracer.experiments import recipes
from podracer.mesh import find_devices, make_mesh
from podracer.networks import CNN, MLP, ResNet, TorsoNetwork
from podracer.replay import Replay, Sample
from podracer.types import (
    ACTION_MASK,
    ArraySpec,
    ConfigError,
    Discrete,
    EnvironmentSpec,
    Step,
    TimeStep,
    Trajectory,
)

N, ACTIONS, ATOMS = 5, 3, 11
SCREEN = ArraySpec((6, 5, 2), np.uint8)
SMALL: dict[str, Any] = {
    "support_size": ATOMS,
    "support_max": 3.0,
    "num_simulations": 3,
    "unroll_steps": 2,
    "n_step": 2,
    "dynamics_hidden": (7,),
    "prediction_hidden": (8,),
    "replay": Replay(B * 40, batch_size=12, warmup=0, prioritized=True),
}
RESNET = TorsoNetwork(ResNet(channels=(4, 6), blocks=1))
CONVOLUTIONAL = MuZero(network=RESNET, dynamics_blocks=2, **SMALL)
VECTORS = MuZero(network=TorsoNetwork(MLP((8,))), latent_size=6, **SMALL)


@dataclasses.dataclass(frozen=True)
class Screen(Walk):
    """The walk as a picture: one bright pixel, and its mirror image."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("screen", ArraySpec((5, 5, 2)), Discrete(ACTIONS))

    def _observe(self, x: jax.Array) -> jax.Array:
        row = jax.nn.softmax(-8 * (x - jnp.linspace(-1.5, 1.5, 5)) ** 2)
        picture = row[:, None] * jnp.ones((1, 5))
        return jnp.stack([picture, picture[::-1]], axis=-1)


def model_and_params(agent: MuZero, observation: Any = SCREEN) -> tuple[Model, ModelParams]:
    """The model of an agent, and random parameters: its own take seconds to compile."""
    spec = EnvironmentSpec("screen", observation, Discrete(ACTIONS))
    model, rng = dataclasses.replace(agent, spec=spec)._model, np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype), shapes
    )


def screens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 256, (N, *SCREEN.shape)), jnp.uint8)


# --- the convolutional model ---------------------------------------------------------------------


def convolve(layer: Any, x: np.ndarray) -> np.ndarray:
    """A convolution with zero padding that keeps the size, as sums over pixels."""
    w, size = np.asarray(layer.weight), layer.weight.shape[0]
    padded = np.pad(x, ((0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
    height, width = x.shape[1:3]
    shifted = [padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
    return np.concatenate(shifted, -1) @ w.reshape(-1, w.shape[-1]) + np.asarray(layer.bias)


def rectify(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def head_outputs(params: Any, name: str, planes: np.ndarray) -> np.ndarray:
    """A head: planes reduced pixel by pixel, a hidden layer, and the output layer."""
    hidden, output = jax.tree.map(np.asarray, params.heads[name].layers)
    x = rectify(convolve(params.reductions[name], rectify(planes))).reshape(len(planes), -1)
    x = rectify(x @ hidden.weight + hidden.bias)
    return x @ output.weight + output.bias


def scaled(planes: np.ndarray) -> np.ndarray:
    flat = planes.reshape(len(planes), -1)
    low, high = flat.min(1), flat.max(1)
    return ((flat - low[:, None]) / (high - low)[:, None]).reshape(planes.shape)


def test_hidden_states_are_planes_between_0_and_1_and_the_action_is_planes_beside_them():
    """One step of the model by hand: action planes, two residual blocks, scaling, heads."""
    model, params = model_and_params(CONVOLUTIONAL)
    state = jax.jit(model.representation)(params, screens())
    assert state.shape == (N, 2, 2, 6)  # two stages halve 6 x 5
    action = jnp.arange(N) % ACTIONS
    next_state, reward_logits = jax.jit(model.dynamics)(params, state, action)
    for planes in (state, next_state):
        flat = np.asarray(planes).reshape(N, -1)
        np.testing.assert_allclose([flat.min(1), flat.max(1)], [[0] * N, [1] * N], atol=1e-4)

    action_planes = np.broadcast_to(np.eye(ACTIONS)[action][:, None, None], (N, 2, 2, ACTIONS))
    first, *blocks = params.dynamics.convolutions[0]
    x = convolve(first, np.concatenate([state, action_planes], axis=-1))
    for inner, outer in zip(blocks[::2], blocks[1::2], strict=True):
        x = x + convolve(outer, rectify(convolve(inner, rectify(x))))
    close(next_state, scaled(np.asarray(state) + x), atol=1e-4)
    np.testing.assert_allclose(reward_logits, head_outputs(params.dynamics, "reward", x), rtol=1e-4)
    policy_logits, value_logits = jax.jit(model.prediction)(params, state)
    state = np.asarray(state)
    expected = [head_outputs(params.prediction, name, state) for name in ("policy", "value")]
    assert [x.shape for x in expected] == [(N, ACTIONS), (N, ATOMS)]
    close([policy_logits, value_logits], expected, atol=1e-3)


def test_numbers_beside_an_image_are_planes_of_it():
    """An action mask, as of board games; torsos of convolutions without padding fit as well."""
    cnn = TorsoNetwork(CNN((4,), (3,), (1,), layer_norm=True))
    agent = dataclasses.replace(CONVOLUTIONAL, network=cnn)
    seen = {"board": SCREEN, ACTION_MASK: ArraySpec((ACTIONS,), np.bool_)}
    model, params = model_and_params(agent, seen)
    weight = params.representation.convolutions[0].layer.weight
    assert weight.shape == (3, 3, 2 + ACTIONS, 4)
    mask = jnp.asarray(np.eye(N, ACTIONS), bool)
    state = jax.jit(model.representation)(params, {"board": screens(), ACTION_MASK: mask})
    assert state.shape == (N, 4, 3, 4)
    check_agent(dataclasses.replace(agent, spec=EnvironmentSpec("x", seen, Discrete(ACTIONS))))


@pytest.mark.slow
def test_every_parameter_of_the_convolutional_model_receives_a_gradient():
    env = auto_reset(Screen())
    agent = dataclasses.replace(CONVOLUTIONAL, spec=env.spec)
    state, _ = learn(agent, *begin(agent, env))
    moments = optax.tree_utils.tree_get(state.shared.optimizer_state, "mu")
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        assert np.abs(leaf).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


@dataclasses.dataclass(frozen=True)
class Cue(Probe):
    """The probe `policy` as a picture: which half of it is bright says which action is better."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("cue", ArraySpec((4, 4, 1)), self.action)


def picture(cue: jax.Array) -> jax.Array:
    return (cue * jnp.where(jnp.arange(4) < 2, 1.0, -1.0) > 0)[:, None, None] * jnp.ones((4, 4, 1))


@pytest.mark.slow
def test_the_convolutional_model_learns_a_probe_from_pictures():
    probe = Cue(**vars(PROBES["policy"]) | {"observe": lambda state: picture(state.cue)})
    env, mesh = auto_reset(probe), make_mesh(find_devices(1))
    agent = dataclasses.replace(
        PROBE_AGENTS["muzero"],
        spec=env.spec,
        network=TorsoNetwork(ResNet(channels=(8,), blocks=1)),
        dynamics_blocks=1,
        reanalyze_fraction=0.5,
        unroll_steps=1,
    )
    config = AnakinConfig(32, 8, updates_per_chunk=50)
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    *_, progress = anakin(agent, env, mesh, config, state, num_updates=200)
    observation = jnp.stack([picture(cue) for cue in (1.0, -1.0)])
    timestep = TimeStep(observation, *(jnp.zeros(2) for _ in range(4)))
    params = agent.actor_params(progress.state.learner)
    keys = jax.random.split(jax.random.key(0), 2)
    action, _, _ = jax.jit(agent.act, static_argnums=4)(params, (), timestep, keys, False)
    np.testing.assert_array_equal(action, [1, 0])
    assert progress.metrics["episode_return"] > 0.9


@pytest.mark.parametrize(
    ("network", "observation", "message"),
    [
        (TorsoNetwork(MLP((8,))), SCREEN, "its network must have convolutions and no memory"),
        (dataclasses.replace(RESNET, memory="gru"), SCREEN, "must have convolutions and no memory"),
        (RESNET, ArraySpec((4,)), "needs image observations"),
        (RESNET, {"a": SCREEN, "b": ArraySpec((4, 4, 1))}, "of one height and width"),
        (RESNET, {"a": SCREEN, "b": ArraySpec((), np.int32, num_values=3)}, "no indices"),
    ],
)
def test_what_a_convolutional_model_cannot_take_is_refused(network, observation, message):
    spec = EnvironmentSpec("x", observation, Discrete(ACTIONS))
    agent = dataclasses.replace(CONVOLUTIONAL, network=network, spec=spec)
    with pytest.raises(ConfigError, match=message):
        check_agent(agent)


def test_muzero_on_atari_is_that_of_its_paper():
    """Schrittwieser et al. 2020, appendices F to H, with Reanalyze's changes."""
    agent = recipes.find("atari_muzero").agent
    assert (agent.unroll_steps, agent.n_step, agent.num_simulations) == (5, 5, 50)
    assert (agent.discount, agent.value_cost, agent.weight_decay) == (0.997, 0.25, 1e-4)
    assert (agent.support_size, agent.support_max, agent.reanalyze_fraction) == (601, 300.0, 0.8)
    replay, driver = agent.replay, recipes.find("atari_muzero").driver
    assert (replay.priority_exponent, replay.importance_exponent) == (1.0, 1.0)
    samples = replay.batch_size * replay.updates_per_rollout
    assert samples == 2 * driver.num_envs * driver.rollout_length == 1024
    pictures = ArraySpec((84, 84, 4), np.uint8, frame_stack=True)
    agent = dataclasses.replace(agent, spec=EnvironmentSpec("atari", pictures, Discrete(18)))
    params = jax.eval_shape(agent._model.init, jax.random.key(0))
    assert len(params.dynamics.convolutions[0]) == 1 + 2 * 16
    assert params.dynamics.convolutions[0][0].layer.weight.shape == (3, 3, 256 + 18, 256)
    assert params.prediction.heads["value"].layers[0].weight.shape == (6 * 6 * 16, 601)


# --- reanalysis ----------------------------------------------------------------------------------


def sample_for(agent: MuZero) -> tuple[ModelParams, Sample]:
    """Random parameters, and a sample of random timesteps within episodes."""
    T, rng = agent._buffer.length - 1, np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    flags = jnp.zeros((T + 1, N), bool)
    timesteps = TimeStep(normal(T + 1, N, 2), normal(T + 1, N), jnp.ones((T + 1, N)), flags, flags)
    policy = jax.nn.softmax(normal(T, N, ACTIONS))
    action = jnp.asarray(rng.integers(ACTIONS, size=(T, N)), jnp.int32)
    extras = {"policy": policy, "value": normal(T, N)}
    steps = Step(jax.tree.map(lambda x: x[:-1], timesteps), action, extras)
    trajectory = Trajectory(steps, jax.tree.map(lambda x: x[-1], timesteps), (), ())
    zeros = jnp.zeros(N, jnp.int32)
    _, params = model_and_params(agent, ArraySpec((2,)))
    return params, Sample(trajectory, jnp.ones(N), zeros, zeros)


def searched_by_hand(agent: MuZero, params: ModelParams, sample: Sample, key: jax.Array) -> Sample:
    """The sample with new extras: mctx alone, one search after the other."""
    model, steps = agent._model, sample.trajectory.steps

    @jax.jit
    def search(observation, key):
        return mctx.gumbel_muzero_policy(
            params,
            key,
            model.root(params, observation),
            lambda params, key, action, state: model.step(
                agent.discount, params, key, action, state
            ),
            agent.num_simulations,
            max_num_considered_actions=agent.max_considered_actions,
            qtransform=partial(mctx.qtransform_completed_by_mix_value, epsilon=1e-8),
        )

    row_key, search_key = jax.random.split(key)
    rows = jax.random.permutation(row_key, N)[: round(agent.reanalyze_fraction * N)]
    searched = agent.unroll_steps + 1 + (agent.n_step if agent.bootstrap == "search" else 0)
    policy, value = (np.array(steps.extras[name]) for name in ("policy", "value"))
    for t, timestep_key in enumerate(jax.random.split(search_key, searched)):
        for row, k in zip(rows, jax.random.split(timestep_key, len(rows)), strict=True):
            found = search(steps.timestep.observation[t, row][None], k)
            policy[t, row] = found.action_weights[0]
            value[t, row] = found.search_tree.summary().value[0]
    extras = {"policy": jnp.asarray(policy), "value": jnp.asarray(value)}
    steps = dataclasses.replace(steps, extras=extras)
    return dataclasses.replace(
        sample, trajectory=dataclasses.replace(sample.trajectory, steps=steps)
    )


def agent_that_reanalyzes(bootstrap: str) -> MuZero:
    """Three of five sequences; values from the second step on are what `search` bootstraps from."""
    spec = EnvironmentSpec("x", ArraySpec((2,)), Discrete(ACTIONS))
    settings = {"spec": spec, "bootstrap": bootstrap, "unroll_steps": 1, "num_simulations": 2}
    return dataclasses.replace(VECTORS, reanalyze_fraction=0.6, **settings)


def test_what_is_searched_anew_is_what_searches_by_hand_find(key):
    """Policies and values of all timesteps that the loss uses; other sequences keep what acting
    found, and all keep their actions."""
    agent = agent_that_reanalyzes("search")
    params, sample = sample_for(agent)
    reanalyze = partial(planning.reanalyze, fraction=0.6, num_timesteps=4)
    search = partial(agent._search, params, True)
    got = jax.jit(lambda trajectory: reanalyze(search, trajectory, key))(sample.trajectory)
    expected = searched_by_hand(agent, params, sample, key).trajectory
    close(got, expected)
    old, new = (x.steps.extras["policy"] for x in (sample.trajectory, got))
    assert np.any(old != new, axis=(0, 2)).sum() == 3


@pytest.mark.slow
@pytest.mark.parametrize("bootstrap", ["search", "target_network"])
def test_the_loss_learns_what_was_searched_anew(bootstrap, key):
    """Its gradient is that of a sample whose policies and values were searched by hand, with the
    newest parameters, which get no gradient through the search."""
    agent = agent_that_reanalyzes(bootstrap)
    params, sample = sample_for(agent)
    target_params = jax.tree.map(lambda x: 0.9 * x, params)

    def gradient(agent: MuZero, sample: Sample) -> Any:
        loss = jax.jit(jax.grad(agent._loss, has_aux=True))
        return loss(params, target_params, sample, key)

    by_hand = searched_by_hand(agent, params, sample, key)
    without = dataclasses.replace(agent, reanalyze_fraction=0.0)
    close(gradient(agent, sample), gradient(without, by_hand))
    with pytest.raises(AssertionError):
        close(gradient(agent, sample), gradient(without, sample))
