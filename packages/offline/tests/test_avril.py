"""AVRIL: its bound in NumPy's float64, its gradient, what it reads, and a run on a data set."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from demonstrations import Recorded, teacher
from walk import WALK, B, T, Walk, begin, built, gradient, learn

import podracer
from podracer.agent import Blueprint, Context
from podracer.checks import check_agent
from podracer.errors import ConfigError
from podracer.io.sinks import TASK_REWARD
from podracer.networks import MLP, Network, TorsoNetwork
from podracer_offline import AVRIL, Dataset

RECORDED = Recorded(WALK)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Two layers of ELUs and a linear one, as the authors have, with plain arrays as parameters."""

    units: int = 8

    def build(self, observation, heads):
        ((name, head),) = heads.items()
        sizes = (observation.shape[0], self.units, self.units, head.size)

        def init(key):
            keys = jax.random.split(key, 3)
            shapes = itertools.pairwise(sizes)
            return [
                {"w": 0.5 * jax.random.normal(k, shape), "b": 0.1 * jax.random.normal(k, shape[1:])}
                for k, shape in zip(keys, shapes, strict=True)
            ]

        def apply(params, carry, x, first):
            for layer in params[:-1]:
                x = jax.nn.elu(x @ layer["w"] + layer["b"].reshape(1, 1, -1))
            return {name: x @ params[-1]["w"] + params[-1]["b"].reshape(1, 1, -1)}, carry

        return Network(init=init, carry=lambda num_envs: (), apply=apply)


def forward(layers, x):
    """The same in float64."""
    for layer in layers[:-1]:
        x = x @ layer["w"] + layer["b"]
        x = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
    return x @ layers[-1]["w"] + layers[-1]["b"]


def expected_losses(settings, params, trajectory):
    """The three parts of the bound, and the accuracy, pair by pair of a demonstration."""
    steps = trajectory.steps
    observation = np.asarray(steps.timestep.observation, np.float64)
    discount = trajectory.next_timesteps().discount
    last = np.concatenate([steps.timestep.last, trajectory.final.last[None]])
    rows = []
    for t, b in np.ndindex(*steps.action.shape):
        is_terminal = discount[t, b] == 0
        if last[t, b] or (not is_terminal and (t == T - 1 or last[t + 1, b])):
            continue
        action = int(steps.action[t, b])
        q = forward(params.critic, observation[t, b])
        implied = q[action]
        if not is_terminal:
            next_q = forward(params.critic, observation[t + 1, b])
            implied -= settings.discount * next_q[int(steps.action[t + 1, b])]
        means, log_scales = np.split(forward(params.encoder, observation[t, b]), 2)
        mean, log_scale = (x[0 if settings.state_only else action] for x in (means, log_scales))
        variance = np.exp(2 * log_scale)
        log_density = -0.5 * np.log(2 * np.pi * variance) - (implied - mean) ** 2 / (2 * variance)
        rows.append(
            {
                "policy_loss": np.log(np.exp(q).sum()) - q[action],
                "divergence_loss": 0.5 * (variance + mean**2 - 1 - np.log(variance)),
                "constraint_loss": -log_density,
                "accuracy": float(q.argmax() == action),
                "posterior_mean": mean,
                "posterior_std": np.sqrt(variance),
            }
        )
    losses = {name: np.mean([row[name] for row in rows]) for name in rows[0]}
    losses["loss"] = (
        losses["policy_loss"]
        + losses["divergence_loss"]
        + settings.constraint_cost * losses["constraint_loss"]
    )
    return losses, len(rows)


@pytest.mark.parametrize("state_only", [False, True])
def test_the_bound_and_its_gradient_are_the_papers(state_only):
    """In a rollout with terminals, time-outs, and an end within episodes."""
    settings = AVRIL(network=Layers(), state_only=state_only, discount=0.9, constraint_cost=0.7)
    agent = built(settings, RECORDED)
    state, trajectory = begin(agent)
    new_state, metrics = learn(agent, state, trajectory)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.shared.params)
    expected, count = expected_losses(settings, params, trajectory)
    assert 0 < count < trajectory.valid().sum()
    assert not any(name.startswith(TASK_REWARD) for name in metrics)  # reports show them as tasks
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-5, err_msg=name)

    # Along random directions, by central differences.
    rng = np.random.default_rng(0)
    grads = gradient(new_state)
    for _ in range(3):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

        def loss(size, direction=direction):
            moved = jax.tree.map(lambda x, d: x + size * d, params, direction)
            return expected_losses(settings, moved, trajectory)[0]["loss"]

        slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
        products = jax.tree.map(
            lambda g, d: np.sum(np.asarray(g, np.float64) * d), grads, direction
        )
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-4)


def test_it_keeps_the_contract_and_refuses_what_it_cannot_learn():
    settings = AVRIL(network=TorsoNetwork(MLP((8,))))
    spec = RECORDED.spec
    check_agent(Blueprint(settings, spec), num_envs=B)
    with pytest.raises(ConfigError, match="take a rollout_length of at least 2"):
        Blueprint(settings, spec, Context(1)).build()
    with pytest.raises(ConfigError, match="needs discrete actions"):
        built(settings, Recorded(podracer.auto_reset(Walk(podracer.Continuous((-1.0,), (1.0,))))))
    with pytest.raises(ConfigError, match="needs a feed-forward network"):
        built(
            dataclasses.replace(settings, network=TorsoNetwork(MLP((8,)), memory="gru")), RECORDED
        )


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "teacher.npz"
    path.write_bytes(teacher().encode())
    return path


@pytest.mark.slow
def test_it_learns_to_act_as_its_teacher_and_what_pleases_it(data_file):
    """Actions that the teacher does not take have lower rewards."""
    result = podracer.train("cartpole_avril", environment=f"data:{data_file}", frames=256_000)
    assert result.evaluation.returns.mean() > 400
    assert result.metrics["accuracy"] > 0.9
    data = Dataset.load(data_file)
    settings = podracer.recipes.find("cartpole_avril").agent
    spec = podracer.make("cartpole").spec
    mean = settings.reward(spec, result.state.shared.params, data.observation).mean
    taken, other = (np.take_along_axis(mean, x[:, None], 1) for x in (data.action, 1 - data.action))
    assert np.mean(taken > other) > 0.7
