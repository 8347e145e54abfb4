"""Delivery: a directory of models, one of which is current; a better one takes its place.

    MODELS/record.jsonl   the truth: one line for each decision, never changed, only added to
    MODELS/000002/        a promoted run: config.json and one checkpoint, vouched for by the record
    MODELS/current        the name of the current model, for everybody else to read
    MODELS/lock           held by whoever promotes or rolls back

A model is copied, then it is recorded, then `current` names it. Each of the last two is
one file replaced whole, so a kill between any two steps leaves the old or the new model current,
and the next command brings `current` in line with the record.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from podracer.envs.trading.environment import Trading, backtest_environment
from podracer.experiments.loading import load_run
from podracer.experiments.run_setup import check_same_environment
from podracer.io.differences import differences
from podracer.io.run_directory import (
    MANIFEST,
    RunLock,
    read_limited,
    seal,
    verify_seal,
    write_bytes,
)
from podracer.trading.backtest import dates, roll
from podracer.types import CheckpointError, ConfigError

RECORD, CURRENT, CHECKPOINTS = "record.jsonl", "current", "checkpoints"
_OF_A_RUN = ("config.json", "pods.jsonl")  # what `load_run` reads besides checkpoints
# What a trading environment's settings may differ in between two models of one directory.
_FREE = {"kind", "split", "name", "period", "episode_length", "random_start", "final_discount"}


@dataclasses.dataclass(frozen=True)
class Decision:
    """A line of the record."""

    action: str  # promote, refuse or rollback
    model: str  # current from here on; of a refusal the one that stayed
    files: dict[str, str]  # SHA-256 of what that model is, see `_digests`
    run: str = ""  # whose checkpoint was judged
    updates: int = 0
    window: tuple[str, ...] = ()  # first and last bar of the validation
    score: float | None = None  # return of the policy there
    before: float | None = None  # that of the model current until then, on the same bars
    time: str = ""


def promote(models: str | Path, run: str | Path) -> Decision:
    """Make the newest checkpoint of `run` the current model if it is better, else refuse.

    Better is a larger return in the validation period of `run`, where both are played anew from
    their checkpoints; the first model is always accepted. Raises `ConfigError` for a run that does
    not trade, whose bars have changed, or that trades in another environment than the current
    model; `CheckpointError` where a checkpoint or the record cannot be trusted.
    """
    models, run = Path(models), Path(run)
    agent, env, state = load_run(run)
    backtest_environment(env)
    check_same_environment(run, env)
    validation: Trading = env.for_evaluation().inner  # type: ignore[union-attr]
    updates = int(state.update)
    facts: dict[str, Any] = {
        "run": run.resolve().name,
        "updates": updates,
        "window": tuple(dates(validation.bars)),
        "score": _gain(agent, validation, state),
    }
    with RunLock(models):
        decisions = _settled(models)
        standing = _standing(decisions)
        if standing:
            old = standing[-1]
            _verify(models, old)
            _check_comparable(models / old.model, run)
            agent, _, state = load_run(models / old.model, environment=env)
            facts["before"] = _gain(agent, validation, state)
            if not facts["score"] > facts["before"]:
                refusal = Decision("refuse", old.model, old.files, **facts)
                return _record(models, refusal)
        name = f"{sum(each.action == 'promote' for each in decisions) + 1:06d}"
        files = _copy(run, updates, models / name)
        return _record(models, Decision("promote", name, files, **facts))


def rollback(models: str | Path) -> Decision:
    """Go back to the model that was current before the current one; again goes further back.

    Raises `ConfigError` if there is none, `CheckpointError` if it is no longer what it was.
    """
    models = Path(models)
    current(models)  # refuses what is no directory of models, before a lock is left there
    with RunLock(models):
        decisions = _settled(models)
        standing = _standing(decisions)
        if len(standing) < 2:
            raise ConfigError(f"{models} has no model before {standing[-1].model} to go back to.")
        before = standing[-2]
        _verify(models, before)
        return _record(models, Decision("rollback", before.model, before.files))


def current(models: str | Path) -> Path:
    """The directory of the current model, which `podracer.load` and every command for runs take.

    Raises `ConfigError` if there is none.
    """
    models = Path(models)
    standing = _standing(_read(models))
    if not standing:
        raise ConfigError(f"{models} has no model yet: promote a run to it.")
    return models / standing[-1].model


def _gain(agent: Any, validation: Trading, state: Any) -> float:
    """The return of a policy in the validation period: 0.1 is a gain of a tenth."""
    equity = roll(agent, validation, agent.actor_params(state.learner), state.key).equity
    return float(equity[-1] / equity[0] - 1)


def _check_comparable(model: Path, run: Path) -> None:
    """Both must trade the same tickers under the same terms, or their figures mean nothing."""

    def terms(directory: Path) -> dict[str, Any]:
        inner = json.loads(read_limited(directory / "config.json"))["environment"]["inner"]
        rest = {name: value for name, value in inner.items() if name not in _FREE}
        return {"tickers": inner["split"]["train"]["market"]["tickers"], **rest}

    for name, (old, new) in differences(terms(model), terms(run)).items():
        raise ConfigError(
            f"the current model trades with {name}={old} and {run} with {new}: "
            "promote it to a directory of its own."
        )


def _copy(run: Path, updates: int, model: Path) -> dict[str, str]:
    """Make a run's checkpoint a model of its own, which `_digests` then tell from any other."""
    shutil.rmtree(model, ignore_errors=True)  # what a killed promotion left
    step = Path(CHECKPOINTS) / f"{updates:012d}"
    try:
        shutil.copytree(run / step, model / step)
        verify_seal(model / step)
    except (OSError, CheckpointError):
        if (run / step / MANIFEST).exists():
            raise
        raise CheckpointError(
            f"{run} goes on training and has retired the checkpoint at update {updates}, which was "
            "judged: promote it again."
        ) from None
    seal(model / CHECKPOINTS)
    for name in _OF_A_RUN:
        if (run / name).is_file():
            write_bytes(model / name, read_limited(run / name))
    return _digests(model)


def _verify(models: Path, decision: Decision) -> None:
    """Raise `CheckpointError` if a model is not what was promoted. Reports may lie beside it."""
    model = models / decision.model
    verify_seal(model / CHECKPOINTS)
    if _digests(model) != decision.files:
        raise CheckpointError(f"{model} is not the model that {models / RECORD} tells of")


def _digests(model: Path) -> dict[str, str]:
    """SHA-256 of the configuration, and of the manifest that vouches for every checkpointed byte
    and for there being no other checkpoint."""
    names = (*_OF_A_RUN, f"{CHECKPOINTS}/{MANIFEST}")
    return {
        name: hashlib.sha256(read_limited(model / name)).hexdigest()
        for name in names
        if (model / name).is_file()
    }


# --- the record ----------------------------------------------------------------------------------


def _record(models: Path, decision: Decision) -> Decision:
    """Add a decision and act on it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    decision = dataclasses.replace(decision, time=now)
    path, line = models / RECORD, json.dumps(dataclasses.asdict(decision)) + "\n"
    write_bytes(path, (path.read_bytes() if path.exists() else b"") + line.encode())
    write_bytes(models / CURRENT, f"{decision.model}\n".encode())
    return decision


def _settled(models: Path) -> list[Decision]:
    """The record, after which `current` says the same: a kill may have come between the two."""
    decisions = _read(models)
    if standing := _standing(decisions):
        write_bytes(models / CURRENT, f"{standing[-1].model}\n".encode())
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


def _standing(decisions: list[Decision]) -> list[Decision]:
    """The promotions that were not rolled back; the last one is current."""
    standing: list[Decision] = []
    for decision in decisions:
        if decision.action == "promote":
            standing.append(decision)
        elif decision.action == "rollback":
            standing.pop()
    return standing
