"""An experiment as a value: the complete, typed configuration of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Settings
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.arguments import fits, named, refusal, type_hints, typed
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.exchange import check_period
from podracer.drivers.population import (
    Exchange,
    Hyperparameter,
    Pod,
    run_keys,
    with_hyperparameters,
)
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.selection import Selection
from podracer.environment import Environment, HostEnvironments
from podracer.envs.catalog import runs_on_host
from podracer.errors import ConfigError
from podracer.evaluate import MAX_EPISODES, PolicyKind
from podracer.fields import NO_FLAG, bounded, check_ranges
from podracer.names import OTHER_NAMES, nearest

# What an int32 counts, and half of what an uint32 does: every second step may only reset.
_MOST = 2**31 - 1


@named
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Configuration of a run; the same experiment on the same devices computes the same bytes."""

    recipe: str = "experiment"
    """Name of the experiment in reports and in the names of run directories."""
    environment: str | Environment | HostEnvironments
    """Environment to train in; `podracer list environments` names them. With another one than
    the recipe's its target return is dropped; one of the host implies Sebulba."""
    agent: Settings
    """Agent and its hyperparameters."""
    driver: AnakinConfig | SebulbaConfig
    """Architecture and its settings."""
    frames: int = bounded(dataclasses.MISSING, low=1, high=2**62)
    """Number of frames to train for, at least, of each pod in a population: the run ends with the
    update in which it reaches them. A frame is a step of an environment; one that only resets it
    does not count."""
    seed: int = bounded(0, high=2**32 - 1)
    """Random seed of the run, from 0 to 2^32 - 1."""
    pods: Annotated[tuple[Pod, ...], NO_FLAG] = ()
    """Members of a population that trains as one program, see `podracer sweep`."""
    exchange: Annotated[Exchange | None, NO_FLAG] = None
    """Exchange of the pods while they train: `Selection` starts them from better ones, `Averaging`
    averages their learners' states; None for none."""
    callbacks: Annotated[tuple[str, ...] | None, NO_FLAG] = None
    """Callbacks of installed packages that change what is computed, such as a curriculum, each as
    `NAME` or `NAME:ARGUMENT`."""
    devices: int = bounded(0, high=65_536)
    """Number of devices to use, over all hosts; 0 for all."""
    evaluations: int = bounded(10, high=100_000)
    """Number of evaluations, evenly spread over the run, the last one at its end; 0 for none, and
    at most 100,000. Each is at the end of a chunk: a run of fewer chunks has one for each."""
    evaluation_episodes: int = bounded(100, low=1, high=MAX_EPISODES)
    """Number of episodes in each evaluation, from 1 to 1,048,576."""
    evaluation_policy: PolicyKind = "greedy"
    """Policy in evaluations: `greedy` for the agent's best actions, `sampled` to explore."""
    evaluation_epsilon: float = bounded(0.0, high=1)
    """Probability epsilon, in [0, 1], of a random action in evaluations; discrete actions only."""
    fixed_evaluation: bool = False
    """Whether all evaluations play the same episodes; otherwise each plays new ones."""
    target_return: float | None = bounded(None, low=-math.inf)
    """Mean return of an evaluation at which the run stops early; a recipe's own target
    applies only in its own environment."""
    max_seconds: float | None = bounded(None, low=0.001)
    """Time limit in seconds; the run stops at the end of the chunk, under Sebulba of the update, in
    which it is reached."""
    save_seconds: float = bounded(60.0)
    """Longest time between two checkpoints, in seconds, plus at most one chunk (under Sebulba one
    update); 0 saves after every chunk."""
    keep_best: bool = True
    """Whether to save at each evaluation with a higher mean return than all before. The checkpoint
    of the best one is then kept besides the newest ones; if returns are equal, the newest."""
    stall_seconds: float = bounded(1800.0, low=0.001)
    """Time in seconds after which a chunk, an evaluation or a save that has not finished ends the
    run (exit code 76)."""

    @property
    def arch(self) -> Literal["anakin", "sebulba"]:
        """Architecture of the run: `anakin` or `sebulba`."""
        return "anakin" if isinstance(self.driver, AnakinConfig) else "sebulba"

    @typed
    def with_arch(self, arch: Literal["anakin", "sebulba"]) -> Experiment:
        """Return this experiment under an architecture, with the settings that both share."""
        if arch == self.arch:
            return self
        kind = AnakinConfig if arch == "anakin" else SebulbaConfig
        old = self.driver
        new = kind(old.num_envs, old.rollout_length, old.updates_per_chunk)
        return dataclasses.replace(self, driver=new)

    def with_environment(self, environment: str | Environment | HostEnvironments) -> Experiment:
        """Return this experiment in another environment: under Sebulba if that needs the host.

        A target return is one of its old environment, and does not count in another.
        """
        is_named = isinstance(environment, str) and environment == self.environment
        if is_named or environment is self.environment:
            return self
        moved = dataclasses.replace(self, environment=environment, target_return=None)
        return moved.with_arch("sebulba") if runs_on_host(environment) else moved

    def with_fields(self, values: Mapping[str, Any]) -> Experiment:
        """Return this experiment with other values of its fields.

        A dictionary holds values of a part's fields: `{"agent": {"learning_rate": 1e-3}}`. Raises
        `ConfigError` for an unknown name.
        """
        return replace_fields(self, values)

    @property
    def run_driver(self) -> AnakinConfig | SebulbaConfig:
        """Settings of the driver, whose chunk is no longer than the run."""
        updates = min(self.driver.updates_per_chunk, self.num_updates)
        return dataclasses.replace(self.driver, updates_per_chunk=updates)

    @property
    def num_updates(self) -> int:
        """Number of updates in the run where every step is a frame, else the least number."""
        return math.ceil(self.frames / self.driver.steps_per_update)

    @property
    def num_steps(self) -> int:
        """Number of environment steps in `num_updates`, in a population of one pod.

        Schedules over the whole run last for as many frames.
        """
        return self.num_updates * self.driver.steps_per_update

    @property
    def evaluation_updates(self) -> frozenset[int]:
        """Numbers of updates after which to evaluate: ends of chunks, evenly spread, and the end.

        They are exact where every step is a frame; see `evaluation_frames`.
        """
        chunk, last = self.run_driver.updates_per_chunk, self.num_updates
        chunks = math.ceil(last / chunk)
        marks = range(1, self.evaluations + 1)
        return frozenset(min(math.ceil(i * chunks / self.evaluations) * chunk, last) for i in marks)

    @property
    def evaluation_frames(self) -> list[int]:
        """Numbers of frames, in order, at which to evaluate: at the end of the chunk with each."""
        return [n * self.driver.steps_per_update for n in sorted(self.evaluation_updates)]

    @property
    def key(self) -> jax.Array:
        """Key of the run; `[P]` in a population."""
        return run_keys(self.pods) if self.pods else jax.random.key(self.seed)

    def of_pod(self, pod: Pod) -> Experiment:
        """Return the experiment of one pod of a population, as a run of its own."""
        values = {parameter.name: parameter.value for parameter in pod.hyperparameters}
        agent = with_hyperparameters(self.agent, values)
        return dataclasses.replace(self, agent=agent, seed=pod.seed, pods=(), exchange=None)

    def check(self) -> None:
        """Raise `ConfigError` for values out of range."""
        if not isinstance(self.driver, kinds := AnakinConfig | SebulbaConfig):
            raise ConfigError(refusal("Experiment.driver", self.driver, kinds))
        check_ranges(self, "")
        steps, driver = self.driver.steps_per_update, self.driver
        if steps > _MOST:
            raise ConfigError(
                f"an update has at most {_MOST:,} environment steps, but num_envs "
                f"{driver.num_envs:,} times rollout_length {driver.rollout_length:,} is {steps:,}."
            )
        if self.num_updates > _MOST:
            raise ConfigError(
                f"a run has at most {_MOST:,} updates, but frames {self.frames:,} takes "
                f"{self.num_updates:,} of {steps:,} environment steps."
            )
        if self.num_updates * driver.rollout_length > _MOST:
            raise ConfigError(
                f"an environment makes at most {_MOST:,} steps, but frames "
                f"{self.frames:,} in {driver.num_envs:,} environments are more: take more of them."
            )
        if len(set(self.pods)) < len(self.pods):
            raise ConfigError("two pods are equal, and would count as two seeds: change a seed.")
        chunk = self.run_driver.updates_per_chunk
        if self.arch == "anakin" and steps * chunk > _MOST:
            raise ConfigError(
                f"a chunk has at most {_MOST:,} environment steps, but updates_per_chunk "
                f"{chunk:,} times {steps:,} steps in an update is {steps * chunk:,}."
            )
        if self.exchange is not None:
            check_period(self.exchange.every, len(self.pods), chunk, self.num_updates)
            self.exchange.check(self.pods)
        if isinstance(self.exchange, Selection):
            for bound in self.exchange.bounds:
                for value in (bound.low, bound.high):
                    self.of_pod(Pod(0, (Hyperparameter(bound.name, value),))).check()


def replace_fields(config: Any, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Return a dataclass with other values of fields and of those of its parts, as `with_fields`.

    `path` leads to it, in messages.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"{type(config).__name__} is no dataclass and has no fields to change.")
    names, changes = [field.name for field in dataclasses.fields(config)], {}
    for name, value in values.items():
        if name not in names:
            kind = type(config).__name__
            paths = (_path_of(x, config) for x in (name, *OTHER_NAMES.get(name, ())))
            place = next(filter(None, paths), ())
            remedy = nearest(name, names)
            if len(place) > 1:
                first, *parts = path + place
                opening = "".join(f'{{"{part}": ' for part in parts)
                keyword = f"{first}={opening}...{'}' * len(parts)}"
                remedy = f"it is one of its {'.'.join(place[:-1])}: {keyword}."
            raise ConfigError(f"{kind} has no field {name!r}: {remedy}")
        part = getattr(config, name)
        is_part = isinstance(value, Mapping) and dataclasses.is_dataclass(part)
        if is_part:
            changes[name] = replace_fields(part, value, (*path, name))
        else:
            value = value.item() if isinstance(value, np.generic) else value
            is_tuple = isinstance(part, tuple) and isinstance(value, list)
            changes[name] = tuple(value) if is_tuple else value
    return dataclasses.replace(config, **changes)


def _path_of(name: str, config: Any) -> tuple[str, ...]:
    """Return the names that lead to a field of a configuration or of its parts, () if none do."""
    if not dataclasses.is_dataclass(config):
        return ()
    names = [field.name for field in dataclasses.fields(config)]
    if name in names:
        return (name,)
    paths = ((part, *_path_of(name, getattr(config, part))) for part in names)
    return next((path for path in paths if len(path) > 1), ())


def check_types(config: Any) -> None:
    """Raise `ConfigError` for a value that its field does not take.

    Objects of the user's own are checked where they are used.
    """
    if type(config).__module__.partition(".")[0] != "podracer":
        return
    hints = type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        is_plain = isinstance(value, bool | int | float | str | tuple | list | dict | None)
        is_plain |= isinstance(value, type) and field.name != "environment"
        if field.name in ("agent", "environment") and not is_plain:  # they have their own checks
            if field.name == "agent" and dataclasses.is_dataclass(value):
                check_types(value)
            continue
        if not fits(value, hint):
            raise ConfigError(refusal(f"{type(config).__name__}.{field.name}", value, hint))
        if hint is OptimizerBuilder and not isinstance(value, Optimizer):
            _check_optimizer(type(config).__name__, value)
            continue
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                check_types(part)


def _check_optimizer(kind: str, optimizer: Any) -> None:
    """Raise `ConfigError` for an optimizer of the user's own that would climb the loss."""
    name = type(optimizer).__name__
    if jax.tree_util.all_leaves([optimizer]):
        raise ConfigError(
            f"{kind}.optimizer is no tree of numbers: put @podracer.struct above its class {name}."
        )
    params, gradient = jnp.zeros((2, 2)), jnp.ones((2, 2))
    descends = False
    with contextlib.suppress(Exception):  # the agent's check explains them
        method = optimizer.build(1.0)
        state = method.init(params)
        for _ in range(3):  # the first one may be 0, as of a learning rate that warms up
            update, state = method.update(gradient, state, params)
            descends = descends or bool(jnp.all(update < 0))
    if descends:
        raise ConfigError(
            f"{kind}.optimizer: updates of {name} point downhill already, and the agent multiplies "
            "them by -learning_rate: leave out the learning rate (optax.scale_by_adam, not "
            "optax.adam)."
        )
