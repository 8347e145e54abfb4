"""A function in pieces computes what the whole one does, and its devices get them in turn."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.devices import pieces
from podracer.devices.fused import cond, scan
from podracer.devices.mesh import DATA, REPLICATED, make_mesh
from podracer.devices.ordering import shard_in_order
from podracer.devices.pieces import Pieces, lower_in_pieces
from podracer_testing.parity import optimized


def loop(x, length=7):
    """Sums and products of numbers and of their carry, of all shards together."""

    def step(carry, number):
        total = jax.lax.psum(carry["sum"] * number, DATA) + x.mean()
        return {"sum": jnp.tanh(total), "key": carry["key"]}, (total, carry["key"])

    with jax.named_scope("minibatches"):
        carry = {"sum": x[0, 0], "key": jax.random.key(0)}
        carry, (totals, keys) = scan(step, carry, jnp.arange(1.0, 1.0 + length), packed=True)
    return carry["sum"], totals, jax.random.key_data(keys)


def conditional(x, threshold):
    """A loop in a condition in a condition."""
    none = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(loop, x))
    inner = lambda x: cond(x.max() > threshold, lambda x: loop(2 * x), lambda x: none, x)  # noqa: E731
    sums = jax.lax.psum(x, DATA)
    result = cond(sums.max() > threshold, inner, lambda x: none, sums)
    return jax.tree.map(lambda y: 3 * y, result), sums


FUNCTIONS = {
    "loop": lambda x, state: (loop(x), state + 1),
    "what waits": lambda x, state: (jnp.exp(loop(x)[1]) + jnp.sin(x).sum(), state),
    "taken": lambda x, state: (conditional(x, -100.0), state),
    "not taken": lambda x, state: (conditional(x, 100.0), state),
    "no loop": lambda x, state: (jnp.sin(x).sum(), state * x.sum()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("devices", [1, 2])
def test_pieces_compute_what_the_whole_function_does(name, devices):
    function, mesh = FUNCTIONS[name], make_mesh(jax.devices()[:devices])
    x, state = jax.random.normal(jax.random.key(0), (2 * devices, 3)), jnp.arange(4.0)
    specs = (mesh, (jax.sharding.PartitionSpec(DATA), REPLICATED), REPLICATED)
    with optimized():
        whole = jax.jit(shard_in_order(function, *specs)).lower(x, state).compile()
        programs: list[Any] = [
            lower_in_pieces(n, function, *specs, x, state).compile() for n in (1, 3, 100)
        ]
    expected = whole(x, state)
    is_cut = [isinstance(program, Pieces) for program in programs]
    assert is_cut == [name != "no loop"] * 3
    if all(is_cut):
        assert [program.num_pieces for program in programs] == [1, 3, 7]
    for program in programs:
        got = program(x, jnp.copy(state))
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_that_the_loop_reads_is_never_copied(devices):
    """As a replay's: each program gives it to the next in its place."""

    def function(x, state):
        state = state.at[0].set(x)

        def step(carry, number):
            return carry + state[number].sum(), None

        with jax.named_scope("minibatches"):
            total, _ = jax.lax.scan(step, jnp.zeros(()), jnp.arange(5))
        return state + 0 * total, total

    mesh, shape = make_mesh(jax.devices()[:devices]), jax.ShapeDtypeStruct((1000, 100), "f4")
    specs = (mesh, (REPLICATED, REPLICATED), REPLICATED)
    with optimized():
        program: Any = lower_in_pieces(
            5, function, *specs, shape.update(shape=(100,)), shape
        ).compile()
    size = 1000 * 100 * 4
    for analysis in (x.memory_analysis() for x in program.programs):
        assert analysis.argument_size_in_bytes < 1.1 * size
        assert analysis.output_size_in_bytes < 1.1 * size
        assert analysis.output_size_in_bytes - analysis.alias_size_in_bytes < 0.1 * size
        assert analysis.temp_size_in_bytes < 0.1 * size


def test_at_most_one_piece_waits_behind_the_one_that_runs(monkeypatch):
    events = []

    def program(name, outputs):
        def run(*args):
            events.append(name)
            return outputs()

        return run

    class Output:
        def __init__(self, name):
            self.name = name

    numbers = itertools.count()
    inputs = [Output("begin")]
    programs = [
        program("begin", lambda: ((), inputs, ())),
        program("piece", lambda: ((), Output(f"piece {next(numbers)}"))),
        program("end", lambda: "result"),
    ]
    monkeypatch.setattr(pieces, "fetch", lambda output: events.append(f"wait for {output.name}"))
    noted = []
    monkeypatch.setattr(pieces, "note_program", lambda output: noted.append(output.name))
    assert Pieces(programs, 3)() == "result"
    assert events == [
        "begin", "piece", "wait for begin", "piece", "wait for piece 0", "piece",
        "wait for piece 1", "end",
    ]  # fmt: skip
    assert noted == ["begin", "piece 0", "piece 1", "piece 2"]
