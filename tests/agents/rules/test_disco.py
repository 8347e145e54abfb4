"""Disco: the arithmetic of the published code, the rule's file, and the agent's contract."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import disco
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import WALK, close, slow

import podracer
from podracer import recipes
from podracer.agent import Blueprint, Context
from podracer.agents.rules.disco import Disco
from podracer.agents.rules.disco.network import StudentParams
from podracer.agents.rules.disco.rule import apply_rule
from podracer.agents.rules.disco.rule_file import decode_rule
from podracer.agents.rules.disco.values import estimate_values
from podracer.agents.rules.lifetimes import to_experience
from podracer.checks import check_agent
from podracer.config.serialization import from_json, to_json
from podracer.errors import ConfigError
from podracer.io.npz import digest_of
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.transforms import evenly_spaced
from podracer.replay import Sample
from podracer.run.setup import build
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep, Trajectory

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "disco_reference.json").read_text())
SHARED = Path(__file__).parents[4] / "shared" / "disco_103.npz"
PUBLISHED = Path(os.environ.get("DISCO_103", SHARED))
needs_file = pytest.mark.skipif(
    not PUBLISHED.is_file(), reason=f"no {PUBLISHED}: set DISCO_103 to the path of disco_103.npz"
)
SPEC = EnvironmentSpec("random", ArraySpec((disco.OBSERVATION,)), Discrete(disco.A))
STUDENT = Disco(
    learning_rate=disco.LEARNING_RATE,
    support_max=disco.MAX_VALUE,
    support_size=disco.BINS,
    model_size=disco.MODEL_SIZE,
    network=TorsoNetwork(MLP(())),
)


# --- against the published code ------------------------------------------------------------------


@pytest.fixture(params=["random", pytest.param("disco_103", marks=needs_file)])
def case(request: Any) -> tuple[Any, dict[str, Any]]:
    """A student of a rule, and what the published code computes for it."""
    is_random = request.param == "random"
    content = disco.file_of(disco.random_rule()) if is_random else PUBLISHED.read_bytes()
    return built(content), GOLDEN[request.param]


def built(content: bytes) -> Any:
    """The functions of a student of the rule in a file, those of its built agent and others."""
    context = Context(disco.T + 1, STUDENT.read(content))
    return STUDENT.build(SPEC, context).init.__self__  # type: ignore[attr-defined]


def sample_of(number: int) -> Sample:
    """A rollout of `disco.py` as a sample; where an episode ends the next one begins."""
    data = disco.random_rollout(number)
    pad = np.zeros((1, disco.B), np.float32)
    terminal = np.concatenate([pad > 0, data["terminal"]])
    timesteps = TimeStep(
        observation=data["observation"],
        reward=np.concatenate([pad, data["reward"]]),
        discount=1.0 - terminal.astype(np.float32),
        first=terminal,
        last=np.zeros_like(terminal),
    )
    steps = Step(timesteps, data["action"], {"policy": data["behavior"]})
    steps, final = (jax.tree.map(lambda x, cut=cut: jnp.asarray(x[cut]), steps) for cut in (
        slice(None, -1), -1
    ))  # fmt: skip
    trajectory = Trajectory(steps, final.timestep, (), ())
    index = jnp.zeros(disco.B, jnp.int32)
    return Sample(trajectory, jnp.ones(disco.B), index, index)


def by_layer(params: StudentParams) -> dict[str, np.ndarray]:
    """Parameters of a student by the names of haiku's layers and parts."""
    (torso,), heads = params.torso.values(), params.heads["shared"].heads

    def reorder(x: jax.Array) -> np.ndarray:  # gates i, f, g, o as haiku's i, g, f, o
        i, f, g, o = np.split(np.asarray(x), 4, axis=-1)
        return np.concatenate([i, g, f, o], axis=-1)

    forget = np.repeat(np.asarray([0, 0, 1, 0], np.float32), disco.MODEL_SIZE)
    layers = {
        "~_head_pass/torso_head/~/linear_0": torso.heads["policy"].layers[0],
        "~_head_pass/torso_head_1/~/linear_0": torso.heads["prediction"].layers[0],
        "linear": torso.heads["state"].layers[0],
    }
    names = {"mlp": "action_prediction", "mlp_1": "next_policy", "mlp_2": "action_value"}
    for name, ours in names.items():
        for number in (0, 1):
            layers[f"{name}/~/linear_{number}"] = heads[ours].layers[number]
    arrays = {f"{name}/w": layer.weight for name, layer in layers.items()}
    arrays |= {f"{name}/b": layer.bias for name, layer in layers.items()}
    arrays["action_cond/linear/w"] = reorder(jnp.concatenate([params.action, params.hidden]))
    arrays["action_cond/linear/b"] = reorder(params.bias) - forget
    return arrays


def with_layers(params: StudentParams, layers: dict[str, dict[str, np.ndarray]]) -> StudentParams:
    """The parameters with the values of haiku's layers: the inverse of `by_layer`."""
    leaves, structure = jax.tree.flatten(params)
    tags = [jnp.full(x.shape, i, jnp.float32) for i, x in enumerate(leaves)]
    places = {
        name: x.ravel()[0] for name, x in by_layer(jax.tree.unflatten(structure, tags)).items()
    }
    values = {f"{name}/{part}": layer[part] for name, layer in layers.items() for part in "wb"}
    model = values.pop("action_cond/linear/w"), values.pop("action_cond/linear/b")
    for name, value in values.items():
        leaves[int(places[name])] = jnp.asarray(value)

    def reorder(x: np.ndarray) -> jax.Array:
        i, g, f, o = np.split(x, 4, axis=-1)
        return jnp.concatenate([i, f, g, o], axis=-1)

    forget = jnp.repeat(jnp.asarray([0.0, 1.0, 0.0, 0.0]), disco.MODEL_SIZE)
    return dataclasses.replace(
        jax.tree.unflatten(structure, leaves),
        action=reorder(model[0][: disco.A]),
        hidden=reorder(model[0][disco.A :]),
        bias=reorder(model[1]) + forget,
    )


def initial_state(agent: Any) -> Any:
    shared = agent.init(jax.random.key(0), 1).shared
    predictions = shared.rule.prediction.bias.size
    params = with_layers(shared.params, disco.random_student(predictions))
    return dataclasses.replace(shared, params=params, target_params=params)


def near(array: Any, expected: list[float]) -> None:
    np.testing.assert_allclose(disco.sample(array), expected, rtol=1e-5, atol=1e-5)


def test_targets_are_those_of_the_published_code(case):
    agent, want = case

    @jax.jit
    def targets_of(state: Any, trajectory: Trajectory) -> Any:
        data = to_experience(trajectory, trajectory.steps.extras["policy"])
        outputs = agent.network.apply(state.params, (), data.observation, data.first)
        support = evenly_spaced(-disco.MAX_VALUE, disco.MAX_VALUE, disco.BINS)
        values = estimate_values(outputs, outputs, data, support, 0.997, 0.95)
        mean, square = jnp.mean(values.advantages), jnp.mean(values.advantages**2)
        moments, _ = state.moments.update([jnp.ones(()), mean, square])
        values = values.normalized(moments)
        targets, _ = apply_rule(state.rule, state.memory, data, outputs, outputs, values)
        return values.targets, targets

    value_targets, targets = targets_of(initial_state(agent), sample_of(0).trajectory)
    near(value_targets, want["value_targets"])
    for name, expected in want["targets"].items():
        near(getattr(targets, name), expected)


def test_updates_are_those_of_the_published_code(case):
    """Losses, parameters and their targets, moments and the lifetime's memory of three updates."""
    agent, want = case
    state, losses = initial_state(agent), []
    update = jax.jit(partial(agent.update, axis=None))
    for number in range(disco.UPDATES):
        state, metrics, _ = update(state, sample_of(number), jax.random.key(0))
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, want["losses"], rtol=1e-5)
    near(state.memory[0], want["memory"]["hidden"])
    near(state.memory[1], want["memory"]["cell"])
    near([state.moments.mean, state.moments.mean_square], want["moments"])
    for params, name in ((state.params, "params"), (state.target_params, "target_params")):
        arrays = by_layer(params)
        assert arrays.keys() == want[name].keys()
        for layer, expected in want[name].items():
            near(arrays[layer], expected)


# --- the update ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def student() -> Any:
    return built(disco.file_of(disco.random_rule()))


def with_time_outs(sample: Sample) -> Sample:
    """The sample with time-outs, of which one column has two and the other none."""
    last = jnp.zeros((disco.T, disco.B), bool).at[jnp.asarray([1, 3]), 0].set(True)
    timestep = dataclasses.replace(sample.trajectory.steps.timestep, last=last)
    steps = dataclasses.replace(sample.trajectory.steps, timestep=timestep)
    trajectory = dataclasses.replace(sample.trajectory, steps=steps)
    return dataclasses.replace(sample, trajectory=trajectory)


def changed_at_time_outs(sample: Sample) -> Sample:
    """The sample with another action and behavior at each time-out, and another reward after it."""
    steps = sample.trajectory.steps
    cut = steps.timestep.last
    after = jnp.concatenate([jnp.zeros_like(cut[:1]), cut[:-1]])
    reward = jnp.where(after, 1e3, steps.timestep.reward)
    steps = dataclasses.replace(
        steps,
        timestep=dataclasses.replace(steps.timestep, reward=reward),
        action=jnp.where(cut, 2 - steps.action, steps.action),
        extras={"policy": jnp.where(cut[..., None], 3.0, steps.extras["policy"])},
    )
    return dataclasses.replace(
        sample, trajectory=dataclasses.replace(sample.trajectory, steps=steps)
    )


def test_what_happens_at_a_time_out_teaches_nothing(student):
    """Neither the student nor the memory and the moments of its lifetime."""
    update = jax.jit(partial(student.update, axis=None))
    state, sample = initial_state(student), with_time_outs(sample_of(0))
    state, _, _ = update(state, sample, jax.random.key(0))  # else the memory is without effect
    want, _, _ = update(state, sample, jax.random.key(0))
    got, _, _ = update(state, changed_at_time_outs(sample), jax.random.key(0))
    close(got, want)


@pytest.mark.parametrize("memory", ["none", slow("gru"), slow("lstm")])
def test_the_agent_keeps_the_contract(student, memory):
    network = TorsoNetwork(MLP((8,)), memory=memory, memory_size=4)
    settings = dataclasses.replace(STUDENT, network=network)
    context = Context(8, student.rule_params)
    check_agent(Blueprint(settings, WALK.spec, context), num_envs=4)


# --- the file ------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "disco.npz"
    path.write_bytes(disco.file_of(disco.random_rule()))
    return path


CORE = "lstm/lstm/linear/w"
DAMAGES = {
    "lacks": lambda arrays: arrays.pop("lstm/linear_4/b"),
    "shape": lambda arrays: arrays.update({"lstm/linear_4/w": np.zeros((15, 1), np.float32)}),
    "dtype": lambda arrays: arrays.update({CORE: arrays[CORE].astype(np.float64)}),
    "objects": lambda arrays: arrays.update({CORE: np.asarray([{}])}),
    "surplus": lambda arrays: arrays.update({"lstm/linear_5/b": np.zeros(1, np.float32)}),
    "not finite": lambda arrays: arrays["lstm/linear_4/w"].fill(np.nan),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_such_a_rule_is_refused(damage):
    arrays = disco.random_rule()
    DAMAGES[damage](arrays)
    with pytest.raises(ConfigError, match=r"some file is not a rule of DiscoRL: .*lstm"):
        decode_rule(disco.file_of(arrays), "some file")


def test_a_file_that_was_cut_is_refused():
    content = disco.file_of(disco.random_rule())
    for end in (0, 100, len(content) // 2, len(content) - 1):
        with pytest.raises(ConfigError, match="some file is not a rule of DiscoRL"):
            decode_rule(content[:end], "some file")


def test_a_run_keeps_the_digest_of_its_file(file):
    made = recipes.with_update_rule(recipes.find("catch_disco"), str(file))
    kept = json.loads(json.dumps(to_json(made)))
    assert kept["agent"]["rule_digest"] == digest_of(file.read_bytes())
    again = from_json(kept)
    assert again == made
    build(again)
    file.write_bytes(disco.file_of(disco.random_rule(seed=1)))
    with pytest.raises(ConfigError, match="is not the file that the run began with"):
        build(again)


@needs_file
def test_the_published_file_is_read():
    params = Disco().read(PUBLISHED.read_bytes())
    assert params.prediction.bias.size == 600
    assert sum(x.size for x in jax.tree.leaves(params)) == 754_778


@needs_file
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_published_rule_learns_catch(tmp_path, seed):
    """After 1,000 updates, as its authors' notebook; seeds took 450 to 625, or more than 750."""
    experiment = recipes.with_update_rule(recipes.find("catch_disco"), str(PUBLISHED))
    result = podracer.train(experiment, run_dir=tmp_path / "run", seed=seed, devices=1)
    assert result.evaluation.returns.mean() >= 0.98
