"""Random words from one key, for the innermost loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

GOLDEN = np.uint32(0x9E3779B9)  # 2^32 over the golden ratio


def random_word(keys: jax.Array) -> UInt32[Array, "*b"]:
    """A random uint32 for each key `[*b]`, by mixing the key's words.

    The keys of a rollout are random words already (Threefry made them), so another block of
    Threefry, as dear as a step of Catch, would add nothing: a product of the words and a mixer of
    full avalanche do. It is for one draw from a key that is used for nothing else.
    """
    return _mixed(_folded(keys))


def random_words(keys: jax.Array, count: int) -> UInt32[Array, "*b n"]:
    """As many random uint32 for each key `[*b]`, the first of them its `random_word`.

    A counter that the mixer makes random, as in SplitMix (Steele et al. 2014): the streams of two
    keys meet as rarely as two words are equal.
    """
    steps = GOLDEN * np.arange(count, dtype=np.uint32)
    start = _folded(keys)[..., None]
    return _mixed(start + steps.reshape((1,) * (start.ndim - 1) + (count,)))


def unit(words: jax.Array) -> Float32[Array, "*b"]:
    """Random words as numbers in [0, 1), multiples of 2^-24."""
    return (words >> 8).astype(jnp.float32) * np.float32(2.0**-24)


def random_uniform(keys: jax.Array) -> Float32[Array, "*b"]:
    """A number in [0, 1), a multiple of 2^-24, for each key `[*b]`; see `random_word`."""
    return unit(random_word(keys))


def _folded(keys: jax.Array) -> jax.Array:
    data = jax.random.key_data(keys)
    x = data[..., 0]
    for i in range(1, data.shape[-1]):
        x = x * GOLDEN + data[..., i]
    return x


def _mixed(x: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 15)
