"""The plan of a run: its compiled programs, and hours and price from a speed that is known."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jax

from podracer.config.experiment import Experiment
from podracer.drivers.driver import Driver
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.errors import ConfigError
from podracer.run.setup import make_driver
from podracer_plan import trials
from podracer_plan.compiled import CompiledRun, compile_run
from podracer_plan.targets import Target

_WARM_UP, _LEAST_CHUNKS = 2, 3  # chunks that are not measured, and that are at least
_TRIES = 4  # compilations of a proposed batch that may turn out too large


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs, as far as it is known; None stands for what is unknown."""

    run: CompiledRun
    largest_num_envs: int | None
    """Number of environments that fit, where the run's do not; 0 if none does."""
    steps_per_second: float | None
    speed_source: str
    """Where the speed comes from, or why there is none."""
    steps_per_second_at_most: float | None
    frames: int
    hours: float | None
    """Hours of training, without start, compilation, evaluations and checkpoints."""
    dollars: float | None

    def to_json(self) -> dict[str, Any]:
        memory = [
            {"role": role, "parts": parts, "total": sum(parts.values())}
            for role, parts in self.run.memory
        ]
        facts = {name: value for name, value in vars(self).items() if name != "run"}
        return {**self.run.to_json(), "memory": memory, **facts}


def make_plan(
    experiment: Experiment,
    target: Target,
    *,
    seconds: float = 0.0,
    steps_per_second: float | None = None,
    price: float | None = None,
) -> Plan:
    """Return the plan of a run on a target.

    `seconds` is the time for a measurement, where the target is this machine; `steps_per_second` is
    a recorded speed in its place, and `price` that of a host for an hour. Raises `ConfigError`
    where the run is impossible there, as training would.
    """
    run = compile_run(experiment, target)
    source = "recorded"
    if not steps_per_second:
        steps_per_second, source = _measured_speed(experiment, target, seconds)
    steps = experiment.run_driver.steps_per_update * max(1, len(experiment.pods))
    frames, bound = experiment.num_updates * steps, run.least_seconds
    hours = None if steps_per_second is None else frames / steps_per_second / 3600
    return Plan(
        run,
        _largest(experiment, run),
        steps_per_second,
        source,
        steps / bound if bound else None,
        frames,
        hours,
        None if hours is None or price is None else target.num_hosts * price * hours,
    )


def _largest(experiment: Experiment, run: CompiledRun) -> int | None:
    """Return the largest number of environments that fits, where the run's do not."""
    if run.fits is not False or run.target.usable_bytes is None:
        return None
    config, multiple = experiment.driver, len(run.target.devices)
    if isinstance(config, SebulbaConfig):
        learners, actors = (x.program.devices for x in run.programs)
        threads = math.lcm(actors * config.num_threads, config.updates_per_batch)
        multiple = run.target.num_hosts * learners * threads

    def memory_of(num_envs: int) -> int:
        smaller = dataclasses.replace(config, num_envs=num_envs)
        smaller = dataclasses.replace(experiment, driver=smaller)
        return compile_run(smaller, run.target).largest_bytes

    return largest_batch(memory_of, config.num_envs, multiple, run.target.usable_bytes)


def largest_batch(
    memory_of: Callable[[int], int], num_envs: int, multiple: int, limit: int
) -> int | None:
    """Return the largest number of environments whose memory fits, 0 where none does.

    `memory_of` compiles, so it is asked for `num_envs`, which do not fit, for a quarter of them,
    and for what the line through both proposes. None where that finds no number. It raises
    `ConfigError` for numbers that the agent cannot split, as into minibatches: then multiples of
    larger divisors of `num_envs`, which it can split, are proposed.
    """
    quotient = num_envs // multiple
    steps = [multiple * n for n in range(1, quotient) if quotient % n == 0]

    def at_most(proposed: float) -> tuple[int, int]:
        """Return the largest number up to the proposed one and its memory, zeros without one."""
        numbers = dict.fromkeys(math.floor(proposed / step) * step for step in steps)
        for number in itertools.takewhile(lambda number: number > 0, numbers):
            with contextlib.suppress(ConfigError):
                return number, memory_of(number)
        return 0, 0

    parts = (max(multiple, num_envs // part) for part in (4, 2))
    small, small_size = next(filter(any, map(at_most, parts)), (0, 0))
    if not small:
        return 0
    size = memory_of(num_envs)
    if size <= small_size:
        return small if small_size <= limit else 0
    proposed = small + (limit - small_size) * (num_envs - small) / (size - small_size)
    for _ in range(_TRIES):
        number, size = at_most(proposed)
        if size <= limit:
            return number
        proposed = 0.9 * number
    return None


def _measured_speed(
    experiment: Experiment, target: Target, seconds: float
) -> tuple[float | None, str]:
    """Return the steps per second if the target is this machine, and the source."""
    if target.kind is not None:
        return None, f"no recorded speed of the {target.title} is given"
    if not seconds:
        return None, "nothing was measured"
    if experiment.pods:
        return None, "populations are not measured"
    driver = make_driver(dataclasses.replace(experiment, devices=len(target.devices)))
    if isinstance(driver, Sebulba):
        return trials.measure(driver, seconds)[0], "measured here"
    return _anakin_speed(driver, seconds), "measured here"


def _anakin_speed(driver: Driver, seconds: float) -> float:
    """Return the steps per second of training, without the first chunks."""
    training = driver.run(driver.init(jax.random.key(0)), Orders(2**31))
    for _ in range(_WARM_UP):
        next(training)
    start, chunks = time.perf_counter(), 0
    while chunks < _LEAST_CHUNKS or time.perf_counter() - start < seconds:
        next(training)
        chunks += 1
    steps = chunks * driver.config.steps_per_update * driver.config.updates_per_chunk
    return steps / (time.perf_counter() - start)


def cost_lines(plan: Plan) -> list[str]:
    """Return speed, hours and price as text."""
    limit, fitted = plan.steps_per_second_at_most, ", if it fitted" * (plan.run.fits is False)
    bound = "" if limit is None else f"; at most {limit:,.0f} steps a second by launches and FLOPs"
    lines = [""]
    if plan.largest_num_envs:
        lines = [f"The largest batch that fits: --num-envs {plan.largest_num_envs}.", ""]
    elif plan.largest_num_envs == 0:
        lines = [
            "No number of environments makes it fit: take a smaller network or replay "
            "(--capacity), a shorter rollout or more devices.",
            "",
        ]
    if plan.steps_per_second is None or plan.hours is None:
        return [*lines, f"Speed, hours and price are not known: {plan.speed_source}{bound}."]
    years, dollars = plan.hours / 8766, plan.dollars
    duration = f"{years:,.0f} years"
    if years < 1000:
        duration = timedelta(seconds=math.ceil(3600 * plan.hours))
    price = "not known: --price gives that of a host for an hour"
    if dollars is not None:
        price = (f"${dollars:,.2f}" if dollars >= 0.01 else "less than $0.01") + fitted
    return [
        *lines,
        f"Speed: {plan.steps_per_second:,.0f} steps a second ({plan.speed_source}{bound})",
        f"Time: {duration} for {plan.frames:,} steps{fitted}",
        f"Price: {price}",
    ]
