"""Programs in pieces, between which a device does other work.

An accelerator runs programs in the order in which it gets them: an actor's inference waits for the
whole update that its device got before. Here a function is cut at its loop over minibatches into
programs of their own: what comes before the loop, some of its steps, and what comes after
(docs/decisions/0069).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh

from podracer.devices.mesh import REPLICATED, fetch, note_program
from podracer.devices.ordering import bind, call, evaluate, read, scan_operands, shard_in_order
from podracer.types import PyTree

LOOPS = ("minibatches", "parts")
"""Scopes (`jax.named_scope`) of scans at which a function is cut."""


class Pieces(NamedTuple):
    """Programs, lowered or compiled: up to a loop, some of its steps, and after it."""

    programs: list[Any]
    num_pieces: int  # number of calls of the second

    def compile(self) -> Pieces:
        """Return the programs compiled."""
        return self._replace(programs=[program.compile() for program in self.programs])

    def memory_analysis(self) -> Any:
        """Return the analysis of the program that needs most memory beside its arguments."""
        analyses = [program.memory_analysis() for program in self.programs]
        return max(analyses, key=lambda x: getattr(x, "temp_size_in_bytes", 0))

    def __call__(self, *args: Any) -> Any:
        """Give the pieces to the devices, where at most one waits behind the one that runs."""
        begin, steps, end = self.programs
        loop, inputs, values = begin(*args)
        newest = inputs[0]
        for _ in range(self.num_pieces):
            note_program(newest)
            previous = newest
            loop, newest = steps(loop, inputs)
            fetch(previous)
        note_program(newest)
        return end(loop, inputs, values)


def lower_in_pieces(
    num_pieces: int,
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: PyTree,
    out_specs: PyTree,
    *args: Any,
) -> jax.stages.Lowered | Pieces:
    """Trace a function of the shards of a mesh, see `shard_in_order`, for arguments or shapes.

    Its loop, the first scan in one of `LOOPS`, also within conditions, becomes `num_pieces` pieces
    at most. A function without one is one program. The second argument is donated.
    """

    def lower(function: Callable[..., Any], specs: Any, donated: Any, *args: Any) -> Any:
        program = shard_in_order(function, mesh, *specs)
        return jax.jit(program, donate_argnums=donated).lower(*args)

    parts: Any = None

    def begin(*args: Any) -> Any:
        nonlocal parts
        *parts, values = _cut(function, *args)
        return values

    # Between programs each device has values of its own. They pass for replicated ones, as nothing
    # else reads them.
    inner = REPLICATED
    with warnings.catch_warnings():
        # What no output can replace is donated, too, to be freed.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        try:
            first = lower(begin, (in_specs, inner), 1, *args)
        except _NoLoop:
            return lower(function, (in_specs, out_specs), 1, *args)
        (steps, end, length), (loop, inputs, values) = parts, first.out_info
        count = math.ceil(length / num_pieces)
        middle = lower(partial(steps, count), (inner, inner), 0, loop, inputs)
        last = lower(end, (inner, out_specs), (0, 1, 2), loop, inputs, values)
    return Pieces([first, middle, last], math.ceil(length / count))


class _NoLoop(Exception):
    """A function has no loop at which it could be cut."""


def _cut(
    function: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], Callable[..., Any], int, Any]:
    """Evaluate a function up to its loop, of L steps.

    Returns `(count, loop, inputs) -> (loop, step)`, which takes `count` more steps but no more than
    there are; `(loop, inputs, values) -> outputs`; L; and `(loop, inputs, values)`. A loop is the
    number of its next step, its carry and its rows of results `[L, ...]`; inputs are the number of
    its steps, its constants and its arrays `[L, ...]`; values are what `end` takes besides.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    equation, operands, num_steps, ending = _up_to_loop(program, jax.tree.leaves(args))
    consts, carry, arrays = scan_operands(equation, operands)
    avals: list[Any] = [x.aval for x in equation.outvars]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    rows = [jnp.zeros(x.shape, x.dtype) for x in results[len(carry) :]]
    closed = jax.make_jaxpr(ending)(results)  # what it takes from here becomes its constants
    # Not twice what the steps take, too, which may be a replay.
    places = {id(x): number for number, x in enumerate([*consts, *arrays])}
    sources = [places.get(id(x)) for x in closed.consts]
    values = [x for x, place in zip(closed.consts, sources, strict=True) if place is None]
    body, length = equation.params["jaxpr"], equation.params["length"]

    def steps(count: int, loop: Any, inputs: Any) -> Any:
        num_steps, consts, arrays = inputs
        stop = jnp.minimum(loop[0] + count, num_steps)

        def step(loop: Any) -> Any:
            number, carry, rows = loop
            outputs = call(body, *consts, *carry, *(x[number] for x in arrays))
            new = zip(rows, outputs[len(carry) :], strict=True)
            return number + 1, outputs[: len(carry)], [x.at[number].set(y) for x, y in new]

        # XLA does not know the number of steps, so it compiles one as within the whole loop.
        loop = jax.lax.while_loop(lambda loop: loop[0] < stop, step, loop)
        return loop, loop[0]

    def end(loop: Any, inputs: Any, values: list[jax.Array]) -> Any:
        (_, carry, rows), (_, consts, arrays) = loop, inputs
        step_inputs, remaining = [*consts, *arrays], iter(values)
        all_values = [next(remaining) if i is None else step_inputs[i] for i in sources]
        outputs = call(closed.jaxpr, *all_values, *carry, *rows)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    inputs = (jnp.int32(num_steps), consts, arrays)
    return steps, end, length, ((jnp.int32(0), carry, rows), inputs, values)


def _up_to_loop(
    program: ClosedJaxpr | Jaxpr, args: Sequence[Any]
) -> tuple[JaxprEqn, list[Any], Any, Callable[..., list[Any]]]:
    """Evaluate a traced function up to its loop.

    Returns the loop, its operands, its number of steps, and `(results of the loop) -> outputs`.
    """
    jaxpr, values = bind(program, args)
    number = next((i for i, x in enumerate(jaxpr.eqns) if _has_loop(x)), None)
    if number is None:
        raise _NoLoop
    evaluate(jaxpr.eqns[:number], values)
    place = jaxpr.eqns[number]
    operands, params = read(values, place.invars), place.params
    if place.primitive.name == "cond":
        loop, operands, length, end = _up_to_loop_of_branch(params["branches"], *operands)
    else:
        loop, length, end = place, params["length"], lambda results: results

    def outputs(results: Sequence[Any]) -> list[Any]:
        final = values | dict(zip(place.outvars, end(results), strict=True))
        evaluate(jaxpr.eqns[number + 1 :], final)
        return read(final, jaxpr.outvars)

    return loop, operands, length, outputs


def _up_to_loop_of_branch(branches: Sequence[Any], index: jax.Array, *inputs: Any) -> Any:
    """Evaluate the branch with the loop, which has no steps where another one is to be taken."""
    number = next(i for i, branch in enumerate(branches) if any(map(_has_loop, branch.eqns)))
    loop, operands, length, end = _up_to_loop(branches[number], inputs)

    def outputs(results: Sequence[Any]) -> Sequence[Any]:
        functions: list[Callable[..., Any]] = [partial(call, branch) for branch in branches]
        functions[number] = lambda *_: end(results)
        return jax.lax.switch(index, functions, *inputs)

    return loop, operands, jnp.where(index == number, length, 0), outputs


def _has_loop(equation: JaxprEqn) -> bool:
    """Return whether an operation is a loop to cut at, or a condition with one in a branch."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return str(equation.source_info.name_stack).endswith(LOOPS) and not params["reverse"]
    branches = params["branches"] if name == "cond" else ()
    return any(_has_loop(x) for branch in branches for x in branch.eqns)
