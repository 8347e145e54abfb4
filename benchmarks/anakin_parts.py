"""Throughput of Anakin and its parts: environment alone, with acting, with learning."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from machine import machine

from podracer import recipes
from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.devices.mesh import find_devices
from podracer.devices.startup import use_compilation_cache
from podracer.drivers.anakin import Anakin, AnakinConfig, make_chunk
from podracer.drivers.progress import Request, request_array
from podracer.drivers.state import TrainState, place_leaves
from podracer.environment import HostEnvironments, action_struct
from podracer.errors import ConfigError
from podracer.rollout import Purpose, environment_keys, purpose_key, rollout
from podracer.run.setup import build
from podracer.types import PyTree, TimeStep

Program = Callable[[PyTree], PyTree]  # jitted, `state -> state`


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one warm repetition.

    CPU seconds, over all threads, hardly change when other processes use the machine.
    """

    seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A compiled program, ready for warm repetitions."""

    lap: Callable[[], Timing]
    """Function that runs one repetition."""
    compile_seconds: float
    memory: dict[str, int]
    """Bytes on one device: `state_bytes` of the arguments, `temporary_bytes` beside them."""


def prepare(program: Program, state: PyTree, calls: int = 1) -> Prepared:
    """Compile a program, and run it once.

    A repetition makes `calls` calls, each on the state of the previous one. `state` is donated. The
    first call of all is not part of any repetition.
    """
    start = time.perf_counter()
    compiled = program.lower(state).compile()  # type: ignore[attr-defined]
    compile_seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    state = jax.block_until_ready(compiled(state))

    def lap() -> Timing:
        nonlocal state
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(calls):
            # With more than two programs in flight virtual CPU devices can run out of threads.
            state = jax.block_until_ready(compiled(state))
        return Timing(time.perf_counter() - start, time.process_time() - cpu_start)

    memory = {
        "state_bytes": analysis.argument_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
    }
    return Prepared(lap, compile_seconds, memory)


def training(driver: Anakin) -> tuple[Program, tuple[TrainState, jax.Array]]:
    """Return one chunk of the whole program, and its state: the run's state and the request."""
    mesh, config = driver.mesh, driver.config
    chunk = partial(make_chunk(driver.env, mesh, config), place_leaves(driver.blueprint, mesh))
    state = driver.init(jax.random.key(0))
    request = request_array(mesh, Request.NONE, config.updates_per_chunk)

    @partial(jax.jit, donate_argnums=0)
    def step(state: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        return chunk(*state)[0], state[1]

    return step, (state, request)


def acting(driver: Anakin, *, act: bool) -> tuple[Program, PyTree]:
    """Return a program of the environment with acting, or alone, and its state, on one device."""
    agent, env, config = driver.agent, driver.env, driver.config
    state = driver.init(jax.random.key(0))
    params = agent.actor_params(state.learner)
    want = action_struct(env.spec)
    shape = (config.num_envs, *want.shape)

    def act_by_constant(
        params: PyTree, carry: PyTree, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        return jnp.zeros(shape, want.dtype), (), carry

    # With a constant only the environment is measured.
    actor = agent if act else dataclasses.replace(agent, act=act_by_constant)
    indices = jnp.arange(config.num_envs, dtype=jnp.uint32)
    times = jnp.arange(config.rollout_length, dtype=jnp.uint32)

    def body(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], PyTree]:
        state, start = carry
        keys = [
            environment_keys(purpose_key(jax.random.key(1), purpose), indices, start + times)
            for purpose in (Purpose.ACT, Purpose.STEP)
        ]
        state, trajectory = rollout(actor, env, params, state, *keys)
        # All outputs of acting are used, so that the compiler does not remove them.
        used = jax.tree.map(jnp.sum, (trajectory.next_timesteps().reward, trajectory.steps.extras))
        return (state, start + jnp.uint32(config.rollout_length)), used

    @jax.jit
    def step(carry: tuple[Any, jax.Array, PyTree]) -> tuple[Any, jax.Array, PyTree]:
        (state, time), used = jax.lax.scan(body, carry[:2], length=config.updates_per_chunk)
        return state, time, used

    start = (state.actor, jnp.uint32(0))
    used = jax.eval_shape(partial(jax.lax.scan, body, length=config.updates_per_chunk), start)[1]
    return step, (*start, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), used))


def measure(program: Program, state: PyTree, steps: int, repetitions: int) -> dict[str, float]:
    """Return steps per second (median over warm repetitions) of a program of `steps` steps.

    The dictionary has its compile seconds and its memory too.
    """
    prepared = prepare(program, state)
    seconds = [prepared.lap().seconds for _ in range(repetitions)]
    return {
        "steps_per_second": steps / statistics.median(seconds),
        "best": steps / min(seconds),
        "worst": steps / max(seconds),
        "compile_seconds": prepared.compile_seconds,
        **prepared.memory,
        "repetitions": repetitions,
    }


def bench_anakin(devices: int, envs_per_device: int, repetitions: int) -> dict[str, Any]:
    """Measure the Catch experiment of the published notebook, and its parts."""
    num_devices = len(find_devices(devices))
    experiment = dataclasses.replace(recipes.find("catch"), devices=num_devices)
    (figures,) = bench_recipe(experiment, [envs_per_device * num_devices], repetitions)
    return {**figures, "benchmark": "anakin"}


def bench_recipe(
    experiment: Experiment, sizes: Sequence[int], repetitions: int
) -> Iterator[dict[str, Any]]:
    """Measure an experiment under Anakin at several numbers of environments, until memory runs out.

    Yields for each the steps per second of training, of the environments alone and with acting, and
    the memory on one device.
    """
    use_compilation_cache()
    devices = find_devices(experiment.devices)
    agent, env = build(experiment)
    if isinstance(env, HostEnvironments):
        raise ConfigError(f"{env.spec.name} is stepped on the host: take `bench.py sebulba`.")
    assert isinstance(experiment.driver, AnakinConfig)
    for size in sizes:
        config = dataclasses.replace(experiment.driver, num_envs=size)
        driver = Anakin(agent, env, config, devices)
        share = dataclasses.replace(config, num_envs=size // len(devices))
        alone = Anakin(agent, env, share, devices[:1])
        steps = config.steps_per_update * config.updates_per_chunk
        context = {"benchmark": experiment.recipe, **machine(), "agent": to_json(experiment.agent)}
        context |= {"devices": len(devices), **dataclasses.asdict(config)}
        try:
            speed = measure(*training(driver), steps, repetitions)
            stepping, with_acting = (
                measure(*acting(alone, act=act), steps // len(devices), repetitions)
                for act in (False, True)
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            yield {**context, "error": "out of memory"}
            return
        yield {
            **context,
            "state_bytes": speed["state_bytes"],
            "temporary_bytes": speed["temporary_bytes"],
            "environment": stepping,
            "environment_and_acting": with_acting,
            "training": speed,
        }


def show_size(figures: dict[str, Any]) -> str:
    """Return the figures of `bench_recipe` for one number of environments as a line."""
    if "error" in figures:
        return f"{figures['num_envs']:>9,} environments: {figures['error']}"
    training, alone = (figures[part]["steps_per_second"] for part in ("training", "environment"))
    share = training / alone / figures["devices"]
    memory = figures["state_bytes"] + figures["temporary_bytes"]
    return (
        f"{figures['num_envs']:>9,} environments "
        f"{training:>12,.0f} steps/s  {share:6.1%} of the environments alone  "
        f"{memory / 2**30:7.2f} GiB  compiled in {figures['training']['compile_seconds']:.0f} s"
    )


def show(figures: dict[str, Any]) -> str:
    """Return the measurements as a short table."""
    lines = [
        f"Catch, greedy Q(λ): {figures['num_envs']} environments, T {figures['rollout_length']}, "
        f"{figures['updates_per_chunk']} updates a dispatch",
        f"{figures['machine']}, {figures['devices']} x {figures['platform']}, JAX {figures['jax']}",
        f"{'':32}{'steps/s':>12}{'compile s':>12}",
    ]
    for part, label in (
        ("environment", "environment alone, one device"),
        ("environment_and_acting", "environment and acting, one device"),
        ("training", "training, all devices"),
    ):
        row = figures[part]
        speed, compiling = row["steps_per_second"], row["compile_seconds"]
        lines.append(f"{label:34}{speed:>10,.0f}{compiling:>12.2f}")
    return "\n".join(lines)
