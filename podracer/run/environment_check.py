"""Check of an environment of any kind: what it declares, and what it does in random play."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from podracer import checks
from podracer.checks.errors import describe_error
from podracer.checks.random_play import random_actions, wrong_scales
from podracer.checks.report import EnvironmentReport, Finding
from podracer.drivers.sebulba.validator import NO_RESTART, TimestepValidator
from podracer.environment import AutoReset, HostEnvironments, auto_reset, is_of_gymnasium
from podracer.envs.catalog import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.envs.host.dlpack import on_host
from podracer.envs.host.gymnasium import Gymnasium
from podracer.errors import ConfigError, PodracerError
from podracer.io.schema import leaves_by_path
from podracer.types import EnvironmentSpec, TimeStep

STEPS, SECONDS = 200, 5.0  # random play ends with the first of them
REPEATED_STEPS = 50
NOT_REPEATED = (
    "two batches with one seed and the same actions differ from step {step} on: the randomness of "
    "a row must depend on `seed`, its index and `start` alone."
)
ENVS_ON_HOST, ENVS_ON_DEVICE = 4, 64  # they play at once


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
            return _examine_class(environment)
        if isinstance(environment, Gymnasium):
            return _examine_gymnasium(environment)
        if isinstance(environment, HostEnvironments):
            return _play(environment, checks.check_spec(environment), ENVS_ON_HOST)
        spec = checks.check_environment(environment)
        return _examine_in_jax(environment, spec)
    except PodracerError as error:
        return EnvironmentReport(name, None, (Finding("error", str(error)),))


def _examine_class(kind: type) -> EnvironmentReport:
    report = _examine_gymnasium(Gymnasium(kind, workers=0))
    try:
        Gymnasium(kind)
    except ConfigError as error:
        return dataclasses.replace(
            report, findings=(*report.findings, Finding("warning", str(error)))
        )
    return report


def _examine_gymnasium(environment: Gymnasium) -> EnvironmentReport:
    from podracer.envs.host.gymnasium_check import examine

    return examine(environment)


def _examine_in_jax(environment: Any, spec: EnvironmentSpec) -> EnvironmentReport:
    """Play in an environment in JAX, with restarts where it has none of its own."""
    agents = getattr(environment, "num_agents", 1)  # rows of one game
    num_envs = max(1, ENVS_ON_DEVICE // agents) * agents
    report = _play(DeviceEnvironments(environment), spec, num_envs)
    never_restarts = [finding for finding in report.findings if NO_RESTART in finding.text]
    if not never_restarts or isinstance(environment, AutoReset):
        return report
    report = _play(DeviceEnvironments(auto_reset(environment)), spec, ENVS_ON_DEVICE)
    advice = Finding("warning", "it does not restart by itself: train in podracer.auto_reset(...).")
    return dataclasses.replace(report, findings=(*report.findings, advice))


def _play(environment: Any, spec: EnvironmentSpec, num_envs: int) -> EnvironmentReport:
    """Play with one seed, on the host twice, and report on the timesteps."""
    validator, timesteps, repeated = TimestepValidator(spec, num_envs), [], []
    seconds = 0.0
    try:
        for timestep, own_seconds in _timesteps(environment, spec, num_envs, STEPS):
            validator.validate(timestep)
            timesteps.append(timestep)
            seconds += own_seconds
        if not isinstance(environment, DeviceEnvironments):  # those are pure functions
            repeated = [x for x, _ in _timesteps(environment, spec, num_envs, REPEATED_STEPS)]
        difference = _first_difference(timesteps, repeated)
    except PodracerError as error:
        return EnvironmentReport(spec.name, spec, (Finding("error", str(error)),))
    except Exception as error:
        text = f"{spec.name} raised {describe_error(error)}"
        return EnvironmentReport(spec.name, spec, (Finding("error", text),))
    errors = [Finding("error", f"{text}.") for text in validator.first_faults.values()]
    warnings = []
    if difference is not None:
        warnings.append(Finding("warning", NOT_REPEATED.format(step=difference)))
    stacked: Any = jax.tree.map(lambda *x: np.stack(x), *timesteps)
    arrays = leaves_by_path(stacked.observation)
    for path, leaf in leaves_by_path(spec.observation).items():
        texts = wrong_scales(f"observation{path}", leaf, arrays[path].max(initial=0))
        warnings += [Finding("warning", text) for text in texts]
    if not stacked.first[0].all():
        errors.append(Finding("error", "`reset` must return timesteps with `first` set."))
    figures = _figures(stacked, num_envs, seconds)
    if not figures["terminals"] + figures["time-outs"]:
        warnings.append(Finding("warning", f"no episode ended within {len(timesteps) - 1} steps."))
    return EnvironmentReport(spec.name, spec, (*errors, *warnings), figures)


def _timesteps(
    environment: Any, spec: EnvironmentSpec, num_envs: int, most_steps: int
) -> Iterator[tuple[TimeStep, float]]:
    """Yield copies of the timesteps of random play, each with the seconds that it took."""
    generator, end = np.random.default_rng(0), np.inf
    validator = TimestepValidator(spec, num_envs)
    with contextlib.closing(on_host(environment).make(num_envs, 1)) as batch:
        timestep = batch.reset(1, np.arange(num_envs, dtype=np.uint32), 0)
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


def _figures(timesteps: TimeStep, num_envs: int, seconds: float) -> dict[str, Any]:
    terminal = (timesteps.discount[1:] == 0) & ~timesteps.last[:-1]
    timeout = timesteps.last[1:] & ~timesteps.first[1:] & ~terminal
    num_steps = (len(timesteps.reward) - 1) * num_envs
    figures: dict[str, Any] = {
        "steps of random play": num_steps,
        "terminals": int(terminal.sum()),
        "time-outs": int(timeout.sum()),
        "mean reward": float(timesteps.reward[1:].mean()),
    }
    if seconds:
        figures[f"steps a second of {num_envs} environments"] = (num_steps - num_envs) / seconds
    return figures
