"""Progress on the terminal: a live panel, or aligned lines of text where there is no terminal.

Also the closing lines of a run, and how numbers are formatted for people.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from podracer.io.reading import read_limited
from podracer.io.sinks import Record, best_return, group, read_metrics, whole_return

if TYPE_CHECKING:
    from podracer.experiments.result import RunInfo

_BARS = "▁▂▃▄▅▆▇█"
_FIRST_METRICS = ("loss", "policy_loss", "value_loss", "entropy", "gradient_norm")
_MAX_WIDTH = 92


def compact(value: float | None) -> str:
    """Format a count or a rate in at most five characters: 950, 1.23k, 45.6M, 7.00B."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 999.5:
        return str(value) if isinstance(value, int) else f"{value:.3g}"
    power = min(int(math.log10(abs(value) / 0.9995)) // 3, 4)
    return f"{value / 1000**power:#.3g}".rstrip(".") + " kMBT"[power]


def number(value: float | None) -> str:
    """Format a measurement with three significant digits: 0.930, 21.0, 4,210, 1.50e-05."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return compact(value)
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def percent(share: float | None) -> str:
    """Format a fraction as a percentage: 0 %, 58 %."""
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def clock(seconds: float | None) -> str:
    """Format a duration in seconds: 0:42, 12:03, 3:04:05, 2d 03:04."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def acting_text(policy: str, epsilon: float) -> str:
    """Describe how an evaluation acts: `greedy`, `sampled`, `greedy with epsilon 0.01`."""
    return f"{policy} with epsilon {epsilon:g}" if epsilon else policy


def faults_text(record: Record) -> str:
    """Describe the faults of environments that a run has recovered from: `3 (died 2, hung 1)`.

    "" if there was none.
    """
    total, prefix = record.get("environment_faults"), "environment_faults_"
    kinds = {key.removeprefix(prefix): n for key, n in record.items() if key.startswith(prefix)}
    return f"{total} ({', '.join(f'{kind} {n}' for kind, n in kinds.items())})" if total else ""


def sparkline(values: list[float]) -> str:
    """Return one bar character for each value, scaled from the lowest to the highest."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(_BARS[int((v - low) / span * 7.999) if span else 3] for v in values)


class Console:
    """Sink that shows progress on `file` and restores the terminal when closed, also at exit.

    Without a terminal it prints a line every `interval` seconds, and always for an evaluation and
    for the last record. The panel appears at once and stays until `close`.
    """

    def __init__(
        self,
        total_updates: int,
        title: str,
        *,
        recipe: str = "",
        devices: str = "",
        memory: str = "",
        acting: str = "",
        resumed_from: int | None = None,
        file: TextIO | None = None,
        interval: float = 5.0,
    ) -> None:
        self._total = max(total_updates, 1)
        self._title = title
        self._acting = acting
        memory_text = memory and f"{memory} of state on each"
        resumed = "" if resumed_from is None else f"resumed from update {resumed_from}"
        self._about = [part for part in (resumed, recipe, devices, memory_text) if part]
        self._file = sys.stdout if file is None else file
        self._terminal = Terminal(file=self._file)
        self._spinner = Spinner("dots", style="cyan")
        self._interval = interval
        self._printed_at = -math.inf
        self._unprinted: Record | None = None
        self._started = time.monotonic()
        self._latest: dict[str, Any] = {}
        self._best: float | None = None
        self._returns: deque[float] = deque(maxlen=32)
        self._pace: deque[tuple[int, float]] = deque(maxlen=64)
        self._lock = threading.Lock()  # the panel is drawn by a thread of rich
        self._live = self._start()

    def write(self, record: Record) -> None:
        with self._lock:
            self._remember(record)
        if self._live is None:
            self._unprinted = record
            is_due = time.monotonic() - self._printed_at >= self._interval
            if is_due or record.get("evaluation_return") is not None:
                self._print()

    def close(self) -> None:
        """Restore the terminal with the last state on it; calling it again does nothing."""
        atexit.unregister(self.close)
        if self._live is not None:
            self._live.stop()
        elif self._unprinted is not None:
            self._print()

    def _start(self) -> Live | None:
        terminal = self._terminal
        unicode = (terminal.encoding or "").lower().startswith("utf")
        if not terminal.is_terminal or terminal.is_dumb_terminal or not unicode:
            acting = self._acting and f"{self._acting} evaluation"
            about = " ".join(f"[{part}]" for part in [*self._about, acting] if part)
            with contextlib.suppress(OSError):  # a broken pipe must not end the run
                print(self._title, about, f"{self._total} updates", file=self._file, flush=True)
            return None
        live = Live(get_renderable=self._panel, console=terminal, refresh_per_second=4)
        atexit.register(self.close)
        live.start()
        return live

    def _remember(self, record: Record) -> None:
        self._latest |= {key: value for key, value in record.items() if value is not None}
        value, evaluation = record.get("episode_return"), whole_return(record)
        if value is not None and math.isfinite(value):
            self._returns.append(value)
        if evaluation is not None:
            self._best = evaluation if self._best is None else max(self._best, evaluation)
        if "seconds" in self._latest:
            self._pace.append((self._latest["updates"], self._latest["seconds"]))

    def _print(self) -> None:
        record, self._unprinted = self._unprinted or {}, None
        self._printed_at = time.monotonic()
        print(line(record, self._total), file=self._file, flush=True)

    def _remaining(self) -> float | None:
        (first, since), (last, until) = self._pace[0], self._pace[-1]
        if last <= first:
            return None
        return max(0, self._total - last) * (until - since) / (last - first)

    def _panel(self) -> RenderableType:
        with self._lock:
            body = self._body() if self._pace else self._waiting()
        return Panel(
            body,
            title=Text.assemble(" ", (self._title, "bold"), " "),
            title_align="left",
            subtitle=Text(f" {'  ·  '.join(self._about)} ", "dim") if self._about else None,
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="cyan",
            padding=(1, 2),
            width=min(_MAX_WIDTH, self._terminal.width),
        )

    def _waiting(self) -> RenderableType:
        passed = clock(time.monotonic() - self._started)
        self._spinner.update(text=Text(f"compiling, then the first updates  {passed}"))
        return self._spinner

    def _body(self) -> RenderableType:
        parts = [self._progress(), Text(), self._figures()]
        if {"actor_idle", "learner_idle"} & self._latest.keys():
            parts.append(_waiting_row(self._latest))
        if faults := faults_text(self._latest):
            parts.append(Text.assemble((f"{'faults':16}", "dim"), (faults, "bold yellow")))
        metrics = [key for key in self._latest if group(key) == "learn"]
        metrics.sort(key=lambda key: _FIRST_METRICS.index(key) if key in _FIRST_METRICS else 9)
        if metrics:
            room = (min(_MAX_WIDTH, self._terminal.width) - 6) // 17
            parts += [Text(), _metrics_row(self._latest, metrics[: max(room, 1)])]
        return Group(*parts)

    def _progress(self) -> Table:
        done = min(self._latest["updates"], self._total)
        left = "done" if done == self._total else f"{clock(self._remaining())} left"
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(ratio=1)
        row.add_column(justify="right")
        row.add_column(justify="right", style="dim", min_width=9)
        bar = ProgressBar(
            total=self._total, completed=done, complete_style="cyan", finished_style="green"
        )
        row.add_row(bar, Text(f"{math.floor(100 * done / self._total)} %", "bold"), left)
        return row

    def _figures(self) -> Table:
        latest = self._latest
        updates = f"{latest['updates']:,} / {self._total:,}"
        distinct = latest.get("evaluation_distinct_episodes")
        evaluated = [
            self._acting,
            f"best {number(self._best)}" if self._best is not None else "",
            f"{distinct:g} distinct episodes" if distinct is not None else "",
        ]
        about = Text("  ".join(filter(None, evaluated)), "dim")
        trend = Text(sparkline(list(self._returns)), "green")
        rows = [
            ("episode return", number(latest.get("episode_return")), trend,
             "frames", compact(latest.get("frames"))),
            ("evaluation", number(latest.get("evaluation_return")), about,
             "frames/second", compact(latest.get("frames_per_second"))),
            ("episode length", number(latest.get("episode_length")), Text(), "updates", updates),
            ("episodes", compact(latest.get("episodes")), Text(),
             "time", clock(latest.get("seconds"))),
        ]  # fmt: skip
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(style="bold", justify="right", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="crop")
        table.add_column(style="dim", no_wrap=True)
        table.add_column(style="bold", justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table


def _waiting_row(latest: dict[str, Any]) -> Text:
    """Format the idle shares of actors and learner of a Sebulba run as a row of the panel."""
    columns = {
        "actors": percent(latest.get("actor_idle")),
        "learner": percent(latest.get("learner_idle")),
        " lag": f"{latest['lag_mean']:.1f}" if "lag_mean" in latest else "-",
        " queue": percent(latest.get("queue_occupancy")),
    }
    row = Text(f"{'waiting':14}", "dim", no_wrap=True, overflow="ellipsis")
    for name, value in columns.items():
        row.append(f"  {name} ").append(value, "not dim bold")
    return row


def _metrics_row(latest: dict[str, Any], keys: list[str]) -> Table:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in keys:
        table.add_column(ratio=1, no_wrap=True)
    table.add_row(*[Text(key.replace("_", " "), "dim") for key in keys])
    table.add_row(*[number(latest[key]) for key in keys])
    return table


def console(run: RunInfo) -> Console:
    """Return the sink that shows a run in the terminal, for `train(..., sinks=[console])`."""
    from podracer.mesh import format_bytes  # imports JAX, which the rest of this file does not need

    experiment = run.experiment
    return Console(
        experiment.num_updates,
        run.run_dir.name,
        recipe=experiment.recipe,
        devices=run.devices,
        memory=format_bytes(run.state_bytes),
        resumed_from=run.resumed_from,
        acting=acting_text(experiment.evaluation_policy, experiment.evaluation_epsilon)
        if experiment.evaluations
        else "",
    )


def line(record: Record, total_updates: int) -> str:
    """Format a record as one line of plain text; columns of successive lines are aligned."""
    width = len(str(total_updates))
    parts = [
        f"update {record.get('updates', 0):>{width}}/{total_updates}",
        f"frames {compact(record.get('frames')):>5}",
        f"fps {compact(record.get('frames_per_second')):>5}",
        f"return {number(record.get('episode_return')):>6}",
        f"length {number(record.get('episode_length')):>5}",
    ]
    idle = [record.get("actor_idle"), record.get("learner_idle")]
    if any(share is not None for share in idle):
        parts.append(f"idle {'/'.join(percent(share).removesuffix(' %') for share in idle):>5} %")
    if faults := faults_text(record):
        parts.append(f"faults {faults}")
    if record.get("evaluation_return") is not None:
        parts.append(f"eval {number(record['evaluation_return']):>6}")
    if record.get("evaluation_distinct_episodes") is not None:
        parts.append(f"distinct {record['evaluation_distinct_episodes']:g}")
    return "  ".join(parts).rstrip()


def summarize(
    run: Path,
    outcome: str = "Finished",
    *,
    reason: str = "",
    next_command: str | None = "play",
    options: Mapping[str, str | None] | None = None,
    file: TextIO | None = None,
) -> None:
    """Print the last metrics of a run, its directory, and the commands to use next.

    `reason` says why it ended before its frames. The commands are `podracer report` and, if there
    is one, `next_command` with flags: `options`.
    """
    path = run / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    last = {key: v for record in records for key, v in record.items() if v is not None}
    evaluations = [
        r["evaluation_return"] for r in records if r.get("evaluation_return") is not None
    ]
    parts = [f"{compact(last.get('frames'))} frames in {clock(last.get('seconds'))}"]
    if "episode_return" in last:
        parts.append(f"episode return {number(last['episode_return'])}")
    if evaluations:
        name = f"{_acting_of(run)} evaluation".lstrip()
        best = number(best_return(records))
        parts.append(f"{name} {number(evaluations[-1])} (best {best})")
    if reason:
        parts.append(reason)
    where = shlex.quote(str(run))
    flags = [f" --{flag} {shlex.quote(x)}" for flag, x in (options or {}).items() if x is not None]
    rows = [
        (outcome, ", ".join(parts) if records else "nothing was recorded"),
        ("Run", str(run)),
        ("Next", f"podracer report {where}"),
    ]
    if next_command is not None:
        rows.append(("", f"podracer {next_command} {where}{''.join(flags)}"))
    terminal = Terminal(file=sys.stdout if file is None else file)
    width = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        terminal.print(Text.assemble((f"{label:{width}}", "bold"), text), soft_wrap=True)


def _acting_of(run: Path) -> str:
    """Return how the evaluations of a run act, "" where its configuration does not say it."""
    try:
        experiment = json.loads(read_limited(run / "config.json"))["experiment"]
        return acting_text(experiment["evaluation_policy"], experiment["evaluation_epsilon"])
    except (OSError, ValueError, KeyError):
        return ""
