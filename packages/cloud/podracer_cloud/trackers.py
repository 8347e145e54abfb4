"""Sinks for experiment trackers: Weights & Biases, trackio and MLflow.

Where a tracker keeps its runs, under which project and whether it is online are the tracker's own
settings, such as `WANDB_PROJECT`, `WANDB_MODE`, `TRACKIO_DIR` or `MLFLOW_TRACKING_URI`. A resumed
run goes on in the tracker's run that it began.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from typing import Any

from podracer.config.serialization import to_json
from podracer.errors import ConfigError
from podracer.io.differences import leaves
from podracer.io.sinks import Record, Sink, scalars
from podracer.io.steps import identity_of
from podracer.io.text import redact
from podracer.run.result import RunInfo

_PROJECT = "podracer"  # where nothing else is set


def wandb(argument: str = "") -> Sink:
    """Return a sink for Weights & Biases. Raises `ConfigError` where that is not installed."""
    return _installed(Wandb)


def trackio(argument: str = "") -> Sink:
    """Return a sink for trackio. Raises `ConfigError` where that is not installed."""
    return _installed(Trackio)


def mlflow(argument: str = "") -> Sink:
    """Return a sink for MLflow. Raises `ConfigError` where that is not installed."""
    return _installed(Mlflow)


def _installed(kind: type[Wandb] | type[Mlflow]) -> Sink:
    if importlib.util.find_spec(kind.library) is None:
        name = kind.library
        command = f'pip install -e "packages/cloud[{name}]"'
        raise ConfigError(f"`track={name}` needs its package: {command}.")
    return kind()


class Wandb:
    """Sink for Weights & Biases, for `callbacks` of `podracer.train`.

    The tracker's run is begun by the first record.
    """

    close_seconds = 60.0  # to send what is left
    library = "wandb"

    def open(self, info: RunInfo) -> None:
        config = {**_settings(info), "devices_used": info.devices}
        settings = {"name": info.run_dir.name, **self._settings(info)}
        self._open = partial(_init, self.library, **settings, config=config, resume="allow")
        self._run: Any = None

    def _settings(self, info: RunInfo) -> dict[str, str]:
        return {"id": _run_id(info), "dir": str(info.run_dir)}

    def write(self, record: Record) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(scalars(record), step=int(record["updates"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackio(Wandb):
    """Sink for trackio, for `callbacks` of `podracer.train`; its interface is that of wandb."""

    library = "trackio"

    def _settings(self, info: RunInfo) -> dict[str, str]:
        return {"name": f"{info.run_dir.name}-{_run_id(info)}"}  # two of one name would be one run


def _init(library: str, **settings: Any) -> Any:
    project = os.environ.get(f"{library.upper()}_PROJECT", _PROJECT)
    return importlib.import_module(library).init(project=project, **settings)


class Mlflow:
    """Sink for MLflow, for `callbacks` of `podracer.train`; its active run is the thread's.

    The tracker's run is begun by the first record.
    """

    close_seconds = 60.0
    library = "mlflow"

    def open(self, info: RunInfo) -> None:
        self._info, self._library = info, None

    def write(self, record: Record) -> None:
        library = self._library = self._library or self._begin()
        library.log_metrics(scalars(record), step=int(record["updates"]))

    def close(self) -> None:
        if self._library is not None:
            self._library.end_run()

    def _begin(self) -> Any:
        library, run_id = importlib.import_module("mlflow"), _run_id(self._info)
        library.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        same = f"tags.podracer = '{run_id}'"
        earlier = library.search_runs(filter_string=same, output_format="list")
        name, ids = self._info.run_dir.name, [run.info.run_id for run in earlier[:1]]
        library.start_run(*ids, run_name=name, tags={"podracer": run_id})
        if not earlier:
            library.log_params({k: str(x)[:500] for k, x in _settings(self._info).items()})
        return library


def _settings(info: RunInfo) -> dict[str, Any]:
    """Return the settings by dotted name, without secrets: others read them."""
    return dict(leaves(redact(to_json(info.experiment), stable=True)))


def _run_id(info: RunInfo) -> str:
    return str(identity_of(info.run_dir)["id"])
