"""Progress of a run: a live panel on the terminal or in a notebook, elsewhere lines of text.

Also the closing lines of a run, and how numbers are formatted for people.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from podracer.io.directories import quoted_path, short_path
from podracer.io.edits import read_object
from podracer.io.sinks import Record, group, read_metrics
from podracer.scores.runs import RunRecords
from podracer.scores.score import UNFINISHED, whole_return

_BARS = "▁▂▃▄▅▆▇█"
_FIRST_METRICS = ("loss", "policy_loss", "value_loss", "entropy", "gradient_norm")
_MAX_WIDTH = 120
_NUM_METRICS = 6


def compact(value: float | None) -> str:
    """Format a count or a rate in at most five characters: 950, 1.23k, 45.6M, 7.00B.

    What is too large for that is in scientific notation.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 999.5:
        return str(value) if isinstance(value, int) else f"{value:.3g}"
    power = int(math.log10(abs(value) / 0.9995)) // 3
    if power > 4:
        return f"{value:.2e}"
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


def faults_text(record: Record) -> str:
    """Describe the faults of environments that a run has recovered from: `3 (died 2, hung 1)`.

    "" if there was none.
    """
    total, prefix = record.get("environment_faults"), "environment_faults_"
    kinds = {key.removeprefix(prefix): n for key, n in record.items() if key.startswith(prefix)}
    return f"{total} ({', '.join(f'{kind} {n}' for kind, n in kinds.items())})" if total else ""


def left_out(record: Record) -> str:
    """Describe what the evaluation in a record leaves out: `2 diverged`, `unfinished evaluation`.

    "" if it leaves out nothing.
    """
    parts = [UNFINISHED] if record.get("evaluation_unfinished") else []
    failed = record.get("pods_failed")
    return ", ".join([*parts, *([f"{failed:g} diverged"] if failed else [])])


def sparkline(values: list[float]) -> str:
    """Return one bar character for each value, scaled from the lowest to the highest."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(_BARS[int((v - low) / span * 7.999) if span else 3] for v in values)


class NotebookPanel:
    """Panel in the output of a notebook's cell, updated in place, in the manner of rich's `Live`.

    Rich's own needs ipywidgets there.
    """

    def __init__(self, get_renderable: Callable[[], RenderableType]) -> None:
        self._get_renderable = get_renderable
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="podracer-panel", daemon=True)
        self._handle: Any = None

    def start(self) -> None:
        """Show the panel, and go on to update it."""
        from IPython.display import display

        self._handle = display(self._get_renderable(), display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Show the panel for the last time."""
        self._closed.set()
        self._thread.join(5.0)  # or it might show an earlier state later
        self._handle.update(self._get_renderable())

    def _refresh(self) -> None:
        while not self._closed.wait(0.5):
            self._handle.update(self._get_renderable())


class Console:
    """Sink that shows progress on `file` and restores the terminal when closed, also at exit.

    `total_frames` are those of the whole run. In a notebook the panel is in the output of the cell.
    Without a terminal it prints a line every `interval` seconds, and always for an evaluation and
    for the last record. The panel appears at once and stays until `close`.
    """

    def __init__(
        self,
        total_frames: int,
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
        self._total = total_frames
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
        self._evaluated: Record = {}  # the last record with an evaluation
        self._best: float | None = None
        self._returns: deque[float] = deque(maxlen=32)
        self._pace: deque[tuple[int, float]] = deque(maxlen=64)
        self._is_closed = False
        self._lock = threading.Lock()  # the panel is drawn by a thread of rich
        self._live = self._start()

    def write(self, record: Record) -> None:
        with self._lock:
            self._remember(record)
        if self._live is None:
            self._unprinted = record
            is_due = time.monotonic() - self._printed_at >= self._interval
            if is_due or "evaluation_return" in record:
                self._print()

    def close(self) -> None:
        """Restore the terminal with the last state on it; calling it again does nothing."""
        atexit.unregister(self.close)
        self._is_closed = True
        if self._live is not None:
            self._live.stop()  # with a last picture
        elif self._unprinted is not None:
            self._print()

    def _start(self) -> Live | NotebookPanel | None:
        terminal = self._terminal
        if terminal.is_jupyter and self._file is sys.stdout:
            panel = NotebookPanel(self.panel)
            panel.start()
            return panel
        unicode = (terminal.encoding or "").lower().startswith("utf")
        if not terminal.is_terminal or terminal.is_dumb_terminal or not unicode:
            acting = self._acting and f"{self._acting} evaluation"
            context = " ".join(f"[{part}]" for part in [*self._about, acting] if part)
            with contextlib.suppress(OSError):  # a broken pipe must not end the run
                print(self._title, context, f"{self._total:,} frames", file=self._file, flush=True)
            return None
        live = Live(get_renderable=self.panel, console=terminal, refresh_per_second=4)
        atexit.register(self.close)
        live.start()
        return live

    def _remember(self, record: Record) -> None:
        self._latest |= {key: value for key, value in record.items() if value is not None}
        value, evaluation = record.get("episode_return"), whole_return(record)
        if "evaluation_return" in record:
            self._evaluated = record
        if value is not None and math.isfinite(value):
            self._returns.append(value)
        if evaluation is not None:
            self._best = evaluation if self._best is None else max(self._best, evaluation)
        if "seconds" in self._latest:
            self._pace.append((self._latest["frames"], self._latest["seconds"]))

    def _print(self) -> None:
        record, self._unprinted = self._unprinted or {}, None
        self._printed_at = time.monotonic()
        print(line(record, self._total), file=self._file, flush=True)

    def _remaining(self) -> float | None:
        (first, start), (last, end) = self._pace[0], self._pace[-1]
        if last <= first:
            return None
        return max(0, self._total - last) * (end - start) / (last - first)

    @property
    def _width(self) -> int:
        return min(_MAX_WIDTH, self._terminal.width)

    def panel(self) -> RenderableType:
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
            width=self._width,
        )

    def _waiting(self) -> RenderableType:
        passed = clock(time.monotonic() - self._started)
        self._spinner.update(text=Text(f"compiling, then the first updates  {passed}"))
        return self._spinner

    def _body(self) -> RenderableType:
        parts = [self._progress(), Text(), self._figures()]
        width = self._label_width()
        if {"actor_idle", "learner_idle"} & self._latest.keys():
            parts.append(_waiting_row(self._latest, width))
        if faults := faults_text(self._latest):
            parts.append(Text.assemble((f"{'faults':{width}}  ", "dim"), (faults, "bold yellow")))
        return Group(*parts)

    def _progress(self) -> Table:
        frames = min(self._latest["frames"], self._total)
        left = "ended" if self._is_closed else f"{clock(self._remaining())} left"
        left = "done" if frames == self._total else left
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(ratio=1)
        row.add_column(justify="right")
        row.add_column(justify="right", style="dim", min_width=9)
        bar = ProgressBar(
            total=self._total, completed=frames, complete_style="cyan", finished_style="green"
        )
        row.add_row(bar, Text(f"{math.floor(100 * frames / self._total)} %", "bold"), left)
        return row

    def _figures(self) -> Table:
        latest = self._latest
        frames = f"{compact(latest['frames'])}/{compact(self._total)}"
        distinct = self._evaluated.get("evaluation_distinct_episodes")
        evaluated = [
            self._acting,
            left_out(self._evaluated),
            f"best {number(self._best)}" if self._best is not None else "",
            f"{compact(distinct)} distinct episodes" if distinct is not None else "",
        ]
        evaluation = Text("  ".join(filter(None, evaluated)), "dim")
        room = 16 if self._width < 100 else 32
        trend = Text(sparkline(list(self._returns)[-room:]), "green")
        rows = [
            ("episode return", number(latest.get("episode_return")), trend,
             "frames", frames),
            ("evaluation", number(whole_return(self._evaluated)), evaluation,
             "frames/second", compact(latest.get("frames_per_second"))),
            ("episode length", number(latest.get("episode_length")), Text(), "updates",
             f"{latest['updates']:,}"),
            ("episodes", compact(latest.get("episodes")), Text(),
             "time", clock(latest.get("seconds"))),
            *self._metrics_rows(),
        ]  # fmt: skip
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True, min_width=self._label_width())
        table.add_column(style="bold", justify="right", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(style="dim", no_wrap=True)
        table.add_column(style="bold", justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table

    def _metrics(self) -> list[str]:
        latest = self._latest.items()
        names = [k for k, x in latest if group(k) == "learn" and isinstance(x, int | float)]
        names.sort(key=lambda key: _FIRST_METRICS.index(key) if key in _FIRST_METRICS else 9)
        return names[:_NUM_METRICS]

    def _metrics_rows(self) -> list[tuple[str, ...]]:
        """Return the agent's metrics in the columns of the other figures, two in a row."""
        cells = [(name.replace("_", " "), number(self._latest[name])) for name in self._metrics()]
        pairs = itertools.zip_longest(cells[::2], cells[1::2], fillvalue=("", ""))
        return [(*left, "", *right) for left, right in pairs]

    def _label_width(self) -> int:
        """Return the width of the first column, with which rows below the figures are aligned."""
        return max(map(len, ["episode return", *self._metrics()[::2]]))


def _waiting_row(latest: dict[str, Any], width: int) -> Text:
    """Format the idle shares of actors and learner of a Sebulba run as a row of the panel."""
    columns = {
        "actors": percent(latest.get("actor_idle")),
        "learner": percent(latest.get("learner_idle")),
        " lag": f"{latest['lag_mean']:.1f}" if "lag_mean" in latest else "-",
        " queue": percent(latest.get("queue_occupancy")),
    }
    row = Text(f"{'waiting':{width}}", "dim", no_wrap=True, overflow="ellipsis")
    for name, value in columns.items():
        row.append(f"  {name} ").append(value, "not dim bold")
    return row


def line(record: Record, total_frames: int) -> str:
    """Format a record as one line of plain text; columns of successive lines are aligned."""
    parts = [
        f"update {record.get('updates', 0):>5}",
        f"frames {compact(record.get('frames')):>5}/{compact(total_frames)}",
        f"fps {compact(record.get('frames_per_second')):>5}",
        f"return {number(record.get('episode_return')):>6}",
        f"length {number(record.get('episode_length')):>5}",
    ]
    idle = [record.get("actor_idle"), record.get("learner_idle")]
    if any(share is not None for share in idle):
        parts.append(f"idle {'/'.join(percent(share).removesuffix(' %') for share in idle):>5} %")
    if faults := faults_text(record):
        parts.append(f"faults {faults}")
    if "evaluation_return" in record:
        parts.append(f"eval {number(whole_return(record)):>6}")
    if record.get("evaluation_distinct_episodes") is not None:
        parts.append(f"distinct {compact(record['evaluation_distinct_episodes'])}")
    if text := left_out(record):
        parts.append(text)
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
    files = (read_object(run / name) for name in ("config.json", "crash.json"))
    told = RunRecords(run.name, next(files), records, next(files), run)
    seconds = told.stage_seconds
    shares = [
        f"{name} {percent(seconds[stage] / sum(seconds.values()))}"
        for stage, name in (("evaluate", "evaluations"), ("save", "saves"))
        if seconds.get(stage)
    ]
    parts = [f"{compact(told.last('frames'))} frames in {clock(told.last('seconds'))}"]
    if shares:
        parts[0] += f" ({', '.join(shares)})"
    if (episode_return := told.last("episode_return")) is not None:
        owner = " of the data set" if told.is_replayed else ""
        parts.append(f"episode return{owner} {number(episode_return)}")
    if any("evaluation_return" in record for record in records):
        name, (value, mark) = f"{told.acting} evaluation".lstrip(), told.final
        facts = f"({mark}{', ' if mark else ''}best {number(told.best_evaluation)})"
        parts.append(f"{name} {number(value)} {facts}")
    if reason:
        parts.append(reason)
    path = quoted_path(run)
    flags = [f" --{flag} {shlex.quote(x)}" for flag, x in (options or {}).items() if x is not None]
    rows = [
        (outcome, ", ".join(parts) if records else "nothing was recorded"),
        ("Run", short_path(run)),
        ("Next", f"podracer report {path}"),
    ]
    if next_command is not None:
        rows.append(("", f"podracer {next_command} {path}{''.join(flags)}"))
    terminal = Terminal(file=sys.stdout if file is None else file)
    width = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        terminal.print(Text.assemble((f"{label:{width}}", "bold"), text), soft_wrap=True)
