"""Order of a program's reductions over devices, without which they could meet on a CPU.

A traced function is evaluated anew with a token, which goes into each reduction and comes out of
it, through all loops and conditions (docs/decisions/0012).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import Mesh

from podracer.devices.fused import platform_of
from podracer.errors import ConfigError
from podracer.types import PyTree

Values = Sequence[Any]
_LOCAL = {"axis_index", "pvary", "pcast"}  # name an axis, but exchange nothing
_CALLS = {"jit", "closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "remat2"}


def in_order(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return a function for `shard_map` in which each reduction waits for the one before it.

    Nothing else about it changes, and nothing at all where one device or an accelerator runs it.
    Tracing it raises `ConfigError` for a reduction that cannot be ordered.
    """

    @wraps(function)
    def ordered(*args: Any) -> Any:
        if mesh.size == 1 or platform_of(mesh) != "cpu":
            return function(*args)
        return call_in_order(function, mesh.axis_names, *args)

    return ordered


def shard_in_order(
    function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Return a function of arrays of a mesh, of whose shards `function` is, see `in_order`."""
    ordered, specs = in_order(function, mesh), {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(ordered, mesh=mesh, **specs, check_vma=False)


def call_in_order(function: Callable[..., Any], axes: tuple[str, ...], *args: Any) -> Any:
    """Return `function(*args)`, whose reductions over the axes of a mesh wait for each other."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    # Never true, but XLA does not know it, so it keeps what depends on it.
    token = jax.lax.axis_index(axes) < 0
    _, outputs = _evaluate(program, token, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def is_reduction(equation: JaxprEqn) -> bool:
    """Return whether devices exchange data in an operation: it names an axis of their mesh."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = names if isinstance(names, tuple) else (names,)
    return equation.primitive.name not in _LOCAL and any(isinstance(x, str) for x in names)


def _has_reduction(equation: JaxprEqn) -> bool:
    return is_reduction(equation) or any(
        _has_reduction(inner) for part in jaxprs_in_params(equation.params) for inner in part.eqns
    )


def bind(program: ClosedJaxpr | Jaxpr, inputs: Values) -> tuple[Jaxpr, dict[Any, Any]]:
    """Return a traced function and the values of its inputs and constants, by variable."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    variables = (*jaxpr.constvars, *jaxpr.invars)
    # An open program gets its constants as inputs; from JAX 0.12 on it has them as well.
    consts = getattr(program, "consts", ()) if len(inputs) < len(variables) else ()
    return jaxpr, dict(zip(variables, (*consts, *inputs), strict=True))


def read(values: dict[Any, Any], variables: Values) -> list[Any]:
    """Return the values of variables and literals."""
    return [x.val if isinstance(x, Literal) else values[x] for x in variables]


def apply(equation: JaxprEqn, operands: Values) -> list[Any]:
    """Return the results of an operation of a traced function on other operands."""
    params = equation.primitive.get_bind_params(equation.params)
    outputs = equation.primitive.bind(*operands, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def evaluate(
    equations: Sequence[JaxprEqn],
    values: dict[Any, Any],
    function: Callable[[JaxprEqn, Values], Sequence[Any]] = apply,
) -> None:
    """Add the results of operations to the values, as `function` applies each of them."""
    for equation in equations:
        with equation.ctx.manager:
            outputs = function(equation, read(values, equation.invars))
        values.update(zip(equation.outvars, outputs, strict=True))


def call(program: ClosedJaxpr | Jaxpr, *inputs: Any) -> list[Any]:
    """Return the outputs of a traced function."""
    jaxpr, values = bind(program, inputs)
    evaluate(jaxpr.eqns, values)
    return read(values, jaxpr.outvars)


def _evaluate(
    program: ClosedJaxpr | Jaxpr, token: jax.Array, inputs: Values
) -> tuple[jax.Array, list[Any]]:
    """Return the token after a program's last reduction, and the program's outputs."""

    def ordered(equation: JaxprEqn, operands: Values) -> Sequence[Any]:
        nonlocal token
        if not _has_reduction(equation):
            return apply(equation, operands)
        token, outputs = _order(equation, token, operands)
        return outputs

    jaxpr, values = bind(program, inputs)
    evaluate(jaxpr.eqns, values, ordered)
    return token, read(values, jaxpr.outvars)


def _order(
    equation: JaxprEqn, token: jax.Array, operands: Values
) -> tuple[jax.Array, Sequence[Any]]:
    """Return the token after an operation that has reductions, and its outputs."""
    name, params = equation.primitive.name, equation.params
    if is_reduction(equation):
        return _reduce(equation, token, operands)
    if name == "scan":
        return _scan(equation, token, operands)
    if name == "while":
        return _while(params, token, operands)
    if name == "cond":
        branches = [partial(_evaluate, branch) for branch in params["branches"]]
        return jax.lax.switch(operands[0], branches, token, operands[1:])
    if name in _CALLS:
        if params.get("differentiated"):  # else XLA keeps what `jax.checkpoint` computes again
            operands = jax.lax.optimization_barrier(list(operands))
        return _evaluate(params.get("jaxpr") or params["call_jaxpr"], token, operands)
    raise ConfigError(
        f"a reduction over devices within `{name}` cannot be ordered, as several devices of a CPU "
        "need it: move it out, or train on one device."
    )


def _reduce(equation: JaxprEqn, token: jax.Array, operands: Values) -> tuple[jax.Array, list[Any]]:
    """Apply a reduction that waits for the token; several operands are reduced in turn."""
    outputs = list[Any]()
    is_elementwise = len(equation.outvars) == len(operands)
    for group in [[x] for x in operands] if is_elementwise else [operands]:
        waiting = [jax.lax.select(token, jax.lax.full_like(x, 0), x) for x in group]
        outputs += apply(equation, waiting)
        if (result := outputs[-1]).size:  # the token, which is never true, waits for it
            first = jax.lax.slice(result, [0] * result.ndim, [1] * result.ndim).reshape(())
            token = token & (first != 0)
    return token, outputs


def _scan(equation: JaxprEqn, token: jax.Array, operands: Values) -> tuple[jax.Array, list[Any]]:
    params, (consts, carry, arrays) = equation.params, scan_operands(equation, operands)
    num_carry = len(carry)

    def step(loop: tuple[jax.Array, Values], row: Values) -> Any:
        token, carry = loop
        token, outputs = _evaluate(params["jaxpr"], token, (*consts, *carry, *row))
        return (token, outputs[:num_carry]), outputs[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (token, carry), rows = jax.lax.scan(step, (token, carry), arrays, **options)
    return token, [*carry, *rows]


def scan_parts(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many its carry."""
    body = next(iter(jaxprs_in_params(equation.params)))
    num_carry = len(body.outvars) - _num_sliced(equation.outvars, body.outvars)
    return len(body.invars) - _num_sliced(equation.invars, body.invars) - num_carry, num_carry


def scan_operands(equation: JaxprEqn, operands: Values) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the operands of a scan by kind: constants, carry and arrays."""
    num_consts, num_carry = scan_parts(equation)
    end = num_consts + num_carry
    return list(operands[:num_consts]), list(operands[num_consts:end]), list(operands[end:])


def _num_sliced(arrays: Values, rows: Values) -> int:
    """Return how many arrays a loop gives to its body, or takes from it, row by row."""
    return sum(x.aval.shape != y.aval.shape for x, y in zip(arrays, rows, strict=True))


def _while(params: Any, token: jax.Array, operands: Values) -> tuple[jax.Array, list[Any]]:
    """Evaluate a loop, with its condition at the end of its body, where a token comes out of it."""
    end_cond = params["cond_nconsts"]
    end = end_cond + params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:end_cond], operands[end_cond:end], operands[end:]

    def condition(token: jax.Array, carry: Values) -> tuple[jax.Array, jax.Array, list[Any]]:
        token, (goes_on,) = _evaluate(params["cond_jaxpr"], token, (*cond_consts, *carry))
        return token, goes_on, list(carry)

    def step(loop: tuple[jax.Array, jax.Array, list[Any]]) -> Any:
        token, _, carry = loop
        return condition(*_evaluate(params["body_jaxpr"], token, (*body_consts, *carry)))

    token, _, carry = jax.lax.while_loop(lambda loop: loop[1], step, condition(token, carry))
    return token, carry
