"""Lax primitives of whole arrays as operators of ONNX, see `elementwise`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from podracer.export.elementwise import Operator
from podracer.export.graph import Graph, narrowed, widened
from podracer.types import ConfigError

# --- reductions ----------------------------------------------------------------------------------


def _reduce(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, name: str) -> str:
        axes = graph.constant(equation.params["axes"], np.int64)
        (name,) = widened(graph, equation, [name])
        return narrowed(graph, equation, graph.add(f"Reduce{kind}", name, axes, keepdims=0))

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


ARRAYS: dict[str, Operator] = {
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
