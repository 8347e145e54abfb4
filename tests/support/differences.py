"""Gradients of whole losses beside finite differences, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

Loss = Callable[[Any], jax.Array]

STEP = 1e-6


def what_is_stopped(loss: Loss, params: Any) -> list[Any]:
    """Return the values that get no gradient, in the order in which the loss stops them."""

    def stopped(params: Any) -> list[Any]:
        values: list[Any] = []

        def stop(x: Any) -> Any:
            values.append(x)
            return x

        with mock.patch.object(jax.lax, "stop_gradient", stop):
            loss(params)
        return values

    return jax.jit(stopped)(params)


def assert_gradient_equals_differences(loss: Loss, params: Any) -> None:
    """Compare in four random directions and for one parameter of each array.

    The differences hold constant what gets no gradient: `stop_gradient` returns what it did at
    `params`.
    """
    values = what_is_stopped(loss, params)
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def value(flat: jax.Array) -> jax.Array:
        with mock.patch.object(jax.lax, "stop_gradient", side_effect=values) as stop:
            result = loss(unravel(flat))
        assert stop.call_count == len(values)
        return result

    gradient = ravel_pytree(jax.jit(jax.grad(loss))(params))[0]
    assert gradient.dtype == value(flat).dtype == jnp.float64
    random = np.random.default_rng(0)
    ends = np.cumsum([0, *(x.size for x in jax.tree.leaves(params))])
    places = [random.integers(start, end) for start, end in itertools.pairwise(ends)]
    directions = [np.eye(1, flat.size, place)[0] for place in places]
    directions += list(random.normal(size=(4, flat.size)))
    expected = [(value(flat + STEP * d) - value(flat - STEP * d)) / (2 * STEP) for d in directions]
    got = [gradient @ d for d in directions]
    assert np.abs(got[-4:]).min() > 1e-3
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)
