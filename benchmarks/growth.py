"""How the speed grows with each size: environments, rollout, chunk, pods, and replay.

One device. A point is the median of repetitions of at least a quarter of a second. The *knee* is
the smallest size that reaches nine tenths of the best rate. Nothing should grow faster than its
work: the last column is how much slower than the best the largest size is.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from harness import Contender, anakin, append, here, parse, parser
from population import one_program
from replay import SAMPLES, VECTOR, ours

from podracer import envs, recipes
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.networks import MLP, TorsoNetwork

SECONDS = 0.25  # of a repetition, at least
KNEE = 0.9
RECIPES = ("catch", "cartpole_ppo")


def powers(low: int, high: int, factor: int) -> list[int]:
    """Return the sizes from low to high, each but the last `factor` times the one before."""
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(high, sizes[-1] * factor))
    return sizes


def parts(recipe: str) -> tuple[Any, Any, AnakinConfig]:
    """Return agent, environment and driver of a recipe."""
    experiment = recipes.find(recipe)
    assert isinstance(experiment.driver, AnakinConfig)
    return experiment.agent, envs.make(str(experiment.environment)), experiment.driver


def with_driver(recipe: str, field: str) -> Callable[[int], Contender]:
    """Return what measures a recipe with a size of its driver."""
    agent, env, driver = parts(recipe)

    def contender(size: int) -> Contender:
        config = dataclasses.replace(driver, **{field: size})
        if field != "updates_per_chunk":
            config = dataclasses.replace(config, updates_per_chunk=1)
        return anakin(str(size), agent, env, config)

    return contender


def with_pods(size: int) -> Contender:
    """Measure a population of small learners of A2C on Catch."""
    agent, env, driver = parts("catch_a2c")
    agent = dataclasses.replace(agent, network=TorsoNetwork(MLP((16,))))
    config = dataclasses.replace(driver, num_envs=1, rollout_length=8, updates_per_chunk=50)
    return one_program(agent, env, config, [Pod(seed) for seed in range(size)])


def with_replay(prioritized: bool) -> Callable[[int], Contender]:
    """Return what samples from a replay of transitions of eight numbers."""

    def contender(size: int) -> Contender:
        case = ("replay", VECTOR, 128, size // 128, 8, 256, 2)
        program, memory, steps = ours(case, prioritized)
        state = (memory, steps, jax.random.key(0), jnp.float32(0))
        return here(str(size), program, jax.tree.map(jnp.copy, state), 50 * SAMPLES * 256)

    return contender


def cases() -> Iterable[tuple[str, list[int], Callable[[int], Contender]]]:
    """Return what grows, over which sizes, and what measures a size."""
    for recipe in RECIPES:
        yield f"environments, {recipe}", powers(8, 65_536, 8), with_driver(recipe, "num_envs")
        yield f"rollout, {recipe}", powers(2, 512, 4), with_driver(recipe, "rollout_length")
        chunks = powers(1, 1000, 10)
        yield f"updates in a chunk, {recipe}", chunks, with_driver(recipe, "updates_per_chunk")
    yield "pods, catch_a2c", powers(1, 1024, 4), with_pods
    for prioritized in (False, True):
        name = f"replay, {'prioritized' if prioritized else 'uniform'}"
        yield name, powers(12_800, 12_800_000, 10), with_replay(prioritized)


def rate(contender: Contender, repetitions: int) -> float:
    """Return steps per second, a median of repetitions that are long enough to be timed."""
    calls = max(1, round(SECONDS / contender.lap().seconds))
    laps = [sum(contender.lap().seconds for _ in range(calls)) for _ in range(repetitions)]
    return contender.steps * calls / statistics.median(laps)


def main() -> None:
    made = parser(__doc__, only=["environments, catch", "pods", "replay"])
    made.add_argument("--only", nargs="+", default=[""], help="what has one of these in its name")
    options = parse(made)
    for name, sizes, contender in cases():
        if not any(part in name for part in options.only):
            continue
        if options.quick:
            sizes = sizes[:2]
        rates = {}
        for size in sizes:
            rates[size] = rate(contender(size), 1 if options.quick else options.repetitions)
            append(options.out, {
                "benchmark": "growth", "grows": name, "size": size, "steps_per_second": rates[size]
            })  # fmt: skip
            jax.clear_caches()
        best = max(rates.values())
        knee = next(size for size, found in rates.items() if found >= KNEE * best)
        points = ", ".join(f"{size:,}: {found / 1e3:,.0f} k" for size, found in rates.items())
        print(f"{name}: {points}", flush=True)
        print(
            f"  knee {knee:,}; the largest is {best / rates[sizes[-1]]:.2f} times slower",
            flush=True,
        )


if __name__ == "__main__":
    main()
