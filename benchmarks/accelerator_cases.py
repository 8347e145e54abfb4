"""The cases of `accelerator.py`, from the parts of the other benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import catch
import convolution
import device_simulators
import jax
import jax.numpy as jnp
import numpy as np
import population
import ppo
import replay
from anakin_parts import acting
from harness import (
    Contender,
    Result,
    anakin,
    convolutions,
    here,
    plain_convolution,
)
from jax.experimental.compilation_cache import compilation_cache
from sebulba_parts import measure_acting, measure_simulator

import podracer
from podracer import envs, recipes
from podracer.agents.impala import Impala
from podracer.agents.muzero import MuZero
from podracer.agents.ppo import PPO
from podracer.devices.machine import num_cores
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.environment import auto_reset
from podracer.envs.catch import Catch, CatchState
from podracer.errors import ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import CNN, MLP, ResNet, TorsoNetwork
from podracer.ops import convolution as ops
from podracer.recipes.atari import IMPALA_SHALLOW
from podracer.run.setup import build
from podracer.schedules import over_run
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep
from podracer_plan import trials

HERE = Path(__file__).parent
SHARE_OF_A_CHILD = "0.3"  # of the device's memory
FLAGS_OUTSIDE = os.environ.get("XLA_FLAGS", "")  # before those of commands are added
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
# Options of the acting program alone, beside the flags of the process.
_ONE_BY_ONE = {"xla_gpu_enable_command_buffer": ""}  # kernels are launched one by one
_AUTOTUNED = {"xla_gpu_deterministic_ops": False, "xla_gpu_exclude_nondeterministic_ops": True}
ACTING_OPTIONS = {
    "as-commands": {},
    "one-by-one": _ONE_BY_ONE,
    "autotuned": _AUTOTUNED,
    "autotuned-one-by-one": _ONE_BY_ONE | _AUTOTUNED,
    "fastest": {"xla_gpu_deterministic_ops": False},
}
STEPS_PER_REPETITION = 2**25  # of Catch, about a second at the goal


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    quick: bool
    out: Path
    deadline: float  # of time.monotonic
    commit: str | None

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def seconds_left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement; `measure` returns its figures, among them `value`, in `unit`."""

    name: str
    measure: Callable[[], dict[str, Any]]
    unit: str = "steps/s"
    goal: float | None = None


def all_cases(plan: Plan) -> Iterator[Case]:
    """Yield the cases, the most valuable ones first."""
    yield Case("doctor", doctor, "checks failed")
    yield from repeatability(plan)
    yield from catch_batches(plan, exponents=(14, 13, 15, 17, 11, 9, 7))
    yield from ppo_speed(plan)
    yield Case("lpg/61440", partial(lpg, plan), goal=10e6)
    yield from sebulba_speed(plan)
    yield from latencies(plan)
    yield from simulators(plan)
    yield from sizes(plan)
    yield from populations(plan)
    yield from convolution_gradients(plan)
    yield from muzero(plan)
    yield from replays(plan)
    yield from transfers(plan)
    yield from solved(plan)
    yield from other_settings(plan)
    if not plan.quick:
        yield from catch_batches(plan, exponents=(16, 12, 10, 8))


def speed(contender: Contender, plan: Plan, **about: Any) -> dict[str, Any]:
    """Figures of a contender: the median of warm repetitions, compile time and memory apart."""
    result = Result(contender, [contender.lap() for _ in range(plan.size(3, 1))])
    return {
        "value": result.rate(),
        "repetitions": result.rates(),
        "compile_seconds": contender.compile_seconds,
        **contender.about,
        **about,
    }


# --- does it work, and is it the same twice ------------------------------------------------------


def doctor() -> dict[str, Any]:
    from podracer.cli.doctor import DoctorOptions, doctor

    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = doctor(DoctorOptions())
    lines = output.getvalue().splitlines()
    print("\n".join(line for line in lines if "environments" not in line), flush=True)
    return {"value": int(code != 0), "output": lines}


def repeatability(plan: Plan) -> Iterator[Case]:
    runs: dict[str, Any] = {"catch": {}, "cartpole_rainbow": {}, "cartpole_ppo": {}}
    runs["breakout_cnn_ppo"] = {"environment": CatchBoard()}
    for name, changes in runs.items():
        yield Case(f"repeat/{name}", partial(repeat, plan, name, changes), "equal of 2")
        if plan.quick:
            return


def repeat(plan: Plan, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Whole runs of a recipe: one, the same again, and one that is stopped and resumed.

    The cache of compiled programs is on, as for users: a resumed run finds its programs there.
    """
    experiment = recipes.find(name)
    updates = plan.size(40, 2)
    driver = dataclasses.replace(experiment.driver, updates_per_chunk=updates // 2)
    if plan.quick:
        driver = dataclasses.replace(driver, num_envs=16, rollout_length=8)
    experiment = dataclasses.replace(
        experiment.with_fields(changes),
        driver=driver,
        frames=updates * driver.steps_per_update,
        evaluations=2,
        evaluation_episodes=4,
        devices=1,
        target_return=None,
    )
    with tempfile.TemporaryDirectory() as folder, compile_cache(plan):
        first, again, resumed = (Path(folder) / name for name in ("first", "again", "resumed"))
        podracer.train(experiment, run_dir=first)
        podracer.train(experiment, run_dir=again)
        podracer.train(experiment, run_dir=resumed, callbacks=[lambda boundary: True])
        podracer.train(experiment, run_dir=resumed, resume=True)
        digests = [stored_fingerprint(run) for run in (first, again, resumed)]
    equal = [digest == digests[0] for digest in digests[1:]]
    return {"value": sum(equal), "again": equal[0], "resumed": equal[1], "digests": digests}


@contextlib.contextmanager
def compile_cache(plan: Plan) -> Iterator[None]:
    if plan.quick:  # which leaves it as it is
        yield
        return
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()


# --- Anakin --------------------------------------------------------------------------------------


def catch_batches(plan: Plan, exponents: tuple[int, ...]) -> Iterator[Case]:
    for exponent in (3,) if plan.quick else exponents:
        batch = 2**exponent
        updates = plan.size(min(100, max(8, STEPS_PER_REPETITION // (batch * catch.LENGTH))), 1)

        def measure(batch: int = batch, updates: int = updates) -> dict[str, Any]:
            return speed(catch.ours("catch", True, 1, batch, updates), plan, environments=batch)

        yield Case(f"catch/{batch}", measure, goal=50e6)


class CatchBoard(Catch):
    """Catch on a board of MinAtar's shape, `[10, 10, 4]`."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("catch, 10x10x4", ArraySpec((10, 10, 4)), Discrete(3))

    def reset(self, key: jax.Array) -> tuple[CatchState, TimeStep]:
        return self._with_board(*super().reset(key))

    def step(
        self, key: jax.Array, state: CatchState, action: jax.Array
    ) -> tuple[CatchState, TimeStep]:
        return self._with_board(*super().step(key, state, action))

    def _with_board(self, state: CatchState, timestep: TimeStep) -> tuple[CatchState, TimeStep]:
        board = jnp.pad(timestep.observation[..., None], ((0, 0), (0, 5), (0, 3)))
        return state, dataclasses.replace(timestep, observation=board)


def ppo_speed(plan: Plan) -> Iterator[Case]:
    networks = {"mlp": MLP((64, 64)), "nature": CNN()}
    for world, torso, num_envs, length, updates, dtype in (
        ("cartpole", "mlp", 8192, 32, 20, "float32"),
        ("pixels", "nature", 256, 32, 4, "float32"),
        ("pixels", "nature", 256, 32, 4, "bfloat16"),
    ):
        num_envs, length = plan.size(num_envs, 4), plan.size(length, 4)
        config = AnakinConfig(num_envs, length, plan.size(updates, 1))
        network = TorsoNetwork(networks[torso], compute_dtype=dtype)

        def measure(
            world: str = world, network: Any = network, config: Any = config
        ) -> dict[str, Any]:
            env = device_world(world)
            agent = PPO(num_minibatches=4, network=network)
            about = {"environment": env.spec.name, **dataclasses.asdict(config)}
            return speed(anakin("ppo", agent, env, config), plan, **about)

        name = f"ppo/{world}-{torso}" + f"-{dtype}" * (dtype != "float32")
        yield Case(name, measure, goal=None if torso == "nature" else 20e6)


def device_world(name: str) -> Any:
    """Return an environment on the device; Catch stands in for MinAtar where gymnax is missing."""
    if name == "pixels":
        return auto_reset(ppo.Pixels())
    try:
        return envs.make(name)
    except ConfigError:
        return CatchBoard()


def sizes(plan: Plan) -> Iterator[Case]:
    """Recipes at their sizes for an accelerator."""
    names = (
        "breakout_ppo", "breakout_cnn_ppo", "cartpole_ppo", "catch", "breakout_pqn", "pendulum_sac",
        "memory_ppo", "cartpole_muzero",
    )  # fmt: skip
    for name in names[:2] if plan.quick else names:

        def measure(name: str = name) -> dict[str, Any]:
            experiment = recipes.with_size(recipes.find(name), name, "accelerator")
            env = device_world(str(experiment.environment))
            changes = {"num_envs": 16, "rollout_length": 4, "updates_per_chunk": 1}
            experiment = experiment.with_fields(
                {"environment": env} | ({"driver": changes} if plan.quick else {})
            )
            config = experiment.run_driver
            agent, env = build(experiment)
            about = {"environment": env.spec.name, **dataclasses.asdict(config)}
            return speed(anakin(name, agent, env, config), plan, **about)

        yield Case(f"size/{name}", measure, goal=20e6 if name == "breakout_ppo" else None)


def lpg(plan: Plan) -> dict[str, Any]:
    """The paper's size: 61,440 environments, 960 students."""
    experiment = recipes.find("lpg_paper")
    if plan.quick:
        experiment = dataclasses.replace(
            recipes.find("lpg"), environment="lifetimes:worlds:dense,envs=2,steps=48"
        )
    config = dataclasses.replace(
        experiment.driver,
        num_envs=plan.size(experiment.driver.num_envs, 8),
        rollout_length=plan.size(experiment.driver.rollout_length, 4),
        updates_per_chunk=plan.size(2, 1),
    )
    agent, env = build(dataclasses.replace(experiment, driver=config))
    return speed(anakin("lpg", agent, env, config), plan, environments=config.num_envs)


def populations(plan: Plan) -> Iterator[Case]:
    for pods, updates in ((16_384, 2), (8192, 2), (2048, 10), (64, 50)):
        count = plan.size(pods, 2)
        config = AnakinConfig(plan.size(32, 4), plan.size(32, 4), plan.size(updates, 1))

        def measure(count: int = count, config: AnakinConfig = config) -> dict[str, Any]:
            agent, pods = PPO(network=TorsoNetwork(MLP((64,)))), [Pod(i) for i in range(count)]
            contender = population.one_program(agent, envs.make("cartpole"), config, pods)
            return speed(contender, plan, pods=count, **dataclasses.asdict(config))

        yield Case(f"population/{pods}", measure)
        if plan.quick:
            return


def muzero(plan: Plan) -> Iterator[Case]:
    """Acting: the search, and the steps of the environment, which take little."""
    for simulations in (16, 64):

        def measure(simulations: int = plan.size(simulations, 2)) -> dict[str, Any]:
            agent, env = MuZero(num_simulations=simulations), envs.make("cartpole")
            config = AnakinConfig(plan.size(4096, 4), plan.size(8, 2), plan.size(4, 1))
            steps = config.steps_per_update * config.updates_per_chunk
            driver = Anakin(agent, env, config, find_devices(1))
            contender = here("acting", *acting(driver, act=True), steps)
            figures = speed(contender, plan, environments=config.num_envs)
            return {**figures, "simulations_per_second": figures["value"] * simulations}

        yield Case(f"muzero/{simulations}", measure)
        if plan.quick:
            return


def replays(plan: Plan) -> Iterator[Case]:
    """Samples from a replay in the device's memory."""
    num_envs, timesteps = plan.size(128, 4), plan.size(2**13, 32)
    for name, spec, batch, length, prioritized in (
        ("vectors", replay.VECTOR, 4096, 2, False),
        ("vectors-prioritized", replay.VECTOR, 4096, 2, True),
        ("frames", replay.FRAMES, 512, 4, False),
    ):

        def measure(
            spec: Any = spec, batch: int = plan.size(batch, 8), length: int = length,
            prioritized: bool = prioritized,
        ) -> dict[str, Any]:  # fmt: skip
            case = ("", spec, num_envs, timesteps, 8, batch, length)
            program, memory, steps = replay.ours(case, prioritized)
            state = jax.tree.map(jnp.copy, (memory, steps, jax.random.key(0), jnp.float32(0)))
            samples = replay.ROUNDS * replay.SAMPLES * batch
            contender = here("replay", program, state, samples, bytes=replay.size(memory))
            return speed(contender, plan, environments=num_envs, timesteps=timesteps)

        yield Case(f"replay/{name}", measure, "samples/s")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def canonical_convolution(x: jax.Array, w: jax.Array, stride: int, padding: int = 0) -> jax.Array:
    """A convolution with the gradients that the library has for a CPU, on any device."""
    return plain_convolution(x, w, stride, padding)


canonical_convolution.defvjp(
    lambda x, w, stride, padding: (plain_convolution(x, w, stride, padding), (x, w)),
    lambda stride, padding, saved, g: ops._canonical_gradients(
        stride, padding, saved[0], saved[1], g
    ),
)


def convolution_gradients(plan: Plan) -> Iterator[Case]:
    """Gradient steps in a scan, with both forms of the gradients."""
    for name, full in (("nature", 512), ("resnet", 256), ("minatar", 8192)):
        for kind, form in (("plain", plain_convolution), ("canonical", canonical_convolution)):

            def measure(name: str = name, full: int = full, form: Any = form) -> dict[str, Any]:
                network, shape, _ = convolution.NETWORKS[name]
                batch = plan.size(full, 2)
                with convolutions(form):
                    contender = convolution.contender(name, network, shape, batch, True)
                return speed(contender, plan, batch=batch)

            yield Case(f"convolution/{name}-{kind}", measure, "frames/s")


# --- Sebulba -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DrawnFrames:
    """Stands for Atari: frames that were drawn beforehand, from a simulator that takes no time.

    They lie in memory as ale-py's do.
    """

    spec: ClassVar = EnvironmentSpec(
        "drawn frames", ArraySpec((84, 84, 4), np.uint8, frame_stack=True), Discrete(6)
    )

    def make(self, num_envs: int, num_threads: int) -> DrawnBatch:
        return DrawnBatch(num_envs, self.spec)


class DrawnBatch:
    """A batch of them."""

    def __init__(self, num_envs: int, spec: EnvironmentSpec) -> None:
        height, width, size = spec.observation.shape
        shape = (8, num_envs, height, width)
        drawn = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
        stacks = np.stack([np.roll(drawn, size - 1 - i, axis=0) for i in range(size)], axis=2)
        self._frames = np.moveaxis(stacks, 2, -1)
        self._steps = 0

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        return self._timestep(first=True)

    def step(self, action: np.ndarray) -> TimeStep:
        self._steps += 1
        return self._timestep(first=False)

    def close(self) -> None: ...

    def _timestep(self, *, first: bool) -> TimeStep:
        frames = self._frames[self._steps % len(self._frames)]
        n = len(frames)
        return TimeStep(
            observation=frames,
            reward=np.zeros(n, np.float32),
            discount=np.ones(n, np.float32),
            first=np.full(n, first),
            last=np.zeros(n, bool),
        )


def atari() -> Any:
    """Pong from ale-py or EnvPool, or what stands for it."""
    for name in ("atari:pong", "envpool:Pong-v5"):
        with contextlib.suppress(ConfigError):
            return envs.make(name)
    return DrawnFrames()


def sebulba_speed(plan: Plan) -> Iterator[Case]:
    """Atari while learning: PPO at CleanRL's settings, then figure 4b of Hessel et al. 2021."""
    larger = recipes.with_size(recipes.find("atari_ppo"), "atari_ppo", "accelerator")
    ppo_agent = over_run(larger.agent, larger.num_steps)
    cleanrl = SebulbaConfig(num_envs=8, rollout_length=128, threads_per_actor=1)
    for name, config in (
        ("cleanrl", cleanrl),
        ("size", larger.driver),
        ("64", dataclasses.replace(larger.driver, num_envs=64)),
        ("512", dataclasses.replace(larger.driver, num_envs=512)),
    ):
        # LeanRL's 6,809 first. A step of one game alone takes 0.35 ms or more, so 9,000 leave half.
        goals = {"first_goal": 6.8e3, "goal": 9e3} if name == "cleanrl" else {}
        measure = partial(atari_speed, plan, ppo_agent, config, **goals)
        yield Case(f"sebulba/ppo-{name}", measure, "agent steps/s")
        if plan.quick:
            break
    networks = {"shallow": IMPALA_SHALLOW, "deep": ResNet()}
    for torso, batch, threads in (
        ("shallow", 128, 4), ("shallow", 64, 4), ("shallow", 32, 4), ("deep", 128, 4),
        ("deep", 64, 4), ("deep", 32, 4), ("shallow", 128, 2), ("shallow", 128, 8),
    ):  # fmt: skip
        agent = Impala(network=TorsoNetwork(networks[torso]))
        config = SebulbaConfig(threads * batch, 60, threads_per_actor=threads)
        measure = partial(atari_speed, plan, agent, config, frames=4)
        yield Case(f"sebulba/{torso}-{batch}-{threads}threads", measure, "emulator frames/s")
        if plan.quick:
            return


def simulators(plan: Plan) -> Iterator[Case]:
    """Torch simulators on the device that learns."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    num_envs, seconds = plan.size(4096, 256), plan.size(5, 1)
    for task in device_simulators.TASKS:
        measure = partial(device_simulators.measure, task, num_envs, seconds, device)
        yield Case(f"simulator/{task}", measure, "ms a step")


def atari_speed(
    plan: Plan, agent: Any, config: Any, frames: int = 1, **goals: float
) -> dict[str, Any]:
    """Return the speed of training in Atari, of so many frames a step, and of acting alone.

    Without other goals it is compared with what the games alone give on all processors.
    """
    env = DrawnFrames() if plan.quick else atari()
    if plan.quick:
        config = SebulbaConfig(num_envs=4, rollout_length=4, threads_per_actor=1)
        network = TorsoNetwork(CNN((4,), (8,), (8,), (8,)))
        agent = dataclasses.replace(agent, network=network)
    driver = Sebulba(agent, env, config, find_devices(1))
    began = time.perf_counter()
    rate, metrics = trials.measure(driver, seconds := plan.size(4, 0) or 0.1)
    start_seconds = time.perf_counter() - began - seconds
    if not goals:
        one = dataclasses.replace(config, threads_per_actor=1, env_threads=num_cores())
        games = Sebulba(agent, env, one, find_devices(1))
        ceiling = frames * measure_simulator(games, plan.size(2, 0) or 0.1)
        goals = {"simulator": ceiling}
        goals |= {} if isinstance(env, DrawnFrames) else {"goal": 0.9 * ceiling}
    return {
        **goals,
        "value": frames * rate,
        "start_seconds": start_seconds,
        "environment": env.spec.name,
        "metrics": metrics,
        **dataclasses.asdict(config),
        "acting": None if plan.quick else frames * measure_acting(driver, 2),
    }


def latencies(plan: Plan) -> Iterator[Case]:
    """Yield the parts of one inference, then whole inferences with other options of its compiler.

    The options are those of the acting program alone.
    """
    for games in (8, 64):
        name = f"latency/{games}"
        yield Case(name, partial(latency, plan, games), f"ms of acting in {games} environments")
        for kind, options in ACTING_OPTIONS.items():
            measure = partial(inference, plan, games, options)
            yield Case(f"{name}-{kind}", measure, f"ms an inference of {games}")
        if plan.quick:
            return


def latency(plan: Plan, games: int) -> dict[str, Any]:
    """Time a step of PPO's actor at CleanRL's settings, and its uploads alone.

    The environments are drawn frames, which take no time.
    """
    device = jax.devices()[0]
    strided = DrawnFrames().make(games, 1).reset(0, np.arange(games), 0).observation
    arrays = {
        "strided": strided,
        "contiguous": np.ascontiguousarray(strided),
        "newest": strided[..., -1],
        "newest_contiguous": np.ascontiguousarray(strided[..., -1]),
        "columns": np.zeros((games, 6), np.uint32),
    }
    time_stages = partial(stages, plan.size(300, 3))

    def upload(array: Any, target: Any = device) -> dict[str, float]:
        put = partial(jax.device_put, array, target)
        return time_stages(put, ready=jax.block_until_ready)

    parts = {f"upload_{name}": upload(array) for name, array in arrays.items()}
    parts["contiguous_by_numpy"] = time_stages(partial(np.ascontiguousarray, strided))
    if "pinned_host" in [memory.kind for memory in device.addressable_memories()]:
        target = jax.sharding.SingleDeviceSharding(device)
        pinned = target.with_memory_kind("pinned_host")
        parts["staging"] = upload(arrays["contiguous"], pinned)
        parts["upload_staged"] = upload(jax.device_put(arrays["contiguous"], pinned), target)
    with ThreadPoolExecutor(1) as thread:
        parts["another_thread"] = time_stages(lambda: thread.submit(int).result())
    rate = measure_acting(drawn_actor(plan, games)[0], plan.size(2, 0) or 0.1)
    return {"value": 1e3 * games / rate, "parts": parts}


def inference(plan: Plan, games: int, options: dict[str, Any]) -> dict[str, Any]:
    """Time the acting program, compiled with these options, as stages of a call.

    Its inputs lie at the same addresses of the device in each step, at new ones, or come from the
    host, as those of an actor do. The result is awaited, or its copy is asked for with the call.
    """
    if options and jax.default_backend() != "gpu":
        raise ConfigError("options of a GPU's compiler, which this device does not have.")
    _, infer, arguments = drawn_actor(plan, games)
    params, state, keys, *host = arguments
    began = time.perf_counter()
    program = infer.lower(*arguments).compile(compiler_options=options)
    compile_seconds = time.perf_counter() - began
    state, device = jax.tree.map(jnp.copy, state), jax.devices()[0]
    fixed, *new = (jax.block_until_ready(jax.device_put(host, device)) for _ in range(33))
    kept = deque[Any](maxlen=len(new))  # so that actions lie at new addresses, too
    awaited: dict[str, Any] = {"ready": jax.block_until_ready, "copy": np.asarray}
    copied = {"copy": np.asarray}
    asked = {"ask": lambda x: x.copy_to_host_async(), "copy": np.asarray}
    parts = {}
    for name, inputs, ends in (
        ("fixed", [fixed], awaited),
        ("new", new, awaited),
        ("host", [host], copied),
        ("host_copy_asked_for", [host], asked),
    ):
        turn = itertools.cycle(inputs)

        def call(turn: Any = turn, keep: bool = name != "fixed") -> jax.Array:
            nonlocal state
            state, action = program(params, state, keys, *next(turn))
            kept.extend([action] * keep)
            return action

        parts[name] = stages(plan.size(300, 3), call, **ends)
    value = sum(parts["host"].values())
    return {"value": value, "parts": parts, "options": options, "compile_seconds": compile_seconds}


@functools.lru_cache(maxsize=1)  # of the games that are measured next
def drawn_actor(plan: Plan, games: int) -> tuple[Sebulba, Any, list[Any]]:
    """Return PPO at CleanRL's settings with one actor thread, its acting program, and arguments.

    The arguments are an actor's, or copies of them.
    """
    network = CNN((4,), (8,), (8,), (8,)) if plan.quick else CNN()
    config = SebulbaConfig(games, rollout_length=plan.size(128, 4), threads_per_actor=1)
    agent, devices = PPO(network=TorsoNetwork(network)), jax.devices()[:1]
    driver, arguments = Sebulba(agent, DrawnFrames(), config, devices), list[Any]()
    programs = driver.actor_programs

    def infer(params: Any, state: Any, *rest: Any) -> Any:
        if not arguments:
            arguments.extend([params, jax.tree.map(jnp.copy, state)])  # it is donated
        arguments[2:] = rest  # those of the first call are zeros
        return programs.infer(params, state, *rest)

    vars(driver)["actor_programs"] = dataclasses.replace(programs, infer=infer)
    measure_acting(driver, 0.1)
    return driver, programs.infer, arguments


def stages(calls: int, begin: Callable[[], Any], **ends: Callable[[Any], Any]) -> dict[str, float]:
    """Return the median milliseconds of a call, and of each function of its result after it."""
    rows = []
    for _ in range(calls + 1):
        times = [time.perf_counter()]
        result = begin()
        times.append(time.perf_counter())
        for end in ends.values():
            end(result)
            times.append(time.perf_counter())
        del result  # so that the next one can have its address
        rows.append(np.diff(times))
    medians = 1e3 * np.median(rows[1:], axis=0)
    return dict(zip(("call", *ends), medians.tolist(), strict=True))


def transfers(plan: Plan) -> Iterator[Case]:
    """Observations to the device, from ordinary and from pinned memory of the host."""
    for kind in ("ordinary", "pinned", "through-pinned"):
        yield Case(f"transfer/{kind}", partial(transfer, plan, kind), "bytes/s")


def transfer(plan: Plan, kind: str) -> dict[str, Any]:
    device = jax.devices()[0]
    frames = np.ones((plan.size(128, 2), 84, 84, 4), np.uint8)
    target = jax.sharding.SingleDeviceSharding(device)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kind != "ordinary" and "pinned_host" not in kinds:
        raise ConfigError(f"{device.device_kind} has no pinned memory of the host, but {kinds}.")
    pin = partial(jax.device_put, device=target.with_memory_kind("pinned_host"))
    source = pin(frames) if kind == "pinned" else frames
    jax.block_until_ready(source)
    calls, seconds = plan.size(200, 2), []
    for _ in range(plan.size(3, 1)):
        began = time.perf_counter()
        for _ in range(calls):
            host = pin(source) if kind == "through-pinned" else source
            jax.block_until_ready(jax.device_put(host, target))
        seconds.append((time.perf_counter() - began) / calls)
    return {"value": frames.nbytes / min(seconds), "seconds": seconds, "bytes": frames.nbytes}


# --- in processes of their own -------------------------------------------------------------------


def child(plan: Plan, command: list[str], **variables: str) -> float:
    """Run Python with these arguments beside this process; return the seconds it took."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    inherited = {key: text for key, text in os.environ.items() if "MEM_FRACTION" not in key}
    share = {"XLA_CLIENT_MEM_FRACTION": SHARE_OF_A_CHILD, "PYTHONPATH": path}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *command],
        env={**inherited, **share, **variables},
        check=True,
        stdout=sys.stderr,
        timeout=plan.seconds_left(),
    )
    return time.perf_counter() - began


def solved(plan: Plan) -> Iterator[Case]:
    """Seconds from the command to CartPole solved, with everything: cold, then with the cache."""
    flags = ["--frames", "2048", "--evaluations", "1"] if plan.quick else []

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:

            def train(name: str) -> float:
                command = ["-m", "podracer", "train", "cartpole_ppo", *flags]
                command += ["--run-dir", f"{folder}/{name}"]
                return child(plan, command, JAX_COMPILATION_CACHE_DIR=f"{folder}/cache")

            cold = train("cold")
            return {"value": train("warm"), "cold_seconds": cold}

    yield Case("solved/cartpole", measure, "seconds, warm cache")


def other_settings(plan: Plan) -> Iterator[Case]:
    """Some of the cases again: with the fastest kernels, launched one by one, without TF32."""
    flags = os.environ.get("XLA_FLAGS", "")
    for name, variables in (
        ("fastest-kernels", {"XLA_FLAGS": FLAGS_OUTSIDE}),
        ("launches", {"XLA_FLAGS": f"{flags} {NO_COMMAND_BUFFERS}".strip()}),
        ("float32", {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}),
    ):
        if all(os.environ.get(key) == value for key, value in variables.items()):
            continue  # this is that process
        words = ["ppo/pixels", "size/breakout_cnn", "catch/8192", "repeat/cartpole_rainbow"]
        more = ["--fastest-kernels"] * (name == "fastest-kernels")

        def measure(
            words: list[str] = words,
            variables: dict[str, str] = variables,
            more: list[str] = more,
        ) -> dict[str, Any]:
            command = [str(HERE / "accelerator.py"), *more, "--only", *words]
            command += ["--out", str(plan.out)]
            command += ["--seconds", str(plan.seconds_left()), *(["--quick"] * plan.quick)]
            command += ["--commit", plan.commit] if plan.commit else []
            return {"value": child(plan, command, **variables), "variables": variables}

        yield Case(f"settings/{name}", measure, "seconds")
