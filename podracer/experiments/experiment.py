"""An experiment as a value: the complete, typed configuration of a run.

`to_json` and `from_json` keep one in a run's `config.json`; only the classes in `KINDS` can come
back from a file, never a dotted path.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from podracer.agents.a2c import A2C
from podracer.agents.alphazero import AlphaZero
from podracer.agents.ddpg import DDPG
from podracer.agents.dqn import DQN
from podracer.agents.impala import Impala
from podracer.agents.lpg.agent import LPG
from podracer.agents.lpg.rule import UpdateRule
from podracer.agents.lpg.student import LPGStudent
from podracer.agents.muzero import MuZero
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.agents.stacx import Stacx
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Hyperparameter, Pod, with_hyperparameters
from podracer.drivers.sebulba import SebulbaConfig
from podracer.io.differences import differences
from podracer.io.run_directory import read_limited
from podracer.networks import CNN, MLP, ResNet, Table, TorsoNetwork
from podracer.ops.action_values import Atoms, Mean, Quantiles
from podracer.replay import Replay
from podracer.types import ConfigError, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides what a run computes. Same experiment, same topology: same bytes."""

    recipe: str = "experiment"
    """Name of the experiment in reports and in the names of run directories."""
    environment: str
    """See `podracer list environments`."""
    agent: (
        A2C | AlphaZero | DDPG | DQN | Impala | LPG | MuZero | PPO | QLambda | R2D2 | SAC | Stacx
        | LPGStudent
    )  # fmt: skip
    """The agent and its hyperparameters."""
    driver: AnakinConfig | SebulbaConfig
    """The architecture, and how it runs the agent."""
    frames: int
    """Environment steps to train for, rounded up to whole updates."""
    seed: int = 0
    """Of the one key that every random number is folded from."""
    pods: Annotated[tuple[Pod, ...], tyro.conf.Suppress] = ()
    """Of a population: many learners in one program, see `podracer sweep`."""
    devices: int = 0
    """How many of the devices of all hosts to use; 0 for every one."""
    evaluations: int = 10
    """How many times to evaluate, evenly spread; the last time at the end. 0 for never."""
    evaluation_episodes: int = 100
    """Greedy episodes in each evaluation."""
    target_return: float | None = None
    """Stop as soon as an evaluation reaches this mean return."""
    max_seconds: float | None = None
    """Stop after so much time, at the end of a chunk."""
    save_seconds: float = 60.0
    """Save at least this often; 0 saves every chunk. The end of a run is always saved."""
    stall_seconds: float = 1800.0
    """Give up (exit code 76) when a chunk takes longer than this."""

    @property
    def arch(self) -> Literal["anakin", "sebulba"]:
        """`anakin` or `sebulba`."""
        return "anakin" if isinstance(self.driver, AnakinConfig) else "sebulba"

    def under(self, arch: str) -> Experiment:
        """This experiment under an architecture, with its settings as far as both have them."""
        if arch == self.arch:
            return self
        kind = AnakinConfig if arch == "anakin" else SebulbaConfig
        old = self.driver
        new = kind(old.num_envs, old.rollout_length, old.updates_per_chunk)
        return dataclasses.replace(self, driver=new)

    @property
    def chunk(self) -> AnakinConfig | SebulbaConfig:
        """The driver's settings, the chunk no longer than the run."""
        updates = min(self.driver.updates_per_chunk, self._updates)
        return dataclasses.replace(self.driver, updates_per_chunk=updates)

    @property
    def num_updates(self) -> int:
        """Updates in all: enough for `frames`, in whole chunks."""
        chunk = self.chunk.updates_per_chunk
        return math.ceil(self._updates / chunk) * chunk

    @property
    def evaluation_updates(self) -> frozenset[int]:
        """Numbers of updates after which to evaluate: ends of chunks, evenly spread."""
        chunk = self.chunk.updates_per_chunk
        chunks = self.num_updates // chunk
        marks = range(1, self.evaluations + 1)
        return frozenset(math.ceil(i * chunks / self.evaluations) * chunk for i in marks)

    @property
    def _updates(self) -> int:
        return math.ceil(self.frames / self.driver.steps_per_update)

    def of_pod(self, pod: Pod) -> Experiment:
        """What one pod of a population runs, as a run of its own."""
        values = {each.name: each.value for each in pod.hyperparameters}
        agent = with_hyperparameters(self.agent, values)
        return dataclasses.replace(self, agent=agent, seed=pod.seed, pods=())

    def check(self) -> None:
        """Raise `ConfigError` for values that cannot be meant."""
        for name, least in (
            ("frames", 1),
            ("seed", 0),
            ("devices", 0),
            ("evaluations", 0),
            ("evaluation_episodes", 1),
            ("save_seconds", 0),
        ):
            value = getattr(self, name)
            if not least <= value < 2**63:
                raise ConfigError(f"{name} must be at least {least}, but it is {value}.")
        if self.seed >= 2**32:
            raise ConfigError(f"seed must be below 2^32, but it is {self.seed}.")
        for name in ("stall_seconds", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, but it is {value}.")
        check_ranges(self.driver, "driver")
        _check_finite("agent", self.agent)


# Hyperparameters that are shares or rates: what they must lie in.
_RANGES = {
    **dict.fromkeys(
        (
            "discount",
            "lambda_",
            "gae_lambda",
            "trace_lambda",
            "epsilon",
            "target_rate",
            "priority_mix",
        ),
        (0, 1),
    ),
    **dict.fromkeys(("target_entropy", "low", "high"), (-math.inf, math.inf)),
}
_COUNTS_FROM_ZERO = ("anneal_updates", "epsilon_frames", "random_frames", "burn_in", "warmup")


def _check_finite(path: str, config: Any) -> None:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{path}.{field.name}"
        if dataclasses.is_dataclass(value):
            _check_finite(name, value)
        elif isinstance(value, float):
            low, high = _RANGES.get(field.name, (0, math.inf))
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} must lie in [{low}, {high}], but it is {value}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            least = 0 if field.name in _COUNTS_FROM_ZERO else 1
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, but it is {value}.")
        elif isinstance(value, tuple) and any(not isinstance(n, int) or n < 1 for n in value):
            raise ConfigError(f"{name} must hold positive whole numbers, but it is {value}.")


# --- to a file and back --------------------------------------------------------------------------

_DRIVERS = (AnakinConfig, SebulbaConfig)
AGENTS = (
    A2C, AlphaZero, DDPG, DQN, Impala, LPG, MuZero, PPO, QLambda, R2D2, SAC, Stacx, LPGStudent,
)  # fmt: skip
_NETWORKS = (TorsoNetwork, Table, MLP, CNN, ResNet, UpdateRule)
_PARTS = (Pod, Hyperparameter, Replay, Mean, Atoms, Quantiles, *_NETWORKS)
_KINDS = (Experiment, *_DRIVERS, *AGENTS, *_PARTS)
KINDS: dict[str, type] = {kind.__name__: kind for kind in _KINDS}


def to_json(value: Any) -> Any:
    """Plain JSON of a configuration; dataclasses carry their `kind`. `spec` is derived, so left."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        fields.pop("spec", None)
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value


def from_json(data: Any, kinds: Mapping[str, type] = KINDS) -> Any:
    """A configuration of these kinds from its JSON.

    Raises `ConfigError` naming what is unknown or missing.
    """
    if isinstance(data, list):
        return tuple(from_json(item, kinds) for item in data)
    if not isinstance(data, dict):
        return data
    kind = kinds.get(data.get("kind", ""))
    if kind is None:
        raise ConfigError(f"the configuration names {data.get('kind')!r}, which is no known kind.")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in data.items():
        if name == "kind":
            continue
        if name not in hints:
            raise ConfigError(f"the configuration of {kind.__name__} has an unknown {name!r}.")
        values[name] = from_json(value, kinds)
        if not _fits(values[name], hints[name]):
            raise ConfigError(f"{kind.__name__}.{name} cannot be {values[name]!r}.")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"the configuration is incomplete: {error}.") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as configurations need it."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(
            _fits(item, typing.get_args(hint)[0]) for item in value
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


# These decide when things happen, not what is computed, so a run may go on with others.
FREE_ON_RESUME = {
    "frames",
    "evaluations",
    "evaluation_episodes",
    "target_return",
    "max_seconds",
    "save_seconds",
    "stall_seconds",
}


def read_experiment(directory: Path) -> Experiment:
    """The experiment of a run. Raises `ConfigError` if there is none or it cannot be read."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} holds no run: there is no config.json in it.")
    return experiment_of(path)


def experiment_of(path: Path) -> Experiment:
    """The experiment of a file: a run's `config.json`, or a sweep's `best.json`.

    Raises `ConfigError` if it cannot be read.
    """
    try:
        experiment = from_json(json.loads(read_limited(path))["experiment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a run's configuration: {error}.") from error
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{path} is not a run's configuration.")
    return experiment


def check_same_experiment(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `ConfigError` with the differences if a checkpoint is of another computation."""
    changed = [
        f"{name} was {old} and is {new}"
        for name, (old, new) in differences(saved, now).items()
        if name not in FREE_ON_RESUME
    ]
    if changed:
        raise ConfigError(f"the run was saved with another configuration: {'; '.join(changed)}.")
