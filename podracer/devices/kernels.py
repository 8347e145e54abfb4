"""Common operations in forms that take few kernels on an accelerator, and are as usual on a CPU.

Launching a kernel on an accelerator takes longer than the work of a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from podracer.devices.reductions import is_for_cpu
from podracer.types import PyTree

_MOST_STEPS = 16
_MOST_REMAINING = 4
_MOST_EQUATIONS = 1024  # in the body of a loop


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: PyTree, *, reverse: bool = False
) -> tuple[Any, PyTree]:
    """Return what `jax.lax.scan` returns.

    On an accelerator an iteration runs as many steps as XLA fuses in a reasonable time to compile.
    The few that remain are fused with the program around the loop: of many, XLA makes a kernel that
    takes minutes to compile.
    """
    steps = 1
    if not is_for_cpu():
        first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], xs))
        size = count_equations(jax.make_jaxpr(body)(carry, first).jaxpr)
        limit = min(_MOST_STEPS, _MOST_EQUATIONS // max(size, 1))
        length = len(jax.tree.leaves(xs)[0])
        sizes = (n for n in range(limit, limit // 2, -1) if length % n <= _MOST_REMAINING)
        steps = max(1, next(sizes, limit))
    return jax.lax.scan(body, carry, xs, reverse=reverse, unroll=steps)


def global_norm(tree: PyTree) -> jax.Array:
    """Return the norm of all arrays of a tree together, f32 `[]`."""
    if is_for_cpu():
        return optax.tree.norm(tree)
    return jnp.linalg.norm(ravel_pytree(tree)[0])


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a program, with those of the programs within it."""
    return sum(1 + sum(map(count_equations, inner_programs(x.params))) for x in jaxpr.eqns)


def inner_programs(params: dict[str, Any]) -> list[Any]:
    """Return the programs within an equation, from its parameters."""
    kinds = jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
    programs = (getattr(x, "jaxpr", x) for x in leaves)
    return [x for x in programs if isinstance(x, jax.extend.core.Jaxpr)]
