"""Loops over time, which an accelerator runs several steps at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core

from podracer.devices.reductions import is_for_cpu
from podracer.types import PyTree

_MOST_STEPS = 16
_MOST_EQUATIONS = 1024  # of the body


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: PyTree, *, reverse: bool = False
) -> tuple[Any, PyTree]:
    """Return what `jax.lax.scan` returns.

    Launching a kernel on an accelerator takes longer than the work of a small one, so there an
    iteration runs as many steps as XLA can fuse in a reasonable time to compile. A CPU keeps one,
    and with it the bits.
    """
    steps = 1
    if not is_for_cpu():
        first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], xs))
        size = count_equations(jax.make_jaxpr(body)(carry, first).jaxpr)
        steps = max(1, min(_MOST_STEPS, _MOST_EQUATIONS // max(size, 1)))
    return jax.lax.scan(body, carry, xs, reverse=reverse, unroll=steps)


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a program, with those of the programs within it."""
    return sum(1 + sum(map(count_equations, inner_programs(x.params))) for x in jaxpr.eqns)


def inner_programs(params: dict[str, Any]) -> list[Any]:
    """Return the programs within an equation, from its parameters."""
    kinds = jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
    programs = (getattr(x, "jaxpr", x) for x in leaves)
    return [x for x in programs if isinstance(x, jax.extend.core.Jaxpr)]
