"""Cheap random numbers from keys, for innermost loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

GOLDEN = np.uint32(0x9E3779B9)  # 2^32 over the golden ratio


def random_word(keys: jax.Array) -> UInt32[Array, "*b"]:
    """Return a random uint32 for each key `[*b]`, by mixing the key's words.

    The keys of a rollout are the output of Threefry, so random already. Another block of Threefry
    would cost as much as a step of Catch and add nothing; a product of the words and a mixer with
    full avalanche suffice. Use it for one draw from a key that is used for nothing else.
    """
    return _mix(_fold(keys))


def random_words(keys: jax.Array, count: int) -> UInt32[Array, "*b n"]:
    """Return `count` random uint32 for each key `[*b]`, the first of them its `random_word`.

    The mixer of a counter, as in SplitMix (Steele et al. 2014): the streams of two keys meet as
    rarely as two words are equal.
    """
    steps = GOLDEN * np.arange(count, dtype=np.uint32)
    start = _fold(keys)[..., None]
    return _mix(start + steps.reshape((1,) * (start.ndim - 1) + (count,)))


def unit(words: jax.Array) -> Float32[Array, "*b"]:
    """Convert random words to numbers in [0, 1), multiples of 2^-24."""
    return (words >> 8).astype(jnp.float32) * np.float32(2.0**-24)


def random_normals(keys: jax.Array, count: int) -> Float32[Array, "*b n"]:
    """Return `count` standard normal numbers for each key `[*b]`, from its `random_words`.

    23 bits of a word make a number within (-1, 1), never at the ends; so the largest is 5.3.
    """
    words = random_words(keys, count) >> 9
    uniform = (words.astype(jnp.float32) + 0.5) * np.float32(2.0**-22) - 1.0
    return np.float32(np.sqrt(2.0)) * jax.lax.erf_inv(uniform)


def random_uniform(keys: jax.Array) -> Float32[Array, "*b"]:
    """Return a number in [0, 1), a multiple of 2^-24, for each key `[*b]`; see `random_word`."""
    return unit(random_word(keys))


def _fold(keys: jax.Array) -> jax.Array:
    data = jax.random.key_data(keys)
    x = data[..., 0]
    for i in range(1, data.shape[-1]):
        x = x * GOLDEN + data[..., i]
    return x


def _mix(x: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 15)
