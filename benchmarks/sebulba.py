"""Sebulba: what the simulator could give, and what is left of it with acting and with learning.

IMPALA with a small network, on one CPU device that actors and learner share. Parts: the simulator
alone at the same batch and threads, with inference, with learning, and beside them a loop by hand
with one thread. `--figure` chooses: `parts` (classic control, and Atari Pong), `batch` (figure 4b
of Hessel et al. 2021: actor batches 32, 64, 128 at T 60), `threads` (one and two), `lag`
(0, 1 and none), `overlap` (a simulator and a device that only wait, so that what is left is ours),
`native` (threads of Atari's simulators in all, in units of the cores, while a device like a GPU
infers). Environments whose package is missing are left out.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import sebulba_parts as bench
from harness import append, parse, parser

from podracer import envs
from podracer.agents.impala import Impala
from podracer.devices.machine import num_cores
from podracer.devices.mesh import find_devices
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.errors import ConfigError
from podracer.networks import CNN, MLP, TorsoNetwork
from podracer_plan import trials

SHALLOW = CNN((16, 32), (8, 4), (4, 2), (256,))  # IMPALA's
TINY = CNN((8,), (8,), (8,), (32,))
CONTROL = ("envpool:CartPole-v1", MLP((32,)), SebulbaConfig(8192, 20))
WORKERS = ("gymnasium:CartPole-v1", MLP((32,)), SebulbaConfig(64, 20))
PONG = ("atari:pong", SHALLOW, SebulbaConfig(64, 20))
ONE = SebulbaConfig(64, 20, threads_per_actor=1, env_threads=1)


def setting(options: Any, environment: str, torso: Any, config: SebulbaConfig) -> Sebulba:
    if options.quick:
        torso = TINY if isinstance(torso, CNN) else torso
        config = dataclasses.replace(config, num_envs=8, rollout_length=4)
    agent = Impala(network=TorsoNetwork(torso))
    return Sebulba(agent, envs.make(environment), config, find_devices(1))


def present(*cases: Any) -> Iterator[Any]:
    """Yield the cases whose packages are installed."""
    for case in cases:
        try:
            envs.make(case[0])
        except ConfigError as error:
            print(f"left out: {error}")
        else:
            yield case


def parts(options: Any) -> None:
    tiny = [("atari:pong", TINY, config) for config in (PONG[2], ONE)]
    for environment, torso, config in present(CONTROL, WORKERS, *tiny, PONG):
        what = setting(options, environment, torso, config)
        figures = bench.compare(what, options.seconds, options.repetitions)
        about = {"benchmark": "Sebulba's parts", "environment": environment, "torso": str(torso)}
        append(options.out, {**about, **figures})
        sizes = f"{config.num_envs} environments, {config.num_threads} threads"
        print(f"\n{environment}, {sizes}, {torso}")
        for name, speed in figures["steps_per_second"].items():
            share = figures["share_of_simulator"].get(name)
            over = figures["over_plain_loop"].get(name)
            more = f"{share:>8.0%} of simulator{over:>7.2f} x plain loop" if share else ""
            print(f"  {name:22}{speed:>12,.0f} steps/s{more}", flush=True)


def series(title: str, choices: list[tuple[Any, ...]], options: Any) -> None:
    """Training and acting at several settings, which take turns."""
    made = [(label, setting(options, *what)) for label, *what in choices]
    turns = []
    for _ in range(options.repetitions):
        turn = []
        for _, what in made:
            rate, metrics = trials.measure(what, options.seconds)
            turn.append((bench.measure_acting(what, options.seconds), rate, metrics))
        turns.append(turn)
    print(
        f"\n{title}\n  {'':24}{'acting':>10}{'training':>10}{'lag':>6}{'idle: actors, learner':>24}"
    )
    for i, (label, what) in enumerate(made):
        acting = statistics.median(turn[i][0] for turn in turns)
        training = statistics.median(turn[i][1] for turn in turns)
        last = turns[-1][i][2]
        idle = f"{last['actor_idle']:>14.0%}{last['learner_idle']:>10.0%}"
        print(f"  {label:24}{acting:>10,.0f}{training:>10,.0f}{last['lag_mean']:>6.1f}{idle}",
              flush=True)  # fmt: skip
        record = {
            "benchmark": title, "setting": label, **dataclasses.asdict(what.config),
            "acting_steps_per_second": acting, "training_steps_per_second": training,
            "repetitions": [turn[i][:2] for turn in turns],
            **{name: last[name] for name in ("lag_mean", "lag_max", "actor_idle", "learner_idle")},
        }  # fmt: skip
        append(options.out, record)


def batch(options: Any) -> None:
    game, torso, config = PONG
    choices = [
        (f"actor batch {size}", game, torso,
         dataclasses.replace(config, num_envs=2 * size, rollout_length=60))
        for size in (32, 64, 128)
    ]  # fmt: skip
    series("Actor batch on Pong at T 60", choices, options)


def threads(options: Any) -> None:
    for environment, torso, config in present(CONTROL, PONG):
        choices = [
            (
                f"{n} actor thread(s)",
                environment,
                torso,
                dataclasses.replace(config, threads_per_actor=n),
            )
            for n in (1, 2)
        ]
        series(f"Actor threads, {environment}", choices, options)


def lag(options: Any) -> None:
    for environment, torso, config in present(CONTROL, PONG):
        choices = [
            (f"lag {n}", environment, torso, dataclasses.replace(config, policy_lag=n))
            for n in (0, 1, None)
        ]
        series(f"Lag, {environment}", choices, options)


def overlap(options: Any) -> None:
    """A batch of 8, where simulator and device take 10 and 10, or 5 and 5 ms. Goal: 1.1."""
    print(f"\nOverlap\n  {'':24}{'ms':>8}{'ideal':>8}{'times':>7}{'only waits':>12}{'CPU us':>9}")
    choices = [(ms, threads) for ms in (10.0, 5.0) for threads in (1, 2, 4)]
    made = [waiting(*choice) for choice in choices]
    turns = bench.acting_turns(made, options.seconds, options.repetitions)
    for (ms, threads), laps in zip(choices, turns, strict=True):
        batch_ms = [8e3 / rate for rate, _ in laps]
        waits_ms = 1e3 / bench.measure_waits(threads, ms, ms, options.seconds)
        cpu = 8 * statistics.median(cpu for _, cpu in laps)
        median, ideal = statistics.median(batch_ms), ms if threads > 1 else 2 * ms
        name = f"{ms:g} + {ms:g} ms, {threads} thread(s)"
        print(f"  {name:24}{median:>8.2f}{ideal:>8.1f}{median / ideal:>7.2f}{waits_ms:>12.2f}"
              f"{cpu:>9.0f}", flush=True)  # fmt: skip
        record = {
            "benchmark": "Overlap", "simulator_ms": ms, "device_ms": ms, "threads": threads,
            "batch_ms": batch_ms, "ideal_ms": ideal, "times_ideal": median / ideal,
            "only_waits_ms": waits_ms, "cpu_us_a_batch": cpu,
            "goal": 1.1 if threads > 1 else None,
        }  # fmt: skip
        append(options.out, record)


def waiting(ms: float, threads: int) -> Sebulba:
    config = SebulbaConfig(8 * threads, 20, threads_per_actor=threads)
    agent = bench.EmulatedDevice(network=TorsoNetwork(MLP((16,))), milliseconds=ms)
    return Sebulba(agent, bench.EmulatedSimulator(ms), config, find_devices(1))


def native(options: Any) -> None:
    """Native threads of Atari's simulators, of all actors together: 1, 1.5 and 2 times the cores.

    The device is emulated, 2 ms for 16 games, in the proportion of a GPU and 16 cores; then it is
    the CPU itself. Where the actors cannot share the threads evenly, a setting is left out.
    """
    emulated = bench.EmulatedDevice(network=TorsoNetwork(TINY), milliseconds=2.0)
    agents = {"a device of 2 ms": emulated, "this CPU": Impala(network=TorsoNetwork(SHALLOW))}
    for environment, *_ in present(PONG, ("envpool:Pong-v5",)):
        for device, agent in agents.items():
            choices = [
                (actors, factor, int(factor * num_cores()) // actors)
                for actors in (1, 2)
                for factor in (1, 1.5, 2)
                if factor * num_cores() % actors == 0
            ]
            made = [
                Sebulba(
                    agent,
                    envs.make(environment),
                    SebulbaConfig(16 * actors, 20, threads_per_actor=actors, env_threads=threads),
                    find_devices(1),
                )
                for actors, _, threads in choices
            ]
            turns = bench.acting_turns(made, options.seconds, options.repetitions)
            once = {
                choice[0]: laps
                for choice, laps in zip(choices, turns, strict=True)
                if choice[1] == 1
            }
            title = f"Native threads, {environment}, {device}, {num_cores()} cores"
            print(f"\n{title}\n  {'':34}{'steps/s':>10}{'of 1 time':>11}{'CPU us':>8}")
            for (actors, factor, threads), laps in zip(choices, turns, strict=True):
                rates, cpus = zip(*laps, strict=True)
                pairs = zip(laps, once[actors], strict=True)
                ratio = statistics.median(lap[0] / base[0] for lap, base in pairs)
                name = f"{actors} actor(s), {factor:g} x the cores"
                print(f"  {name:34}{statistics.median(rates):>10,.0f}{ratio:>11.2f}"
                      f"{statistics.median(cpus):>8.0f}", flush=True)  # fmt: skip
                record = {
                    "benchmark": title, "actors": actors, "factor": factor,
                    "env_threads": threads, "steps_per_second": rates, "cpu_us_a_step": cpus,
                    "of_one_time": ratio,
                }  # fmt: skip
                append(options.out, record)


def main() -> None:
    made = parser(__doc__, seconds=0.2)
    figures = {
        "parts": parts, "batch": batch, "threads": threads, "lag": lag, "overlap": overlap,
        "native": native,
    }  # fmt: skip
    made.add_argument("--figure", choices=figures, action="append", help="default: all of them")
    made.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default 4)")
    made.set_defaults(repetitions=3)
    # An actor waits for each inference anyway; see `devices/startup.py`.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    options = parse(made)
    for name in options.figure or figures:
        figures[name](options)


if __name__ == "__main__":
    main()
