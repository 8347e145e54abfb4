"""Waits of actors for an update on the device that they share with the learner, whole or in pieces.

A step of the simulator waits for 5 ms, and an update has 16 minibatches that keep one core busy. A
CPU, which would infer beside an update, is made to do so in turn, as an accelerator does: an actor
waits for what the learner gave the device before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import append, parse, parser

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.impala import Impala
from podracer.devices import mesh
from podracer.devices.mesh import find_devices
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba import Sebulba, SebulbaConfig, actor
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.fields import static, struct
from podracer.networks import MLP, TorsoNetwork
from podracer.types import EnvironmentSpec, TimeStep

STEP, MINIBATCHES, LENGTH = 0.005, 16, 32


@struct
class SlowUpdate(Impala):
    """An agent whose update computes sines in each of its minibatches, with one core."""

    sines: int = static(default=2000)

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        def learn(state: Any, trajectory: Any, key: Any, axis: Any) -> Any:
            def step(x: jax.Array, _: Any) -> Any:
                return jax.lax.fori_loop(0, self.sines, lambda _, x: jnp.sin(x), x), None

            with jax.named_scope("minibatches"):
                x, _ = jax.lax.scan(step, jax.random.normal(key, (1000,)), length=MINIBATCHES)
            return state, {"loss": x.mean()}

        return dataclasses.replace(super().build(spec, context), learn=learn)


class SlowSimulator(DeviceEnvironments):
    """Environments that take a fixed time for a step of a batch."""

    def make(self, num_envs: int, num_threads: int) -> Any:
        batch = super().make(num_envs, num_threads)
        step: Callable[..., TimeStep] = batch.step

        def slow_step(action: Any) -> TimeStep:
            time.sleep(STEP)
            return step(action)

        batch.step = slow_step  # type: ignore[method-assign]
        return batch


class Timed:
    """An output of a program, whose waits are kept."""

    def __init__(self, output: jax.Array, waits: list[float]) -> None:
        self._output, self._waits = output, waits

    def block_until_ready(self) -> None:
        start = time.perf_counter()
        self._output.block_until_ready()
        self._waits.append(time.perf_counter() - start)


def measure(num_pieces: int, sines: int, updates: int) -> dict[str, float]:
    """Return steps a second, the longest wait, and the share of time in which actors wait."""
    config = SebulbaConfig(16, LENGTH, updates, threads_per_actor=1, update_pieces=num_pieces)
    agent = SlowUpdate(network=TorsoNetwork(MLP((16,))), sines=sines)
    driver = Sebulba(agent, SlowSimulator(make("catch")), config, find_devices(1))
    noted, waits = mesh.noted_program, list[float]()

    def timed(device: Any) -> Timed | None:
        output = noted(device)
        return None if output is None else Timed(output, waits)

    actor.noted_program = timed  # type: ignore[assignment]
    state = driver.init(jax.random.key(0))
    with contextlib.closing(driver.run(state, Orders(2 * updates))) as run:
        next(run)  # warms up
        waits.clear()
        start, metrics = time.perf_counter(), next(run).metrics
        seconds = time.perf_counter() - start
    actor.noted_program = noted
    return {
        "steps_per_second": updates * config.steps_per_update / seconds,
        "longest_wait_ms": 1e3 * max(waits, default=0.0),
        "median_wait_ms": 1e3 * statistics.median(waits or [0.0]),
        "share_of_waits": metrics["actor_time_device"] / seconds,
        "update_ms": 1e3 * metrics["learner_time_learn"] / updates,
    }


def main() -> None:
    made = parser(__doc__, updates=2)
    made.add_argument("--updates", type=int, default=20, help="in each measurement (default 20)")
    made.add_argument("--sines", type=int, default=2000, help="of a minibatch (default 2000)")
    options = parse(made)
    mesh.in_turn = lambda device: True
    print(
        f"{'pieces':>8}{'steps/s':>10}{'update':>10}{'median wait':>14}{'longest':>10}{'waits':>8}"
    )
    for num_pieces in (0, 1, 4, 16):
        figures = measure(num_pieces, options.sines, options.updates)
        rate, update_ms = figures["steps_per_second"], figures["update_ms"]
        print(f"{num_pieces:>8}{rate:>10,.0f}{update_ms:>7.0f} ms"
              f"{figures['median_wait_ms']:>11.0f} ms{figures['longest_wait_ms']:>7.0f} ms"
              f"{figures['share_of_waits']:>8.0%}",
              flush=True)  # fmt: skip
        append(options.out, {"benchmark": "pieces", "pieces": num_pieces, **figures})


if __name__ == "__main__":
    main()
