"""Lax primitives as operators of ONNX.

An operator is a function of the graph, the equation and the names of its inputs; it returns the
name of its output, or a list of several. Axes of the equation are those of the arrays in ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podracer.export.graph import Graph
from podracer.types import ConfigError

Operator = Callable[..., str | list[str]]
_SMALL = (np.uint8, np.int8, np.uint16, np.int16)  # which runtimes store, but do not compute with
_WORD = 0xFFFFFFFF
_GROWING = {
    "add", "sub", "mul", "neg", "not", "square", "integer_pow", "shift_left", "cumsum",
    "reduce_sum", "reduce_prod", "convert_element_type",
}  # fmt: skip  # what may leave the range of a uint32


def _wide(graph: Graph, equation: Any, names: Sequence[str]) -> list[str]:
    """Cast small integers to int32."""
    pairs = zip(equation.invars, names, strict=True)
    return [graph.cast(n, np.int32) if x.aval.dtype in _SMALL else n for x, n in pairs]


def _narrow(graph: Graph, equation: Any, name: str) -> str:
    """Cast a result to small integers, or to 32 bits, where the equation has these."""
    dtype = equation.outvars[0].aval.dtype
    if dtype == np.uint32 and equation.primitive.name in _GROWING:
        return graph.add("BitwiseAnd", name, graph.constant(_WORD, np.int64))
    return graph.cast(name, dtype) if dtype in _SMALL else name


def _elementwise(kind: str, **attributes: Any) -> Operator:
    def write(graph: Graph, equation: Any, *names: str) -> str:
        inputs = _wide(graph, equation, names)
        return _narrow(graph, equation, graph.add(kind, *inputs, **attributes))

    return write


def _compare(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, *names: str) -> str:
        return graph.add(kind, *_wide(graph, equation, names))

    return write


def _logical(kind: str) -> Operator:
    """Bitwise operators of integers, logical ones of bools."""

    def write(graph: Graph, equation: Any, *names: str) -> str:
        if equation.outvars[0].aval.dtype == bool:
            return graph.add(kind, *names)
        return _narrow(graph, equation, graph.add(f"Bitwise{kind}", *names))

    return write


def _not_equal(graph: Graph, equation: Any, *names: str) -> str:
    return graph.add("Not", graph.add("Equal", *_wide(graph, equation, names)))


def _same(graph: Graph, equation: Any, name: str) -> str:
    return name


def _square(graph: Graph, equation: Any, name: str) -> str:
    (name,) = _wide(graph, equation, [name])
    return _narrow(graph, equation, graph.add("Mul", name, name))


def _rsqrt(graph: Graph, equation: Any, name: str) -> str:
    return graph.add("Reciprocal", graph.add("Sqrt", name))


def _power(graph: Graph, equation: Any, name: str) -> str:
    exponent = equation.params["y"]
    return graph.add("Pow", name, graph.constant(exponent, equation.invars[0].aval.dtype))


def _exp2(graph: Graph, equation: Any, name: str) -> str:
    return graph.add("Pow", graph.constant(2.0, np.float32), name)


def _log1p(graph: Graph, equation: Any, name: str) -> str:
    """Compute `x log(u) / (u - 1)` with `u = 1 + x`, which is exact where u rounds.

    Source: Kahan, quoted in Goldberg 1991, theorem 4.
    """
    one = graph.constant(1.0, np.float32)
    u = graph.add("Add", one, name)
    excess = graph.add("Sub", u, one)
    is_one = graph.add("Equal", excess, graph.constant(0.0, np.float32))
    is_infinite = graph.add("IsInf", name)
    quotient = graph.add("Div", name, graph.add("Where", is_one, one, excess))
    product = graph.add("Mul", graph.add("Log", u), quotient)
    result = graph.add("Where", is_one, name, product)
    return graph.add("Where", is_infinite, graph.add("Log", u), result)


def _expm1(graph: Graph, equation: Any, name: str) -> str:
    """Compute `tanh(x / 2) (exp(x) + 1)` where that does not overflow, else `exp(x)`."""
    exp = graph.add("Exp", name)
    one, half = graph.constant(1.0, np.float32), graph.constant(0.5, np.float32)
    tanh = graph.add("Tanh", graph.add("Mul", half, name))
    product = graph.add("Mul", tanh, graph.add("Add", exp, one))
    large = graph.add("Greater", name, graph.constant(20.0, np.float32))
    return graph.add("Where", large, exp, product)


# Coefficients of Giles 2010, "Approximating the erfinv function", as XLA has them.
_ERF_INV_CENTER = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _erf_inv(graph: Graph, equation: Any, name: str) -> str:
    def constant(value: float) -> str:
        return graph.constant(value, np.float32)

    def polynomial(x: str, coefficients: Sequence[float]) -> str:
        total = constant(coefficients[0])
        for coefficient in coefficients[1:]:
            total = graph.add("Add", graph.add("Mul", total, x), constant(coefficient))
        return total

    complement = graph.add("Sub", constant(1.0), graph.add("Mul", name, name))
    w = graph.add("Neg", graph.add("Log", complement))
    center = polynomial(graph.add("Sub", w, constant(2.5)), _ERF_INV_CENTER)
    tail = polynomial(graph.add("Sub", graph.add("Sqrt", w), constant(3.0)), _ERF_INV_TAIL)
    chosen = graph.add("Where", graph.add("Less", w, constant(5.0)), center, tail)
    return graph.add("Mul", chosen, name)


def _is_finite(graph: Graph, equation: Any, name: str) -> str:
    infinite = graph.add("IsInf", name)
    return graph.add("Not", graph.add("Or", infinite, graph.add("IsNaN", name)))


def _round(graph: Graph, equation: Any, name: str) -> str:
    if int(equation.params["rounding_method"]) == 1:  # half to even
        return graph.add("Round", name)
    rounded = graph.add("Add", graph.add("Abs", name), graph.constant(0.5, np.float32))
    return graph.add("Mul", graph.add("Sign", name), graph.add("Floor", rounded))


def _clamp(graph: Graph, equation: Any, *names: str) -> str:
    low, x, high = _wide(graph, equation, names)
    return _narrow(graph, equation, graph.add("Min", graph.add("Max", x, low), high))


def _select(graph: Graph, equation: Any, which: str, *cases: str) -> str:
    if len(cases) != 2 or equation.invars[0].aval.dtype != bool:
        raise ConfigError("ONNX can select between two cases only, not between more.")
    dtype = equation.outvars[0].aval.dtype
    if dtype == np.bool_:
        cases = tuple(graph.cast(case, np.uint8) for case in cases)
        return graph.cast(graph.add("Where", which, cases[1], cases[0]), bool)
    _, no, yes = _wide(graph, equation, [which, *cases])
    return _narrow(graph, equation, graph.add("Where", which, yes, no))


# --- integers and bits ---------------------------------------------------------------------------


def _shift(graph: Graph, equation: Any, name: str, amount: str) -> str:
    """Shift uint32 by constant numbers of bits: a product or a quotient of int64."""
    bits = graph.value(amount)
    if equation.invars[0].aval.dtype != np.uint32 or bits is None:
        raise ConfigError("ONNX can shift only uint32, by constant numbers of bits.")
    power = graph.constant(2 ** bits.astype(np.int64))
    kind = "Mul" if equation.primitive.name == "shift_left" else "Div"
    return _narrow(graph, equation, graph.add(kind, name, power))


def _bits_as_float(graph: Graph, equation: Any, name: str) -> str:
    """Read uint32 as float32 of the positive normal numbers that random bits are made into."""
    source, target = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if (source, target) != (np.uint32, np.float32):
        raise ConfigError(f"ONNX cannot read the bits of {source} as {target}.")
    unit = graph.constant(2**23, np.int64)
    exponent = graph.cast(graph.add("Div", name, unit), np.float32)
    fraction = graph.cast(graph.add("Mod", name, unit), np.float32)
    power = graph.add("Sub", exponent, graph.constant(127.0, np.float32))
    scale = graph.add("Pow", graph.constant(2.0, np.float32), power)
    fraction = graph.add("Mul", fraction, graph.constant(2.0**-23, np.float32))
    return graph.add("Mul", scale, graph.add("Add", fraction, graph.constant(1.0, np.float32)))


def _threefry(graph: Graph, equation: Any, *names: str) -> list[str]:
    """Compute a block of Threefry-2x32 with 20 rounds (Salmon et al. 2011), on int64."""
    mask = graph.constant(_WORD, np.int64)

    def add(x: str, y: str) -> str:
        return graph.add("BitwiseAnd", graph.add("Add", x, y), mask)

    def rotate(x: str, bits: int) -> str:
        product = graph.add("Mul", x, graph.constant(2**bits, np.int64))
        high = graph.add("Div", product, graph.constant(2**32, np.int64))
        return graph.add("Add", graph.add("BitwiseAnd", product, mask), high)

    first, second, x, y = names
    parity = graph.constant(0x1BD11BDA, np.int64)
    third = graph.add("BitwiseXor", graph.add("BitwiseXor", first, second), parity)
    keys = [first, second, third]
    x, y = add(x, first), add(y, second)
    for group in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = add(x, y)
            y = graph.add("BitwiseXor", rotate(y, bits), x)
        x = add(x, keys[(group + 1) % 3])
        y = add(add(y, keys[(group + 2) % 3]), graph.constant(group + 1, np.int64))
    return [x, y]


def _convert(graph: Graph, equation: Any, name: str) -> str:
    source, target = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if source == target:
        return name
    if target == np.uint32:
        return _narrow(graph, equation, graph.cast(name, np.int64))
    return graph.cast(name, target)


# --- reductions ----------------------------------------------------------------------------------


def _reduce(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, name: str) -> str:
        axes = graph.constant(equation.params["axes"], np.int64)
        (name,) = _wide(graph, equation, [name])
        return _narrow(graph, equation, graph.add(f"Reduce{kind}", name, axes, keepdims=0))

    return write


def _reduce_logical(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, name: str) -> str:
        axes = graph.constant(equation.params["axes"], np.int64)
        number = graph.cast(name, np.int32)
        return graph.cast(graph.add(f"Reduce{kind}", number, axes, keepdims=0), bool)

    return write


def _arg(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, name: str) -> str:
        (axis,) = equation.params["axes"]
        is_bool = equation.invars[0].aval.dtype == np.bool_
        name = graph.cast(name, np.int32) if is_bool else _wide(graph, equation, [name])[0]
        place = graph.add(kind, name, axis=int(axis), keepdims=0)
        return graph.cast(place, equation.params["index_dtype"])

    return write


def _cumsum(graph: Graph, equation: Any, name: str) -> str:
    params = equation.params
    axis = graph.constant(int(params["axis"]), np.int64)
    return graph.add("CumSum", name, axis, reverse=int(params["reverse"]))


# --- shapes --------------------------------------------------------------------------------------


def _reshape(graph: Graph, equation: Any, name: str) -> str:
    if equation.params.get("dimensions") is not None:
        raise ConfigError("ONNX cannot reshape in another order of axes.")
    return graph.reshape(name, equation.outvars[0].aval.shape)


def _squeeze(graph: Graph, equation: Any, name: str) -> str:
    return graph.reshape(name, equation.outvars[0].aval.shape)


def _broadcast(graph: Graph, equation: Any, name: str, *dynamic_sizes: str) -> str:
    operand, shape = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    places = [int(axis) for axis in equation.params["broadcast_dimensions"]]
    aligned: list[Any] = [1] * len(shape)
    for place, size in zip(places, operand, strict=True):
        aligned[place] = size
    name = name if len(operand) == len(shape) else graph.reshape(name, aligned)
    return graph.expand(name, aligned, shape)


def _transpose(graph: Graph, equation: Any, name: str) -> str:
    return graph.add("Transpose", name, perm=[int(i) for i in equation.params["permutation"]])


def _concatenate(graph: Graph, equation: Any, *names: str) -> str:
    return graph.add("Concat", *names, axis=int(equation.params["dimension"]))


def _split(graph: Graph, equation: Any, name: str) -> list[str]:
    sizes, axis = equation.params["sizes"], int(equation.params["axis"])
    parts = graph.constant(sizes, np.int64)
    names = graph.add("Split", name, parts, outputs=len(sizes), axis=axis)
    return [names] if isinstance(names, str) else names


def _unstack(graph: Graph, equation: Any, name: str) -> list[str]:
    axis = int(equation.params["axis"])
    return [
        graph.reshape(_cut(graph, name, [(axis, i, i + 1, 1)]), x.aval.shape)
        for i, x in enumerate(equation.outvars)
    ]


def _slice(graph: Graph, equation: Any, name: str) -> str:
    params, shape = equation.params, equation.invars[0].aval.shape
    strides = params["strides"] or (1,) * len(shape)
    ranges = zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)
    cut = [
        (axis, start, limit, stride)
        for axis, (start, limit, stride, size) in enumerate(ranges)
        if (str(start), str(limit), stride) != ("0", str(size), 1)
    ]
    return _cut(graph, name, cut)


def _reverse(graph: Graph, equation: Any, name: str) -> str:
    end = -(2**31)
    return _cut(graph, name, [(int(axis), -1, end, -1) for axis in equation.params["dimensions"]])


def _cut(graph: Graph, name: str, cut: Sequence[tuple[int, int, int, int]]) -> str:
    if not cut:
        return name
    axes, starts, ends, steps = (graph.constant(x, np.int64) for x in zip(*cut, strict=True))
    return graph.add("Slice", name, starts, ends, axes, steps)


def _pad(graph: Graph, equation: Any, name: str, value: str) -> str:
    config = equation.params["padding_config"]
    if any(min(low, high) < 0 or inner for low, high, inner in config):
        raise ConfigError("ONNX can pad at the edges only, and not by negative numbers.")
    pads = [low for low, _, _ in config] + [high for _, high, _ in config]
    return graph.add("Pad", name, graph.constant(pads, np.int64), value, mode="constant")


def _gather(graph: Graph, equation: Any, name: str, indices: str) -> str:
    """Take rows of an array, as `array[indices]` does; other gathers are refused."""
    dims, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, index_shape = (x.aval.shape for x in equation.invars)
    result = equation.outvars[0].aval.shape
    is_take = (
        dims.collapsed_slice_dims == (0,)
        and dims.start_index_map == (0,)
        and not dims.operand_batching_dims
        and tuple(sizes) == (1, *shape[1:])
        and tuple(dims.offset_dims) == tuple(range(len(index_shape) - 1, len(result)))
    )
    if not is_take:
        raise ConfigError("ONNX can take rows of an array only, not gather otherwise.")
    place = graph.reshape(graph.cast(indices, np.int64), index_shape[:-1])
    last = graph.constant(shape[0] - 1, np.int64)
    inside = graph.add("Min", graph.add("Max", place, graph.constant(0, np.int64)), last)
    rows = graph.add("Gather", name, inside, axis=0)
    if "FILL" not in str(equation.params["mode"]) or equation.outvars[0].aval.dtype != np.float32:
        return rows
    is_inside = graph.reshape(
        graph.add("Equal", place, inside), (*index_shape[:-1], *[1] * (len(shape) - 1))
    )
    return graph.add("Where", is_inside, rows, graph.constant(np.nan, np.float32))


# --- products ------------------------------------------------------------------------------------


def _dot(graph: Graph, equation: Any, lhs: str, rhs: str) -> str:
    ((lhs_sum, rhs_sum), (lhs_batch, rhs_batch)) = equation.params["dimension_numbers"]
    lhs_shape, rhs_shape = (x.aval.shape for x in equation.invars)
    out_shape = equation.outvars[0].aval.shape
    lhs_free = [i for i in range(len(lhs_shape)) if i not in (*lhs_sum, *lhs_batch)]
    rhs_free = [i for i in range(len(rhs_shape)) if i not in (*rhs_sum, *rhs_batch)]
    summed = [lhs_shape[i] for i in lhs_sum]
    batch = [lhs_shape[i] for i in lhs_batch]
    if not batch and len(rhs_shape) == 2 and len(summed) == 1:  # the layers of networks
        lhs = _permute(graph, lhs, [*lhs_free, *lhs_sum])
        return graph.add("MatMul", lhs, _permute(graph, rhs, [*rhs_sum, *rhs_free]))
    lhs = _permute(graph, lhs, [*lhs_batch, *lhs_free, *lhs_sum])
    rhs = _permute(graph, rhs, [*rhs_batch, *rhs_sum, *rhs_free])
    lhs_rows, rhs_rows = ([s[i] for i in free] for s, free in
                          ((lhs_shape, lhs_free), (rhs_shape, rhs_free)))  # fmt: skip
    lhs = graph.reshape(lhs, [*batch, math.prod(lhs_rows), math.prod(summed)])
    rhs = graph.reshape(rhs, [*batch, math.prod(summed), math.prod(rhs_rows)])
    return graph.reshape(graph.add("MatMul", lhs, rhs), out_shape)


def _permute(graph: Graph, name: str, order: Sequence[int]) -> str:
    order = [int(i) for i in order]
    if order == sorted(order):
        return name
    constant = graph.value(name)
    if constant is not None:
        return graph.constant(constant.transpose(order))
    return graph.add("Transpose", name, perm=order)


def _convolution(graph: Graph, equation: Any, x: str, kernel: str) -> str:
    params, dims = equation.params, equation.params["dimension_numbers"]
    if params["batch_group_count"] != 1 or set(params["lhs_dilation"]) != {1}:
        raise ConfigError("ONNX cannot compute this kind of convolution.")
    low, high = zip(*params["padding"], strict=True)
    y = graph.add(
        "Conv",
        _permute(graph, x, dims.lhs_spec),
        _permute(graph, kernel, dims.rhs_spec),
        strides=[int(i) for i in params["window_strides"]],
        dilations=[int(i) for i in params["rhs_dilation"]],
        pads=[*map(int, low), *map(int, high)],
        group=int(params["feature_group_count"]),
    )
    return _permute(graph, y, np.argsort(dims.out_spec).tolist())


_SAME_NAMES = (
    "exp", "log", "tanh", "erf", "sqrt", "neg", "abs", "sign", "floor", "ceil", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "add", "sub", "mul", "div", "pow", "max", "min",
)  # fmt: skip

OPERATORS: dict[str, Operator] = {
    **{name: _elementwise(name.capitalize()) for name in _SAME_NAMES},
    "logistic": _elementwise("Sigmoid"),
    "rem": _elementwise("Mod", fmod=1),
    "square": _square,
    "rsqrt": _rsqrt,
    "integer_pow": _power,
    "exp2": _exp2,
    "log1p": _log1p,
    "expm1": _expm1,
    "erf_inv": _erf_inv,
    "is_finite": _is_finite,
    "round": _round,
    "clamp": _clamp,
    "select_n": _select,
    "eq": _compare("Equal"),
    "ne": _not_equal,
    "lt": _compare("Less"),
    "le": _compare("LessOrEqual"),
    "gt": _compare("Greater"),
    "ge": _compare("GreaterOrEqual"),
    "and": _logical("And"),
    "or": _logical("Or"),
    "xor": _logical("Xor"),
    "not": _logical("Not"),
    "shift_left": _shift,
    "shift_right_logical": _shift,
    "bitcast_convert_type": _bits_as_float,
    "threefry2x32": _threefry,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "reduce_sum": _reduce("Sum"),
    "reduce_max": _reduce("Max"),
    "reduce_min": _reduce("Min"),
    "reduce_prod": _reduce("Prod"),
    "reduce_and": _reduce_logical("Min"),
    "reduce_or": _reduce_logical("Max"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "cumsum": _cumsum,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _squeeze,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "split": _split,
    "unstack": _unstack,
    "slice": _slice,
    "rev": _reverse,
    "pad": _pad,
    "gather": _gather,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
