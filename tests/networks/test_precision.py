"""Networks that compute in bfloat16: what stays float32, and how near they are."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from agents import AGENTS, blueprint, environment_for
from variants import variants

from podracer.devices.mesh import make_mesh
from podracer.drivers import anakin, population
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.state import abstract_state
from podracer.networks import CNN, MLP, Head, ResNet, TorsoNetwork
from podracer.types import ArraySpec

IMAGE, VECTOR = ArraySpec((12, 12, 4), np.uint8), ArraySpec((6,))
HEADS = {"policy": Head(5, 0.01, hidden=(32,)), "value": Head(1)}
NOISY = {"policy": Head(5, noisy=True, hidden=(32,)), "value": Head(1, noisy=True)}
NETWORKS = {
    "mlp": (TorsoNetwork(MLP((64, 64), "tanh"), shared=False), VECTOR, HEADS),
    "silu": (
        TorsoNetwork(MLP((64, 64), "silu")),
        {"x": VECTOR, "last_step": {"action": VECTOR}},
        HEADS,
    ),
    "residual": (TorsoNetwork(MLP((64,), residual_blocks=1)), VECTOR, HEADS),
    "cnn": (TorsoNetwork(CNN((16, 32), (4, 3), (2, 1), (64,))), IMAGE, HEADS),
    "resnet": (TorsoNetwork(ResNet((16, 32), 1, 64)), IMAGE, HEADS),
    "gru": (TorsoNetwork(MLP((64,)), memory="gru", memory_size=16), VECTOR, HEADS),
    "lstm": (TorsoNetwork(MLP((64,)), memory="lstm", memory_size=16), VECTOR, HEADS),
    "noisy": (TorsoNetwork(MLP((64,))), VECTOR, NOISY),
}
T, B = 4, 64
FAST = ("ppo", "pqn-gru", "rainbow", "sac")


def computed(name, compute_dtype):
    """Return outputs, the memory and gradients of a network, and its program."""
    builder, observation, heads = NETWORKS[name]
    network = dataclasses.replace(builder, compute_dtype=compute_dtype).build(observation, heads)
    rng = np.random.default_rng(0)

    def observe(spec):
        shape = (T, B, *spec.shape)
        if spec.dtype == np.uint8:
            return jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    inputs = jax.tree.map(observe, observation)
    first, noise = jnp.zeros((T, B), bool), jax.random.split(jax.random.key(1), (T, B))
    params = jax.tree.map(  # its own orthogonal ones take seconds to compile
        lambda x: jnp.asarray(rng.normal(size=x.shape) / np.sqrt(x.size / x.shape[-1]), x.dtype),
        jax.eval_shape(network.init, jax.random.key(0)),
    )

    def loss(params):
        arguments = (noise,) if name == "noisy" else ()
        outputs, carry = network.apply(params, network.carry(B), inputs, first, *arguments)
        return sum(jnp.mean(jnp.sin(x)) for x in outputs.values()), (outputs, carry)

    program = jax.jit(jax.grad(loss, has_aux=True)).trace(params).lower()
    grads, (outputs, carry) = program.compile()(params)
    return outputs, carry, grads, program.as_text()


@variants("name", ["silu", "cnn", "lstm"], NETWORKS)
def test_outputs_and_gradients_in_bfloat16_are_float32_and_near_those_in_float32(name):
    outputs, carry, grads, program = computed(name, "bfloat16")
    plain_outputs, plain_carry, plain_grads, plain_program = computed(name, "float32")
    got, plain = (outputs, carry, grads), (plain_outputs, plain_carry, plain_grads)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(plain), strict=True
    ):
        assert x.dtype == y.dtype == jnp.float32, path
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert 0 <= error < 0.05, (jax.tree_util.keystr(path), error)
    assert not np.array_equal(outputs["policy"], plain_outputs["policy"])
    assert "bf16" not in plain_program
    # Products of layers are bfloat16 but for the output layers and a recurrent layer's.
    products = re.findall(
        r"stablehlo\.(dot_general|convolution).*-> tensor<(?:\d+x)+(\w+)>", program
    )
    kinds = {kind for operation, kind in products if operation == "convolution"}
    assert kinds <= {"bf16"}
    assert sum(kind == "bf16" for _, kind in products) >= 3


def test_a_bias_is_summed_over_many_rows_in_float32():
    network = TorsoNetwork(MLP((2,)), compute_dtype="bfloat16").build(
        ArraySpec((1,)), {"y": Head(1)}
    )
    params = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype), jax.eval_shape(network.init, jax.random.key(0))
    )
    rows = 100_000  # a sum of ones in bfloat16 ends at 256

    def loss(params):
        first = jnp.zeros((1, rows), bool)
        outputs, _ = network.apply(params, (), jnp.ones((1, rows, 1)), first)
        return jnp.sum(outputs["y"])

    for grad in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert (np.abs(grad) >= 0.99 * rows).all()


@variants("name", FAST, AGENTS)
def test_the_state_of_every_agent_stays_float32(name):
    env, mesh, config = (
        environment_for(name),
        make_mesh(jax.devices()[:1]),
        AnakinConfig(16, 8, 2),
    )
    settings = population.with_hyperparameters(AGENTS[name], {})
    network = dataclasses.replace(settings.network, compute_dtype="bfloat16")
    in_bfloat16, agent = (
        blueprint(each, env.spec, config.rollout_length)
        for each in (dataclasses.replace(settings, network=network), settings)
    )
    states = [abstract_state(each, env, mesh, config) for each in (in_bfloat16, agent)]
    kinds = [[(x.dtype, x.shape) for x in jax.tree.leaves(state)] for state in states]
    assert kinds[0] == kinds[1]
    # Tracing refuses a state whose dtypes change from one update to the next.
    request = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    program = anakin.make_chunk(env, mesh, config).trace(in_bfloat16, states[0], request)
    assert "bf16" in str(program.jaxpr)
