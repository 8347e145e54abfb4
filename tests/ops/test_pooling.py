"""Max-pooling and its gradient equal those of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.ops.pooling import max_pool


def plain(x: jax.Array) -> jax.Array:
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


@pytest.mark.parametrize("shape", [(84, 84, 2), (21, 21, 3), (6, 5, 1), (1, 2, 1), (3, 1, 2)])
def test_value_and_gradient_equal_jax(shape):
    """With few distinct numbers: of equal ones the first takes the gradient."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-2, 2, (2, *shape)), jnp.float32)

    @jax.jit
    def both(x):
        g = jnp.sin(jnp.arange(plain(x).size, dtype=x.dtype)).reshape(plain(x).shape)
        return [(f(x), jax.vjp(f, x)[1](g)[0]) for f in (max_pool, plain)]

    (y, dx), (expected_y, expected_dx) = both(x)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-6)


def test_under_vmap_and_in_half_precision():
    x = jax.random.normal(jax.random.key(0), (3, 2, 7, 6, 2), jnp.bfloat16)

    @jax.jit
    def both(x):
        forms = [jax.vmap(max_pool), jax.vmap(plain)]
        return [jax.value_and_grad(lambda x, f=f: jnp.sum(f(x)))(x) for f in forms]

    for got, expected in zip(*both(x), strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))
