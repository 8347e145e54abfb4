"""What the live page shows of runs and sweeps, with films that somebody who watches asked for."""

from __future__ import annotations

import contextlib
import html
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from podracer.io.edits import Sealed, read_object, read_sealed
from podracer.io.text import redact
from podracer.reports.charts import Groups, curves
from podracer.reports.console import clock, compact, number, percent
from podracer.reports.page import section, table, tiles
from podracer.reports.run import RETURNS, configuration, crash_note, group_runs, learning_sections
from podracer.reports.seeds import REMARKS, final_scores, remarks
from podracer.reports.selection import lineage_figures
from podracer.reports.sweep import ranking, sweep
from podracer.reports.timeline import utilization_section
from podracer.reports.watch.files import Tail, signature
from podracer.scores.runs import RunRecords, members_of, pod_records, pods_in, with_parts
from podracer.scores.score import returns_of

FILMS = ("play.mp4", "play.gif")  # the first of them is shown
_EVALUATION = "evaluation_return"
_MEMBER_RECORDS = 20_000  # in all pods together at most


class WatchedRun:
    """One run's files, read as they grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file, self._pods = Tail(path / "metrics.jsonl"), Tail(path / "pods.jsonl")
        self._signature: tuple[tuple[int, ...], ...] = ()
        self._sealed, self._compared = Sealed(), list[tuple[int, ...]]()
        self.records = RunRecords(path.name, {}, [], {}, path)
        self.pods: list[dict[str, Any]] = []  # records of a population, a list for each metric

    def update(self) -> bool:
        """Read what is new, and return whether anything is."""
        names = ("config.json", "crash.json", "pods.jsonl", "metrics.jsonl", *FILMS)
        current = tuple(signature(self.path / name) for name in names)
        if current == self._signature:
            return False
        self._pods.update()  # first, so that the run's own records reach as far
        self.metrics_file.update()
        files = [read_object(self.path / name) for name in ("config.json", "crash.json")]
        config, crash = redact(files, stable=True)
        if not isinstance(config.get("experiment", {}), dict):
            config = {}
        self._compare_seals()
        records = [*map(with_parts, self.metrics_file.records)]
        self.records = RunRecords(self.path.name, config, records, crash, self.path, self._sealed)
        self.pods = pod_records(config, self._pods.records) if pods_in(config) else []
        self._signature = current  # at last: what could not be read is read again
        return True

    def _compare_seals(self) -> None:
        """Compare the files with their seals, where they may differ from them now.

        Records that are added while the run goes on are its own.
        """
        names = ("config.json", "checkpoints", "metrics.jsonl", "pods.jsonl")
        current = [signature(self.path / name) for name in names]
        if self.records.progress < 1:
            current[2:] = [mark[:2] for mark in current[2:]]
        if current != self._compared:
            self._sealed, self._compared = read_sealed(self.path), current

    @property
    def film(self) -> Path | None:
        """The film that `podracer play` has made of the run."""
        films = (self.path / name for name in FILMS)
        return next((path for path in films if path.is_file() and not path.is_symlink()), None)

    @property
    def last_write(self) -> float:
        """Time of the last record, in seconds since 1970; 0 if there is none."""
        return next((mark[3] / 1e9 for mark in reversed(self._signature[:4]) if mark), 0.0)

    @property
    def progress(self) -> float:
        """Share of the run's updates that are done."""
        return self.records.progress

    @property
    def status(self) -> str:
        """What the run does, as far as its files tell."""
        if self.records.crash:
            return "ended by an error"
        if self.progress == 1 or self.records.early_end == "target_return":
            return "finished"
        if self.records.early_end == "max_seconds":
            return "finished: out of time"
        if not self.records.records:
            return "no record yet"
        return f"wrote at {time.strftime('%H:%M:%S', time.localtime(self.last_write))}"

    @property
    def notes(self) -> str:
        """Sentence about lines that cannot be read."""
        count = self.metrics_file.unreadable + self._pods.unreadable
        return f"{count:,} lines of {self.path.name} are no records." if count else ""

    @property
    def members(self) -> list[RunRecords]:
        """The run, or the pods of a population as far as their scores need it."""
        if not self.pods:
            return [self.records]
        return members_of(self.records, self.pods, only_scores=True)

    @property
    def evaluations(self) -> tuple[float | None, float | None]:
        """The last evaluation and the best one.

        Of a population they are the mean over its pods, and that of the best of them.
        """
        if not self.pods:
            return self.records.final_evaluation, self.records.best_evaluation
        returns = [returns_of(r, _EVALUATION) for r in self.pods if _EVALUATION in r]
        best = [x for values in returns for x in values if np.isfinite(x)]
        last = [x for member in self.members if np.isfinite(x := member.final_evaluation)]
        return float(np.mean(last)) if last else None, max(best, default=None)


class Studio:
    """Process of `podracer play`, one at a time, and what it said of a run that has no film."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._path = Path()
        self._notes: dict[Path, str] = {}
        self._has_changed = False

    def start(self, run: WatchedRun) -> bool:
        """Begin to film the newest policy of a run, unless another film is being made."""
        if self._process is not None:
            return False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        output = [] if run.film is None else ["--out", str(run.film)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "podracer", "play", str(run.path.resolve()), *output],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        self._path, self._has_changed = run.path, True
        return True

    def has_changed(self) -> bool:
        """Return whether a film began or ended since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        if self._process is None or (code := self._process.poll()) is None:
            return has_changed
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._notes.pop(self._path, None)
        if code:
            self._notes[self._path] = lines[-1][:500] if lines else f"exit code {code}"
        self._errors.close()
        self._process = None
        return True

    @property
    def is_free(self) -> bool:
        """Whether a film can begin."""
        return self._process is None

    def note(self, run: WatchedRun) -> str:
        """Return what there is to say of a run: it is being filmed, or why it has no film."""
        is_filmed = self._process is not None and run.path == self._path
        return "being filmed" if is_filmed else self._notes.get(run.path, "")

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()


def find_runs(directory: Path) -> list[Path]:
    """Return the directories of the runs at or directly below a directory, by their last change."""
    if _holds_run(directory):
        return [directory]
    try:
        children = [path for path in directory.iterdir() if not path.is_symlink()]
    except OSError:
        return []
    return sorted(filter(_holds_run, children), key=_last_change)


def _holds_run(path: Path) -> bool:
    return bool(signature(path / "config.json") or signature(path / "metrics.jsonl"))


def _last_change(path: Path) -> int:
    return max(
        (mark[3] for name in ("metrics.jsonl", "config.json") if (mark := signature(path / name))),
        default=0,
    )


def run_sections(
    runs: Sequence[WatchedRun], num_runs: int, studio: Studio | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the parts of the page: a name and HTML, empty where there is nothing to show."""
    records = [run.records for run in runs]
    groups = group_runs(records)
    left_out = num_runs - len(runs)
    note = f"<p>{left_out:,} more runs, which wrote earlier, are not shown.</p>" if left_out else ""
    yield "overview", _overview(runs, groups) + note
    yield "crashes", "".join(crash_note(run) for run in records if run.crash)
    learning = dict(learning_sections(groups))
    yield "learning", learning["learning"]
    for index, run in enumerate(runs):
        if run.records.config.get("experiment", {}).get("pods"):
            yield f"pods-{index}", section(f"Pods of {html.escape(run.path.name)}", _pods(run))
    yield "sweep", section("Settings and score", sweep(groups))
    yield "waiting", section("Who waits for whom", utilization_section(records))
    films = [
        _film(index, run, studio)
        for index, run in enumerate(runs)
        if run.film is not None or studio is not None
    ]
    yield "films", section("Films", f'<div class="panels">{"".join(films)}</div>' if films else "")
    yield "metrics", learning["tasks"] + learning["metrics"]
    yield "machine", learning["machine"]
    if len(runs) == 1:
        settings = configuration(records)
        folded = f"<details><summary>All settings</summary>{settings}</details>"
        yield "configuration", section("Configuration", folded if settings else "")


# --- the overview ---------------------------------------------------------------------------------


def _overview(runs: Sequence[WatchedRun], groups: Groups) -> str:
    facts, marks = [_facts(run) for run in runs], remarks(groups)
    if marks:
        facts = [
            row | {REMARKS: marks.get(run.records.name, "-")}
            for run, row in zip(runs, facts, strict=True)
        ]
    notes = "".join(f"<p>{html.escape(run.notes)}</p>" for run in runs if run.notes)
    if len(runs) == 1:
        return tiles(facts[0]) + notes
    rows = ([run.path.name, *row.values()] for run, row in zip(runs, facts, strict=True))
    return table(["Run", *facts[0]], rows) + _final_scores(runs) + notes if runs else ""


def _final_scores(runs: Sequence[WatchedRun]) -> str:
    """Return the final scores of the configurations that several of the directories hold."""
    return final_scores(group_runs([m for run in runs for m in run.members]), of_directories=True)


def _facts(run: WatchedRun) -> dict[str, str]:
    records = run.records
    pace = records.series("frames_per_second", "updates")[1]
    final, best = run.evaluations
    return {
        "Evaluation": number(final),
        "Best evaluation": number(best),
        "Episode return": number(records.final_return),
        "Progress": percent(np.floor(100 * run.progress) / 100),
        "Frames": compact(records.last("frames")),
        "Frames/second": compact(float(np.median(pace[-20:])) if len(pace) else None),
        "Wall time": clock(records.last("seconds")),
        "State": run.status,
        "Recipe": records.recipe,
        "Seed": records.settings.get("seed", "-"),
        "Evaluation policy": records.acting or "-",
        "Updates": f"{records.last('updates') or 0:,}",
    }


def _film(index: int, run: WatchedRun, studio: Studio | None) -> str:
    kind = ""
    if run.film is not None:
        mark = signature(run.film)
        address = f"film/{index}?{mark[3] if mark else 0}"
        kind = (
            f'<video src="{address}" autoplay loop muted playsinline controls></video>'
            if run.film.suffix == ".mp4"
            else f'<img src="{address}" alt="film">'
        )
    text = html.escape(run.path.name)
    if studio is not None and (note := studio.note(run)):
        text += f": {html.escape(note)}"
    if studio is not None and studio.is_free:
        text += f' <button data-film="{index}">Film the newest policy</button>'
    return f"<figure>{kind}<figcaption>{text}</figcaption></figure>"


def _pods(run: WatchedRun) -> str:
    """Draw the pods of a population, and rank their configurations by their last evaluation."""
    records, (name, experiment) = run.records, (run.path.name, run.records.config["experiment"])
    size = -(-len(run.pods) * len(experiment["pods"]) // _MEMBER_RECORDS)
    kept_records = [
        x for i, x in enumerate(reversed(run.pods)) if i % max(size, 1) == 0 or _EVALUATION in x
    ]
    groups = group_runs(members_of(records, kept_records[::-1]))
    # The frames of a pod add up over all records, of which some are left out.
    block = curves(f"pods {name}", groups, [RETURNS], axes=("updates", "seconds"))
    return block + (sweep(groups) or ranking(groups)) + lineage_figures(name, experiment, run.pods)
