"""Check of an environment of any kind: what it declares, and what it does in random play."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from podracer import checks
from podracer.checks.errors import describe_error
from podracer.checks.random_play import random_actions, wrong_scales
from podracer.drivers.sebulba.validator import NO_RESTART, TimestepValidator
from podracer.environment import AutoReset, HostEnvironments, auto_reset, is_of_gymnasium
from podracer.envs.catalog import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.envs.host.dlpack import on_host
from podracer.envs.host.gymnasium import Gymnasium
from podracer.envs.host.gymnasium_check import Watched
from podracer.errors import ConfigError, PodracerError
from podracer.frames import CONTINUED, first_source
from podracer.io.text import plain
from podracer.types import EnvironmentSpec, TimeStep, leaves_by_path

STEPS, GYMNASIUM_STEPS, SECONDS = 200, 1_000, 5.0  # random play ends with the first of them
NOT_SEEDED = (
    "two environments that are reset with one seed begin differently: `reset(seed=seed)` must call "
    "super().reset(seed=seed) and draw from self.np_random."
)
NOT_REPEATED = (
    "two batches with one seed and the same actions differ from step {step} on: the randomness of "
    "a row must depend on `seed`, its index and `start` alone, in Gymnasium on self.np_random."
)
ENVS_ON_HOST, ENVS_ON_DEVICE = 4, 64  # they play at once


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence on an environment: an error makes it unusable, a warning does not."""

    level: Literal["error", "warning"]
    text: str


@dataclasses.dataclass(frozen=True, repr=False)
class EnvironmentReport:
    """What was found on an environment, by its specification and in random play."""

    name: str
    spec: EnvironmentSpec | None
    """Specification, None where it cannot be read."""
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What random play measured: steps, ends of episodes, returns, and steps a second."""

    @property
    def usable(self) -> bool:
        """Whether an agent can be trained in the environment: nothing found is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object of JSON."""
        return {
            "environment": self.name,
            "usable": self.usable,
            "spec": None if self.spec is None else _describe(self.spec),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "figures": plain(self.figures),
        }

    def __repr__(self) -> str:
        lines = [f"{self.name}: {'usable' if self.usable else 'not usable'}"]
        if self.spec is not None:
            lines += [f"  {name}: {text}" for name, text in _describe(self.spec).items()]
        for name, value in self.figures.items():
            is_long = isinstance(value, int) or abs(value) >= 1000
            lines.append(f"  {name}: {value:,.0f}" if is_long else f"  {name}: {value:.4g}")
        lines += [f"  {finding.level}: {finding.text}" for finding in self.findings]
        return "\n".join(lines if self.findings else [*lines, "  no errors and no warnings"])


def _describe(spec: EnvironmentSpec) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(spec.observation)
    observation = ", ".join(
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}".strip()
        + (" divided by 255" if leaf.scaled else "")
        for path, leaf in leaves
    )
    return {"observation": observation, "action": str(spec.action)}


def check_environment(environment: Any) -> EnvironmentReport:
    """Return what was found on an environment. Raises `ConfigError` if it cannot be used.

    It is a name, a class of Gymnasium, an environment in JAX, or environments of the host. What it
    declares is checked by abstract evaluation where it is in JAX; then it is played with random
    actions, those of Gymnasium in this process.
    """
    report = examine(environment)
    if report.usable:
        return report
    errors = [finding.text for finding in report.findings if finding.level == "error"]
    raise ConfigError(errors[0] if len(errors) == 1 else "\n".join([report.name, *errors]))


def examine(environment: Any) -> EnvironmentReport:
    """Return what was found on an environment, see `check_environment`."""
    name = getattr(environment, "__qualname__", type(environment).__qualname__)
    name = environment if isinstance(environment, str) else name
    try:
        environment = make(environment) if isinstance(environment, str) else environment
        if isinstance(environment, type) and is_of_gymnasium(environment):
            report = examine(Gymnasium(environment, workers=0))
            try:
                Gymnasium(environment)
            except ConfigError as error:
                return _with_warning(report, str(error))
            return report
        if isinstance(environment, Gymnasium):
            watched = Watched(environment)
            return _play(watched, checks.check_spec(watched), 1, GYMNASIUM_STEPS)
        if isinstance(environment, HostEnvironments):
            return _play(environment, checks.check_spec(environment), ENVS_ON_HOST)
        return _play_in_jax(environment, checks.check_environment(environment))
    except PodracerError as error:
        return EnvironmentReport(name, None, (Finding("error", str(error)),))


def _play_in_jax(environment: Any, spec: EnvironmentSpec) -> EnvironmentReport:
    """Play in an environment in JAX, with restarts where it has none of its own."""
    agents = getattr(environment, "num_agents", 1)  # rows of one game
    num_envs = max(1, ENVS_ON_DEVICE // agents) * agents
    report = _play(DeviceEnvironments(environment), spec, num_envs)
    never_restarts = any(NO_RESTART in finding.text for finding in report.findings)
    if not never_restarts or isinstance(environment, AutoReset):
        return report
    report = _play(DeviceEnvironments(auto_reset(environment)), spec, ENVS_ON_DEVICE)
    return _with_warning(report, "it does not restart: train in podracer.auto_reset(...).")


def _with_warning(report: EnvironmentReport, text: str) -> EnvironmentReport:
    return dataclasses.replace(report, findings=(*report.findings, Finding("warning", text)))


def _play(
    environment: Any, spec: EnvironmentSpec, num_envs: int, num_steps: int = STEPS
) -> EnvironmentReport:
    """Play with one seed, on the host twice, and report on the timesteps."""
    watched = environment if isinstance(environment, Watched) else None
    validator = TimestepValidator(spec, np.zeros(num_envs, bool))
    timesteps, repeated, reseeded = [], [], []
    largest = dict.fromkeys(leaves_by_path(spec.observation), 0)
    seconds = 0.0
    try:
        for timestep, own_seconds in _timesteps(environment, spec, num_envs, num_steps):
            validator.validate(timestep)
            timesteps.append(timestep)
            seconds += own_seconds
            for path, array in leaves_by_path(timestep.observation).items():
                largest[path] = max(largest[path], array.max(initial=0))
        if not isinstance(environment, DeviceEnvironments):  # those are pure functions
            plays = (_timesteps(environment, spec, num_envs, num_steps // 4, x) for x in (1, 2))
            repeated = [x for x, _ in next(plays)]
            reseeded = [x for x, _ in next(plays)] if watched else []
        difference = _first_difference(timesteps, repeated)
    except PodracerError as error:
        return EnvironmentReport(spec.name, spec, (Finding("error", str(error)),))
    except (Exception, SystemExit) as error:  # its code 0 would count as success
        text = f"{spec.name} raised {describe_error(error)}"
        return EnvironmentReport(spec.name, spec, (Finding("error", text),))
    errors = [f"{text}." for text in validator.first_faults.values()]
    warnings = [*watched.warnings()] if watched else []
    if watched and difference == 0:
        warnings.append(NOT_SEEDED)
    elif difference is not None:
        warnings.append(NOT_REPEATED.format(step=difference))
    elif len(reseeded) > 1 and _first_difference(repeated, reseeded) is None:
        warnings.append("two seeds give the same episodes: nothing is random, or no seed is used.")
    if {"actor", "critic"} <= spec.groups.keys():
        unread = spec.observation.keys() - spec.keys(tuple(spec.groups))
        warnings += [f"no group has the key {key!r}: no network sees it." for key in sorted(unread)]
    for path, leaf in leaves_by_path(spec.observation).items():
        warnings += wrong_scales(f"observation{path}", leaf, largest[path])
        values = (leaves_by_path(x.observation)[path] for x in timesteps)
        if (n := leaf.num_values) and any(((x < 0) | (x >= n)).any() for x in values):
            errors.append(f"observation{path} must be 0 to {n - 1}, by its num_values of {n}.")
    errors += _broken_stacks(spec, timesteps)
    pairs = itertools.pairwise(timesteps)
    if any((new.first & ~new.last & ~old.last & (new.discount != 0)).any() for old, new in pairs):
        errors.append("`first` is set where no episode ended, by `last` or a `discount` of 0.")
    if not timesteps[0].first.all():
        errors.append("`reset` must return timesteps with `first` set.")
    figures = _figures(timesteps, num_envs)
    if seconds:
        rate = (len(timesteps) - 2) * num_envs / seconds  # the first step compiles
        count = "one environment" if watched else f"{num_envs} environments"
        figures[f"steps a second of {count}"] = rate
    if not figures["terminals"] + figures["time-outs"]:
        warnings.append(
            f"no episode ended within {len(timesteps) - 1:,} steps: where episodes have no limit, "
            "set one, in Gymnasium by gymnasium.wrappers.TimeLimit."
        )
    findings = [Finding("error", x) for x in errors] + [Finding("warning", x) for x in warnings]
    return EnvironmentReport(spec.name, spec, tuple(findings), figures)


def _timesteps(
    environment: Any, spec: EnvironmentSpec, num_envs: int, most_steps: int, seed: int = 1
) -> Iterator[tuple[TimeStep, float]]:
    """Yield copies of the timesteps of random play, each with the seconds that it took."""
    generator, end = np.random.default_rng(0), np.inf
    validator = TimestepValidator(spec, np.zeros(num_envs, bool))
    with contextlib.closing(on_host(environment).make(num_envs, 1)) as batch:
        timestep = batch.reset(seed, np.arange(num_envs, dtype=np.uint32), 0)
        validator.check(timestep)
        yield jax.tree.map(np.array, timestep), 0.0
        for step in range(most_steps):
            actions = random_actions(generator, spec, timestep.observation, num_envs)
            start = time.perf_counter()
            timestep = batch.step(actions)
            seconds = time.perf_counter() - start
            validator.check(timestep)
            yield jax.tree.map(np.array, timestep), seconds if step else 0.0  # the first compiles
            end = end if step else time.monotonic() + SECONDS
            if time.monotonic() > end:
                return


def _first_difference(timesteps: list[TimeStep], repeated: list[TimeStep]) -> int | None:
    for step, pair in enumerate(zip(timesteps, repeated, strict=False)):
        leaves = zip(*map(jax.tree.leaves, pair), strict=True)
        if not all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in leaves):
            return step
    return None


def _broken_stacks(spec: EnvironmentSpec, timesteps: list[TimeStep]) -> Iterator[str]:
    """Yield an error for each leaf that is no stack of frames, although its specification says so.

    Actors send the newest frame alone, and replay buffers store each frame once.
    """
    stacks = {path for path, leaf in leaves_by_path(spec.observation).items() if leaf.frame_stack}
    for path in stacks:
        series = [leaves_by_path(timestep.observation)[path] for timestep in timesteps]
        for step, (previous, stack) in enumerate(itertools.pairwise(series), 1):
            goes_on = (stack[..., :-1] == previous[..., 1:]).reshape(len(stack), -1).all(axis=1)
            begins = timesteps[step].first & (first_source(np, stack) != CONTINUED)
            if not (goes_on | begins).all():
                yield (
                    f"observation{path} has `frame_stack`, but at step {step} it is not the "
                    "previous stack with one new frame: leave `frame_stack` out."
                )
                break


def _figures(timesteps: list[TimeStep], num_envs: int) -> dict[str, Any]:
    terminals = timeouts = 0
    returns, totals = list[float](), np.zeros(num_envs)
    for previous, timestep in itertools.pairwise(timesteps):
        terminal = (timestep.discount == 0) & ~previous.last
        timeout = timestep.last & ~timestep.first & ~terminal
        terminals, timeouts = terminals + int(terminal.sum()), timeouts + int(timeout.sum())
        totals += timestep.reward
        returns += totals[terminal | timeout].tolist()
        totals[terminal | timeout] = 0
    steps = (len(timesteps) - 1) * num_envs
    figures = {"steps of random play": steps, "terminals": terminals, "time-outs": timeouts}
    return figures | ({"mean return": float(np.mean(returns))} if returns else {})
