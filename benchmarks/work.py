"""What a program computes, counted in its trace: operations, FLOPs, bytes.

Nothing is compiled or run. Loops count as often as they run; a `while` whose length is not known
counts once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from podracer.devices.reductions import traced_for

# Operations that only change shapes or types, which XLA fuses into their neighbors.
_FREE = {
    *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice", "concatenate"),
    *("pad", "rev", "copy", "copy_p", "iota", "stop_gradient", "optimization_barrier"),
    *("convert_element_type", "bitcast_convert_type", "random_wrap", "random_unwrap"),
    *("axis_index", "pvary", "pcast", "sharding_constraint", "platform_index"),
}
# Operations that write into an array in place, and which operand they write.
_IN_PLACE = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter-mul": 2}
_IN_PLACE |= {"scatter-min": 2, "scatter-max": 2}


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device."""

    operations: float = 0.0
    """Operations one after the other, each the size of its whole batch."""
    flops: float = 0.0
    """Floating-point operations of matrix products and convolutions."""
    bytes_written: float = 0.0
    """Bytes that all operations write, as if none were fused."""

    def __add__(self, other: Work) -> Work:
        numbers = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(x + y for x, y in numbers))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * x for x in dataclasses.astuple(self)))


def count(function: Callable[..., Any], *arguments: Any) -> Work:
    """Return the work of a function of arrays, or of their shapes and types.

    Where a platform has a form of its own, it is that of an accelerator. What no result needs is
    not counted.
    """
    with traced_for("gpu"):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return _count(jaxpr, [True] * len(jaxpr.outvars))


def _count(jaxpr: Jaxpr, is_needed: Sequence[bool]) -> Work:
    """Count the equations that the needed results depend on, from the last one to the first."""
    needed = {id(x) for x, keep in zip(jaxpr.outvars, is_needed, strict=True) if keep}
    total = Work()
    for equation in reversed(jaxpr.eqns):
        outputs = [id(x) in needed for x in equation.outvars]
        if any(outputs):
            total += _count_equation(equation, outputs)
            needed |= {id(x) for x in equation.invars}
    return total


def _count_equation(equation: Any, is_needed: Sequence[bool]) -> Work:
    name, params = equation.primitive.name, equation.params
    bodies = _jaxprs(params)
    if name in ("scan", "while") or any(len(x.outvars) != len(is_needed) for x in bodies):
        inner = [_count(x, [True] * len(x.outvars)) for x in bodies]
    else:
        inner = [_count(x, is_needed) for x in bodies]
    if name == "scan":
        return inner[0] * params["length"]
    if name == "while":
        return inner[0] + inner[1]
    if name == "cond":
        platforms = params.get("branches_platforms")
        if platforms is not None:
            return inner[platforms.index(None)] if None in platforms else inner[-1]
        return max(inner, key=lambda work: (work.flops, work.operations))
    if name.startswith(("custom_vjp", "custom_jvp")):
        return inner[0]
    if inner:
        return sum(inner, Work())
    if name in _FREE:
        return Work()
    place = _IN_PLACE.get(name)
    targets = equation.outvars if place is None else [equation.invars[place]]
    written = sum(_bytes(variable) for variable in targets)
    return Work(1.0, _flops(equation), written)


def _jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """Return the programs within an operation: bodies of loops, branches, called functions."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _bytes(variable: Any) -> float:
    shape, dtype = getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None)
    size = dtype.itemsize if isinstance(dtype, np.dtype) else 8  # a key
    return float(math.prod(shape) * size)


def _flops(equation: Any) -> float:
    """Return the FLOPs of a matrix product or a convolution, 0 for anything else."""
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
        out_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        zeros = math.prod(equation.params["lhs_dilation"])  # between the pixels, not multiplied
        return 2.0 * math.prod(out) * math.prod(kernel) / out_channels / zeros
    return 0.0
