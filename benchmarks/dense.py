"""The weight gradient of a matrix product, as `networks/layers.py` writes it and as JAX does.

Narrow outputs, the heads, gain most. Wide ones show little here, without a network around them: in
PPO and Catch they gain more (`ppo.py`, `catch.py`), and that is what decides on a new JAX release.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from harness import Contender, compare, here, parse, parser

from podracer.networks.layers import dense

SHAPES = ((4, 64), (64, 64), (64, 2), (50, 256), (256, 3), (400, 64), (1024, 128))
CALLS = 20  # in a repetition, in a loop as a learner has them
Product = Callable[[jax.Array, jax.Array], jax.Array]


def contender(name: str, product: Product, rows: int, inputs: int, outputs: int) -> Contender:
    first = jax.random.normal(jax.random.key(0), (rows, inputs))

    def update(w: jax.Array, _: None) -> tuple[jax.Array, None]:
        # Other activations in each turn, or their transpose would be made once for all of them.
        x = jnp.tanh(first + w[0, 0])
        gradient = jax.grad(lambda w: 0.5 * jnp.sum(product(x, w) ** 2))(w)
        return w - 1e-9 * gradient, None

    program = jax.jit(lambda w: jax.lax.scan(update, w, length=CALLS)[0])
    w = jax.random.normal(jax.random.key(1), (inputs, outputs))
    return here(name, program, w, rows * CALLS)


def main() -> None:
    options = parse(parser(__doc__))
    for rows in (128,) if options.quick else (128, 512, 8192):
        for inputs, outputs in SHAPES:
            made = [
                contender("ours", dense, rows, inputs, outputs),
                contender("plain", jnp.matmul, rows, inputs, outputs),
            ]
            about = {"rows": rows, "inputs": inputs, "outputs": outputs}
            compare("dense", about, made, options, unit="rows")


if __name__ == "__main__":
    main()
