"""Lax primitives of single numbers as operators of ONNX.

An operator is a function of the graph, the equation and the names of its inputs; it returns the
name of its output, or a list of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podracer.errors import ConfigError
from podracer.export.graph import WORD, Graph, narrowed, widened

Operator = Callable[..., str | list[str]]


def _elementwise(kind: str, **attributes: Any) -> Operator:
    def write(graph: Graph, equation: Any, *names: str) -> str:
        inputs = widened(graph, equation, names)
        return narrowed(graph, equation, graph.add(kind, *inputs, **attributes))

    return write


def _compare(kind: str) -> Operator:
    def write(graph: Graph, equation: Any, *names: str) -> str:
        return graph.add(kind, *widened(graph, equation, names))

    return write


def _logical(kind: str) -> Operator:
    """Bitwise operators of integers, logical ones of bools."""

    def write(graph: Graph, equation: Any, *names: str) -> str:
        if equation.outvars[0].aval.dtype == bool:
            return graph.add(kind, *names)
        return narrowed(graph, equation, graph.add(f"Bitwise{kind}", *names))

    return write


def _not_equal(graph: Graph, equation: Any, *names: str) -> str:
    return graph.add("Not", graph.add("Equal", *widened(graph, equation, names)))


def _same(graph: Graph, equation: Any, name: str) -> str:
    return name


def _square(graph: Graph, equation: Any, name: str) -> str:
    (name,) = widened(graph, equation, [name])
    return narrowed(graph, equation, graph.add("Mul", name, name))


def _rsqrt(graph: Graph, equation: Any, name: str) -> str:
    return graph.add("Reciprocal", graph.add("Sqrt", name))


def _power(graph: Graph, equation: Any, name: str) -> str:
    exponent = equation.params["y"]
    return graph.add("Pow", name, graph.constant(exponent, equation.invars[0].aval.dtype))


def _exp2(graph: Graph, equation: Any, name: str) -> str:
    return graph.add("Pow", graph.constant(2.0, np.float32), name)


def _erfc(graph: Graph, equation: Any, name: str) -> str:
    """Compute `1 - erf(x)`, exact to the rounding of 1."""
    return graph.add("Sub", graph.constant(1.0, np.float32), graph.add("Erf", name))


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
    low, x, high = widened(graph, equation, names)
    return narrowed(graph, equation, graph.add("Min", graph.add("Max", x, low), high))


def _select(graph: Graph, equation: Any, which: str, *cases: str) -> str:
    if equation.invars[0].aval.dtype != bool:  # a number of several cases
        _, result, *others = widened(graph, equation, [which, *cases])
        for number, case in enumerate(others, 1):
            is_case = graph.add("Equal", which, graph.constant(number, np.int32))
            result = graph.add("Where", is_case, case, result)
        return narrowed(graph, equation, result)
    dtype = equation.outvars[0].aval.dtype
    if dtype == np.bool_:
        cases = tuple(graph.cast(case, np.uint8) for case in cases)
        return graph.cast(graph.add("Where", which, cases[1], cases[0]), bool)
    _, no, yes = widened(graph, equation, [which, *cases])
    return narrowed(graph, equation, graph.add("Where", which, yes, no))


# --- integers and bits ---------------------------------------------------------------------------


def _shift(graph: Graph, equation: Any, name: str, amount: str) -> str:
    """Shift uint32 by constant numbers of bits: a product or a quotient of int64."""
    bits = graph.value(amount)
    if equation.invars[0].aval.dtype != np.uint32 or bits is None:
        raise ConfigError("ONNX can shift only uint32, by constant numbers of bits.")
    power = graph.constant(2 ** bits.astype(np.int64))
    kind = "Mul" if equation.primitive.name == "shift_left" else "Div"
    return narrowed(graph, equation, graph.add(kind, name, power))


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
    mask = graph.constant(WORD, np.int64)

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
        return narrowed(graph, equation, graph.cast(name, np.int64))
    return graph.cast(name, target)


_SAME_NAMES = (
    "exp", "log", "tanh", "erf", "sqrt", "neg", "abs", "sign", "floor", "ceil", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "add", "sub", "mul", "div", "pow", "max", "min",
)  # fmt: skip

ELEMENTWISE: dict[str, Operator] = {
    **{name: _elementwise(name.capitalize()) for name in _SAME_NAMES},
    "logistic": _elementwise("Sigmoid"),
    "rem": _elementwise("Mod", fmod=1),
    "square": _square,
    "rsqrt": _rsqrt,
    "integer_pow": _power,
    "exp2": _exp2,
    "log1p": _log1p,
    "expm1": _expm1,
    "erfc": _erfc,
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
}
