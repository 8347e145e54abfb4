"""The convolution and its two gradients equal JAX's own, in every place that agents use them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer.ops.convolution import LAYOUT, convolution, rows_at_once

# Image [H, W, C], kernel [h, w, D], stride, padding.
CASES = {
    "atari 1": ((84, 84, 4), (8, 8, 8), 4, 0),
    "atari 2": ((20, 20, 8), (4, 4, 4), 2, 0),
    "atari 3": ((9, 9, 8), (3, 3, 4), 1, 0),
    "products": ((5, 6, 32), (3, 2, 4), 1, 0),
    "products of blocks": ((6, 8, 16), (4, 2, 4), 2, 0),
    "minatar": ((10, 10, 4), (3, 3, 16), 1, 0),
    "residual": ((11, 11, 3), (3, 3, 5), 1, 1),
    "rows left over": ((10, 11, 2), (3, 3, 3), 3, 0),
    "many rows left over": ((12, 11, 2), (4, 4, 3), 5, 0),
    "padded and left over": ((7, 8, 2), (3, 3, 3), 2, 1),
    "wide padding": ((6, 6, 2), (3, 3, 3), 2, 2),
    "oblong kernel": ((9, 7, 2), (4, 2, 3), 2, 1),
    "even kernel": ((8, 8, 2), (2, 2, 3), 1, 1),
    "kernel of one": ((5, 5, 3), (1, 1, 2), 1, 0),
    "kernel of one, strided": ((5, 6, 3), (1, 1, 2), 2, 0),
    "whole image": ((5, 5, 2), (5, 5, 3), 1, 0),
}


def plain(x: jax.Array, w: jax.Array, stride: int, padding: int) -> jax.Array:
    pads = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=LAYOUT)


def inputs(case: str, batch: int = 3) -> tuple[jax.Array, jax.Array, int, int]:
    image, (height, width, outputs), stride, padding = CASES[case]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, *image)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(height, width, image[-1], outputs)), jnp.float32)
    return x, w, stride, padding


def loss(function, stride: int, padding: int):
    """Different weights for every output, so that no two gradients can change places."""

    def weighted(x: jax.Array, w: jax.Array) -> jax.Array:
        y = function(x, w, stride, padding)
        return jnp.sum(y * jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return weighted


def close(got, expected) -> None:
    """Equal up to the order of sums, on the scale of the largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()), rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_equal_jax(case):
    x, w, stride, padding = inputs(case)

    @jax.jit
    def both(x, w):
        return [
            (f(x, w, stride, padding), jax.grad(loss(f, stride, padding), (0, 1))(x, w))
            for f in (convolution, plain)
        ]

    close(*both(x, w))


@pytest.mark.parametrize("case", ["padded and left over", "residual", "products of blocks"])
def test_gradients_through_the_gradients_equal_jax(case, monkeypatch):
    """As updates that learn how to learn take them, summed over parts of the batch."""
    monkeypatch.setattr("podracer.ops.convolution.rows_at_once", lambda g, w: 2)
    x, w, stride, padding = inputs(case, batch=4)

    def through(function):
        def bent(x, w):
            return jnp.sum(jnp.sin(function(x, w, stride, padding)))

        def length(x, w):
            return optax.tree.norm(jax.grad(bent, (0, 1))(x, w), squared=True)

        return jax.grad(length, (0, 1))(x, w)

    got, expected = jax.jit(lambda: [through(f) for f in (convolution, plain)])()
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=1e-3)


@pytest.mark.parametrize(
    ("channels", "rows", "is_product"), [(4, 512, True), (4, 2048, False), (8, 2, False)]
)
def test_patches_that_fit_the_cache_become_one_product(channels, rows, is_product):
    """On a CPU; larger ones, and those of more channels, are left to XLA's own kernel."""
    x, w = jnp.zeros((rows, 10, 10, channels)), jnp.zeros((3, 3, channels, 16))
    text = jax.jit(lambda x, w: convolution(x, w, 1)).lower(x, w).as_text()
    assert ("stablehlo.dot_general" in text) == is_product
    assert ("stablehlo.convolution" in text) != is_product


def test_parts_of_the_batch_have_bounded_patches():
    """And divide it; a batch that nothing near the bound divides is one part."""
    w, rows = jnp.zeros((8, 8, 4, 32)), {24: 8, 64: 8, 37: 37, 9: 9}
    assert {n: rows_at_once(jnp.zeros((n, 20, 20, 32)), w) for n in rows} == rows


def test_under_vmap_over_inputs_and_over_weights():
    x, w, stride, padding = inputs("padded and left over")
    xs, ws = jnp.stack([x, 2 * x, x + 1]), jnp.stack([w, w - 1, -w])
    for axes in ((0, 0), (0, None), (None, 0)):
        args = tuple(v[0] if a is None else v for v, a in zip((xs, ws), axes, strict=True))

        @jax.jit
        def both(*args, axes=axes):
            return [
                jax.vmap(jax.value_and_grad(loss(f, stride, padding), (0, 1)), axes)(*args)
                for f in (convolution, plain)
            ]

        close(*both(*args))


def test_inside_a_scan():
    x, w, stride, padding = inputs("residual")
    xs = jnp.stack([x, 2 * x, x + 1])

    def through(function):
        def total(w):
            step = loss(function, stride, padding)
            return jax.lax.scan(lambda s, x: (s + step(x, w), None), 0.0, xs)[0]

        return jax.value_and_grad(total)

    close(*jax.jit(lambda w: [through(f)(w) for f in (convolution, plain)])(w))


def test_gradients_are_plain_forward_convolutions_on_a_cpu():
    """What XLA gives its fast kernel within a loop, too. JAX's own gradients permute dimensions."""

    def layouts(function) -> set[str]:
        x, w, stride, padding = inputs("residual")
        grad = jax.jit(jax.grad(loss(function, stride, padding), (0, 1)))
        text = grad.lower(x, w).as_text()
        return set(re.findall(r"dim_numbers = (\S+x\S+->\[[^]]*\])", text.replace(", ", ",")))

    assert layouts(convolution) == {"[b,0,1,f]x[0,1,i,o]->[b,0,1,f]"}
    assert len(layouts(plain)) > 1
