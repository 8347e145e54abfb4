"""Progress of a run: a panel on the terminal or in a notebook, elsewhere lines; its closing lines.

What they show of a run is chosen in `scores/facts.py`, also for its page.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from podracer.config.serialization import to_json
from podracer.io.directories import quoted_path, short_path
from podracer.io.sinks import Record, Sink, group
from podracer.scores.facts import facts
from podracer.scores.format import clock, compact, number, percent
from podracer.scores.runs import RunRecords, read_run

if TYPE_CHECKING:
    from podracer.run.result import RunInfo

_FIRST_METRICS = ("loss", "policy_loss", "value_loss", "entropy", "gradient_norm")
_MAX_WIDTH = 120
_NUM_METRICS = 6
_NUM_RECORDS = 64  # the panel is about these, and about the first one and all with an evaluation
_LINE_SECONDS = 5.0  # between two lines without a terminal
_NOTEBOOK_SECONDS = 0.5  # between two pictures in a notebook


class Terminal(RichConsole):
    """A terminal that falls silent when nobody reads it any more; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def with_progress(sinks: Sequence[Sink], progress: bool | None) -> Sequence[Sink]:
    """Return the sinks, after a `Console` if progress is to be shown and none of them is one.

    By default it is shown in an interactive terminal and in a notebook.
    """
    if progress is None:
        progress = Terminal().is_jupyter or (sys.stdout is not None and sys.stdout.isatty())
    has_one = any(isinstance(sink, Console) for sink in sinks)
    return [Console(), *sinks] if progress and not has_one else sinks


class Console:
    """Sink that shows progress on `file` and restores the terminal when closed, also at exit.

    In a notebook the panel is in the output of the cell. Without a terminal it prints a line every
    five seconds, and always for an evaluation and for the last record. The panel appears at once
    and stays until `close`.
    """

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file

    def open(self, run: RunInfo) -> None:
        """Show the run, of which there is no record yet."""
        from podracer.devices.memory import format_bytes  # imports JAX

        experiment, memory = run.experiment, format_bytes(run.state_bytes)
        self._run = RunRecords(run.run_dir.name, {"experiment": to_json(experiment)}, [], {})
        self._total = experiment.frames * max(1, len(experiment.pods))
        parts = [experiment.recipe, run.devices, f"{memory} of state on each"]
        resumed = f"resumed from update {run.resumed_from}"
        self._about = parts if run.resumed_from is None else [resumed, *parts]
        self._terminal = Terminal(file=self._file)
        self._spinner = Spinner("dots", style="cyan")
        self._shown_at = -math.inf
        self._unprinted: Record | None = None
        self._started = time.monotonic()
        self._is_closed = False
        self._lock = threading.Lock()  # the panel is drawn by a thread of rich
        self._live: Live | None = None
        self._cell: Any = None  # handle of the panel in a notebook
        terminal = self._terminal
        unicode = (terminal.encoding or "").lower().startswith("utf")
        if terminal.is_jupyter and self._file is sys.stdout:  # rich's own needs ipywidgets there
            from IPython.display import display

            self._cell = display(self.panel(), display_id=True)
        elif terminal.is_terminal and not terminal.is_dumb_terminal and unicode:
            self._live = Live(get_renderable=self.panel, console=terminal, refresh_per_second=4)
            atexit.register(self.close)
            self._live.start()
        else:
            acting = f"{self._run.acting} evaluation" if experiment.evaluations else ""
            context = " ".join(f"[{part}]" for part in [*self._about, acting] if part)
            text = f"{self._run.name} {context} {self._total:,} frames"
            with contextlib.suppress(OSError):  # a broken pipe must not end the run
                print(text, file=self._file, flush=True)

    def write(self, record: Record) -> None:
        records = self._run.records
        with self._lock:
            records.append(dict(record))
            oldest = len(records) - 1 - _NUM_RECORDS  # it is no longer among the recent ones
            if oldest > 0 and "evaluation_return" not in records[oldest]:
                del records[oldest]
        if self._live is not None:
            return
        self._unprinted = record
        interval = _LINE_SECONDS if self._cell is None else _NOTEBOOK_SECONDS
        is_due = time.monotonic() - self._shown_at >= interval
        if is_due or "evaluation_return" in record:
            self._show()

    def close(self) -> None:
        """Restore the terminal with the last state on it; calling it again does nothing."""
        atexit.unregister(self.close)
        self._is_closed = True
        if self._live is not None:
            self._live.stop()  # with a last picture
        elif self._cell is not None or self._unprinted is not None:
            self._show()

    def _show(self) -> None:
        record, self._unprinted = self._unprinted or {}, None
        self._shown_at = time.monotonic()
        if self._cell is not None:
            self._cell.update(self.panel())
        else:
            print(line(record, self._total), file=self._file, flush=True)

    def panel(self) -> RenderableType:
        passed = clock(time.monotonic() - self._started)
        self._spinner.update(text=Text(f"compiling, then the first updates  {passed}"))
        with self._lock:
            is_begun = bool(self._run.records)
            body = Group(self._progress(), Text(), self._facts()) if is_begun else self._spinner
        return Panel(
            body,
            title=Text.assemble(" ", (self._run.name, "bold"), " "),
            title_align="left",
            subtitle=Text(f" {'  ·  '.join(self._about)} ", "dim"),
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="cyan",
            padding=(1, 2),
            width=min(_MAX_WIDTH, self._terminal.width),
        )

    def _progress(self) -> Table:
        positions, seconds = (x[-_NUM_RECORDS:] for x in self._run.series("seconds", "frames"))
        frames = min(self._run.last("frames") or 0, self._total)
        pace = math.nan
        if len(positions) and positions[-1] > positions[0]:
            pace = (seconds[-1] - seconds[0]) / (positions[-1] - positions[0])
        left = "ended" if self._is_closed else f"{clock(pace * (self._total - frames))} left"
        left = "done" if frames == self._total else left
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(ratio=1)
        row.add_column(justify="right")
        row.add_column(justify="right", style="dim", min_width=9)
        bar = ProgressBar(
            total=self._total, completed=frames, complete_style="cyan", finished_style="green"
        )
        share = f"{compact(frames)}/{compact(self._total)}  {100 * frames // self._total:.0f} %"
        row.add_row(bar, Text(share, "bold"), left)
        return row

    def _facts(self) -> Table:
        """Return the facts about a run and the agent's metrics, two in a row."""
        last, shown = self._run.last, facts(self._run)
        names = dict.fromkeys(key for record in self._run.records for key in record)
        metrics = [key for key in names if group(key) == "learn" and last(key) is not None]
        metrics.sort(key=lambda x: _FIRST_METRICS.index(x) if x in _FIRST_METRICS else 9)
        cells = [
            *((name, text) for name, text in shown.items() if name not in ("Frames", "Seed")),
            *((key.replace("_", " "), number(last(key))) for key in metrics[:_NUM_METRICS]),
        ]
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in range(2):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(style="bold", ratio=1, overflow="fold")
        for left, right in itertools.zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
            table.add_row(*left, *right)
        return table


def line(record: Record, total_frames: int) -> str:
    """Format a record as one line of plain text; columns of successive lines are aligned."""
    run = RunRecords("", {}, [dict(record)], {})
    shown = facts(run)
    parts = [
        f"update {record.get('updates', 0):>5}",
        f"frames {shown['Frames']:>5}/{compact(total_frames)}",
        f"fps {shown['Frames/second']:>5}",
        f"return {shown['Episode return']:>6}",
        f"length {shown['Episode length']:>5}",
    ]
    if waits := [shown[name] for name in ("Actors wait", "Learner waits") if name in shown]:
        parts.append(f"idle {'/'.join(waits)}")
    if "Environment faults" in shown:
        parts.append(f"faults {shown['Environment faults']}")
    if run.is_evaluated:
        parts.append(f"eval {shown['Last evaluation']:>6}")
        if "Distinct episodes" in shown:
            parts.append(f"distinct {shown['Distinct episodes']}")
        parts += run.marks
    return "  ".join(parts).rstrip()


def summarize(
    run: Path,
    outcome: str,
    *,
    reason: str,
    next_command: str | None,
    options: Mapping[str, str | None],
) -> None:
    """Print the last metrics of a run, its directory, and the commands to use next.

    `reason` says why it ended before its frames, if it did. The commands are `podracer report` and,
    if there is one, `next_command` with flags: the `options` that are not None.
    """
    records = read_run(run)
    shown, seconds = facts(records), records.stage_seconds
    shares = [
        f"{name} {percent(seconds[stage] / sum(seconds.values()))}"
        for stage, name in (("evaluate", "evaluations"), ("save", "saves"))
        if seconds.get(stage)
    ]
    stages = f" ({', '.join(shares)})" if shares else ""
    parts = [f"{shown['Frames']} frames in {shown['Wall time']}{stages}"]
    if shown["Episode return"] != "-":
        parts.append(f"episode return {shown['Episode return']}")
    if records.is_evaluated:
        mark = f"{records.final[1]}, " if records.final[1] else ""
        name = f"{records.acting} evaluation".lstrip()
        parts.append(f"{name} {shown['Last evaluation']} ({mark}best {shown['Best evaluation']})")
    if reason:
        parts.append(reason)
    path = quoted_path(run)
    flags = [f" --{flag} {shlex.quote(x)}" for flag, x in options.items() if x is not None]
    rows = [
        (outcome, ", ".join(parts) if records.records else "nothing was recorded"),
        ("Run", short_path(run)),
        ("Next", f"podracer report {path}"),
    ]
    if next_command is not None:
        rows.append(("", f"podracer {next_command} {path}{''.join(flags)}"))
    width, terminal = max(len(label) for label, _ in rows) + 2, Terminal()
    for label, text in rows:
        terminal.print(Text.assemble((f"{label:{width}}", "bold"), text), soft_wrap=True)
