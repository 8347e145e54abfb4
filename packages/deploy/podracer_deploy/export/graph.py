"""A graph of ONNX in the making."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from jax.extend.core import Literal

from podracer.errors import ConfigError

SMALL = (np.uint8, np.int8, np.uint16, np.int16)  # runtimes only store them
WORD = 0xFFFFFFFF
_GROWING = {
    "add", "sub", "mul", "neg", "not", "integer_pow", "shift_left", "cumsum", "reduce_sum",
    "reduce_prod", "convert_element_type",
}  # fmt: skip
"""Primitives whose results may leave the range of a uint32."""


class Graph:
    """ONNX graph in the making: nodes, constants, and the names of a traced function's values.

    uint32 are int64 in it, because runtimes compute with these; all other dtypes are themselves.
    """

    def __init__(self, first_input: str):
        self.nodes: list[Any] = []
        self.initializers: dict[Any, Any] = {}
        self.names: dict[Any, str] = {}
        """Names of the values of a traced function's variables."""
        self._first_input = first_input
        self._constants: dict[str, np.ndarray] = {}
        self._before_reshape: dict[str, str] = {}

    def read(self, variable: Any) -> str:
        """Return the name of a variable's or a literal's value."""
        if isinstance(variable, Literal):
            literal: Any = variable
            return self.constant(np.asarray(literal.val, literal.aval.dtype))
        return self.names[variable]

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a list of the names of several."""
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(onnx.helper.make_node(kind, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def add_named(self, kind: str, source: str, name: str) -> None:
        """Add a node of one input whose output has a given name."""
        self.nodes.append(onnx.helper.make_node(kind, [source], [name]))

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Return the name of a constant."""
        array = np.asarray(value, dtype)
        array = array.astype(np.int64) if array.dtype == np.uint32 else array
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.initializers:
            name = f"constant_{len(self.initializers)}"
            contiguous = np.ascontiguousarray(array).reshape(array.shape)
            self.initializers[key] = onnx.numpy_helper.from_array(contiguous, name)
            self._constants[name] = array
        return self.initializers[key].name

    def value(self, name: str) -> np.ndarray | None:
        """Return a constant, None if the name is of something that is computed."""
        return self._constants.get(name)

    def cast(self, name: str, dtype: Any) -> str:
        """Add a cast to a dtype of ONNX."""
        constant = self.value(name)
        if constant is not None:
            return self.constant(constant.astype(dtype))
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.add("Cast", name, to=kind)

    def reshape(self, name: str, shape: Sequence[Any]) -> str:
        """Reshape to a shape in which at most one axis depends on B."""
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        constant = self.value(name)
        if constant is not None and -1 not in sizes:
            return self.constant(constant.reshape(sizes))
        if sizes.count(-1) > 1:
            raise ConfigError(f"ONNX cannot reshape to {tuple(shape)}.")
        source = self._before_reshape.get(name, name)
        result = self.add("Reshape", source, self.constant(sizes, np.int64))
        self._before_reshape[result] = source
        return result

    def expand(self, name: str, operand: Sequence[Any], shape: Sequence[Any]) -> str:
        """Broadcast axes of size 1 of an operand with as many axes as the shape."""
        pairs = list(zip(operand, shape, strict=True))
        if all(str(old) == str(new) for old, new in pairs):
            return name
        # An axis that is already as wide, is 1 here: Expand broadcasts both ways.
        sizes = [1 if str(old) == str(new) else new for old, new in pairs]
        parts = [
            self.constant([size], np.int64) if isinstance(size, int) else self._batch_size(size)
            for size in sizes
        ]
        if all(isinstance(size, int) for size in sizes):
            return self.add("Expand", name, self.constant(sizes, np.int64))
        return self.add("Expand", name, self.add("Concat", *parts, axis=0))

    def _batch_size(self, size: Any) -> str:
        if str(size) != "B":
            raise ConfigError(f"ONNX cannot make an array of {size} rows.")
        return self.add("Shape", self._first_input, start=0, end=1)

    def remove_unneeded(self, outputs: Iterable[str]) -> None:
        """Remove nodes and constants that no output depends on."""
        needed, nodes = set(outputs), []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.output):
                needed |= set(node.input)
                nodes.append(node)
        self.nodes = nodes[::-1]
        self.initializers = {k: x for k, x in self.initializers.items() if x.name in needed}


def widened(graph: Graph, equation: Any, names: Sequence[str]) -> list[str]:
    """Cast small integers to int32."""
    pairs = zip(equation.invars, names, strict=True)
    return [graph.cast(n, np.int32) if x.aval.dtype in SMALL else n for x, n in pairs]


def narrowed(graph: Graph, equation: Any, name: str) -> str:
    """Cast a result to small integers, or to 32 bits, where the equation has these."""
    dtype = equation.outvars[0].aval.dtype
    if dtype == np.uint32 and equation.primitive.name in _GROWING:
        return graph.add("BitwiseAnd", name, graph.constant(WORD, np.int64))
    return graph.cast(name, dtype) if dtype in SMALL else name
