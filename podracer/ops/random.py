"""One random word for one key, for the innermost loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32


def random_word(keys: jax.Array) -> UInt32[Array, "*b"]:
    """A random uint32 for each key `[*b]`, by mixing the key's words.

    The keys of a rollout are random words already (Threefry made them), so another block of
    Threefry, as dear as a step of Catch, would add nothing: a product of the words and a mixer of
    full avalanche do. It is for one draw from a key that is used for nothing else.
    """
    data = jax.random.key_data(keys)
    x = data[..., 0]
    for i in range(1, data.shape[-1]):
        x = x * np.uint32(0x9E3779B9) + data[..., i]
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 15)


def random_uniform(keys: jax.Array) -> Float32[Array, "*b"]:
    """A number in [0, 1), a multiple of 2^-24, for each key `[*b]`; see `random_word`."""
    return (random_word(keys) >> 8).astype(jnp.float32) * np.float32(2.0**-24)
