"""Sinks for experiment trackers: Weights & Biases, trackio and MLflow.

Where a tracker keeps its runs, under which project and whether it is online are the tracker's own
settings, such as `WANDB_PROJECT`, `WANDB_MODE`, `TRACKIO_DIR` or `MLFLOW_TRACKING_URI`. A resumed
run goes on in the tracker's run that it began.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from podracer.config.serialization import to_json
from podracer.errors import ConfigError, install_command
from podracer.io.differences import leaves
from podracer.io.sinks import Record, Sink, scalars
from podracer.io.steps import identity_of
from podracer.io.text import redact
from podracer.run.result import RunInfo

_PROJECT = "podracer"  # where nothing else is set


def trackers(names: Sequence[str]) -> list[Sink]:
    """Return the sinks of these trackers. Raises `ConfigError` for one that is not installed."""
    makers: dict[str, type[Sink]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"`track={name}` needs its package: {install_command(name)}.")
    return [makers[name]() for name in names]


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
    """Sink for MLflow, for `callbacks` of `podracer.train`.

    The tracker's run is begun by the first record.
    """

    close_seconds = 60.0

    def open(self, info: RunInfo) -> None:
        self._info = info
        self._client: Any = None
        self._run = ""

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found]

        client = self._client = self._client or self._begin()
        milliseconds, step = int(time.time() * 1000), int(record["updates"])
        metrics = [
            Metric(name, value, milliseconds, step) for name, value in scalars(record).items()
        ]
        client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run)

    def _begin(self) -> Any:
        from mlflow import MlflowClient  # type: ignore[import-not-found]
        from mlflow.entities import Param  # type: ignore[import-not-found]

        client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else client.create_experiment(name)
        run_id = _run_id(self._info)
        runs = client.search_runs([number], f"tags.podracer = '{run_id}'")
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            run = client.create_run(
                number, run_name=self._info.run_dir.name, tags={"podracer": run_id}
            )
            self._run = run.info.run_id
            settings = _settings(self._info).items()
            params = [Param(key, str(value)[:500]) for key, value in settings]
            client.log_batch(self._run, params=params)
        return client


def _settings(info: RunInfo) -> dict[str, Any]:
    """Return the settings by dotted name, without secrets: others read them."""
    return dict(leaves(redact(to_json(info.experiment), stable=True)))


def _run_id(info: RunInfo) -> str:
    return str(identity_of(info.run_dir)["id"])
