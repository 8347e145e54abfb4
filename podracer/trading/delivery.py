"""Delivery: a directory of models, one of which is current until a better one replaces it.

    MODELS/record.jsonl   the source of truth: one line for each decision, append-only
    MODELS/000002/        a promoted run: config.json and one checkpoint, with digests in the record
    MODELS/current        name of the current model, for other programs to read
    MODELS/lock           held during a promotion or a rollback

A model is first copied, then recorded, and then `current` is updated. Each of the last two steps
replaces one file atomically, so a kill between any two steps leaves the old or the new model
current, and the next command makes `current` agree with the record.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from podracer.envs.trading.environment import Trading, backtest_environment
from podracer.experiments.loading import load_run
from podracer.experiments.run_setup import check_same_environment
from podracer.io.checkpoint import Choice
from podracer.io.differences import differences
from podracer.io.directories import is_tournament
from podracer.io.paths import user_path
from podracer.io.reading import read_limited
from podracer.io.run_directory import RunLock, copy_file, write_bytes
from podracer.io.seal import MANIFEST, file_digest, seal, verify_seal
from podracer.io.steps import CHECKPOINTS, check_holds_no_run, step_name
from podracer.trading.backtest import date_range, simulate
from podracer.types import CheckpointError, ConfigError

RECORD, CURRENT = "record.jsonl", "current"
_RUN_FILES = ("config.json", "pods.jsonl")  # what `load_run` reads besides checkpoints
# Settings of the trading environment that may differ between the models of one directory.
_IGNORED_SETTINGS = {
    "kind",
    "periods",
    "name",
    "period",
    "episode_length",
    "random_start",
    "final_discount",
}


@dataclasses.dataclass(frozen=True)
class Decision:
    """A line of the record."""

    action: str  # promote, refuse or rollback
    model: str  # the current model after the decision
    files: dict[str, str]  # SHA-256 of the files of that model, see `_digests`
    run: str = ""  # name of the run that was compared
    updates: int = 0  # of its checkpoint
    window: tuple[str, ...] = ()  # first and last bar of the validation period
    score: float | None = None  # return of the run's policy in it
    previous_score: float | None = None  # return of the model that was current, on the same bars
    time: str = ""  # ISO 8601, UTC


def promote(models: str | Path, run: str | Path, *, checkpoint: Choice = "newest") -> Decision:
    """Make a checkpoint of `run` the current model if it is better, else refuse.

    A run is better if its return in its validation period is larger; both models are simulated from
    their checkpoints. The first model is always accepted. `checkpoint` is that of `podracer.load`.

    Raises `ConfigError` for a run that does not trade, whose bars have changed, or that trades
    under other terms than the current model; `CheckpointError` where a checkpoint or the record is
    damaged.
    """
    models, run = user_path(models), user_path(run)
    agent, env, state, _ = load_run(run, checkpoint=checkpoint)
    backtest_environment(env)
    check_same_environment(run, env)
    validation: Trading = env.for_evaluation().inner  # type: ignore[union-attr]
    updates = int(state.update)
    details: dict[str, Any] = {
        "run": run.resolve().name,
        "updates": updates,
        "window": tuple(date_range(validation.bars)),
        "score": _validation_return(agent, validation, state),
    }
    with RunLock(models, partial(_check_claim, models)):
        decisions = _read_and_repair(models)
        promotions = _active_promotions(decisions)
        if promotions:
            current = promotions[-1]
            _verify(models, current)
            _check_comparable(models / current.model, run)
            agent, _, state, _ = load_run(models / current.model, environment=env)
            details["previous_score"] = _validation_return(agent, validation, state)
            if not details["score"] > details["previous_score"]:
                refusal = Decision("refuse", current.model, current.files, **details)
                return _record(models, refusal)
        name = f"{sum(decision.action == 'promote' for decision in decisions) + 1:06d}"
        files = _copy(run, updates, models / name)
        return _record(models, Decision("promote", name, files, **details))


def rollback(models: str | Path) -> Decision:
    """Make the previous model the current one again; a second rollback goes further back.

    Raises `ConfigError` if there is none, `CheckpointError` if its files have changed.
    """
    models = user_path(models)
    with RunLock(models, partial(current_model, models)):
        decisions = _read_and_repair(models)
        promotions = _active_promotions(decisions)
        if len(promotions) < 2:
            raise ConfigError(f"{models} has no model before {promotions[-1].model} to go back to.")
        previous = promotions[-2]
        _verify(models, previous)
        return _record(models, Decision("rollback", previous.model, previous.files))


def current_model(models: str | Path) -> Path:
    """Return the directory of the current model: a run directory for every command.

    Raises `ConfigError` if there is none.
    """
    models = user_path(models)
    promotions = _active_promotions(_read(models))
    if not promotions:
        raise ConfigError(f"{models} has no model yet: promote a run to it.")
    return models / promotions[-1].model


def _check_claim(models: Path) -> None:
    """Raise `ConfigError` if a directory for models holds something else."""
    check_holds_no_run(models)
    if is_tournament(models):
        raise ConfigError(f"{models} holds a tournament: choose another name.")


def _validation_return(agent: Any, validation: Trading, state: Any) -> float:
    """Return the return of a policy in the validation period: 0.1 is a gain of 10 %."""
    equity = simulate(agent, validation, agent.actor_params(state.learner), state.key).equity
    return float(equity[-1] / equity[0] - 1)


def _check_comparable(model: Path, run: Path) -> None:
    """Raise `ConfigError` unless both trade the same tickers under the same terms."""

    def terms(directory: Path) -> dict[str, Any]:
        inner = json.loads(read_limited(directory / "config.json"))["environment"]["inner"]
        settings = {key: value for key, value in inner.items() if key not in _IGNORED_SETTINGS}
        return {"tickers": inner["periods"]["train"]["market"]["tickers"], **settings}

    for name, (old, new) in differences(terms(model), terms(run)).items():
        raise ConfigError(
            f"the current model trades with {name}={old} and {run} with {new}: "
            "promote it to a directory of its own."
        )


def _copy(run: Path, updates: int, model: Path) -> dict[str, str]:
    """Copy a run's checkpoint and configuration to a model; return the digests of its files."""
    shutil.rmtree(model, ignore_errors=True)  # left by a killed promotion
    step = Path(CHECKPOINTS) / step_name(updates)
    try:
        shutil.copytree(run / step, model / step)
        verify_seal(model / step)
    except (OSError, CheckpointError):
        if (run / step / MANIFEST).exists():
            raise
        raise CheckpointError(
            f"{run} is still training and has deleted the checkpoint at update {updates}, which "
            "was compared: promote it again."
        ) from None
    seal(model / CHECKPOINTS)
    for name in _RUN_FILES:
        if (run / name).is_file():
            copy_file(run / name, model / name)
    return _digests(model)


def _verify(models: Path, decision: Decision) -> None:
    """Raise `CheckpointError` if a model is not what was promoted; other files are ignored."""
    model = models / decision.model
    verify_seal(model / CHECKPOINTS)
    if _digests(model) != decision.files:
        raise CheckpointError(f"{model} is not the model that {models / RECORD} describes")


def _digests(model: Path) -> dict[str, str]:
    """Return SHA-256 digests of the configuration and of the manifest of all checkpoint files."""
    names = (*_RUN_FILES, f"{CHECKPOINTS}/{MANIFEST}")
    return {name: file_digest(model / name) for name in names if (model / name).is_file()}


# --- the record ----------------------------------------------------------------------------------


def _record(models: Path, decision: Decision) -> Decision:
    """Append a decision to the record, then update `current`."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    decision = dataclasses.replace(decision, time=time)
    path, line = models / RECORD, json.dumps(dataclasses.asdict(decision)) + "\n"
    write_bytes(path, (read_limited(path) if path.exists() else b"") + line.encode())
    write_bytes(models / CURRENT, f"{decision.model}\n".encode())
    return decision


def _read_and_repair(models: Path) -> list[Decision]:
    """Return the record, and make `current` agree with it after a kill between the two."""
    decisions = _read(models)
    if promotions := _active_promotions(decisions):
        write_bytes(models / CURRENT, f"{promotions[-1].model}\n".encode())
    return decisions


def _read(models: Path) -> list[Decision]:
    path = models / RECORD
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in read_limited(path).splitlines()]
        return [Decision(**{**line, "window": tuple(line["window"])}) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a record of models: {error}") from error


def _active_promotions(decisions: list[Decision]) -> list[Decision]:
    """Return the promotions that were not rolled back; the last one is current."""
    promotions: list[Decision] = []
    for decision in decisions:
        if decision.action == "promote":
            promotions.append(decision)
        elif decision.action == "rollback":
            if len(promotions) < 2:
                raise CheckpointError(f"{RECORD} has a rollback without a model to go back to.")
            promotions.pop()
    return promotions
