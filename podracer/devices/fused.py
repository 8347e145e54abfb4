"""Variants of common operations that launch fewer kernels on a GPU; on a CPU they are JAX's own.

Launching a kernel takes longer there than the work of a small one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxprs_in_params
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from podracer.types import PyTree

_TRACED_FOR: ContextVar[str] = ContextVar("traced_for", default="")

_MOST_STEPS = 16
_MOST_REMAINING = 4
_MOST_EQUATIONS = 1024  # in the body of a loop
_LARGE = 1 << 17  # elements of an array whose own kernel works longer than it takes to launch


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Trace programs as they are for a platform: `cpu`, or any other for an accelerator.

    So a CPU can compile what an accelerator would get, to learn its memory.
    """
    token = _TRACED_FOR.set(platform)
    try:
        yield
    finally:
        _TRACED_FOR.reset(token)


def platform_of(mesh: Mesh) -> str:
    """Return the platform for which a program of a mesh is traced, see `traced_for`."""
    return _TRACED_FOR.get() or mesh.devices.flat[0].platform


def is_for(platform: str) -> bool:
    """Return whether the program that is traced is for `cpu`, `gpu` or `tpu`, see `traced_for`."""
    return (_TRACED_FOR.get() or jax.default_backend()) == platform


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: PyTree,
    *,
    reverse: bool = False,
    packed: bool = False,
) -> tuple[Any, PyTree]:
    """Return what `jax.lax.scan` returns.

    On an accelerator an iteration runs as many steps as XLA fuses in a reasonable time to compile.
    On a GPU few remain, which are fused with the program around the loop: of many, XLA makes a
    kernel that takes minutes to compile. There a step writes the small arrays of its results
    together. With `packed`, for parameters and metrics, a CPU does so, too, and a GPU writes the
    small arrays of the carry together.
    """
    is_plain = is_for("cpu") and not packed
    if is_plain or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    body = jax.jit(body, inline=True)  # traced once
    first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], xs))
    program, (_, shapes) = jax.make_jaxpr(body, return_shape=True)(carry, first)
    limit = max(1, min(_MOST_STEPS, _MOST_EQUATIONS // max(count_equations(program.jaxpr), 1)))
    if is_for("tpu"):
        return jax.lax.scan(body, carry, xs, reverse=reverse, unroll=limit)
    length = len(jax.tree.leaves(xs)[0])
    sizes = (n for n in range(limit, limit // 2, -1) if length % n <= _MOST_REMAINING)
    steps = 1 if is_for("cpu") else next(sizes, limit)

    def packed_body(loop: Any, x: Any) -> tuple[Any, Any]:
        new_carry, y = body(unpack(loop, carry) if packed else loop, x)
        return pack(new_carry) if packed else new_carry, _pack(y)

    loop = pack(carry) if packed else carry
    loop, ys = jax.lax.scan(packed_body, loop, xs, reverse=reverse, unroll=steps)
    ys = jax.vmap(lambda y: _unpack(y, shapes))(ys) if ys else shapes
    return unpack(loop, carry) if packed else loop, ys


def cond(
    predicate: jax.Array,
    if_true: Callable[[Any], PyTree],
    if_false: Callable[[Any], PyTree],
    operand: PyTree,
) -> PyTree:
    """Return what `jax.lax.cond` returns; on a GPU a branch writes its small arrays together."""
    if not is_for("gpu"):
        return jax.lax.cond(predicate, if_true, if_false, operand)
    shapes = jax.eval_shape(if_false, operand)
    packed = jax.lax.cond(
        predicate, lambda x: pack(if_true(x)), lambda x: pack(if_false(x)), operand
    )
    return unpack(packed, shapes)


def pack(tree: PyTree) -> PyTree:
    """Return the arrays of a tree with all small ones of a dtype as one vector.

    A loop copies and writes it with one kernel, and its elementwise operations are one, too. A TPU
    would rearrange matrices for it, so elsewhere than on a GPU this is the tree itself.
    """
    return _pack(tree) if is_for("gpu") else tree


def _pack(tree: PyTree) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves(tree)
    return {
        kind: jnp.concatenate([jnp.ravel(leaves[i]) for i in group])
        if len(group) > 1
        else leaves[group[0]]
        for kind, group in _groups(leaves).items()
    }


def unpack(packed: PyTree, shapes: PyTree) -> PyTree:
    """Return the tree that was packed; `shapes` is one with the same arrays, or their shapes."""
    return _unpack(packed, shapes) if is_for("gpu") else packed


def _unpack(packed: dict[str, jax.Array], shapes: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(shapes)
    for kind, group in _groups(leaves).items():
        ends = list(itertools.accumulate(leaves[i].size for i in group))[:-1]
        parts = jnp.split(packed[kind], ends) if ends else [packed[kind]]
        for i, part in zip(group, parts, strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def _groups(leaves: Sequence[Any]) -> dict[str, list[int]]:
    """Return the places of the arrays that are packed together."""
    groups: dict[str, list[int]] = {}
    for i, x in enumerate(leaves):
        groups.setdefault(str(x.dtype) if x.size < _LARGE else str(i), []).append(i)
    return groups


def select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return one of two trees with the same shapes."""
    packed = jax.tree.map(lambda n, o: jnp.where(condition, n, o), pack(new), pack(old))
    return unpack(packed, new)


def periodic_update(new: PyTree, old: PyTree, steps: jax.Array, period: int) -> PyTree:
    """Return what `optax.periodic_update` returns, whose branches are copies on a GPU."""
    if not is_for("gpu"):
        return optax.periodic_update(new, old, steps, period)
    return select(steps % period == 0, new, old)


def all_finite(trees: Sequence[PyTree]) -> list[jax.Array]:
    """Return of each tree whether its floats are finite.

    A GPU finds the first tree that is not finite, and no later one.
    """
    floats = [
        [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        for tree in trees
    ]
    if not is_for("gpu"):
        checks = ((jnp.all(jnp.isfinite(x)) for x in arrays) for arrays in floats)
        return [functools.reduce(jnp.logical_and, x, jnp.bool_(True)) for x in checks]
    flat = ravel_pytree(floats)[0]
    places = jnp.where(jnp.isfinite(flat), flat.size, jnp.arange(flat.size))
    first = jnp.min(places, initial=flat.size)
    ends = [0, *itertools.accumulate(sum(x.size for x in arrays) for arrays in floats)]
    return [(first < start) | (first >= end) for start, end in itertools.pairwise(ends)]


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a program, with those of the programs within it."""
    return sum(1 + sum(map(count_equations, jaxprs_in_params(x.params))) for x in jaxpr.eqns)
