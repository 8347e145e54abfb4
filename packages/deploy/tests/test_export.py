"""Exported policies decide as their agents do, and each operator computes what lax does."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, CONTINUOUS, RECURRENT, blueprint, environment_for
from jax import lax
from lucky import LUCKY
from walk import BOX, WALK, Walk

import podracer
from podracer.agents.ppo import PPO
from podracer.cli.main import main
from podracer.envs import make
from podracer.errors import ConfigError, PodracerError
from podracer.io import text
from podracer.ops.convolution import convolution
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec, LearnerState
from podracer_deploy import export_policy
from podracer_deploy.export import files
from podracer_deploy.export.decision import Decision, make_decision
from podracer_deploy.export.files import onnx_runner, stablehlo_runner, to_stablehlo
from podracer_deploy.export.onnx import to_onnx
from podracer_deploy.export.proof import draw_timesteps, prove

# --- operators -----------------------------------------------------------------------------------

# Functions of rows: floats x, y [3, 4], integers i [3, 4], words w uint32 [4], bits b [3, 4],
# pixels p uint8 [3, 4], images z [6, 5, 2]. A row of several outputs is one array.
KERNEL = np.random.default_rng(2).normal(size=(3, 2, 2, 4)).astype(np.float32)
MATRIX = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
UNARY = (
    "exp", "tanh", "logistic", "erf", "neg", "abs", "sign", "floor", "ceil", "sin", "cos",
    "square", "exp2", "is_finite", "expm1", "sinh", "atan",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "max", "min", "rem", "lt", "le", "gt", "ge", "ne")


def unary(name, a):
    return getattr(lax, name)(a["x"])


def binary(name, a):
    return getattr(lax, name)(a["x"], a["y"])


OPERATIONS = {
    **{name: partial(unary, name) for name in UNARY},
    **{name: partial(binary, name) for name in BINARY},
    "log": lambda a: lax.log(lax.abs(a["x"])),
    "log1p": lambda a: lax.log1p(1e-4 * a["x"]),
    "log1p, large": lambda a: lax.log1p(lax.exp(9 * a["x"])),
    "softplus": lambda a: jax.nn.softplus(a["x"]),
    "sqrt": lambda a: lax.sqrt(lax.abs(a["x"])),
    "rsqrt": lambda a: lax.rsqrt(1e-8 + lax.abs(a["x"])),
    "pow": lambda a: lax.pow(lax.abs(a["x"]), a["y"]),
    "integer_pow": lambda a: a["x"] ** 3 + (1 + a["x"] ** 2) ** -2,
    "erfc": lambda a: lax.erfc(a["x"]),
    "gelu": lambda a: jax.nn.gelu(a["x"], approximate=False),
    "erf_inv": lambda a: lax.erf_inv(jnp.tanh(a["x"])),
    "round": lambda a: lax.round(a["x"]),
    "round near halves": lambda a: lax.round(
        jnp.where(a["b"], jnp.array([0.49999997, 0.5, -1.5, 8388609]), a["x"])
    ),
    "round to even": lambda a: jnp.round(2 * a["x"]) / 2,
    "clamp": lambda a: lax.clamp(-0.5, a["x"], a["y"]),
    "select_n": lambda a: jnp.where(a["b"], a["x"], a["y"]),
    "select_n of bools": lambda a: jnp.where(a["b"], a["x"] > 0, a["y"] > 0),
    "eq": lambda a: a["i"] == a["i"][::-1],
    "and": lambda a: a["b"] & (a["x"] > 0),
    "or": lambda a: a["b"] | (a["x"] > 0),
    "xor": lambda a: a["b"] ^ (a["x"] > 0),
    "not": lambda a: ~a["b"],
    "div of integers": lambda a: a["i"] // 3,
    "rem of integers": lambda a: lax.rem(a["i"], jnp.int32(3)),
    "not of words": lambda a: ~a["w"],
    "add of words": lambda a: a["w"] + a["w"] * jnp.uint32(0x9E3779B9),
    "sub of words": lambda a: a["w"] - a["w"][::-1],
    "shift_left": lambda a: a["w"] << 5,
    "shift_right_logical": lambda a: (a["w"] >> 7) ^ (a["w"] & 255),
    "lt of words": lambda a: a["w"] < a["w"][::-1],
    "random_bits": lambda a: jax.random.bits(jax.random.wrap_key_data(a["w"][:2]), (5,)),
    "normal": lambda a: jax.random.normal(jax.random.wrap_key_data(a["w"][:2]), (5,)),
    "split of keys": lambda a: jax.random.key_data(
        jax.random.split(jax.random.wrap_key_data(a["w"][:2]), (2, 3))
    ),
    "randint": lambda a: jax.random.randint(jax.random.wrap_key_data(a["w"][:2]), (5,), 0, 7),
    "fold_in": lambda a: jax.random.uniform(
        jax.random.fold_in(jax.random.wrap_key_data(a["w"][:2]), 3)
    ),
    "convert pixels to float": lambda a: a["p"].astype(jnp.float32) / 255,
    "convert words to float": lambda a: a["w"].astype(jnp.float32),
    "convert to integer": lambda a: (9 * a["x"]).astype(jnp.int32),
    "convert to word": lambda a: a["i"].astype(jnp.uint32),
    "convert to bool": lambda a: a["i"].astype(bool),
    "add of pixels": lambda a: a["p"] + a["p"],
    "max of pixels": lambda a: a["p"].max(axis=0),
    "reduce_sum": lambda a: a["x"].sum(axis=(0, 1)),
    "reduce_sum of integers": lambda a: a["i"].sum(axis=0),
    "reduce_max": lambda a: a["x"].max(axis=1),
    "reduce_min": lambda a: a["x"].min(axis=0),
    "reduce_prod": lambda a: a["x"].prod(axis=1),
    "reduce_and": lambda a: a["b"].all(axis=1),
    "reduce_or": lambda a: a["b"].any(axis=0),
    "argmax": lambda a: jnp.argmax(a["x"], axis=1),
    "argmax of ties": lambda a: jnp.argmax(a["i"] > 0, axis=1),
    "argmin": lambda a: jnp.argmin(a["x"], axis=0),
    "softmax": lambda a: jax.nn.softmax(a["x"]),
    "variance": lambda a: a["x"].var(axis=-1),
    "cumsum": lambda a: jnp.cumsum(a["x"], axis=0),
    "cumsum in reverse": lambda a: lax.cumsum(a["i"], axis=1, reverse=True),
    "reshape": lambda a: a["x"].reshape(2, 6),
    "squeeze": lambda a: lax.squeeze(a["x"][:1], (0,)),
    "broadcast_in_dim": lambda a: jnp.broadcast_to(a["x"][:, None], (3, 2, 4)),
    "broadcast of a constant": lambda a: jnp.concatenate([a["x"], jnp.zeros((1, 4))]),
    "transpose": lambda a: a["x"].T,
    "concatenate": lambda a: jnp.concatenate([a["x"], a["y"]], axis=1),
    "stack": lambda a: jnp.stack([a["x"], a["y"]]),
    "stack along the last axis": lambda a: jnp.stack([a["x"], a["y"]], axis=-1),
    "tile": lambda a: jnp.tile(a["x"], (2, 3)),
    "split": lambda a: jnp.split(a["x"], [1], axis=1)[1],
    "unstack": lambda a: jnp.unstack(a["x"], axis=1)[1],
    "slice": lambda a: a["x"][1:, ::2],
    "rev": lambda a: a["x"][::-1],
    "dynamic_slice": lambda a: lax.dynamic_slice(a["x"], (5, 0), (2, 4)),
    "pad": lambda a: jnp.pad(a["x"], ((1, 0), (0, 2)), constant_values=-jnp.inf),
    "gather": lambda a: jnp.asarray(MATRIX)[a["i"][0] % 4],
    "one_hot": lambda a: jax.nn.one_hot(a["i"], 5),
    "take of columns": lambda a: jnp.take(a["x"], a["i"][0] % 4, axis=1),
    "take of constant columns": lambda a: a["x"][:, jnp.array([3, 0])],
    "take outside": lambda a: jnp.nan_to_num(jnp.take(a["x"], a["i"][0], axis=0), nan=-7.0),
    "take_along_axis": lambda a: jnp.take_along_axis(a["x"], a["i"] % 4, axis=1),
    "gather of entries": lambda a: a["x"][jnp.arange(3), a["i"][:, 0] % 4],
    "gather of a row": lambda a: a["x"][a["i"][0, 0] % 3],
    "sort": lambda a: jnp.sort(a["x"], axis=0),
    "argsort of ties": lambda a: jnp.argsort(a["i"], axis=1),
    "top_k": lambda a: lax.top_k(a["i"], 2)[0] + lax.top_k(a["x"], 2)[1],
    "max-pool": lambda a: lax.reduce_window(
        a["z"], -jnp.inf, lax.max, (3, 2, 1), (2, 2, 1), ((1, 1), (0, 1), (0, 0))
    ),
    "sum of windows": lambda a: lax.reduce_window(
        a["z"], 0.0, lax.add, (3, 2, 1), (1, 2, 1), ((1, 0), (0, 1), (0, 0))
    ),
    "select_n of three": lambda a: lax.switch(
        a["i"][0, 0] % 3, [lambda x: x, lambda x: -x, lambda x: 2 * x], a["x"]
    ),
    "dot_general": lambda a: a["x"] @ MATRIX,
    "dot_general of a vector": lambda a: a["x"][0] @ MATRIX,
    "dot_general of inputs": lambda a: jnp.einsum("ij,kj->ki", a["x"], a["y"]),
    "dot_general with a batch": lambda a: jnp.einsum("ij,ij->i", a["x"], a["y"]),
    "convolution of small patches": lambda a: convolution(
        a["z"][None], jnp.sin(jnp.arange(36.0)).reshape(3, 2, 2, 3), 1
    )[0],
    "conv_general_dilated": lambda a: lax.conv_general_dilated(
        a["z"][None], KERNEL, (2, 1), ((1, 0), (0, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )[0],
    "optimization_barrier": lambda a: lax.optimization_barrier(a["x"]),
    "scan": lambda a: lax.scan(lambda c, x: (c + x, c * x), a["y"][0], a["x"][:1])[1],
    "scan with outputs": lambda a: _scan(a, reverse=False),
    "scan in reverse": lambda a: _scan(a, reverse=True),
}
SPECS = {
    "x": ArraySpec((3, 4)),
    "y": ArraySpec((3, 4)),
    "i": ArraySpec((3, 4), np.int32),
    "w": ArraySpec((4,), np.uint32),
    "b": ArraySpec((3, 4), bool),
    "p": ArraySpec((3, 4), np.uint8),
    "z": ArraySpec((6, 5, 2)),
}


def _scan(arrays, reverse):
    """The outputs of every step and the last carry, as columns."""
    x, y = arrays["x"], arrays["y"]
    last, outputs = lax.scan(
        lambda carry, row: (0.5 * carry + row[0], carry * row[1]), y[0], (x, y), reverse=reverse
    )
    return jnp.concatenate([outputs, last[None]])


def decision_of(functions):
    """A decision that computes functions of `SPECS`."""
    names = list(functions)
    zeros = {name: np.zeros(spec.shape, spec.dtype) for name, spec in SPECS.items()}

    def row(*values):
        arrays = dict(zip(SPECS, values, strict=True))
        return [functions[name](arrays) for name in names]

    jaxpr, shapes = jax.make_jaxpr(row, return_shape=True)(*zeros.values())
    outputs = {n: ArraySpec(x.shape, x.dtype) for n, x in zip(names, shapes, strict=True)}
    return Decision(SPECS, outputs, {}, False, jaxpr, zeros, tuple(names))


def draw(rows, seed=0):
    rng = np.random.default_rng(seed)
    low, high = -5, 6
    drawn = {name: rng.normal(size=(rows, *spec.shape)) for name, spec in SPECS.items()}
    drawn["i"] = rng.integers(low, high, drawn["i"].shape)
    drawn["w"] = rng.integers(0, 2**32, drawn["w"].shape)
    drawn["b"] = drawn["b"] > 0
    drawn["p"] = rng.integers(0, 256, drawn["p"].shape)
    return {name: x.astype(SPECS[name].dtype) for name, x in drawn.items()}


@pytest.fixture(scope="module")
def computed():
    """Outputs of all operations for seven rows, by lax and by onnxruntime; and of one row."""
    decision = decision_of(OPERATIONS)
    runner, x = onnx_runner(to_onnx(decision, {})), draw(7)
    first = runner({name: array[:1] for name, array in x.items()})
    return jax.device_get(jax.jit(decision)(x)), runner(x), first


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_computes_what_lax_does(name, computed):
    expected, result, first = (outputs[name] for outputs in computed)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first, expected[:1], rtol=1e-5, atol=1e-6)


def test_an_unknown_primitive_is_named():
    with pytest.raises(ConfigError, match=r"no operator for 'cummax', .* `format=stablehlo`"):
        to_onnx(decision_of({"cummax": lambda a: lax.cummax(a["x"])}), {})


# --- agents --------------------------------------------------------------------------------------


def build(settings, spec):
    """An agent, untrained but for larger weights, and its state without a replay buffer."""
    agent = blueprint(settings, spec).build()
    shared = jax.jit(lambda: agent.init(jax.random.key(1), 16).shared)()
    return agent, LearnerState(jax.tree.map(lambda x: x * 3 if jnp.ndim(x) == 2 else x, shared))


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Host environments that only have a specification."""

    spec: EnvironmentSpec

    def make(self, num_envs, num_threads):
        raise NotImplementedError


def proof_of(settings, env, *, sampled=False, format="onnx", source=None):
    agent, state = build(settings, env.spec)
    decision = make_decision(agent, state, sampled=sampled)
    if format == "onnx":
        runner = onnx_runner(to_onnx(decision, {}))
    else:
        runner = stablehlo_runner(to_stablehlo(decision))
    proof = prove(decision, runner, agent, env, state)
    assert proof.observations == 1000
    assert proof.holds, proof
    assert source in (None, proof.source)
    return decision


@dataclasses.dataclass(frozen=True)
class TrainingOnly(Walk):
    """An environment that is not evaluated in itself."""

    played: Any = None

    def for_evaluation(self):
        if self.played is None:
            raise ConfigError("there is no environment to evaluate in.")
        return self.played


@pytest.mark.parametrize("played", [Hosts(WALK.spec), None])
def test_a_policy_without_an_environment_in_jax_is_proven_by_its_specification(played):
    proof_of(AGENTS["a2c"], TrainingOnly(played=played), source="specification")


ONE = ("ppo-gru", False)  # the others are slow tests
SEARCHERS = (
    "muzero", "muzero-reanalyze", "muzero-sampled", "muzero-planes",
)  # fmt: skip
CASES = [
    pytest.param(name, sampled, marks=() if (name, sampled) == ONE else pytest.mark.slow)
    for name in AGENTS
    for sampled in (False, True)
    if name not in SEARCHERS
]


@pytest.mark.parametrize(("name", "sampled"), CASES)
def test_a_file_decides_as_the_agent_does(name, sampled):
    env = Walk(BOX) if name in CONTINUOUS else WALK
    decision = proof_of(AGENTS[name], env, sampled=sampled)
    assert ("key" in decision.inputs) == (sampled and name != "q_lambda")
    assert ("scores" in decision.outputs) == (name not in CONTINUOUS and not sampled)


def test_a_mask_that_is_drawn_allows_an_action_wherever_it_stands():
    observation = {"observation": {ACTION_MASK: ArraySpec((3,), bool)}}
    spec = EnvironmentSpec("masked", observation, Discrete(3))
    drawn = draw_timesteps(spec, np.random.default_rng(0)).observation
    assert jax.tree.structure(drawn) == jax.tree.structure(observation)
    assert drawn["observation"][ACTION_MASK].any(axis=-1).all()


def test_a_file_takes_the_part_of_an_observation_that_is_for_the_actor():
    """Without the critic's memory, too."""
    settings = dataclasses.replace(AGENTS["ppo-gru"], normalize_observations=True)
    decision = proof_of(settings, LUCKY, source="environment")
    assert set(decision.inputs) == {"observation.cue", "first", "memory.actor.shared"}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_stablehlo_holds_every_agent(name):
    decision = proof_of(AGENTS[name], make(environment_for(name)), format="stablehlo")
    is_discrete = name not in (*CONTINUOUS, "ppo-multidiscrete")
    assert ("scores" in decision.outputs) == (is_discrete and name not in SEARCHERS)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_goes_from_call_to_call_and_first_forgets_it():
    agent, state = build(PPO(network=RECURRENT), WALK.spec)
    decision = make_decision(agent, state)
    runner = onnx_runner(to_onnx(decision, {}))
    arrays = {"observation": np.ones((2, 2), np.float32), "first": np.array([True, False])}
    memory = {name: np.ones((2, *x.shape), x.dtype) for name, x in decision.initial_memory.items()}
    outputs = runner(arrays | memory)
    assert set(memory) == {"memory.shared"}
    new_memory = outputs["next_memory.shared"]
    assert np.abs(new_memory[0] - new_memory[1]).max() > 0.01
    fresh = runner(arrays | {name: np.zeros_like(x) for name, x in memory.items()})
    np.testing.assert_array_equal(fresh["next_memory.shared"][0], new_memory[0])


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs[0], tmp_path / "run")


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["export", *map(str, arguments)])
    printed = capsys.readouterr()
    return leaving.value.code, printed.out, printed.err


@pytest.mark.slow
def test_stablehlo_is_read_by_jax(run, capsys, tmp_path):
    path = tmp_path / "p.stablehlo"
    code, out, _ = command(capsys, run, "--format", "stablehlo", "--out", path, "--json")
    assert code == 0
    assert json.loads(out)["different_actions"] == 0
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    outputs = exported.call({"observation": jnp.zeros((5, 10, 5))})
    assert outputs["action"].shape == (5,)
    assert json.loads((tmp_path / "p.stablehlo.json").read_text())["platforms"]


@pytest.mark.slow
def test_a_file_that_decides_otherwise_is_not_written(run, tmp_path, monkeypatch):
    def wrong(data):
        runner = onnx_runner(data)
        return lambda x: {n: (y + 1) % 3 if n == "action" else y for n, y in runner(x).items()}

    monkeypatch.setattr(files, "onnx_runner", wrong)
    with pytest.raises(PodracerError, match="1000 of 1,000 actions differ"):
        export_policy(run, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == [run]


def test_a_run_is_exported_from_its_address(experiment, tmp_path, monkeypatch, capsys):
    pytest.importorskip("podracer_cloud", reason="the package is not installed")
    address = f"file://{tmp_path / 'store' / 'run'}"
    evaluated = dataclasses.replace(experiment, evaluations=1, evaluation_episodes=4)
    podracer.train(evaluated, run_dir=tmp_path / "run", callbacks=[f"mirror:{address}"])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, error = command(capsys, address, "--format", "stablehlo", "--checkpoint", "best")
    assert code == 0, error
    assert sorted(path.name for path in Path().iterdir()) == [
        "policy.stablehlo", "policy.stablehlo.json"
    ]  # fmt: skip


def test_a_file_holds_no_secret_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SECRETS_OF_SETTINGS", set())
    experiment = dataclasses.replace(
        podracer.recipes.find("catch_a2c"),
        environment="gymnasium:Maze-v0,api_key=k3y-0f-a-user,url=https://me:pa55-0f-me@example.org",
    )
    origin = files.origin_of(tmp_path, experiment, 1, 64, None)
    expected = "gymnasium:Maze-v0,api_key=[redacted],url=https://me:[redacted]@example.org"
    assert origin["environment"] == expected
