"""The model beside published points and our own measurements, most of which it was not fitted to.

Each source is fitted on one or two of its points, and predicts the others. Errors are those of the
predicted time or rate, as it was published. Nothing here is tuned to the held-out points.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from podracer.experiments import recipes
from podracer.experiments.run_setup import build
from podracer.plan.counted import anakin_work, sebulba_work
from podracer.plan.devices import Device, Speeds, read_catalog
from podracer.plan.machine import machine_of
from podracer.plan.modeled import Split, model_sebulba
from podracer.plan.parts import Part, affine_fit, update_seconds
from podracer.plan.work import Work
from podracer.reproduce.figures import FIGURES
from podracer.reproduce.records import SHIPPED, read_records
from podracer.schedules import over_run
from podracer.types import ArraySpec, Discrete, EnvironmentSpec

FRAME_SKIP = 4  # Atari's papers count frames of the emulator

COUNTED_ERRORS = (0.52, 0.94)
"""Median and worst error of rates on devices that were not measured, held-out points only."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A published or measured point, and what the model says of it."""

    group: str
    source: str
    setting: str
    unit: str
    published: float
    predicted: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1


def all_rows() -> list[Row]:
    """Return all points."""
    return [*scaling(), *splits(), *simulators(), *counted(), *ours()]


# --- one configuration, replicated ----------------------------------------------------------------

REPLICAS = "more replicas"


def scaling() -> Iterator[Row]:
    """Predict more replicas of one configuration: proportional, as reductions are not known."""
    for figure, unit in (
        ("anakin-scaling", "steps/s"),
        ("pod-throughput", "frames/s"),
        ("muzero-scaling", "frames/s"),
    ):
        points = FIGURES[figure].published[0].points
        place = FIGURES[figure].place.replace("Figure", "figure")
        yield from _proportional(f"Podracer, {place}", "TPU cores", unit, points)
    # MuZero's 200 M frames in 9 hours, against the rate of figure 4c at as many cores.
    (cores, rate), *_ = FIGURES["muzero-scaling"].published[0].points
    setting = f"200 M frames on {cores:.0f} cores"
    yield Row(REPLICAS, "Podracer, MuZero", setting, "hours", 9.0, 200e6 / rate / 3600)
    instadeep = ((8, 0.31e6), (16, 0.60e6), (32, 1.22e6), (64, 2.41e6), (128, 4.79e6))
    yield from _proportional("InstaDeep, PPO on Breakout", "TPU v4 cores", "frames/s", instadeep)


def _proportional(
    source: str, what: str, unit: str, points: Sequence[tuple[float, float]]
) -> Iterator[Row]:
    (first, rate), *_ = points
    for size, published in points:
        predicted = rate * size / first
        yield Row(
            REPLICAS, source, f"{size:,.0f} {what}", unit, published, predicted, size == first
        )


# --- actors and learners on devices of their own --------------------------------------------------

SPLITS = "splits of devices"


def splits() -> Iterator[Row]:
    """Predict Cleanba's times on Breakout by split, from that of one device and that of two.

    Alone a device acts and learns, which takes the sum; a second one to learn on leaves the larger.
    """
    together, apart = 154.0, 121.0
    learning, acting = apart, together - apart  # the learner is the slower one, as more help it

    def minutes(actors: int, learners: int, schedule: Any) -> float:
        # One learner takes all of a batch; several share it.
        parts = [
            Part("acting", acting / actors, ""),
            Part("learning", learning / learners, ""),
        ]
        return update_seconds(parts, schedule, threads=2)

    source, unit = "Cleanba, Breakout, A100", "minutes"
    one = minutes(1, 1, "one device")
    yield Row(SPLITS, source, "actor and learner on one", unit, together, one, True)
    for learners, published in ((1, apart), (2, 70.0), (3, 52.5), (6, 38.4)):
        predicted = minutes(1, learners, "split devices")
        setting = f"1 actor, {learners} learner{'s' * (learners > 1)}"
        yield Row(SPLITS, source, setting, unit, published, predicted, learners == 1)
    yield Row(
        SPLITS,
        source,
        "8 A100: twice 1 actor, 3 learners",
        unit,
        30.5,
        minutes(2, 6, "split devices"),
    )
    tpu, fitted = "Cleanba, Breakout, TPU v4", 54.6
    yield Row(SPLITS, tpu, "4 cores", unit, fitted, fitted, True)
    yield Row(SPLITS, tpu, "8 cores", unit, 33.1, fitted / 2)


# --- simulators -----------------------------------------------------------------------------------

SIMULATORS = "simulators over cores"

# EnvPool's table: frames a second by the threads of a laptop, a workstation, a TPU host, a DGX.
ENVPOOL = {
    "Atari": {12: 49e3, 32: 200e3, 96: 373e3, 256: 1.07e6},
    "MuJoCo": {12: 105e3, 32: 582e3, 96: 897e3, 256: 3.13e6},
}


def simulators() -> Iterator[Row]:
    """Predict EnvPool's rates on four machines: proportional to threads, from the smallest."""
    for name, rates in ENVPOOL.items():
        for threads, rate in rates.items():
            predicted, setting = rates[12] * threads / 12, f"{threads} threads"
            source = f"EnvPool, {name}"
            yield Row(SIMULATORS, source, setting, "frames/s", rate, predicted, threads == 12)


# --- devices that were not measured ---------------------------------------------------------------

COUNTED = "counted work on devices that were not measured"

# gymnax's table: an A100, 2,000 environments, seconds of 1 M steps (500 of all of them), and what
# one step of all of them is in our adapter: operations, bytes. `test_plan.py` counts them again.
GYMNAX = {
    "CartPole-v1": (0.05, 73, 650_004),
    "Catch-bsuite": (0.15, 113, 912_139),
    "Breakout-MinAtar": (0.19, 242, 7_664_195),
    "SpaceInvaders-MinAtar": (0.33, 438, 23_515_324),
    "Asterix-MinAtar": (0.92, 1_296, 16_497_174),
}
GYMNAX_ENVIRONMENTS = 2_000
_CLEANBA_SECONDS = 136.5 * 60 / 50e6  # of a step: mean time of a game, 1 A100, 200 M frames


# Pong under IMPALA's protocol, for which no emulator need be installed.
ATARI = EnvironmentSpec(
    "atari:pong", ArraySpec((84, 84, 4), np.dtype(np.uint8), frame_stack=True), Discrete(6)
)


@functools.cache
def fitted_speeds() -> Speeds:
    """Return the two speeds that a modeled time needs, each fitted to a point of an A100.

    The time of an operation is that of gymnax's CartPole, the share of the peak that of Cleanba's
    IMPALA with the deep network, which acts and learns on one A100.
    """
    device = _a100()
    seconds, operations, written = GYMNAX["CartPole-v1"]
    step = seconds * GYMNAX_ENVIRONMENTS / 1e6 - written / device.bytes_per_second
    per_operation = step / operations
    work, steps = _impala_deep(60)
    fixed = Speeds(per_operation, 1.0).seconds(dataclasses.replace(work, flops=0.0), device)
    busy = steps * _CLEANBA_SECONDS - fixed
    return Speeds(per_operation, work.flops / device.peak_flops / busy)


def _a100() -> Device:
    return read_catalog().devices["a100-40"]


def _impala_deep(num_envs: int) -> tuple[Work, int]:
    """Return the work of an update with IMPALA's deep network on one device, and its steps."""
    experiment = recipes.find("atari_impala_deep")
    unbuilt: Any = over_run(experiment.agent, experiment.num_steps)
    agent = dataclasses.replace(unbuilt, spec=ATARI)
    config: Any = dataclasses.replace(experiment.driver, num_envs=num_envs)
    work = sebulba_work(agent, ATARI, config, threads=1, learners=1, num_learners=1)
    return work.acting * config.rollout_length + work.learning, config.steps_per_update


def counted() -> Iterator[Row]:
    """Predict devices that we never measured, from counted work and the two fitted speeds."""
    speeds = fitted_speeds()
    for name, (seconds, operations, written) in GYMNAX.items():
        step = speeds.seconds(Work(operations, 0.0, written), _a100())
        rate = GYMNAX_ENVIRONMENTS / step
        setting = f"{name}, {GYMNAX_ENVIRONMENTS:,} environments"
        is_fitted = name == "CartPole-v1"
        yield Row(COUNTED, "gymnax, A100", setting, "steps/s", 1e6 / seconds, rate, is_fitted)
    work, steps = _impala_deep(60)
    rate = FRAME_SKIP * steps / speeds.seconds(work, _a100())
    published = FRAME_SKIP / _CLEANBA_SECONDS
    yield Row(COUNTED, "Cleanba, IMPALA", "1 A100", "frames/s", published, rate, True)
    yield _anakin_row("Podracer, notebook", "catch", 1024, 8, 4.41e6)
    yield _anakin_row("Podracer, LPG (at least)", "lpg_paper", 61_440, 16, 3e6)
    for recipe, network in (("pong_impala", "shallow"), ("atari_impala_deep", "deep")):
        yield _sebulba_row(recipe, network)


def _anakin_row(source: str, recipe: str, num_envs: int, cores: int, published: float) -> Row:
    experiment = recipes.find(recipe)
    agent, env = build(experiment)
    config: Any = dataclasses.replace(experiment.driver, num_envs=num_envs)
    work = anakin_work(agent, env, config, cores)  # pyright: ignore[reportArgumentType]
    total = work.simulator + work.acting + work.learning
    rate = config.steps_per_update / fitted_speeds().seconds(total, read_catalog().devices["v3-8"])
    return Row(COUNTED, source, f"{cores} TPU v3 cores", "steps/s", published, rate)


def _sebulba_row(recipe: str, network: str) -> Row:
    """Predict the V-trace agent of figure 4b at an actor batch of 128 and T 60, on a TPU v3.

    The paper gives neither network nor split. Both of IMPALA's networks are tried, with 2 actors of
    3 threads, and 6 learners; 126 rows for each thread, as 6 cannot share 128. The simulators' rate
    is EnvPool's on a TPU host.
    """
    experiment = recipes.find(recipe)
    agent, env = build(experiment)
    assert env.spec is not None
    config: Any = dataclasses.replace(
        experiment.driver, num_envs=6 * 126, rollout_length=60, threads_per_actor=3
    )
    split = Split(actors=2, learners=6, threads_per_actor=3)
    machine = machine_of(read_catalog().devices["v3-8"], 1, 0)
    frames = FRAME_SKIP * config.steps_per_update
    simulator = Part("simulator", frames / ENVPOOL["Atari"][96], "published")
    modeled = model_sebulba(agent, env.spec, config, split, machine, fitted_speeds(), simulator)
    (_, published), *_ = FIGURES["sebulba-batch"].published[0].points
    setting = f"8 TPU v3 cores, batch 128, {network} network assumed"
    return Row(
        COUNTED, "Podracer, figure 4b", setting, "frames/s", published, frames / modeled.seconds
    )


# --- our own measurements -------------------------------------------------------------------------

OURS = "our own measurements, two cores"


# Steps a second on one CPU device and on two, 3b23e14, benchmarks/results/ppo.jsonl.
PPO_DEVICES = {
    "PPO, CartPole, 1024 x 128": (354_285.4775808196, 822_946.9184646113),
    "PPO, MinAtar Breakout, 64 x 128": (113639.99102470349, 174330.45024955494),
    "PPO, CartPole, 4 x 128": (277303.9321270994, 156263.8428553645),
}


def ours() -> Iterator[Row]:
    """Predict our records from the smallest of them."""
    records = {(r.figure, r.case): r.values for r in read_records(SHIPPED) if r.scale == "laptop"}
    one, two = (records["anakin-scaling", f"{n}-devices"]["steps_per_second"] for n in (1, 2))
    pairs = {"Catch, 128 environments a device": (one, two), **PPO_DEVICES}
    for source, (one, two) in pairs.items():
        yield Row(OURS, source, "1 CPU device", "steps/s", one, one, True)
        yield Row(OURS, source, "2 CPU devices", "steps/s", two, 2 * one)
    sizes = (32, 64, 128, 256, 512, 1024)
    yield from _batches(
        records, "notebook", "Catch, batch of each of 2 CPU devices", sizes, (32, 128)
    )
    sizes = (512, 2048, 8192, 61_440)
    yield from _batches(records, "lpg-rate", "LPG, batch of 1 CPU device", sizes, (512, 2048))
    yield from _sebulba(records)


def _batches(
    records: dict[tuple[str, str], Any],
    figure: str,
    source: str,
    sizes: Sequence[int],
    fitted: Sequence[int],
) -> Iterator[Row]:
    """Predict a rate over the batch: a fixed time of an update and a time of each environment."""
    rates = {n: records[figure, f"{n}-environments"]["steps_per_second"] for n in sizes}
    fixed, per_environment = affine_fit([(n, n / rates[n]) for n in fitted])
    for n in sizes:
        predicted = n / (fixed + per_environment * n)
        setting = f"{n:,} environments"
        yield Row(OURS, source, setting, "steps/s", rates[n], predicted, n in fitted)


def _sebulba(records: dict[tuple[str, str], Any]) -> Iterator[Row]:
    """Predict learning on Pong from acting alone, as both take turns on the same cores.

    The learner's time of a step is fitted to the first record.
    """
    cases = [("sebulba-batch", f"batch-{n}") for n in (32, 64, 128)]
    cases += [("sebulba-settings", f"threads-{n}-length-20") for n in (1, 2)]
    learning = 0.0
    for case in cases:
        acting, training = (records[case][part] for part in ("acting", "training"))
        learning = learning or 1 / training - 1 / acting
        parts = [Part("acting", 1 / acting, ""), Part("learning", learning, "")]
        predicted = 1 / update_seconds(parts, "one after another")
        is_fitted = case == cases[0]
        yield Row(OURS, "IMPALA on Pong", case[1], "steps/s", training, predicted, is_fitted)


# --- the table ------------------------------------------------------------------------------------


def errors(rows: Iterable[Row]) -> tuple[int, float, float]:
    """Return the number of held-out points, and their median and worst error, without sign."""
    sizes = [abs(row.error) for row in rows if not row.is_fitted]
    return len(sizes), statistics.median(sizes), max(sizes)


def table(rows: Sequence[Row]) -> str:
    """Return all points as tables of Markdown, with the errors of each group and of all."""
    lines = ["| group | held-out points | median error | worst error |", "|---|---|---|---|"]
    groups = list(dict.fromkeys(row.group for row in rows))
    for group in groups:
        lines.append(_summary(group, [row for row in rows if row.group == group]))
    lines += [_summary("**all**", rows), ""]
    head = "| source | setting | unit | published | predicted | error |"
    for group in groups:
        lines += [f"### {group[0].upper()}{group[1:]}", "", head, "|---|---|---|---|---|---|"]
        for row in rows:
            if row.group == group:
                error = "fitted" if row.is_fitted else f"{row.error:+.0%}"
                published, predicted = (_number(x) for x in (row.published, row.predicted))
                cells = (row.source, row.setting, row.unit, published, predicted, error)
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _summary(name: str, rows: Sequence[Row]) -> str:
    number, median, worst = errors(rows)
    return f"| {name} | {number} | {median:.0%} | {worst:.0%} |"


def _number(value: float) -> str:
    for unit, scale in (("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"
