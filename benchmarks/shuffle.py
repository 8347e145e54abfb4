"""Shuffling without sorting: our permutation against `jax.random.permutation`, and the split of a
PPO batch of CartPole into minibatches with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import Contender, compare, here, parse, parser

from podracer.agents.common.epochs import permutation

ORDERS = {"ours": permutation, "jax.random.permutation": jax.random.permutation}
CALLS = 10  # in a repetition
Order = Callable[[jax.Array, int], jax.Array]


def order_alone(name: str, order: Order, items: int) -> Contender:
    """A repetition draws `CALLS` orders, each with the key that the last one leads to."""

    def draw(key: jax.Array, _: None) -> tuple[jax.Array, None]:
        first = order(key, items)[0].astype(jnp.uint32)
        return jax.random.fold_in(key, first), None

    program = jax.jit(lambda key: jax.lax.scan(draw, key, length=CALLS)[0])
    return here(name, program, jax.random.key(0), items * CALLS)


def split(name: str, order: Order, items: int, minibatches: int) -> Contender:
    """The same with the batch split: observations and the five numbers that PPO keeps a step."""
    batch = {"observation": jnp.zeros((items, 4)), "numbers": [jnp.zeros(items) for _ in range(5)]}

    def deal(state: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], None]:
        key, batch = state
        dealt = order(key, items).reshape(minibatches, -1)

        def visit(total: jax.Array, chosen: jax.Array) -> tuple[jax.Array, None]:
            taken = jax.tree.map(
                lambda x: x.at[chosen].get(mode="promise_in_bounds", unique_indices=True), batch
            )
            return total + sum(jnp.sum(x) for x in jax.tree.leaves(taken)), None

        total, _ = jax.lax.scan(visit, jnp.float32(0), dealt)
        return (jax.random.fold_in(key, total.astype(jnp.uint32)), batch), None

    program = jax.jit(lambda state: jax.lax.scan(deal, state, length=CALLS)[0])
    return here(name, program, (jax.random.key(0), batch), items * CALLS)


def main() -> None:
    options = parse(parser(__doc__))
    sizes = ((512, 4),) if options.quick else ((512, 4), (8192, 8), (131_072, 16))
    for items, minibatches in sizes:
        made = [order_alone(name, order, items) for name, order in ORDERS.items()]
        compare("permutation", {"items": items}, made, options, unit="items")
        made = [split(name, order, items, minibatches) for name, order in ORDERS.items()]
        about = {"items": items, "minibatches": minibatches}
        compare("shuffled split", about, made, options, unit="items")


if __name__ == "__main__":
    main()
