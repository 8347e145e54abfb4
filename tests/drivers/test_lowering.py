"""What is meant for a GPU, on a machine without one: programs as they are lowered, settings."""

import importlib.metadata
import os
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, blueprint, environment_for
from variants import variants

from podracer import recipes
from podracer.devices.mesh import find_devices, make_mesh
from podracer.devices.startup import choose_gpu_kernels
from podracer.drivers import anakin, population
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.state import abstract_state
from podracer.envs import make
from podracer.networks.layers import dense
from podracer.ops.convolution import LAYOUT, convolution
from podracer.tournament.config import Tournament
from podracer.tournament.engine import LocalEngine, find_engine

DEFAULT = ("rainbow",)  # the others take half a minute


def for_gpu(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@variants("name", DEFAULT, AGENTS)
def test_the_program_of_every_agent_can_be_lowered_for_a_gpu(name):
    env = environment_for(name)
    agent = population.with_hyperparameters(AGENTS[name], {})
    mesh, config = make_mesh(jax.devices()[:1]), AnakinConfig(16, 8, 2)
    agent = blueprint(agent, env.spec, config.rollout_length)
    state = abstract_state(agent, env, mesh, config)
    request = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    program = anakin.make_chunk(env, mesh, config)
    text = program.trace(agent, state, request).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert "custom_call" not in text.replace("custom_call @Sharding", "")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_on_a_gpu_are_those_of_jax_also_under_vmap(mapped, dtype):
    """Those for a CPU have one layout and barriers."""

    def layouts(convolve, product):
        def loss(x, w):
            features = convolve(x, w, 2).reshape(len(x), -1)
            weights = jnp.ones((features.shape[1], 4), dtype)
            return jnp.sum(product(features, weights) ** 2, dtype=jnp.float32)

        x, w = jnp.ones((4, 3, 9, 9, 2), dtype), jnp.ones((4, 3, 3, 2, 5), dtype)
        grads = jax.grad(loss, (0, 1))
        text = for_gpu(jax.vmap(grads), x, w) if mapped else for_gpu(grads, x[0], w[0])
        assert "optimization_barrier" not in text
        return sorted(re.findall(r"dim_numbers = (\S+x\S+->\[[^]]*\])", text.replace(", ", ",")))

    def plain(x, w, s):
        return jax.lax.conv_general_dilated(x, w, (s, s), "VALID", dimension_numbers=LAYOUT)

    ours = layouts(convolution, dense)
    assert ours == layouts(plain, jnp.matmul)
    assert len(ours) == 3
    assert len(set(ours)) > 1


def test_parts_of_a_batch_in_16_bits_are_summed_in_32():
    """Each of 1024 images adds 2^-8 of what is summed already, which bfloat16 would not see."""
    x = jnp.full((1024, 32, 32, 1), 0.125, jnp.bfloat16)
    w = jnp.zeros((1, 1, 1, 1), jnp.bfloat16)
    loss = jax.grad(lambda w: jnp.sum(convolution(x, w, 1).astype(jnp.float32)))
    grad = jax.jit(loss)(w)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(grad[0, 0, 0, 0]), x.size * 0.125, rtol=2**-7)


@pytest.mark.parametrize(("platform", "loops"), [("cpu", [5]), ("gpu", [1])])
def test_pods_begin_one_after_another_on_a_cpu_and_all_at_once_elsewhere(
    platform, loops, monkeypatch
):
    monkeypatch.setattr(population, "platform_of", lambda mesh: platform)
    env, pods = make("catch"), [Pod(seed) for seed in range(5)]
    agent = blueprint(AGENTS["a2c"], env.spec, 4)
    mesh, config = make_mesh(find_devices(1)), AnakinConfig(2, 4, 1)

    def states(agents, keys):
        return population.make_initial_states(pods, env, mesh, config, None, agents, keys)

    program = jax.make_jaxpr(states)(
        population.stack_agents(agent, pods), population.run_keys(pods)
    )
    scans = [eqn.params["length"] for eqn in program.eqns if eqn.primitive.name == "scan"]
    assert scans == loops


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "flags", "expected"),
    [
        ("xla_cuda13", None, "FIXED NO_SOFTMAX"),
        ("xla_cuda13", "--xla_dump_to=x", "--xla_dump_to=x FIXED NO_SOFTMAX"),
        (
            "xla_cuda13",
            "--xla_gpu_deterministic_ops=false",
            "--xla_gpu_deterministic_ops=false NO_SOFTMAX",
        ),
        ("libtpu", None, None),
    ],
)
def test_kernels_of_a_gpu_sum_in_a_fixed_order_unless_the_user_says_otherwise(
    monkeypatch, plugin, flags, expected
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags:
        monkeypatch.setenv("XLA_FLAGS", flags)
    plugins = [SimpleNamespace(name=plugin)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    choose_gpu_kernels()
    settings = {
        "NO_SOFTMAX": "--xla_disable_hlo_passes=triton-softmax-rewriter",
        "FIXED": "--xla_gpu_deterministic_ops=true",
    }
    for name, setting in settings.items():
        expected = expected and expected.replace(name, setting)
    assert os.environ.get("XLA_FLAGS") == expected
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # also what was set without monkeypatch


@pytest.mark.parametrize(
    ("share", "name", "expected"),
    [
        (0.25, None, {"XLA_CLIENT_MEM_FRACTION": "0.2250"}),
        (1.0, None, {}),
        (0.25, "XLA_CLIENT_MEM_FRACTION", {"XLA_CLIENT_MEM_FRACTION": "0.6"}),
        (0.25, "XLA_PYTHON_CLIENT_MEM_FRACTION", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}),
    ],
)
def test_pods_on_one_gpu_share_its_memory(tmp_path, monkeypatch, share, name, expected):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, "0.6")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    engine = LocalEngine(gpu_share=share)
    engine.start(0, tmp_path)
    while not engine.poll():
        pass
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert {line for line in lines if re.match("XLA.*MEM_FRACTION=", line)} == {
        f"{key}={value}" for key, value in expected.items()
    }


def test_a_tournament_divides_a_gpu_among_its_pods(tmp_path, monkeypatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    tournament = Tournament((recipes.find("catch_a2c"),), pods=4)
    memory = find_engine(tournament)(tmp_path, ()).variables  # type: ignore[attr-defined]
    assert memory["XLA_CLIENT_MEM_FRACTION"] == "0.2250"
