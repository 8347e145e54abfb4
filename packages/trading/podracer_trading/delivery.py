"""Delivery: a directory of models, one of which is current until a better one replaces it.

    MODELS/record.jsonl:  the source of truth: one line for each decision, append-only
    MODELS/000002/:       a promoted run: config.json and one checkpoint, with digests in the record
    MODELS/current:       name of the current model, for other programs to read
    MODELS/lock:          held during a promotion or a rollback

A model is first copied, then recorded, and then `current` is updated. Each of the last two steps
replaces one file atomically: a kill between two steps leaves the old or the new model current. The
next command makes `current` agree with the record.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import stat
from functools import partial
from pathlib import Path
from typing import Any

from podracer.agent import Agent
from podracer.config.experiment import Experiment
from podracer.drivers.state import TrainState
from podracer.environment import auto_reset
from podracer.errors import CheckpointError, ConfigError
from podracer.io.checkpoint import Choice
from podracer.io.differences import differences
from podracer.io.directories import is_tournament
from podracer.io.models import RECORD, RUN_FILES, check_promoted, digests
from podracer.io.paths import user_path
from podracer.io.reading import naming, read_limited
from podracer.io.run_directory import RunLock, fsync_directory, write_bytes
from podracer.io.seal import MANIFEST, seal, verify_seal
from podracer.io.steps import CHECKPOINTS, check_holds_no_run, step_name
from podracer.run.loading import load_run
from podracer_trading.backtest import date_range, load_trading, simulate
from podracer_trading.environment import Trading
from podracer_trading.models import (
    Decision,
    active_promotions,
    current_model,
    current_promotion,
    read_record,
)

__all__ = ["Decision", "current_model", "promote", "rollback"]

CURRENT = "current"
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


def promote(
    models: str | Path,
    run: str | Path,
    *,
    recipe: Experiment | str | None = None,
    checkpoint: Choice = "newest",
) -> Decision:
    """Make a checkpoint of `run` the current model if it is better, else refuse.

    A run is better if its return in its validation period is larger; both models are simulated from
    their checkpoints. The first model is always accepted. `recipe`, of both, and `checkpoint` are
    those of `podracer.load`.

    Raises `ConfigError` for a run that does not trade, whose bars have changed, or that trades
    under other terms than the current model; `CheckpointError` where a checkpoint or the record is
    damaged.
    """
    models, run = user_path(models), user_path(run)
    agent, env, state = load_trading(run, checkpoint, recipe)
    validation, updates = env.for_evaluation(), int(state.update)
    details: dict[str, Any] = {
        "run": run.resolve().name,
        "updates": updates,
        "window": tuple(date_range(validation.bars)),
        "score": validation_return(agent, validation, state),
    }
    with RunLock(models, partial(check_claim, models)):
        decisions = _read_and_repair(models)
        promotions = active_promotions(decisions)
        if promotions:
            current = promotions[-1]
            check_promoted(models / current.model)
            _check_comparable(models / current.model, run)
            previous = load_run(models / current.model, recipe, auto_reset(env))
            details["previous_score"] = validation_return(
                previous.agent, validation, previous.state
            )
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
    with RunLock(models, partial(current_promotion, models)):
        decisions = _read_and_repair(models)
        promotions = active_promotions(decisions)
        if len(promotions) < 2:
            raise ConfigError(f"{models} has no model before {promotions[-1].model} to go back to.")
        previous = promotions[-2]
        check_promoted(models / previous.model)
        return _record(models, Decision("rollback", previous.model, previous.files))


def check_claim(models: Path) -> None:
    """Raise `ConfigError` if a directory for models holds something else."""
    check_holds_no_run(models)
    if is_tournament(models):
        raise ConfigError(f"{models} holds a tournament: choose another name.")


def validation_return(agent: Agent, validation: Trading, state: TrainState) -> float:
    """Return the return of a policy in the validation period: 0.1 is a gain of 10 %."""
    params = agent.actor_params(state.learner)
    equity = simulate(agent, validation, params, state.key).equity
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
    for name in RUN_FILES:
        if (run / name).is_file():
            copy_file(run / name, model / name)
    return digests(model)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file and its mode durably; a link in the place of `target` is replaced."""
    target.unlink(missing_ok=True)
    with naming(source), source.open("rb") as reading, target.open("xb") as writing:
        os.fchmod(writing.fileno(), stat.S_IMODE(os.fstat(reading.fileno()).st_mode))
        shutil.copyfileobj(reading, writing)
        writing.flush()
        os.fsync(writing.fileno())
    fsync_directory(target.parent)


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
    decisions = read_record(models)
    if promotions := active_promotions(decisions):
        write_bytes(models / CURRENT, f"{promotions[-1].model}\n".encode())
    return decisions
