"""A two-dimensional convolution that is fast on a CPU, also inside loops.

XLA's CPU backend brings convolutions into the layout of its fast kernel in a program's entry
computation only. Inside the body of a `scan` the two gradient convolutions, which JAX writes with
permuted dimensions, fall to a naive loop. So gradients are written as plain forward convolutions,
or, where that is faster still, as matrix products, as are the first layers of small images.
`benchmarks/limits.py --parts` measures them.
"""

from __future__ import annotations

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LAYOUT = ("NHWC", "HWIO", "NHWC")


_PATCHES_IN_CACHE = 3 * 2**20  # numbers


def _forward(x: jax.Array, w: jax.Array, stride: int, padding: int) -> jax.Array:
    if not _has_small_patches(x, w, stride, padding):
        return _plain(x, w, stride, padding)
    plain = partial(_plain, stride=stride, padding=padding)
    return jax.lax.platform_dependent(x, w, cpu=_product, default=plain)


def _has_small_patches(x: jax.Array, w: jax.Array, stride: int, padding: int) -> bool:
    """Say whether a CPU is faster with patches and one product, as measured for such shapes.

    XLA's kernel for fewer than 32 output channels takes twice as long for few input channels.
    """
    patch = math.prod(w.shape[:3])
    patches = len(x) * (x.shape[1] - w.shape[0] + 1) * (x.shape[2] - w.shape[1] + 1)
    is_small = patch <= 64 and patches * patch <= _PATCHES_IN_CACHE
    return is_small and w.shape[3] < 32 and stride == 1 and padding == 0


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute a convolution with stride 1 and without padding as one product of patches."""
    height, width = w.shape[:2]
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    places = [(i, j) for i in range(height) for j in range(width)]
    patches = jnp.concatenate([x[:, i : i + rows, j : j + columns] for i, j in places], axis=-1)
    return patches @ w.reshape(-1, w.shape[3])


def _plain(x: jax.Array, w: jax.Array, stride: int, padding: int) -> jax.Array:
    pads = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=LAYOUT)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolution(
    x: Float[Array, "B H W C"], w: Float[Array, "h w C D"], stride: int, padding: int = 0
) -> Float[Array, "B H2 W2 D"]:
    """Correlate `x [B, H, W, C]` with `w [h, w, C, D]`, zero-padded by `padding` on each side."""
    return _forward(x, w, stride, padding)


def _gradients(stride: int, padding: int, saved: tuple[jax.Array, jax.Array], g: jax.Array):
    def plain(x: jax.Array, w: jax.Array, g: jax.Array):
        return jax.vjp(lambda x, w: _plain(x, w, stride, padding), x, w)[1](g)

    fast = partial(_fast_gradients, stride, padding)
    return jax.lax.platform_dependent(*saved, g, cpu=fast, default=plain)


def _fast_gradients(stride: int, padding: int, x: jax.Array, w: jax.Array, g: jax.Array):
    """Choose the form by shape, as measured for the layers of our networks.

    Without padding, products are faster from 32 channels on, also where these are the pixels of
    blocks that a stride skips; a first layer of few channels loses by making the blocks.
    """
    # Whether it is a convolution of stride 1 over blocks of `stride` x `stride` pixels.
    is_over_blocks = stride > 1 and padding == 0
    is_over_blocks &= all(size % stride == 0 for size in (*x.shape[1:3], *w.shape[:2]))
    if w.shape[2] >= 16 and is_over_blocks:
        dx, dw = _product_gradients(_blocks(x, stride), _kernel_blocks(w, stride), g)
        return _pixels(dx, stride), _kernel_pixels(dw, stride)
    if w.shape[2] >= 32 and stride == 1 and padding == 0:
        return _product_gradients(x, w, g)
    return _canonical_gradients(stride, padding, x, w, g)


def _blocks(x: jax.Array, n: int) -> jax.Array:
    """Make the pixels of each block of `n` x `n` the channels of one pixel."""
    batch, height, width, channels = x.shape
    rows = x.reshape(batch, height // n, n, width // n, n * channels)
    return jnp.concatenate([rows[:, :, i] for i in range(n)], axis=-1)


def _pixels(x: jax.Array, n: int) -> jax.Array:
    """Invert `_blocks`."""
    batch, height, width, channels = x.shape
    rows = x.reshape(batch, height, width, n, channels // n).swapaxes(2, 3)
    return rows.reshape(batch, height * n, width * n, channels // n**2)


def _kernel_blocks(w: jax.Array, n: int) -> jax.Array:
    height, width, channels, outputs = w.shape
    w = w.reshape(height // n, n, width // n, n, channels, outputs).swapaxes(1, 2)
    return w.reshape(height // n, width // n, n * n * channels, outputs)


def _kernel_pixels(w: jax.Array, n: int) -> jax.Array:
    """Invert `_kernel_blocks`."""
    height, width, channels, outputs = w.shape
    w = w.reshape(height, width, n, n, channels // n**2, outputs).swapaxes(1, 2)
    return w.reshape(height * n, width * n, channels // n**2, outputs)


def _product_gradients(x: jax.Array, w: jax.Array, g: jax.Array):
    """Compute both gradients of a convolution with stride 1.

        dx[i + k] = Σ g[i] w[k]ᵀ        dw[k] = Σ x[i + k]ᵀ g[i]

    The former is one product for all k and shifted sums. The latter is a product for each k, with
    the transpose of `g` made once: XLA is slow at products of transposes.
    """
    height, width, channels, outputs = w.shape
    rows, columns = g.shape[1:3]
    places = [(i, j) for i in range(height) for j in range(width)]
    # In float32: 16-bit numbers would lose small parts of a sum.
    dtype = jnp.promote_types(g.dtype, jnp.float32)
    y = jnp.matmul(g, w.reshape(-1, outputs).T, preferred_element_type=dtype)
    y = y.reshape(*g.shape[:3], height, width, channels)
    shifted = [
        jnp.pad(y[..., i, j, :], ((0, 0), (i, height - 1 - i), (j, width - 1 - j), (0, 0)))
        for i, j in places
    ]
    dx = reduce(jnp.add, shifted).astype(x.dtype)
    barrier = jax.lax.optimization_barrier
    transposed = barrier(g.reshape(-1, outputs).T)
    dw = [
        barrier(transposed @ x[:, i : i + rows, j : j + columns].reshape(-1, channels)).T
        for i, j in places
    ]
    return dx, jnp.stack(dw).reshape(w.shape)


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

    rows = rows_at_once(g, w)
    if rows == len(x):
        return dx, weights(x, g).transpose(1, 2, 0, 3)
    parts = [array.reshape(-1, rows, *array.shape[1:]) for array in (x, g)]
    # Summed in float32: 16-bit numbers would lose small parts of a large sum.
    zero = jnp.zeros((w.shape[2], *kernel, w.shape[3]), jnp.promote_types(g.dtype, jnp.float32))
    dw, _ = jax.lax.scan(lambda total, part: (total + weights(*part), None), zero, tuple(parts))
    return dx, dw.astype(w.dtype).transpose(1, 2, 0, 3)


def rows_at_once(g: jax.Array, w: jax.Array) -> int:
    """Return the number of rows of a part of the batch; it divides the batch.

    The patches of a part have about 2^20 numbers, or 2^21 where there are fewer than 32 output
    channels, for which XLA has another kernel. Where no divisor comes near that, the part is the
    whole batch.
    """
    batch, height, width, outputs = g.shape
    limit = 2**21 if outputs < 32 else 2**20
    best = max(1, limit // (height * width * math.prod(w.shape[:3])))
    divisors = [rows for rows in range(best, best // 4, -1) if batch % rows == 0]
    return divisors[0] if divisors and best < batch else batch


convolution.defvjp(lambda *args: (_forward(*args), args[:2]), _gradients)
