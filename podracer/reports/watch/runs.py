"""What the live page shows of runs and sweeps."""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podracer.io.edits import Sealed, read_object, read_sealed
from podracer.io.sinks import TASK_REWARD, group
from podracer.reports.console import clock, compact, number, percent
from podracer.reports.curves import (
    COLORS,
    POD,
    WINNER,
    Groups,
    Panel,
    legend,
)
from podracer.reports.page import section, table, tiles
from podracer.reports.run import CURVES, configuration, crash_note, group_runs, metric_title
from podracer.reports.seeds import (
    REMARKS,
    final_scores,
    remarks,
    spread_text,
)
from podracer.reports.selection import LEGEND, lineages
from podracer.reports.timeline import ACTOR_STAGES, LEARNER_STAGES, segments, verdict
from podracer.reports.watch.chart import HEIGHT, Chart, extent
from podracer.reports.watch.curves import draw_group, draw_panels, group_legend
from podracer.reports.watch.files import Tail, signature
from podracer.scores.runs import (
    RunRecords,
    has_selection,
    members_of,
    pod_records,
    pods_in,
)
from podracer.scores.score import returns_of
from podracer.scores.seeds import score_of_runs

FILMS = ("play.mp4", "play.gif")
_WAITING = 4  # runs of which is shown who waits
_METRICS = 12  # panels
_EVALUATION = "evaluation_return"


class WatchedRun:
    """One run's files, read as they grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics, self._pods = Tail(path / "metrics.jsonl"), Tail(path / "pods.jsonl")
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
        self._metrics.update()
        config, crash = (read_object(self.path / name) for name in ("config.json", "crash.json"))
        if not isinstance(config.get("experiment", {}), dict):
            config = {}
        self._compare_seals()
        self.records = RunRecords(
            self.path.name, config, self._metrics.records, crash, self.path, self._sealed
        )
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
        count = self._metrics.unreadable + self._pods.unreadable
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


def find_runs(directory: Path) -> list[Path]:
    """Return the directories of the runs at or directly below a directory, by their last change."""
    if _holds_run(directory):
        return [directory]
    try:
        children = [path for path in directory.iterdir() if not path.is_symlink()]
    except OSError:
        return []
    found = [path for path in children if _holds_run(path)]
    return sorted(found, key=_last_change)


def _holds_run(path: Path) -> bool:
    return bool(signature(path / "config.json") or signature(path / "metrics.jsonl"))


def _last_change(path: Path) -> int:
    return max(
        (mark[3] for name in ("metrics.jsonl", "config.json") if (mark := signature(path / name))),
        default=0,
    )


def run_sections(runs: Sequence[WatchedRun], num_found: int) -> Iterator[tuple[str, str]]:
    """Yield the parts of the page: a name and HTML, empty where there is nothing to show."""
    records = [run.records for run in runs]
    groups = group_runs(records)
    left_out = num_found - len(runs)
    note = f"<p>{left_out:,} more runs, which wrote earlier, are not shown.</p>" if left_out else ""
    yield "overview", _overview(runs, groups) + note
    yield "crashes", "".join(crash_note(run) for run in records if run.crash)
    for title, _, _, panels in CURVES:
        yield title.lower(), section(title, draw_panels(groups, panels))
    for index, run in enumerate(runs):
        if run.records.config.get("experiment", {}).get("pods"):
            yield f"pods-{index}", section(f"Pods of {html.escape(run.path.name)}", _sweep(run))
    waiting = [part for run in records if (part := _waiting(run, named=len(runs) > 1))]
    yield "waiting", section("Who waits for whom", "".join(waiting[:_WAITING]))
    films = [_film(index, run) for index, run in enumerate(runs) if run.film is not None]
    yield "films", section("Films", f'<div class="panels">{"".join(films)}</div>' if films else "")
    metrics = draw_panels(groups, _metric_panels(records))
    yield "metrics", section("Losses and other metrics", metrics)
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
    return final_scores(group_runs([m for run in runs for m in run.members]), across=True)


def _facts(run: WatchedRun) -> dict[str, str]:
    records = run.records
    pace = records.series("frames_per_second", "updates")[1]
    final, best = run.evaluations
    return {
        "Evaluation": number(final),
        "Best evaluation": number(best),
        "Episode return": number(records.final_return),
        "Progress": percent(run.progress),
        "Frames": compact(records.last("frames")),
        "Frames/second": compact(float(np.median(pace[-20:])) if len(pace) else None),
        "Wall time": clock(records.last("seconds")),
        "State": run.status,
        "Recipe": records.recipe,
        "Seed": records.settings.get("seed", "-"),
        "Evaluation policy": records.acting or "-",
        "Updates": f"{records.last('updates') or 0:,}",
    }


def _film(index: int, run: WatchedRun) -> str:
    assert run.film is not None
    mark = signature(run.film)
    address = f"film/{index}?{mark[3] if mark else 0}"
    kind = (
        f'<video src="{address}" autoplay loop muted playsinline controls></video>'
        if run.film.suffix == ".mp4"
        else f'<img src="{address}" alt="film">'
    )
    return f"<figure>{kind}<figcaption>{html.escape(run.path.name)}</figcaption></figure>"


# --- curves ---------------------------------------------------------------------------------------


def _metric_panels(runs: Sequence[RunRecords]) -> list[Panel]:
    """Return a panel for each metric of the agents, losses first."""
    keys = {key: None for run in runs for record in run.records[-1:] for key in record}
    ordered = sorted(keys, key=lambda key: ("loss" not in key, key))
    panels = [
        Panel(metric_title(key.removeprefix(TASK_REWARD)), key, "frames")
        for key in ordered
        if group(key) == "learn"
    ]
    return panels[:_METRICS]


# --- a sweep --------------------------------------------------------------------------------------


def _sweep(run: WatchedRun) -> str:
    """Draw the pods of a population, and rank their configurations by their last evaluation."""
    experiment = run.records.config["experiment"]
    pods = experiment["pods"]
    labels = [
        ", ".join(f"{item['name']} {number(item['value'])}" for item in pod["hyperparameters"])
        for pod in pods
    ]
    if has_selection(experiment):  # which changes them
        labels = ["all pods"] * len(pods)
    members: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label or "all seeds", []).append(index)
    charts, runs = [], run.members
    for key, title in (("episode_return", "Episode return"), (_EVALUATION, "Evaluation")):
        rows = [record for record in run.pods if key in record]
        if not rows:
            continue
        updates = np.array([record["updates"] for record in rows], float)
        values = np.stack([returns_of(record, key) for record in rows])
        curves = {
            pod: (updates[finite], values[finite, pod])
            for pod in range(len(pods))
            if (finite := np.isfinite(values[:, pod])).any()
        }
        finite_values = values[np.isfinite(values)]
        chart = Chart(
            f"{title} of each pod", "updates", (0, updates[-1]), extent([finite_values], 0.04)
        )
        for color, numbers in zip(itertools.cycle(COLORS), members.values(), strict=False):
            drawn = [pod for pod in numbers if pod in curves]
            sound = [curves[pod] for pod in drawn if not runs[pod].has_diverged]
            draw_group(chart, [curves[pod] for pod in drawn], sound, color)
        charts.append(chart.svg())
    names = group_legend(members) if len(members) > 1 else ""
    figures = f'{names}<div class="panels">{"".join(charts)}</div>'
    return figures + _ranking(members, runs) + _lineages(run)


def _ranking(members: Mapping[str, Sequence[int]], runs: Sequence[RunRecords]) -> str:
    """Return a table of configurations, given by the numbers of their pods, best first."""
    groups = {label: [runs[pod] for pod in numbers] for label, numbers in members.items()}
    scores = {label: score_of_runs(pods, groups.values()) for label, pods in groups.items()}
    ranking = sorted(scores, key=lambda label: scores[label].rank)[:20]
    head = ["Configuration", "Pods", "Last evaluation", "95 % interval, or each seed", REMARKS]
    rows = [
        [
            label,
            str(len(members[label])),
            number(scores[label].mean),
            spread_text(scores[label]),
            "; ".join(scores[label].marks) or "-",
        ]
        for label in ranking
    ]
    return table(head, rows)


def _lineages(run: WatchedRun) -> str:
    """Draw who descends from whom in a population under selection."""
    charts = []
    for lineage in lineages(run.records.config["experiment"], run.pods):
        pods, winner = (lines[np.isfinite(lines).all((1, 2))] for lines in lineage[2:])
        title = lineage.title
        if lineage.is_logarithmic:
            title = f"{title}, decimal logarithm"
            for lines in (pods, winner):
                lines[..., 1] = np.log10(lines[..., 1])
        x, y = (extent([pods[..., axis].ravel()], margin) for axis, margin in ((0, 0.0), (1, 0.04)))
        chart = Chart(title, "updates", x, y)
        chart.lines(pods, POD, 0.8, 0.5)
        chart.lines(winner, WINNER, 2.0)
        charts.append(chart.svg())
    return f'{legend(LEGEND)}<div class="panels">{"".join(charts)}</div>' if charts else ""


# --- who waits ------------------------------------------------------------------------------------


def _waiting(run: RunRecords, *, named: bool) -> str:
    """Return who waits for whom under Sebulba, in words and over time."""
    words = verdict(run)
    if not words:
        return ""
    name = f"<b>{html.escape(run.name)}</b>: " if named else ""
    charts, legends = [], []
    for title, stages in (("Actors", ACTOR_STAGES), ("Learner", LEARNER_STAGES)):
        stretches = segments(run, [key for key, *_ in stages])
        if not stretches:
            continue
        colors = [color for *_, color in stages]
        x = min(start[0] for start, *_ in stretches), max(end[-1] for _, end, _ in stretches)
        names = {0.0: "0 %", 0.5: "50 %", 1.0: "100 %"}
        chart = Chart(f"{title}: share of time", "seconds", x, (0, 1), height=HEIGHT, names=names)
        for start, end, seconds in stretches:
            chart.shares(start, end, seconds, colors)
        legends.append(legend([(text, color) for _, text, color in stages], title))
        charts.append(chart.svg())
    panels = f'<div class="panels">{"".join(charts)}</div>' if charts else ""
    return f"<p>{name}{html.escape(words)}</p>{''.join(legends)}{panels}"
