"""Forward and backward of convolutional networks, with our gradients and with those JAX writes.

On a CPU the plain gradients are slow inside loops, where every learner has them, because XLA
brings convolutions into the layout of its fast kernel in a program's entry computation only. When
the two take equally long here, on a new release of JAX, `podracer/ops/convolution.py` can go.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from harness import Contender, compare, convolutions, here, parse, parser

from podracer.networks import CNN, Head, ResNet, TorsoNetwork
from podracer.types import ArraySpec

NETWORKS = {
    "nature": (TorsoNetwork(CNN()), (84, 84, 4), 32),
    "resnet": (TorsoNetwork(ResNet()), (84, 84, 4), 8),
    "minatar": (TorsoNetwork(CNN((16,), (3,), (1,), (128,))), (10, 10, 4), 512),
}
MINIBATCHES = 2  # in a scan, as a learner has them


def contender(name: str, network: Any, shape: tuple[int, ...], batch: int, loop: bool) -> Contender:
    """A repetition is `MINIBATCHES` gradient steps of `batch` frames, unrolled or in a scan."""
    built = network.build(ArraySpec(shape, jnp.uint8), {"policy": Head(6), "value": Head(1)})
    first = jnp.zeros((1, batch), bool)

    def loss(params: Any, frames: jax.Array) -> jax.Array:
        outputs, _ = built.apply(params, built.carry(batch), frames, first)
        return sum(jnp.mean((x - 1) ** 2) for x in outputs.values())

    def update(params: Any, frames: jax.Array) -> tuple[Any, None]:
        grads = jax.grad(loss)(params, frames)
        return jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads), None

    def program(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        params, frames = state
        return jax.lax.scan(update, params, frames, unroll=1 if loop else MINIBATCHES)[0], frames

    frames = jax.random.bits(jax.random.key(0), (MINIBATCHES, 1, batch, *shape), jnp.uint8)
    state = (built.init(jax.random.key(1)), frames)
    return here(name, jax.jit(program), state, MINIBATCHES * batch)


def measure(name: str, options: argparse.Namespace) -> None:
    network, shape, batch = NETWORKS[name]
    batch = min(batch, 4) if options.quick else batch

    def pair(loop: bool) -> list[Contender]:
        place = "in a scan" if loop else "at top level"
        made = [contender(f"ours, {place}", network, shape, batch, loop)]
        with convolutions():
            return [*made, contender(f"plain, {place}", network, shape, batch, loop)]

    about = {"network": name, "batch": batch}
    results = compare("convolution", about, pair(True) + pair(False), options, unit="frames")
    print()
    for result in results:
        print(f"{result.contender.name}: {1000 / result.rate():.2f} ms a frame")
    for ours, plain in (results[:2], results[2:]):
        print(f"{ours.contender.name}: {ours.ratio(plain):.1f} times plain")


def main() -> None:
    made = parser(__doc__, only=["minatar"])
    made.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parse(made)
    for name in options.only:
        measure(name, options)


if __name__ == "__main__":
    main()
