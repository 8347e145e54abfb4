"""Operations in forms that take few kernels on a GPU, run here in that form."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agents import AGENTS, environment_for
from runs import anakin_setup, train_anakin

from podracer.agent import LearnerState
from podracer.agents.common.optimizers import global_norm
from podracer.devices import fused
from podracer.devices.fused import traced_for
from podracer.devices.ordering import scan_parts
from podracer.drivers.faults import fault_bits
from podracer.networks import MLP, Head, TorsoNetwork
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep, Trajectory


def on_gpu(function, *args):
    """The result of a program as it is for a GPU."""
    with traced_for("gpu"):
        return jax.jit(function)(*args)


def assert_close(actual, expected, rtol=1e-6, atol=1e-6):
    def compare(x, y):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=rtol, atol=atol)

    jax.tree.map(compare, actual, expected)


# --- loops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 5, 16, 33])
def test_a_scan_computes_the_same(length, reverse):
    def body(carry, x):
        carry = 0.5 * carry + jnp.sin(x["a"])
        return carry, {"b": carry**2, "c": carry[:2] > 0, "d": carry[:0], "e": (carry[1], None)}

    xs = {"a": jnp.arange(length, dtype=jnp.float32)}
    expected = jax.lax.scan(body, jnp.ones(3), xs, reverse=reverse)
    assert_close(on_gpu(lambda: fused.scan(body, jnp.ones(3), xs, reverse=reverse)), expected)
    with traced_for("gpu"):
        text = jax.jit(lambda: fused.scan(body, jnp.ones(3), xs)).lower().as_text()
    assert text.count("stablehlo.while") == (length > 16)


def test_a_scan_without_results_computes_the_same():
    def body(carry, x):
        return carry + x, None

    assert on_gpu(lambda: fused.scan(body, 1.0, jnp.arange(3.0))) == (4.0, None)


def test_a_recurrent_layer_takes_several_steps_in_an_iteration():
    network = TorsoNetwork(MLP((8,)), memory="gru", memory_size=4).build(
        ArraySpec((3,)), {"value": Head(1)}
    )
    params, carry = network.init(jax.random.key(0)), network.carry(2)
    observation, first = jnp.sin(jnp.arange(192.0)).reshape(32, 2, 3), jnp.zeros((32, 2), bool)

    def loss(params):
        outputs, _ = network.apply(params, carry, observation, first.at[5, 0].set(True))
        return jnp.mean(outputs["value"] ** 2)

    assert_close(on_gpu(jax.value_and_grad(loss), params), jax.value_and_grad(loss)(params))
    with traced_for("gpu"):
        program = jax.make_jaxpr(loss)(params)
    (loop,) = (x for x in program.eqns if x.primitive.name == "scan")
    assert loop.params["unroll"] > 4


# --- trees ----------------------------------------------------------------------------------------

TREE = {
    "matrix": jnp.arange(6.0).reshape(2, 3),
    "scalar": jnp.float32(7),
    "empty": jnp.zeros((0, 3)),
    "integer": jnp.int32(8),
    "integers": jnp.arange(3),
    "flag": jnp.bool_(True),
    "half": jnp.ones(3, jnp.bfloat16),
    "key": jax.random.key(0),
    "large": jnp.arange(float(1 << 17)).reshape(2, -1),
    "nothing": (),
}


def test_a_packed_tree_is_a_vector_for_each_dtype_and_comes_back():
    packed = on_gpu(fused.pack, TREE)
    shapes = sorted(x.shape for x in jax.tree.leaves(packed))
    assert shapes == [(), (), (2, 1 << 16), (3,), (4,), (7,)]  # of a large array its own
    actual = on_gpu(lambda packed: fused.unpack(packed, TREE), packed)
    assert_close(actual, TREE, rtol=0, atol=0)
    assert actual["key"] == TREE["key"]
    assert fused.unpack(fused.pack(TREE), TREE) is TREE  # on a CPU


def test_loops_and_conditions_with_packed_trees_return_the_same():
    carry = {"a": jnp.ones(3), "b": jnp.int32(2), "c": jnp.ones((2, 2))}

    def body(carry, x):
        carry = {"a": carry["a"] * x, "b": carry["b"] + 1, "c": carry["c"] - carry["a"][0]}
        return carry, {"sum": jnp.sum(carry["c"]), "count": carry["b"]}

    def run(positive):
        def loop(carry):
            return fused.scan(body, carry, jnp.arange(1.0, 8.0), packed=True)

        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(loop, carry)[1])
        return fused.cond(positive, loop, lambda carry: (carry, none), carry)

    for positive in (True, False):
        assert_close(on_gpu(run, positive), jax.jit(run)(positive), rtol=0, atol=0)
    with traced_for("gpu"):
        program = jax.make_jaxpr(lambda: fused.scan(body, carry, jnp.ones(40), packed=True))()
    (scan,) = (x for x in program.eqns if x.primitive.name == "scan")
    _, num_carry = scan_parts(scan)
    assert num_carry == 2  # a vector of floats and the integer


@pytest.mark.parametrize("steps", [3, 4])
def test_parameters_are_copied_after_each_period(steps):
    new = {"a": jnp.ones(2), "b": jnp.ones(())}
    old = jax.tree.map(jnp.zeros_like, new)
    actual = on_gpu(lambda: fused.periodic_update(new, old, jnp.int32(steps), 4))
    assert_close(actual, optax.periodic_update(new, old, jnp.int32(steps), 4), rtol=0)


def test_a_norm_is_the_norm():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
    assert_close(on_gpu(global_norm, tree), global_norm(tree))


@pytest.mark.parametrize("place", [None, "observation", "reward", "loss", "norm", "a", "b", "c"])
def test_a_fault_has_the_same_bits(place):
    def value(name, shape=()):
        return jnp.full(shape, jnp.nan if name == place else 1.0)

    def timestep(shape):
        ends = jnp.zeros(shape, bool)
        observation = value("observation", (*shape, 3))
        return TimeStep(observation, value("reward", shape), jnp.ones(shape), ends, ends)

    steps = Step(timestep((4, 2)), jnp.zeros((4, 2), jnp.int32), ())
    trajectory = Trajectory(steps, timestep((2,)), (), ())
    metrics = {"loss": value("loss"), "gradient_norm": value("norm")}
    shared = {"a": value("a", (2, 3)), "b": (value("b"), jnp.int32(1)), "c": value("c", (3,))}

    agent = types.SimpleNamespace(spec=EnvironmentSpec("env", ArraySpec((3,)), Discrete(2)))

    def bits():
        return fault_bits(agent, trajectory, LearnerState(shared), metrics, None)

    expected = bits()
    assert (expected == 0) == (place is None)
    assert on_gpu(bits) == expected


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("a2c", "ppo") else pytest.mark.slow)
        for name in ("a2c", "ppo", "ppo-gru", "pqn", "dqn", "rainbow", "sac", "fast_td3", "muzero")
    ],
)
def test_a_run_learns_what_it_learns_on_a_cpu(name):
    """With moments, schedules, target networks, priorities and decay of matrices alone."""
    driver, state = anakin_setup(AGENTS[name], environment_for(name), updates_per_chunk=4)
    start = jax.tree.map(jnp.copy, state)
    expected, _ = train_anakin(driver, state, 4)
    with traced_for("gpu"):
        actual, _ = train_anakin(driver, start, 4)
    assert int(actual.fault[0]) == 0
    assert_close(actual.learner.shared, expected.learner.shared, 1e-3, 1e-4)
