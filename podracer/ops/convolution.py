"""A two-dimensional convolution whose gradients stay fast inside loops on a CPU.

XLA's CPU backend brings convolutions into the layout of its fast kernel in a program's entry
computation only. Inside the body of a `scan` the two gradient convolutions, which JAX writes with
permuted dimensions, fall to a naive loop. Written as plain forward convolutions they are fast
everywhere. `benchmarks/convolution.py` measures it; see `docs/numerics.md`.
"""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LAYOUT = ("NHWC", "HWIO", "NHWC")


def _forward(x: jax.Array, w: jax.Array, stride: int, padding: int) -> jax.Array:
    pads = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=LAYOUT)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolution(
    x: Float[Array, "B H W C"], w: Float[Array, "h w C D"], stride: int, padding: int = 0
) -> Float[Array, "B H2 W2 D"]:
    """Correlate `x [B, H, W, C]` with `w [h, w, C, D]`, zero-padded by `padding` on each side."""
    return _forward(x, w, stride, padding)


def _keep(x: jax.Array, w: jax.Array, stride: int, padding: int):
    return _forward(x, w, stride, padding), (x, w)


def _gradients(stride: int, padding: int, saved: tuple[jax.Array, jax.Array], g: jax.Array):
    x, w = saved
    return jax.lax.platform_dependent(
        x, w, g,
        cpu=partial(_canonical_gradients, stride, padding),
        default=partial(_plain_gradients, stride, padding),
    )  # fmt: skip


def _plain_gradients(stride: int, padding: int, x: jax.Array, w: jax.Array, g: jax.Array):
    return jax.vjp(lambda x, w: _forward(x, w, stride, padding), x, w)[1](g)


def _canonical_gradients(stride: int, padding: int, x: jax.Array, w: jax.Array, g: jax.Array):
    """Compute both gradients as forward convolutions.

        dx[j] = Σ g[i] w[k]        dw[k] = Σ x[j] g[i]        over j = stride i + k − padding

    `dx` convolves the dilated `g` with the flipped kernel; `dw` convolves `x` with the dilated `g`
    as the kernel, batch and channels exchanged. The latter goes in parts of the batch: XLA copies
    all inputs of an output, and those of a part stay in the processor's cache.
    """
    kernel, size = w.shape[:2], x.shape[1:3]
    dilated = [(n - 1) * stride + 1 for n in g.shape[1:3]]
    dx = jax.lax.conv_general_dilated(
        g,
        w[::-1, ::-1].transpose(0, 1, 3, 2),
        (1, 1),
        [(k - 1 - padding, n - d + padding) for k, n, d in zip(kernel, size, dilated, strict=True)],
        lhs_dilation=(stride, stride),
        dimension_numbers=LAYOUT,
    )
    pads = [
        (padding, k - 1 + d - n - padding) for k, n, d in zip(kernel, size, dilated, strict=True)
    ]

    def weights(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x.transpose(3, 1, 2, 0),
            g.transpose(1, 2, 0, 3),
            (1, 1),
            pads,
            rhs_dilation=(stride, stride),
            dimension_numbers=LAYOUT,
        )

    rows = _rows_at_once(*g.shape[:3])
    if rows == len(x):
        return dx, weights(x, g).transpose(1, 2, 0, 3)
    parts = [array.reshape(-1, rows, *array.shape[1:]) for array in (x, g)]
    # Summed in float32: 16-bit numbers would lose small parts of a large sum.
    zero = jnp.zeros((w.shape[2], *kernel, w.shape[3]), jnp.promote_types(g.dtype, jnp.float32))
    dw, _ = jax.lax.scan(lambda total, part: (total + weights(*part), None), zero, tuple(parts))
    return dx, dw.astype(w.dtype).transpose(1, 2, 0, 3)


def _rows_at_once(batch: int, height: int, width: int) -> int:
    """Return the number of rows of a part of the batch; it divides the batch.

    An output of the weights' gradient then sums over about 8000 numbers of each channel. Where no
    divisor comes near that, the part is the whole batch.
    """
    best = max(1, 8192 // (height * width))
    divisors = [rows for rows in range(best, best // 4, -1) if batch % rows == 0]
    return divisors[0] if divisors and best < batch else batch


convolution.defvjp(_keep, _gradients)
