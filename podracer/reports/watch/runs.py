"""What the live page shows of runs and sweeps."""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podracer.experiments.statistics import score_of_seeds
from podracer.io.sinks import TASK_REWARD, group, returns_of
from podracer.reports.console import clock, compact, number, percent
from podracer.reports.curves import (
    COLORS,
    POD,
    WINNER,
    Groups,
    Panel,
    RunRecords,
    final_mean,
    legend,
    running_mean,
)
from podracer.reports.page import section, table, tiles
from podracer.reports.run import CURVES, configuration, crash_note, group_runs, metric_title
from podracer.reports.selection import LEGEND, has_selection, lineages
from podracer.reports.timeline import ACTOR_STAGES, LEARNER_STAGES, segments, verdict
from podracer.reports.watch.chart import HEIGHT, Chart, extent
from podracer.reports.watch.files import Tail, read_object, signature

FILMS = ("play.mp4", "play.gif")
_WAITING = 4  # runs of which is shown who waits
_METRICS = 12  # panels
_NAMED = 12  # groups in a legend
_GRID = 200  # points at which the seeds of a group are compared


class WatchedRun:
    """One run's files, read as they grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics, self._pods = Tail(path / "metrics.jsonl"), Tail(path / "pods.jsonl")
        self._signature: tuple[tuple[int, ...], ...] = ()
        self.records = RunRecords(path.name, {}, [], {}, path)

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
        self.records = RunRecords(self.path.name, config, self._metrics.records, crash, self.path)
        self._signature = current  # at last: what could not be read is read again
        return True

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
    def pods(self) -> list[dict[str, Any]]:
        """Records of a population, with a list for each metric."""
        return self._pods.records


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
    return max((mark[3] for name in ("metrics.jsonl", "config.json")
                if (mark := signature(path / name))), default=0)  # fmt: skip


def run_sections(runs: Sequence[WatchedRun], num_found: int) -> Iterator[tuple[str, str]]:
    """Yield the parts of the page: a name and HTML, empty where there is nothing to show."""
    records = [run.records for run in runs]
    groups = group_runs(records)
    left_out = num_found - len(runs)
    note = f"<p>{left_out:,} more runs, which wrote earlier, are not shown.</p>" if left_out else ""
    yield "overview", _overview(runs) + note
    yield "crashes", "".join(crash_note(run) for run in records if run.crash)
    for title, _, _, panels in CURVES:
        yield title.lower(), section(title, _panels(groups, panels))
    for index, run in enumerate(runs):
        if run.records.config.get("experiment", {}).get("pods"):
            yield f"pods-{index}", section(f"Pods of {html.escape(run.path.name)}", _sweep(run))
    waiting = [part for run in records if (part := _waiting(run, named=len(runs) > 1))]
    yield "waiting", section("Who waits for whom", "".join(waiting[:_WAITING]))
    films = [_film(index, run) for index, run in enumerate(runs) if run.film is not None]
    yield "films", section("Films", f'<div class="panels">{"".join(films)}</div>' if films else "")
    yield "metrics", section("Losses and other metrics", _panels(groups, _metric_panels(records)))
    if len(runs) == 1:
        settings = configuration(records)
        folded = f"<details><summary>All settings</summary>{settings}</details>"
        yield "configuration", section("Configuration", folded if settings else "")


# --- the overview ---------------------------------------------------------------------------------


def _overview(runs: Sequence[WatchedRun]) -> str:
    facts = [_facts(run) for run in runs]
    notes = "".join(f"<p>{html.escape(run.notes)}</p>" for run in runs if run.notes)
    if len(runs) == 1:
        return tiles(facts[0]) + notes
    rows = ([run.path.name, *row.values()] for run, row in zip(runs, facts, strict=True))
    return table(["Run", *facts[0]], rows) + notes if runs else ""


def _facts(run: WatchedRun) -> dict[str, str]:
    records = run.records
    evaluations, returns, pace = (
        records.series(key, "updates")[1]
        for key in ("evaluation_return", "episode_return", "frames_per_second")
    )
    return {
        "Evaluation": number(float(evaluations[-1]) if len(evaluations) else None),
        "Best evaluation": number(records.best_evaluation),
        "Episode return": number(final_mean(returns)),
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


def _panels(groups: Groups, panels: Sequence[Panel]) -> str:
    """Draw panels side by side, with a legend if there are several groups."""
    charts = [chart for panel in panels if (chart := _curves(groups, panel))]
    if not charts:
        return ""
    return _legend(groups) + f'<div class="panels">{"".join(charts)}</div>'


def _legend(names: Mapping[str, Any]) -> str:
    if len(names) < 2:
        return ""
    more = [("…", "transparent")] if len(names) > _NAMED else []
    return legend([*zip(list(names)[:_NAMED], itertools.cycle(COLORS), strict=False), *more])


def _curves(groups: Groups, panel: Panel) -> str:
    """Draw a curve for each group, of several seeds also their score."""
    lines = {
        label: [pair for run in members if len((pair := run.series(panel.key, panel.over))[0])]
        for label, members in groups.items()
    }
    points = {
        label: [run.series(panel.points, panel.over) for run in members if panel.points]
        for label, members in groups.items()
    }
    drawn = [pair for pairs in (*lines.values(), *points.values()) for pair in pairs]
    if not any(len(x) for x, _ in drawn):
        return ""
    last = max(float(x[-1]) for x, _ in drawn if len(x))
    chart = Chart(panel.title, panel.over, (0, last), extent((y for _, y in drawn), 0.04))
    for color, label in zip(itertools.cycle(COLORS), groups, strict=False):
        _draw_group(chart, lines[label], color)
        for x, y in points[label]:
            chart.dots(x, y, color)
    return chart.svg()


def _draw_group(chart: Chart, series: Sequence[tuple[np.ndarray, np.ndarray]], color: str) -> None:
    is_alone = len(series) == 1
    means = [(x, running_mean(y)) for x, y in series]
    for x, y in series if is_alone else ():
        chart.line(x, y, color, width=0.7, opacity=0.3)
    for x, y in means:
        opacity, width = (1.0, 1.6) if is_alone else (0.4, 0.7)
        chart.line(x, y, color, width=width, opacity=opacity)
    if not is_alone and series:
        start, end = max(x[0] for x, _ in series), min(x[-1] for x, _ in series)
        if end > start:
            at = np.linspace(start, end, _GRID)
            seeds = np.stack([np.interp(at, x, y) for x, y in means])
            chart.line(at, score_of_seeds(seeds), color, width=1.8)


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
    charts, last = [], np.full(len(pods), np.nan)
    for key, title in (("episode_return", "Episode return"), ("evaluation_return", "Evaluation")):
        rows = [record for record in run.pods if key in record]
        if not rows:
            continue
        updates = np.array([record["updates"] for record in rows], float)
        values = np.stack([returns_of(record, key) for record in rows])
        last = values[-1] if key == "evaluation_return" else last
        series = {
            label: [
                (updates[finite], values[finite, pod])
                for pod in numbers
                if (finite := np.isfinite(values[:, pod])).any()
            ]
            for label, numbers in members.items()
        }
        finite_values = values[np.isfinite(values)]
        chart = Chart(
            f"{title} of each pod", "updates", (0, updates[-1]), extent([finite_values], 0.04)
        )
        for color, group_series in zip(itertools.cycle(COLORS), series.values(), strict=False):
            _draw_group(chart, group_series, color)
        charts.append(chart.svg())
    scores = {label: float(score_of_seeds(last[numbers])) for label, numbers in members.items()}
    ranking = sorted(members, key=lambda label: -np.nan_to_num(scores[label], nan=-np.inf))
    rows = [[label, str(len(members[label])), number(scores[label])] for label in ranking[:20]]
    head = ["Configuration", "Pods", "Last evaluation"]
    figures = _legend(members) + f'<div class="panels">{"".join(charts)}</div>'
    return figures + table(head, rows) + _lineages(run)


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
