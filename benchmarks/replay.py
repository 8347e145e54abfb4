"""Our replay against flashbax: adding and sampling, uniform and by priority, and their memory.

Both in one compiled scan over a donated state, the same steps, sample sizes and sequences; the
contenders take turns. What is sampled is summed, so that nothing can be left out.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import compare, here, parse, parser

from podracer.replay import Buffer, Replay
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep

VECTOR = EnvironmentSpec("vector", ArraySpec((8,)), Discrete(4))
FRAMES = EnvironmentSpec("frames", ArraySpec((84, 84, 4), np.uint8, frame_stack=True), Discrete(4))
# Name, environment, environments, timesteps of each, rollout, sample, timesteps of a sample
CASES = (
    ("vectors, transitions", VECTOR, 128, 1024, 8, 256, 2),
    ("vectors, sequences", VECTOR, 128, 1024, 16, 64, 40),
    ("frames, 3 steps", FRAMES, 16, 512, 4, 64, 4),
)
ROUNDS = 50  # in one call
SAMPLES = 4  # after each rollout


def rollout(spec: EnvironmentSpec, T: int, B: int) -> Step:
    """T timesteps `[T, B, ...]`."""
    leaf = spec.observation
    observation = jnp.ones((T, B, *leaf.shape), leaf.dtype)
    number, flag = jnp.ones((T, B)), jnp.zeros((T, B), bool)
    timestep = TimeStep(observation, number, number, flag, flag)
    return Step(timestep, jnp.zeros((T, B), jnp.int32), ())


def total(tree: Any) -> jax.Array:
    return sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(tree))  # type: ignore[return-value]


def ours(case: Any, prioritized: bool) -> Any:
    _, spec, B, columns, T, num, length = case
    buffer = Buffer(Replay(B * columns, prioritized=prioritized), spec, length)

    def draw(memory: Any, key: jax.Array) -> Any:
        sample = buffer.sample(memory, key, num)
        # Errors follow from the sample, as in training: else XLA may write first, into a copy.
        priorities = buffer.update_priorities(memory.priorities, sample, sample.weights)
        return dataclasses.replace(memory, priorities=priorities), total(
            sample.trajectory.timesteps()
        )

    def step(steps: Step, memory: Any, key: jax.Array) -> Any:
        return jax.lax.scan(draw, buffer.add(memory, steps), jax.random.split(key, SAMPLES))

    return _program(step), buffer.init(B), rollout(spec, T, B)


def theirs(case: Any, prioritized: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what flashbax imports
        import flashbax  # pyright: ignore[reportMissingImports]

    _, spec, B, columns, T, num, length = case
    sizes = {
        "add_batch_size": B, "sample_batch_size": num, "sample_sequence_length": length,
        "period": 1, "min_length_time_axis": length, "max_length_time_axis": columns,
    }  # fmt: skip
    make = (
        flashbax.make_prioritized_trajectory_buffer
        if prioritized
        else flashbax.make_trajectory_buffer
    )
    buffer = make(**sizes)
    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rollout(spec, T, B))

    def draw(state: Any, key: jax.Array) -> Any:
        sample = buffer.sample(state, key)
        if prioritized:
            state = buffer.set_priorities(state, sample.indices, jnp.ones(num))
        return state, total(sample.experience.timestep)

    def step(steps: Step, state: Any, key: jax.Array) -> Any:
        return jax.lax.scan(draw, buffer.add(state, steps), jax.random.split(key, SAMPLES))

    item = jax.tree.map(lambda x: x[0, 0], steps)
    return _program(step), buffer.init(item), steps


def _program(step: Any) -> Any:
    def program(state: Any) -> Any:
        memory, steps, key, _ = state
        key, now = jax.random.split(key)
        memory, sums = jax.lax.scan(partial(step, steps), memory, jax.random.split(now, ROUNDS))
        return memory, steps, key, jnp.sum(sums)

    return jax.jit(program, donate_argnums=0)


def size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def main() -> None:
    options = parse(parser(__doc__))
    for case in CASES:
        name, spec, B, columns, T, num, length = case
        for prioritized in (False, True):
            contenders = []
            both = (("podracer", ours), ("flashbax", theirs))
            for who, make in both[: 1 if options.quick else 2]:
                program, memory, steps = make(case, prioritized)
                about = {"bytes": size(memory)}
                state = (memory, steps, jax.random.key(0), jnp.float32(0))
                state = jax.tree.map(jnp.copy, state)  # donated, so no leaf may be another
                contenders.append(here(who, program, state, ROUNDS * SAMPLES * num, **about))
            settings = {
                "prioritized": prioritized, "environments": B, "timesteps": columns,
                "rollout": T, "batch": num, "length": length,
            }  # fmt: skip
            compare(f"Replay, {name}", settings, contenders, options, unit="samples")
            data = size(jax.tree.map(lambda x: x[0, 0], rollout(spec, 1, 1))) * B * columns
            for contender in contenders:
                share = contender.about["bytes"] / data
                print(f"  {contender.name}: {share:.2f} times the data as observed")


if __name__ == "__main__":
    main()
