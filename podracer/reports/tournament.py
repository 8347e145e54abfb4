"""Self-contained HTML report on a tournament, also while it runs."""

from __future__ import annotations

import html
from collections import Counter
from pathlib import Path

from podracer.io.paths import user_path
from podracer.io.run_directory import write_bytes
from podracer.io.text import redact
from podracer.reports import tournament_figures as pictures
from podracer.reports import tournament_log
from podracer.reports.page import page, section, table, tiles
from podracer.reports.run import configuration
from podracer.scores.format import clock, compact
from podracer.scores.runs import RunRecords
from podracer.tournament import events
from podracer.tournament.leaderboard import read_events

_NAMED = 24  # ancestors
_ERRORS = "<p><small>Scores are mean returns &plusmn; their standard errors.</small></p>"


def write_tournament_report(directory: Path, file: Path, refresh: float = 0) -> Path:
    """Write the report on the tournament in `directory` to a file, and return its path.

    A browser that shows it loads it again every `refresh` seconds, if not 0.
    Raises `ConfigError` if there is no tournament, `CheckpointError` if its log is damaged.
    """
    directory, file = user_path(directory).resolve(), user_path(file)
    log = tournament_log.TournamentLog(read_events(directory))
    events.check_settings(log.state.header)
    head, rows = tournament_log.board_rows(log.state.board)
    note = _ERRORS if any(entry.episodes > 1 for entry in log.state.board) else ""
    failures = [
        [clock(log.since(event.time)), *cells] for event in log.events if (cells := _failure(event))
    ]
    failure_head = ["Time", "Pod", "Round", "What", "Reason"]
    body = [
        tiles(facts(log)),
        section("Leaderboard", note + table(head, rows) if rows else ""),
        section("Scores", pictures.scores(log)),
        section("Lineage", ancestry(log) + pictures.lineage(log)),
        section("Hyperparameters", pictures.hyperparameters(log)),
        section("Failures", table(failure_head, failures) if failures else ""),
        section("Configuration", configuration(_experiments(log))),
    ]
    write_bytes(file, page(directory.name, body, refresh).encode(errors="replace"))
    return file


def facts(log: tournament_log.TournamentLog) -> dict[str, str]:
    """Return the facts of the summary."""
    state, settings = log.state, log.state.header.tournament
    best = state.board[0] if state.board else None
    pods = state.pods.values()
    # An entry also counts the frames of its first parent.
    parents = [log.entries[entry.parents[0]] for entry in log.entries.values() if entry.parents]
    frames = sum(x.frames for x in log.entries.values()) - sum(x.frames for x in parents)
    statuses = Counter(pod.status for pod in pods)
    counts = [f"{statuses[s]} {s}" for s in ("running", "quarantined") if s in statuses]
    return {
        "Best entry": best.id if best else "-",
        "Score": tournament_log.score_text(best) if best else "-",
        "Frames in all": compact(frames),
        "Wall time": clock(log.seconds),
        "Rounds": f"{sum(pod.round for pod in pods)} of {settings['rounds'] * len(pods)}",
        "Entries": f"{len(log.entries)}, {len(state.board)} on the board",
        "Pods": ", ".join([str(len(pods)), *counts]),
        "Selection": settings["selection"]["kind"],
        "Failures": str(sum(isinstance(event, events.Failed) for event in log.events)),
        "Refused reports": str(state.rejected),
        "Episodes of an evaluation": ", ".join(
            [str(state.header.episodes), *tournament_log.ways_of_acting(state)]
        ),
        "Seed": str(state.header.seed),
    }


def ancestry(log: tournament_log.TournamentLog) -> str:
    """Return a sentence about the ancestors of the winner."""
    if not log.ancestry:
        return ""
    best, *ancestors = (html.escape(entry.id) for entry in log.ancestry)
    if not ancestors:
        return f"<p><b>{best}</b> began fresh.</p>"
    remainder = f" and {len(ancestors) - _NAMED} more" if len(ancestors) > _NAMED else ""
    return f"<p><b>{best}</b> descends from {', '.join(ancestors[:_NAMED])}{remainder}.</p>"


def _failure(event: events.Event) -> list[str]:
    match event:
        case events.Failed():
            return [str(event.pod), str(event.round), "failed", event.reason]
        case events.Rejected():
            return [str(event.pod), str(event.round), "report refused", event.reason]
        case events.Stopped():
            return [str(event.pod), "", event.status, event.reason]
    return []


def _experiments(log: tournament_log.TournamentLog) -> list[RunRecords]:
    """Return the configurations of the experiments that pods began with, and of the tournament."""
    settings = redact(log.state.header.tournament, stable=True)
    experiments = settings.pop("experiments")
    configs = [{"experiment": {"tournament": settings, "experiment": e}} for e in experiments]
    return [
        RunRecords(experiment["recipe"], config, records=[], crash={})
        for experiment, config in zip(experiments, configs, strict=True)
    ]
