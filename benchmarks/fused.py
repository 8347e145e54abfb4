"""The fused unit against two passes: how much less it computes, and what that gains in time.

A2C and Q(lambda) on Catch and CartPole, without memory and with a GRU, over several batches. FLOPs
are those that the compiler counts for one update; as it counts one turn of a loop only, the loops
are unrolled for counting, though not for timing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from anakin_parts import training
from harness import anakin, append, compare, parse, parser

from podracer.agents.a2c import A2C
from podracer.agents.q_lambda import QLambda
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.envs import make
from podracer.networks import MLP, TorsoNetwork

LENGTH, STEPS = 16, 204_800  # steps: environment steps of a repetition, about
NETWORKS = {
    "feed-forward": TorsoNetwork(MLP((256,))),
    "gru": TorsoNetwork(MLP((256,)), memory="gru", memory_size=128),
}


@contextmanager
def unrolled_loops() -> Iterator[None]:
    scan = jax.lax.scan
    jax.lax.scan = partial(scan, unroll=True)
    try:
        yield
    finally:
        jax.lax.scan = scan


def flops(agent: Any, env: Any, config: AnakinConfig) -> float:
    """Of one update on one device."""
    one = replace(config, updates_per_chunk=1)
    with unrolled_loops():
        program, state = training(Anakin(agent, env, one, find_devices(1)))
        lowered = program.lower(state)  # type: ignore[attr-defined]
    return lowered.compile().cost_analysis()["flops"]


def measure(
    environment: str, name: str, memory: str, batch: int, options: argparse.Namespace
) -> None:
    kind = {"a2c": A2C, "q_lambda": QLambda}[name]
    agent, env = kind(network=NETWORKS[memory]), make(environment)
    updates = 1 if options.quick else max(1, STEPS // (batch * LENGTH))
    fused = AnakinConfig(batch, LENGTH, updates, fused=True)
    both = {"fused": fused, "two passes": replace(fused, fused=False)}
    about = {"agent": name, "environment": environment, "network": memory, "batch": batch}
    counts = {form: flops(agent, env, config) for form, config in both.items()}
    contenders = [anakin(form, agent, env, config) for form, config in both.items()]
    results = compare("fused", about, contenders, options)
    share, gain = counts["fused"] / counts["two passes"], results[0].ratio(results[1])
    print(f"\nfused: {100 * share:.0f} % of the FLOPs, {gain:.2f} times as fast", flush=True)
    append(
        options.out, {"benchmark": "fused flops", **about, **counts, "share": share, "gain": gain}
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--batches", nargs="+", type=int, default=[16, 128, 1024])
    options = parse(made)
    cases = list(
        itertools.product(("catch", "cartpole"), ("a2c", "q_lambda"), NETWORKS, options.batches)
    )
    for environment, agent, network, batch in cases[: 1 if options.quick else None]:
        measure(environment, agent, network, batch, options)


if __name__ == "__main__":
    main()
