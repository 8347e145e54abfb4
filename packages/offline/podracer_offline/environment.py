"""A data set as an environment: it replays episodes, and shows what was done in them.

An update learns from recorded transitions as from a rollout: under the same driver and with the
same checkpoints. Evaluations are in the environment that the data come from.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import Agent
from podracer.config.experiment import Experiment
from podracer.drivers.selection import Selection
from podracer.environment import evaluation_environment
from podracer.envs.catalog import imported_module, make
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.io.paths import user_path
from podracer.io.text import REDACTED
from podracer.types import ArraySpec, EnvironmentSpec, TimeStep
from podracer_offline.dataset import Dataset, Rows
from podracer_offline.records import Record, replayed, require_student
from podracer_offline.teacher import DAgger


@struct
class DataEnvironment:
    """Device environment that replays a data set; its state is the index of a timestep.

    A reset draws any timestep, also the last one of a time-out, and after an episode follows the
    beginning of another one, each as likely as the others. So at every step all transitions are
    equally likely.
    """

    digest: str = static()
    """SHA-256 of the data set."""
    rows: Rows
    environment: Any = static()
    """Environment that the data set comes from, None if it is unknown."""
    spec: EnvironmentSpec = static()
    source: str = static(default="")
    """Name of the environment, if it has one."""

    def for_evaluation(self) -> Any:
        """Return the environment to evaluate in. Raises `ConfigError` if it is unknown."""
        if self.environment is None and (module := imported_module(self.source)):
            raise ConfigError(
                f"the data come from {self.source!r}, which imports the module {module!r}, and a "
                f"file does not decide that: add `,environment={self.source}`, or take "
                "`evaluations=0`."
            )
        if self.environment is None:
            raise ConfigError(
                "the data set names no environment to evaluate in: name it by "
                "`data:FILE,environment=NAME`, or train with `evaluations=0`."
            )
        return evaluation_environment(self.environment)

    def check_agent(self, agent: Agent, experiment: Experiment) -> None:
        """Raise `ConfigError` for an agent that would act, and for what ranks pods by returns."""
        require_student(agent)
        if isinstance(experiment.agent, DAgger):
            raise ConfigError(
                "DAgger learns where its own actions lead, which no data set shows: take "
                '`environment="taught:RUN"`, or another agent, such as Cloning.'
            )
        if isinstance(experiment.exchange, Selection):
            raise ConfigError(
                "selection ranks pods by their training returns, which are those of the data set: "
                "train without one, and rank the pods by their evaluations."
            )

    def reset(self, key: jax.Array) -> tuple[jax.Array, TimeStep]:
        row = jax.random.randint(key, (), 0, len(self.rows.last))
        return row, self._timestep(row, jnp.float32(0), jnp.float32(1), jnp.bool_(True))

    def step(self, key: jax.Array, state: jax.Array, action: Any) -> tuple[jax.Array, TimeStep]:
        rows = self.rows
        starts = rows.terminal[state] | rows.last[state]
        episode = jax.random.randint(key, (), 0, len(rows.starts))
        row = jnp.where(starts, rows.starts[episode], state + 1)
        discount = 1.0 - rows.terminal[state].astype(jnp.float32)
        return row, self._timestep(row, rows.reward[state], discount, starts)

    def _timestep(
        self, row: jax.Array, reward: jax.Array, discount: jax.Array, first: jax.Array
    ) -> TimeStep:
        rows = self.rows
        record = Record(rows.observation, rows.action, rows.distribution)
        record = jax.tree.map(lambda x: x[row], record)
        return TimeStep(record, reward, discount, first, self.rows.last[row])


def data(name: str, environment: str | None = None, **options: Any) -> DataEnvironment:
    """Return the replay of a data set: `data:FILE.npz`, or of Minari `data:minari:ID`.

    `environment` names the one that it comes from, by default as the file does, and "" none;
    `options` are its own, such as a secret, which no file has.
    """
    kind, _, id = name.partition(":")
    dataset = _minari(id) if kind == "minari" else Dataset.load(user_path(name))
    source = dataset.environment if environment is None else environment
    parts = (part.partition("=") for part in source.split(","))
    if missing := {key for key, _, value in parts if REDACTED in value} - options.keys():
        raise ConfigError(
            f"{name} comes from {source!r}, whose secrets it lacks: add `,{min(missing)}=...`."
        )
    is_refused = environment is None and imported_module(source)  # a file imports no module
    if options and (is_refused or not source):
        raise ConfigError(
            f"{name} decides no environment with options: add `,environment={source or 'NAME'}`."
        )
    env = replay(dataset, make(source, **options) if source and not is_refused else None)
    source = ",".join([source, *(f"{key}={value}" for key, value in options.items())])
    return dataclasses.replace(env, source=source)


def acting_name(env: Any, name: Any) -> Any:
    """Return the name of a run's environment, or of the one that its data set comes from."""
    return env.source if isinstance(env, DataEnvironment) else name


def replay(dataset: Dataset, environment: Any = None) -> DataEnvironment:
    """Return the environment that replays a data set from another environment, if it is known.

    Raises `ConfigError` where the transitions cannot be of that environment.
    """
    spec = dataset.spec if environment is None else replayed(environment.spec)  # a student's
    refuse_turns(spec)
    rows = dataset.check(spec).rows()
    action, distribution = (
        jax.tree.map(lambda x: ArraySpec(x.shape[1:], x.dtype), x)
        for x in (rows.action, rows.distribution)
    )
    return DataEnvironment(
        digest=dataset.digest,
        rows=jax.tree.map(jnp.asarray, rows),
        environment=environment,
        spec=dataclasses.replace(spec, observation=Record(spec.observation, action, distribution)),
    )


def refuse_turns(spec: EnvironmentSpec) -> None:
    """Raise `ConfigError` for games of two players, where each gain is the other one's loss."""
    if spec.takes_turns:
        raise ConfigError(
            f"a data set does not say whose turn it was, as values in {spec.name} need: record "
            "games against an opponent."
        )


def _minari(id: str) -> Dataset:
    """Return a data set that Minari has on this machine, by its id, or by its whole path."""
    try:
        minari: Any = importlib.import_module("minari")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data:minari:{id} needs the package {error.name}: "
            '`pip install -e "packages/offline[minari]"`.'
        ) from error
    try:
        dataset = minari.load_dataset(id)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"Minari has no data set {id} that it can read: {error} (`minari download {id}` "
            "fetches a published one)."
        ) from error
    return Dataset.from_minari(dataset)
