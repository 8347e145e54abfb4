"""Lax primitives as operators of ONNX.

An operator is a function of the graph, the equation and the names of its inputs; it returns the
name of its output, or a list of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podracer.errors import ConfigError
from podracer_deploy.export.graph import SMALL, Graph, narrowed, widened

Operator = Callable[..., str | list[str]]


def _elementwise(kind: str, **attributes: Any) -> Operator:
    def write(graph: Graph, equation: Any, *names: str) -> str:
        inputs = widened(graph, equation, names)
        return narrowed(graph, equation, graph.add(kind, *inputs, **attributes))

    return write


def _logical(kind: str) -> Operator:
    """Bitwise operators of integers, logical ones of bools."""

    def write(graph: Graph, equation: Any, *names: str) -> str:
        if equation.outvars[0].aval.dtype == bool:
            return graph.add(kind, *names)
        return narrowed(graph, equation, graph.add(f"Bitwise{kind}", *names))

    return write


def _same(graph: Graph, equation: Any, name: str) -> str:
    return name


def _power(graph: Graph, equation: Any, name: str) -> str:
    exponent = equation.params["y"]
    return graph.add("Pow", name, graph.constant(exponent, equation.invars[0].aval.dtype))


def _round(graph: Graph, equation: Any, name: str) -> str:
    if int(equation.params["rounding_method"]) == 1:  # half to even
        return graph.add("Round", name)
    below_half = np.nextafter(np.float32(0.5), np.float32(0))  # the sum is rounded, too
    rounded = graph.add("Add", graph.add("Abs", name), graph.constant(below_half))
    return graph.add("Mul", graph.add("Sign", name), graph.add("Floor", rounded))


def _select(graph: Graph, equation: Any, index: str, *cases: str) -> str:
    if equation.invars[0].aval.dtype != bool:  # a number of several cases
        _, result, *later_cases = widened(graph, equation, [index, *cases])
        for number, case in enumerate(later_cases, 1):
            is_case = graph.add("Equal", index, graph.constant(number, np.int32))
            result = graph.add("Where", is_case, case, result)
        return narrowed(graph, equation, result)
    if equation.outvars[0].aval.dtype == np.bool_:
        false, true = (graph.cast(case, np.uint8) for case in cases)
        return graph.cast(graph.add("Where", index, true, false), bool)
    _, false, true = widened(graph, equation, [index, *cases])
    return narrowed(graph, equation, graph.add("Where", index, true, false))


# --- integers and bits ---------------------------------------------------------------------------


def _shift(graph: Graph, equation: Any, name: str, amount: str) -> str:
    """Shift uint32 by constant numbers of bits: a product or a quotient of int64."""
    bits = graph.value(amount)
    if equation.invars[0].aval.dtype != np.uint32 or bits is None:
        raise ConfigError("ONNX can shift only uint32, by constant numbers of bits.")
    power = graph.constant(2 ** bits.astype(np.int64))
    kind = "Mul" if equation.primitive.name == "shift_left" else "Div"
    return narrowed(graph, equation, graph.add(kind, name, power))


def _convert(graph: Graph, equation: Any, name: str) -> str:
    source, target = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if source == target:
        return name
    if target == np.uint32:
        return narrowed(graph, equation, graph.cast(name, np.int64))
    return graph.cast(name, target)


# --- reductions ----------------------------------------------------------------------------------


def _reduce(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, name: str) -> str:
        axes = graph.constant(equation.params["axes"], np.int64)
        (name,) = widened(graph, equation, [name])
        return narrowed(graph, equation, graph.add(f"Reduce{kind}", name, axes, keepdims=0))

    return write


def _arg(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, name: str) -> str:
        (axis,) = equation.params["axes"]
        is_bool = equation.invars[0].aval.dtype == np.bool_
        name = graph.cast(name, np.int32) if is_bool else widened(graph, equation, [name])[0]
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
    places = (graph.constant(i, np.int64) for i in range(len(equation.outvars)))
    return [graph.add("Gather", name, place, axis=axis) for place in places]


def _tile(graph: Graph, equation: Any, name: str) -> str:
    return graph.add("Tile", name, graph.constant(equation.params["reps"], np.int64))


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
    """Take entries or whole slices at indices along some axes; parts of slices are refused."""
    dims, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, index_shape = (x.aval.shape for x in equation.invars)
    batch, is_clipped = list(dims.operand_batching_dims), "CLIP" in str(equation.params["mode"])
    # An index of a whole axis is clipped to 0, as in a `dynamic_slice`.
    columns = [k for k, i in enumerate(dims.start_index_map) if sizes[i] == 1 or not is_clipped]
    picked = [dims.start_index_map[k] for k in columns]
    whole = [i for i in range(len(shape)) if i not in (*batch, *picked)]
    is_take = all(sizes[i] == 1 for i in picked) and not set(dims.collapsed_slice_dims) & set(whole)
    if not is_take or any(str(sizes[i]) != str(shape[i]) for i in whole):
        raise ConfigError("ONNX can take entries or whole slices of an array, not parts of slices.")
    *axes, last = range(len(index_shape))
    axes.sort(key=lambda i: i not in dims.start_indices_batching_dims)
    place = _permute(graph, graph.cast(indices, np.int64), [*axes, last])
    if len(columns) < len(dims.start_index_map):
        place = graph.add("Gather", place, graph.constant(columns, np.int64), axis=-1)
    largest = graph.constant([shape[i] - 1 for i in picked], np.int64)
    nearest = graph.add("Min", graph.add("Max", place, graph.constant(0, np.int64)), largest)
    source = _permute(graph, name, [*batch, *picked, *whole])
    if batch or len(picked) > 1:
        rows = graph.add("GatherND", source, nearest, batch_dims=len(batch))
    else:
        rows = graph.add("Gather", source, graph.reshape(nearest, index_shape[:-1]), axis=0)
    if "FILL" in str(equation.params["mode"]) and equation.outvars[0].aval.dtype == np.float32:
        is_inside = graph.cast(graph.add("Equal", place, nearest), np.int32)
        is_inside = graph.add("ReduceMin", is_inside, graph.constant([-1], np.int64), keepdims=0)
        lengths = [*(index_shape[i] for i in axes), *[1] * len(whole)]
        is_inside = graph.reshape(graph.cast(is_inside, bool), lengths)
        rows = graph.add("Where", is_inside, rows, graph.constant(np.nan, np.float32))
    result = equation.outvars[0].aval.shape
    slice_dims = [i for i in range(len(shape)) if i not in (*batch, *dims.collapsed_slice_dims)]
    place_of = dict(zip(slice_dims, dims.offset_dims, strict=True))
    batch_dims = [i for i in range(len(result)) if i not in dims.offset_dims]
    targets = [*(batch_dims[i] for i in axes), *(place_of[i] for i in whole)]
    rows = _permute(graph, rows, np.argsort(targets).tolist())
    return rows if len(targets) == len(result) else graph.reshape(rows, result)


def _sort(graph: Graph, equation: Any, *names: str) -> list[str]:
    """Sort by the first array, and the other arrays with it."""
    axis = int(equation.params["dimension"])
    if equation.params["num_keys"] != 1:
        raise ConfigError("ONNX can sort by one array only.")
    names = tuple(widened(graph, equation, names))
    size = graph.constant([equation.invars[0].aval.shape[axis]], np.int64)
    first, order = graph.add("TopK", names[0], size, outputs=2, axis=axis, largest=0)
    sorted_names = [graph.add("GatherElements", name, order, axis=axis) for name in names[1:]]
    outputs = zip([first, *sorted_names], equation.outvars, strict=True)
    return [graph.cast(x, y.aval.dtype) if y.aval.dtype in SMALL else x for x, y in outputs]


def _top_k(graph: Graph, equation: Any, name: str) -> list[str]:
    size = graph.constant([equation.params["k"]], np.int64)
    axis = len(equation.invars[0].aval.shape) - 1
    values, places = graph.add("TopK", name, size, outputs=2, axis=axis)
    return [values, graph.cast(places, equation.outvars[1].aval.dtype)]


# --- pooling -------------------------------------------------------------------------------------


def _pool(kind: str) -> Operator:
    """Reduce windows of floats, which ONNX has as `[N, channels, ...]`."""

    def write(graph: Graph, equation: Any, name: str) -> str:
        params, shape = equation.params, equation.invars[0].aval.shape
        is_dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
        if is_dilated or equation.invars[0].aval.dtype != np.float32:
            raise ConfigError("ONNX can pool only floats, in windows without gaps.")
        parts = zip(
            params["window_dimensions"], params["window_strides"], params["padding"], strict=True
        )
        windows = {i: x for i, x in enumerate(parts) if x != (1, 1, (0, 0))}
        if not windows:
            return name
        order = [*(i for i in range(len(shape)) if i not in windows), *windows]
        images = _permute(graph, name, order)
        images = graph.reshape(images, ["B", 1, *(shape[i] for i in windows)])
        sizes, strides, padding = (list(x) for x in zip(*windows.values(), strict=True))
        pads = [low for low, _ in padding] + [high for _, high in padding]
        counts = {"count_include_pad": 1} if kind == "AveragePool" else {}
        pooled = graph.add(kind, images, kernel_shape=sizes, strides=strides, pads=pads, **counts)
        if kind == "AveragePool":
            count = graph.constant(math.prod(sizes), np.float32)
            pooled = graph.add("Mul", pooled, count)
        pooled = graph.reshape(pooled, [equation.outvars[0].aval.shape[i] for i in order])
        return _permute(graph, pooled, np.argsort(order).tolist())

    return write


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
    lhs_rows, rhs_rows = (
        [s[i] for i in free] for s, free in ((lhs_shape, lhs_free), (rhs_shape, rhs_free))
    )
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
    "integer_pow": _power,
    "round": _round,
    "select_n": _select,
    "eq": _elementwise("Equal"),
    "lt": _elementwise("Less"),
    "le": _elementwise("LessOrEqual"),
    "gt": _elementwise("Greater"),
    "ge": _elementwise("GreaterOrEqual"),
    "and": _logical("And"),
    "or": _logical("Or"),
    "xor": _logical("Xor"),
    "not": _logical("Not"),
    "shift_left": _shift,
    "shift_right_logical": _shift,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "reduce_sum": _reduce("Sum"),
    "reduce_max": _reduce("Max"),
    "reduce_min": _reduce("Min"),
    "reduce_prod": _reduce("Prod"),
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
    "tile": _tile,
    "slice": _slice,
    "rev": _reverse,
    "pad": _pad,
    "gather": _gather,
    "sort": _sort,
    "top_k": _top_k,
    "reduce_window_max": _pool("MaxPool"),
    "reduce_window_sum": _pool("AveragePool"),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
"""Operators by the names of lax primitives."""
