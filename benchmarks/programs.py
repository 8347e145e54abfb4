"""Whole training programs for `limits.py`: what they compute, beside what the machine could.

The counts are those of `podracer compile`: FLOPs are those of matrix products and convolutions,
bytes those that the compiled kernels read and write. A cache may hold them, so the share of the
copy can exceed 1. Where both shares are small the time goes into the kernels themselves, which are
too small for the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import ceiling
import jax
import jax.numpy as jnp
from agents import CARTPOLE, CHUNK, ENVS, PENDULUM, REPLAY, T
from anakin_parts import Program, training
from harness import alternate, append, here

from podracer import envs, recipes
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer_plan.compiled import matrix_flops
from podracer_plan.hlo import Program as Text

Parts = tuple[str, Any, AnakinConfig]  # environment, agent, driver
WIDE = TorsoNetwork(MLP((256, 256)))
EACH_STEP = dataclasses.replace(REPLAY, updates_per_rollout=4, warmup=1000)


def recipe(name: str, num_envs: int) -> Parts:
    experiment = recipes.find(name)
    assert isinstance(experiment.driver, AnakinConfig)
    driver = dataclasses.replace(experiment.driver, num_envs=num_envs, updates_per_chunk=2)
    return str(experiment.environment), experiment.agent, driver


def update_each_step(name: str, agent: Any) -> Parts:
    """The settings of the contests with sbx: four environments, an update for each timestep."""
    agent = dataclasses.replace(agent, network=WIDE, replay=EACH_STEP)
    return name, agent, AnakinConfig(4, 1, 250)


PROGRAMS: dict[str, Parts] = {
    "Catch, Q(λ), 128 environments": ("catch", *ceiling.SETTINGS["catch"]),
    "CartPole, PPO, 1024": ("cartpole", *ceiling.SETTINGS["cartpole"]),
    "MinAtar Breakout, PPO, MLP, 64": (
        "gymnax:Breakout-MinAtar", *ceiling.SETTINGS["gymnax:Breakout-MinAtar"],
    ),
    "MinAtar Breakout, PPO, CNN, 64": recipe("breakout_cnn_ppo", 64),
    "Pendulum, SAC, 256 x 256": update_each_step("pendulum", PENDULUM["SAC"]),
    "CartPole, DQN, 256 x 256": update_each_step("cartpole", CARTPOLE["DQN"]),
    **{
        f"CartPole, {name}, 64": ("cartpole", CARTPOLE[name], AnakinConfig(ENVS, T, CHUNK))
        for name in ("A2C", "IMPALA", "Rainbow", "R2D2", "MuZero")
    },
}  # fmt: skip


def build(parts: Parts, quick: bool) -> tuple[Program, Any, int]:
    """Return a chunk as a program, its state past the warm-up, and its number of timesteps."""
    environment, agent, config = parts
    if quick:
        config = dataclasses.replace(config, updates_per_chunk=1)
    program, state = training(Anakin(agent, envs.make(environment), config, jax.devices()[:1]))
    return program, state, config.steps_per_update * config.updates_per_chunk


def measure_programs(flops: float, bandwidth: float, options: argparse.Namespace) -> None:
    """Print the work of each program a timestep, its rates, and their shares of the machine's.

    `flops` is the rate of a large product a CPU second, `bandwidth` that of copying, in bytes read
    and written.
    """
    columns = ("MFLOP", "kB", "kernels", "us", "GFLOP/s", "share", "GB/s", "share", "us/kernel")
    print(f"\nA timestep of training\n\n{'':32}" + "".join(f"{name:>12}" for name in columns))
    names = list(PROGRAMS)[:1] if options.quick else PROGRAMS
    for name in names:
        program, state, steps = build(PROGRAMS[name], options.quick)
        traced = program.trace(state)  # type: ignore[attr-defined]
        work = Text(traced.lower().compile().as_text()).update.total()
        timesteps = PROGRAMS[name][2].steps_per_update
        product_flops = (
            matrix_flops(traced.jaxpr.jaxpr) / timesteps
        )  # a loop of updates counts once
        traffic, kernels = work.bytes / timesteps, work.kernels.total() / timesteps
        contender = here(name, program, jax.tree.map(jnp.copy, state), steps)
        contender.lap()  # past the warm-up of a replay
        [result] = alternate([contender], 1 if options.quick else options.repetitions)
        seconds = 1 / result.cpu_rate()
        record = {
            "benchmark": "limits", "program": name, "flops": product_flops,
            "bytes": traffic, "kernels": kernels,
            "microseconds": seconds * 1e6, "share_of_product": product_flops / seconds / flops,
            "share_of_copy": traffic / seconds / bandwidth,
        }  # fmt: skip
        print(
            f"{name:32}{product_flops / 1e6:>12.3f}{traffic / 1e3:>12.1f}{kernels:>12.2f}"
            f"{seconds * 1e6:>12.2f}{product_flops / seconds / 1e9:>12.1f}"
            f"{record['share_of_product']:>12.0%}{traffic / seconds / 1e9:>12.2f}"
            f"{record['share_of_copy']:>12.0%}{seconds * 1e6 / kernels:>12.1f}",
            flush=True,
        )
        append(options.out, record)
        jax.clear_caches()
