"""Simplification of a traced function: no calls, no loops over layers, constants computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from podracer.devices.ordering import scan_operands
from podracer.errors import ConfigError
from podracer_deploy.export.composites import COMPOSITES

_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
_THREEFRY = jax.extend.random.threefry_prng_impl


class Inliner:
    """Evaluator of traced functions that may itself be traced, into a simpler function.

    With `keys_as_words` random keys become their uint32 words `[..., 2]`, what is drawn from them
    arithmetic of these, and `COMPOSITES` simpler operations, for formats that have none of them.
    """

    def __init__(self, *, keys_as_words: bool = False):
        self.keys_as_words = keys_as_words
        self.argmax_inputs: list[jax.Array] = []
        """What the argmaxima were taken of, in the order of their evaluation."""
        self.has_loop = False
        """Whether there is a loop that is not evaluated step by step, such as a search."""

    def __call__(self, function: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a function for arguments, of which some may be constants."""
        jaxpr = function.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, function.consts, strict=True))
        values |= zip(jaxpr.invars, arguments, strict=True)

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            results = self._evaluate(equation, [read(x) for x in equation.invars])
            values |= zip(equation.outvars, results, strict=True)
        return [read(x) for x in jaxpr.outvars]

    def _evaluate(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self(_closed(body), inputs)
        if name == "optimization_barrier":
            return inputs
        if name == "platform_index":
            return [np.int32(0)]  # the only branch taken below
        if name == "cond" and (platforms := params.get("branches_platforms")):
            default = params["branches"][platforms.index(None)]
            return self(default, inputs[1:])
        if not any(map(_is_traced, inputs)):
            with jax.ensure_compile_time_eval():
                return _bind(equation, inputs)
        # A scan over arrays, such as layers, rather than a number of times.
        if name == "scan" and (params["length"] == 1 or scan_operands(equation, inputs)[2]):
            return self._all_steps(equation, inputs)
        if name == "select_n" and (case := _constant_case(inputs[0])) is not None:
            return [inputs[1 + case]]
        if name == "dynamic_slice" and not any(map(_is_traced, inputs[1:])):
            return [_slice(inputs[0], inputs[1:], params["slice_sizes"])]
        if self.keys_as_words and (name == "random_wrap" or _takes_keys(equation)):
            return self._draw(equation, inputs)
        if self.keys_as_words and name in COMPOSITES:
            composite = partial(COMPOSITES[name], **params)
            return self(jax.make_jaxpr(composite)(*inputs), inputs)
        if name == "argmax":
            self.argmax_inputs.append(inputs[0])
        self.has_loop |= name in ("scan", "while")
        return _bind(equation, inputs)

    def _all_steps(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate a scan step by step."""
        params, body = equation.params, _closed(equation.params["jaxpr"])
        consts, carry, arrays = scan_operands(equation, inputs)
        size, rows = len(carry), {}
        for i in range(params["length"])[:: -1 if params["reverse"] else 1]:
            results = self(body, [*consts, *carry, *(_row(x, i) for x in arrays)])
            carry, rows[i] = results[:size], results[size:]
        outputs = zip(*(rows[i] for i in sorted(rows)), strict=True)
        return [*carry, *map(_stack, outputs)]

    def _draw(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        """Evaluate a primitive of random keys on their words."""
        params, words = equation.params, inputs[0]
        num_key_axes = len(equation.invars[0].aval.shape)
        match equation.primitive.name:
            case "random_wrap" | "random_unwrap":
                return [words]
            case "random_bits":
                sizes = {"bit_width": params["bit_width"], "shape": params["shape"]}
                draw: Callable[..., jax.Array] = partial(_THREEFRY.random_bits, **sizes)
            case "random_fold_in":
                draw = _THREEFRY.fold_in
            case "random_split":
                draw = partial(_THREEFRY.split, shape=params["shape"])
            case name if name.startswith("random_"):
                raise refusal(name)
            case _:  # such as a reshape, of each word
                return jax.vmap(lambda word: _bind(equation, [word]), -1, -1)(words)
        for depth in range(num_key_axes, 0, -1):
            draw = jax.vmap(draw, (0, *(0 if np.ndim(x) >= depth else None for x in inputs[1:])))
        return self(jax.make_jaxpr(draw)(*inputs), inputs)


def refusal(primitive: str) -> ConfigError:
    """Return the error for a primitive that ONNX has no operator for."""
    return ConfigError(
        f"ONNX has no operator for {primitive!r}, which this policy computes: take "
        "`format=stablehlo`, which holds every policy."
    )


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def _row(x: Any, i: int) -> Any:
    if _is_traced(x):
        return jax.lax.index_in_dim(x, i, keepdims=False)
    with jax.ensure_compile_time_eval():
        return x[i]


def _stack(rows: Sequence[Any]) -> jax.Array:
    """Stack arrays without calls inside, as `jnp.stack` has them."""
    return jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in rows], 0)


def _slice(x: jax.Array, starts: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    """Return a slice from constant places, moved into the array as `dynamic_slice` does."""
    places = zip(starts, sizes, x.shape, strict=True)
    begin = [min(max(int(start), 0), length - size) for start, size, length in places]
    return jax.lax.slice(x, begin, [b + size for b, size in zip(begin, sizes, strict=True)])


def _bind(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]


def _takes_keys(equation: Any) -> bool:
    dtypes = (x.aval.dtype for x in equation.invars[:1])
    return any(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes)


def _constant_case(index: Any) -> int | None:
    """Return the case that a selection always takes, None if it depends on its inputs."""
    if _is_traced(index):
        return None
    cases = np.unique(np.asarray(index))
    return int(cases[0]) if len(cases) == 1 else None
