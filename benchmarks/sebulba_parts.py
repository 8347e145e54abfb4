"""Throughput of Sebulba and its parts: simulator alone, with acting, learner alone, everything.

All functions measure steps of single environments per second, over a window after warming up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from machine import machine

from podracer import envs
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.impala import Impala
from podracer.checks.random_play import random_actions
from podracer.devices.machine import num_cores
from podracer.devices.mesh import find_devices
from podracer.devices.startup import use_compilation_cache
from podracer.drivers.progress import Request, request_array
from podracer.drivers.sebulba import Sebulba
from podracer.drivers.sebulba.actor_pool import ActorPool, make_actor_pool, native_threads
from podracer.drivers.sebulba.config import SebulbaConfig, environment_indices
from podracer.drivers.sebulba.supervisor import Supervisor
from podracer.drivers.sebulba.update import make_update, on_mesh
from podracer.drivers.state import TrainState, place_leaves
from podracer.environment import features
from podracer.envs.host.dlpack import on_host
from podracer.fields import static, struct
from podracer.networks import CNN, MLP, TorsoNetwork
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep, Trajectory
from podracer_plan import trials


def measure_simulator(driver: Sebulba, seconds: float) -> float:
    """Measure the environments alone: the same threads and batches, precomputed random actions."""
    split, config, generator = driver.split, driver.config, np.random.default_rng(0)
    draw = partial(random_actions, generator, driver.host.spec, None, split.envs_per_thread)
    actions = [draw() for _ in range(64)]
    if features(driver.host).on_device:
        actions = jax.device_put(actions, split.actors[0])
    errors = list[Exception]()
    steps, stop = [0] * split.threads, threading.Event()
    ready = threading.Barrier(split.threads + 1)
    with contextlib.ExitStack() as stack:
        batches = []
        for _ in range(split.threads):
            batch = driver.host.make(split.envs_per_thread, native_threads(config, split))
            batches.append(stack.enter_context(contextlib.closing(batch)))

        def run(number: int) -> None:
            batch = batches[number]
            try:
                batch.reset(0, environment_indices(split, number, 0), 0)
                batch.step(actions[0])  # compiles a device environment
                ready.wait(300)
                while not stop.is_set():
                    batch.step(actions[steps[number] % len(actions)])
                    steps[number] += 1
            except threading.BrokenBarrierError:
                return  # another one failed
            except Exception as error:
                errors.append(error)
                stop.set()
                ready.abort()

        threads = [threading.Thread(target=run, args=(n,)) for n in range(split.threads)]
        for thread in threads:
            thread.start()
        try:
            ready.wait(300)
        except threading.BrokenBarrierError:
            stop.set()
            late = TimeoutError("an environment took over 300 s to reset.")
            raise (errors or [late])[0] from None
        start = time.perf_counter()
        stop.wait(seconds)
        stop.set()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return sum(steps) * split.envs_per_thread / (time.perf_counter() - start)


@contextlib.contextmanager
def _acting(driver: Sebulba, config: SebulbaConfig, state: TrainState) -> Iterator[ActorPool]:
    """Run a driver's actors within the context."""
    with contextlib.ExitStack() as stack, Supervisor(config.env_timeout_seconds) as supervisor:
        parts = (driver.actor_programs, driver.host, driver.split, config, state)
        actors = make_actor_pool(*parts, supervisor=supervisor, stack=stack)
        actors.start()
        stack.pop_all()  # from now on each thread closes its own environments
        yield actors


def _first_state(driver: Sebulba) -> TrainState:
    """Return an initial state without `actor`: the environments are reset."""
    return dataclasses.replace(driver.init(jax.random.key(0)), actor=())


def measure_acting(driver: Sebulba, seconds: float) -> float:
    """Measure the actors of a run whose learner discards every trajectory."""
    return acting_turns([driver], seconds, 1, pause=0)[0][0][0]


def acting_turns(
    drivers: Sequence[Sebulba], seconds: float, turns: int, *, pause: float = 1.0
) -> list[list[tuple[float, float]]]:
    """Let the actors of runs take turns: steps per second and CPU microseconds a step of each lap.

    The other runs' actors wait for room in their queues. They go on for two rollouts after their
    lap, for which there is a pause.
    """
    with contextlib.ExitStack() as stack:
        runs = []
        for driver in drivers:
            config = dataclasses.replace(driver.config, policy_lag=None)
            pool = stack.enter_context(_acting(driver, config, _first_state(driver)))
            runs.append(_windows(pool, config.steps_per_update))
        laps = [[_costs(run, seconds, pause) for run in runs] for _ in range(turns)]
    return [list(of_run) for of_run in zip(*laps, strict=True)]


def _windows(actors: ActorPool, steps: int) -> Iterator[int]:
    while True:
        actors.collect(lambda: False)
        yield steps


def measure_learning(driver: Sebulba, seconds: float) -> float:
    """Measure the learner alone: updates from the same rollouts, while the actors wait."""
    config, mesh = dataclasses.replace(driver.config, policy_lag=0), driver.mesh
    state, agent = _first_state(driver), place_leaves(driver.blueprint, mesh)
    update = make_update(mesh, driver.split.threads, config.updates_per_batch)
    with _acting(driver, config, state) as actors:
        rollouts = actors.collect(lambda: False) or []
        shards = [on_mesh(mesh, rollout.shards) for rollout in rollouts]
        request = request_array(mesh, Request.NONE)

        def windows(state: TrainState) -> Iterator[int]:
            while True:
                state = jax.block_until_ready(update(agent, state, shards, request)[0])
                yield config.steps_per_update

        return _rate(windows(state), seconds)


def measure_plain_loop(driver: Sebulba, seconds: float, *, learn: bool) -> float:
    """Measure a simple loop: one thread, one batch of all environments, act, step, learn."""
    agent, config = driver.agent, driver.config
    act = jax.jit(lambda params, timestep, keys: agent.act(params, (), timestep, keys, True)[:2])
    update = jax.jit(
        lambda state, trajectory, key: agent.learn(state, trajectory, key, None), donate_argnums=0
    )
    key = jax.random.key(0)
    state = agent.init(key, config.num_envs)
    keys = jax.random.split(key, config.num_envs)
    cores = config.env_threads or num_cores()
    with contextlib.closing(on_host(driver.host).make(config.num_envs, cores)) as batch:
        timestep = batch.reset(0, np.arange(config.num_envs, dtype=np.uint32), 0)

        def windows() -> Iterator[int]:
            nonlocal state, timestep, keys
            while True:
                steps = []
                for _ in range(config.rollout_length):
                    keys = jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys)
                    device_timestep: TimeStep = jax.device_put(jax.tree.map(np.copy, timestep))
                    action, extras = act(agent.actor_params(state), device_timestep, keys)
                    steps.append((device_timestep, action, extras))
                    timestep = batch.step(np.asarray(action))
                if learn:
                    columns = jax.tree.map(lambda *x: jnp.stack(x), *(Step(*s) for s in steps))
                    final = jax.device_put(jax.tree.map(np.copy, timestep))
                    state, _ = update(state, Trajectory(columns, final, (), ()), key)
                yield config.steps_per_update

        return _rate(windows(), seconds)


def _rate(windows: Iterator[int], seconds: float) -> float:
    """Return steps per second of a counter read window by window, without the first ones."""
    return _costs(windows, seconds)[0]


def _costs(windows: Iterator[int], seconds: float, pause: float = 0) -> tuple[float, float]:
    """Return steps per second of such a counter, and CPU microseconds of a step."""
    time.sleep(pause)
    for _ in range(3):
        next(windows)
    start, cpu_start, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        steps += next(windows)
    cpu_seconds = time.process_time() - cpu_start
    return steps / (time.perf_counter() - start), 1e6 * cpu_seconds / steps


# --- what only waits ------------------------------------------------------------------------------


_DEVICE = threading.Lock()  # it serves one batch after another


@struct
class EmulatedDevice(Impala):
    """Acts at random on a device that takes a fixed time for a batch, and no time of the host."""

    milliseconds: float = static(default=10.0)

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        agent, generator = super().build(spec, context), np.random.default_rng(0)
        assert isinstance(spec.action, Discrete)
        num_actions = spec.action.num_actions

        def wait(reward: np.ndarray) -> np.ndarray:
            with _DEVICE:
                time.sleep(1e-3 * self.milliseconds)
                return generator.integers(num_actions, size=len(reward), dtype=np.int32)

        def act(params: Any, carry: Any, timestep: TimeStep, *rest: Any) -> Any:
            _, extras, carry = agent.act(params, carry, timestep, *rest)
            extras = jax.tree.map(jnp.zeros_like, extras)  # so XLA leaves the network out
            shape = jax.ShapeDtypeStruct(timestep.reward.shape, jnp.int32)
            return jax.pure_callback(wait, shape, timestep.reward), extras, carry

        return dataclasses.replace(agent, act=act)


@dataclasses.dataclass(frozen=True)
class EmulatedSimulator:
    """Environments that take a fixed time for a step of a batch, and no time of the host."""

    milliseconds: float
    spec: ClassVar = EnvironmentSpec("emulated simulator", ArraySpec((4,)), Discrete(2))

    def make(self, num_envs: int, num_threads: int) -> EmulatedBatch:
        return EmulatedBatch(num_envs, self.milliseconds)


class EmulatedBatch:
    """A batch of them."""

    def __init__(self, num_envs: int, milliseconds: float) -> None:
        self._num_envs, self._seconds = num_envs, 1e-3 * milliseconds

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        return self._timestep(first=True)

    def step(self, action: np.ndarray) -> TimeStep:
        time.sleep(self._seconds)
        return self._timestep(first=False)

    def close(self) -> None: ...

    def _timestep(self, *, first: bool) -> TimeStep:
        n = self._num_envs
        return TimeStep(
            observation=np.zeros((n, 4), np.float32),
            reward=np.zeros(n, np.float32),
            discount=np.ones(n, np.float32),
            first=np.full(n, first),
            last=np.zeros(n, bool),
        )


def measure_waits(threads: int, simulator: float, device: float, seconds: float) -> float:
    """Return the batches a second of threads that only wait for the same simulator and device."""
    stop, batches = threading.Event(), [0] * threads

    def run(number: int) -> None:
        while not stop.is_set():
            with _DEVICE:
                time.sleep(1e-3 * device)
            time.sleep(1e-3 * simulator)
            batches[number] += 1

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    rate = sum(batches) / (time.perf_counter() - start)
    stop.set()
    for worker in workers:
        worker.join()
    return rate


MEASURES: dict[str, Callable[[Sebulba, float], float]] = {
    "simulator": measure_simulator,
    "acting": measure_acting,
    "learning": measure_learning,
    "training": lambda driver, seconds: trials.measure(driver, seconds)[0],
    "plain_loop_acting": partial(measure_plain_loop, learn=False),
    "plain_loop_training": partial(measure_plain_loop, learn=True),
}


def compare(
    driver: Sebulba, seconds: float, repetitions: int, parts: Sequence[str] = tuple(MEASURES)
) -> dict[str, Any]:
    """Measure parts in turn, `repetitions` times. Returns medians, and shares of each turn."""
    turns = [{name: MEASURES[name](driver, seconds) for name in parts} for _ in range(repetitions)]

    def ratios(reference: str) -> dict[str, float]:
        pairs = {name: reference.format(name) for name in ("acting", "training")}
        return {
            name: statistics.median(turn[name] / turn[base] for turn in turns)
            for name, base in pairs.items()
            if {name, base} <= set(parts)
        }

    return {
        **dataclasses.asdict(driver.config),
        **driver.split.describe(),
        "steps_per_second": {n: statistics.median(turn[n] for turn in turns) for n in parts},
        "share_of_simulator": ratios("simulator"),
        "over_plain_loop": ratios("plain_loop_{}"),
        "repetitions": turns,
    }


def bench_sebulba(
    environment: str,
    config: SebulbaConfig,
    *,
    hidden: tuple[int, ...],
    devices: int,
    seconds: float,
    repetitions: int,
    parts: Sequence[str],
) -> dict[str, Any]:
    """Measure host environments alone, with acting, with learning, and a plain loop."""
    use_compilation_cache()
    env = envs.make(environment)
    observation = env.spec.observation
    pictures = isinstance(observation, ArraySpec) and len(observation.shape) == 3
    torso = CNN((16, 32), (8, 4), (4, 2), hidden) if pictures else MLP(hidden)
    agent = Impala(network=TorsoNetwork(torso))
    driver = Sebulba(agent, env, config, find_devices(devices))
    figures = compare(driver, seconds, repetitions, parts)
    context = {"benchmark": "sebulba", "environment": environment, "hidden": list(hidden)}
    return {**context, **machine(), **figures}


def show(environment: str, figures: dict[str, Any]) -> str:
    """Return the measurements as a short table."""
    speeds = figures["steps_per_second"]
    lines = [
        f"{environment}: {figures['num_envs']} environments in {figures['actor_threads']} threads, "
        f"T {figures['rollout_length']}, policy lag {figures['policy_lag']}",
        f"{figures['machine']}, {figures['device']}, JAX {figures['jax']}",
        f"{'':34}{'steps/s':>10}{'of simulator':>14}{'of plain loop':>15}",
    ]
    labels = {
        "simulator": "simulator alone",
        "learning": "learner alone",
        "acting": "with inference",
        "training": "with learning",
    }
    for name, label in labels.items():
        if name not in speeds:
            continue
        share = figures["share_of_simulator"].get(name)
        speedup = figures["over_plain_loop"].get(name)
        shares = f"{share:.0%}" if share else ""
        speedups = f"{speedup:.2f}x" if speedup else ""
        lines.append(f"{label:34}{speeds[name]:>10,.0f}{shares:>14}{speedups:>15}".rstrip())
    return "\n".join(lines)
