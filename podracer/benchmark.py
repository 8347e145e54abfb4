"""How fast Anakin is, and where its time goes: environment alone, with acting, with learning."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podracer import recipes
from podracer.agent import Agent
from podracer.anakin import AnakinConfig, TrainState, init_state, make_chunk
from podracer.environment import Environment, action_struct
from podracer.mesh import SHARDED, find_devices, make_mesh, shardings
from podracer.rollout import rollout
from podracer.training import build, use_compilation_cache
from podracer.types import PyTree


def machine() -> dict[str, Any]:
    """What a figure must be read with."""
    device = jax.devices()[0]
    return {
        "machine": f"{os.cpu_count()} x {_processor()}",
        "device": f"{jax.device_count()} x {device.device_kind}",
        "platform": device.platform,
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "podracer": importlib.metadata.version("podracer"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(x.split(":")[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measure(
    function: Callable[[PyTree], PyTree], state: PyTree, repetitions: int
) -> tuple[float, list[float]]:
    """Compile seconds, and the seconds of warm repetitions of a jitted `state -> state`."""
    began = time.perf_counter()
    compiled = function.lower(state).compile()  # type: ignore[attr-defined]
    compile_seconds = time.perf_counter() - began
    state = jax.block_until_ready(compiled(state))
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state))
        seconds.append(time.perf_counter() - began)
    return compile_seconds, seconds


def measure_anakin(
    agent: Agent, env: Environment, config: AnakinConfig, mesh: Mesh, repetitions: int
) -> dict[str, float]:
    """Steps per second (median over warm chunks) and compile seconds of the whole program."""
    chunk = make_chunk(agent, env, mesh, config)
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    request = jax.device_put(jnp.zeros(mesh.size, jnp.int32), shardings(mesh, SHARDED))

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState) -> TrainState:
        return chunk(state, request)[0]

    compile_seconds, seconds = measure(step, state, repetitions)
    steps = config.steps_per_update * config.updates_per_chunk
    return _rates(compile_seconds, seconds, steps)


def measure_acting(
    agent: Agent, env: Environment, config: AnakinConfig, repetitions: int, *, act: bool
) -> dict[str, float]:
    """The same for the environment with acting, or (`act=False`) alone, on one device."""
    mesh = make_mesh(jax.devices()[:1])
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    params = agent.actor_params(state.learner)
    want = action_struct(env.spec)  # type: ignore[arg-type]
    shape = (config.num_envs, *want.shape)

    class Still:
        """Acts without looking: a constant, so that only the environment costs anything."""

        def act(self, params, carry, timestep, keys, explore):
            return jnp.zeros(shape, want.dtype), (), carry

    actor = agent if act else Still()

    def body(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], jax.Array]:
        state, key = carry
        key, *keys = jax.random.split(key, 3)
        keys = [jax.random.split(k, (config.rollout_length, config.num_envs)) for k in keys]
        state, trajectory = rollout(actor, env, params, state, *keys)  # type: ignore[arg-type]
        return (state, key), jnp.sum(trajectory.after().reward)

    @jax.jit
    def step(carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        (actor, key), rewards = jax.lax.scan(body, carry[:2], length=config.updates_per_chunk)
        return actor, key, jnp.sum(rewards)

    start = (state.actor, jax.random.key(1), jnp.float32(0))
    compile_seconds, seconds = measure(step, start, repetitions)
    return _rates(compile_seconds, seconds, config.steps_per_update * config.updates_per_chunk)


def _rates(compile_seconds: float, seconds: list[float], steps: int) -> dict[str, float]:
    return {
        "steps_per_second": steps / statistics.median(seconds),
        "best": steps / min(seconds),
        "worst": steps / max(seconds),
        "compile_seconds": compile_seconds,
        "repetitions": len(seconds),
    }


def bench_anakin(devices: int, envs_per_device: int, repetitions: int) -> dict[str, Any]:
    """The Catch experiment of the published notebook, and the share of each of its parts."""
    use_compilation_cache()
    mesh = make_mesh(find_devices(devices))
    experiment = recipes.catch()
    agent, env = build(experiment)
    config = dataclasses.replace(experiment.anakin, num_envs=envs_per_device * mesh.size)
    one = dataclasses.replace(config, num_envs=envs_per_device)
    return {
        "benchmark": "anakin",
        **machine(),
        "devices": mesh.size,
        **dataclasses.asdict(config),
        "environment": measure_acting(agent, env, one, repetitions, act=False),
        "environment_and_acting": measure_acting(agent, env, one, repetitions, act=True),
        "training": measure_anakin(agent, env, config, mesh, repetitions),
    }


def show(figures: dict[str, Any]) -> str:
    """The figures as a short table."""
    lines = [
        f"Catch, greedy Q(λ): {figures['num_envs']} environments, T {figures['rollout_length']}, "
        f"{figures['updates_per_chunk']} updates a dispatch",
        f"{figures['machine']}, {figures['devices']} x {figures['platform']}, JAX {figures['jax']}",
        f"{'':32}{'steps/s':>12}{'compile s':>12}",
    ]
    for part, what in (
        ("environment", "environment alone, one device"),
        ("environment_and_acting", "environment and acting, one device"),
        ("training", "training, all devices"),
    ):
        row = figures[part]
        speed, compiling = row["steps_per_second"], row["compile_seconds"]
        lines.append(f"{what:34}{speed:>10,.0f}{compiling:>12.2f}")
    return "\n".join(lines)
