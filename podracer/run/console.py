"""Progress of a run: a panel on the terminal or in a notebook, elsewhere lines; its closing lines.

The panel is one table of rich.
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
from collections.abc import Mapping, Sequence
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

from podracer.io.directories import quoted_path, short_path
from podracer.io.sinks import Record, Sink, group
from podracer.scores.format import clock, compact, number, percent
from podracer.scores.runs import acting_text, read_run
from podracer.scores.score import UNFINISHED, whole_return

if TYPE_CHECKING:
    from podracer.run.result import RunInfo

_FIRST_METRICS = ("loss", "policy_loss", "value_loss", "entropy", "gradient_norm")
_MAX_WIDTH = 120
_NUM_METRICS = 6
_NOTEBOOK_SECONDS = 0.5  # between two pictures in a notebook


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
    `interval` seconds, and always for an evaluation and for the last record. The panel appears at
    once and stays until `close`.
    """

    def __init__(self, *, file: TextIO | None = None, interval: float = 5.0) -> None:
        self._file = sys.stdout if file is None else file
        self._interval = interval

    def open(self, run: RunInfo) -> None:
        """Show the run, of which there is no record yet."""
        from podracer.devices.memory import format_bytes  # imports JAX

        experiment, memory = run.experiment, format_bytes(run.state_bytes)
        acting = acting_text(experiment.evaluation_policy, experiment.evaluation_epsilon)
        self._acting = acting if experiment.evaluations else ""
        self._total = experiment.frames * max(1, len(experiment.pods))
        self._title = run.run_dir.name
        parts = [experiment.recipe, run.devices, f"{memory} of state on each"]
        resumed = f"resumed from update {run.resumed_from}"
        self._about = parts if run.resumed_from is None else [resumed, *parts]
        self._terminal = Terminal(file=self._file)
        self._spinner = Spinner("dots", style="cyan")
        self._shown_at = -math.inf
        self._unprinted: Record | None = None
        self._started = time.monotonic()
        self._latest: dict[str, Any] = {}
        self._evaluated: Record = {}  # the last record with an evaluation
        self._best: float | None = None
        self._pace: deque[tuple[int, float]] = deque(maxlen=64)
        self._is_closed = False
        self._lock = threading.Lock()  # the panel is drawn by a thread of rich
        self._live: Live | None = None
        self._cell: Any = None  # handle of the panel in a notebook
        self._start()

    def _start(self) -> None:
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
            acting = self._acting and f"{self._acting} evaluation"
            context = " ".join(f"[{part}]" for part in [*self._about, acting] if part)
            with contextlib.suppress(OSError):  # a broken pipe must not end the run
                print(self._title, context, f"{self._total:,} frames", file=self._file, flush=True)

    def write(self, record: Record) -> None:
        with self._lock:
            self._remember(record)
        if self._live is not None:
            return
        self._unprinted = record
        interval = self._interval if self._cell is None else _NOTEBOOK_SECONDS
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

    def _remember(self, record: Record) -> None:
        self._latest |= {key: value for key, value in record.items() if value is not None}
        evaluation = whole_return(record)
        if "evaluation_return" in record:
            self._evaluated = record
        if evaluation is not None:
            self._best = evaluation if self._best is None else max(self._best, evaluation)
        if "seconds" in self._latest:
            self._pace.append((self._latest["frames"], self._latest["seconds"]))

    def panel(self) -> RenderableType:
        with self._lock:
            body = Group(self._progress(), Text(), self._figures()) if self._pace else self._wait()
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

    def _wait(self) -> RenderableType:
        passed = clock(time.monotonic() - self._started)
        self._spinner.update(text=Text(f"compiling, then the first updates  {passed}"))
        return self._spinner

    def _progress(self) -> Table:
        frames = min(self._latest["frames"], self._total)
        (first, start), (last, end) = self._pace[0], self._pace[-1]
        pace = (end - start) / (last - first) if last > first else math.nan
        left = "ended" if self._is_closed else f"{clock(pace * (self._total - frames))} left"
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
        """Return the figures of a run and the agent's metrics, two in a row."""
        latest, evaluated = self._latest, self._evaluated
        distinct = evaluated.get("evaluation_distinct_episodes")
        notes = [
            self._acting,
            left_out(evaluated),
            f"best {number(self._best)}" if self._best is not None else "",
            f"{compact(distinct)} distinct episodes" if distinct is not None else "",
        ]
        evaluation, note = number(whole_return(evaluated)), "  ".join(filter(None, notes))
        frames = f"{compact(latest['frames'])}/{compact(self._total)}"
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(style="bold", justify="right", no_wrap=True)
        table.add_column(style="dim", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(style="dim", no_wrap=True)
        table.add_column(style="bold", justify="right", no_wrap=True)
        add, value = table.add_row, latest.get
        add("episode return", number(value("episode_return")), "", "frames", frames)
        pace = compact(value("frames_per_second"))
        add("evaluation", evaluation, note, "frames/second", pace)
        length, updates = number(value("episode_length")), f"{latest['updates']:,}"
        add("episode length", length, "", "updates", updates)
        add("episodes", compact(value("episodes")), "", "time", clock(value("seconds")))
        names = [k for k, x in latest.items() if group(k) == "learn" and isinstance(x, int | float)]
        names.sort(key=lambda key: _FIRST_METRICS.index(key) if key in _FIRST_METRICS else 9)
        cells = [(key.replace("_", " "), number(latest[key])) for key in names[:_NUM_METRICS]]
        for left, right in itertools.zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
            add(*left, "", *right)
        if {"actor_idle", "learner_idle"} & latest.keys():
            lag = (
                f"lag {value('lag_mean', math.nan):.1f}  queue {percent(value('queue_occupancy'))}"
            )
            idle = percent(value("learner_idle"))
            add("actors wait", percent(value("actor_idle")), lag, "learner waits", idle)
        if faults := faults_text(latest):
            total, _, kinds = faults.partition(" ")
            add("faults", Text(total, "bold yellow"), kinds)
        return table


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
    told = read_run(run)
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
    if told.is_evaluated:
        name, (value, mark) = f"{told.acting} evaluation".lstrip(), told.final
        facts = f"({mark}{', ' if mark else ''}best {number(told.best_evaluation)})"
        parts.append(f"{name} {number(value)} {facts}")
    if reason:
        parts.append(reason)
    path = quoted_path(run)
    flags = [f" --{flag} {shlex.quote(x)}" for flag, x in (options or {}).items() if x is not None]
    rows = [
        (outcome, ", ".join(parts) if told.records else "nothing was recorded"),
        ("Run", short_path(run)),
        ("Next", f"podracer report {path}"),
    ]
    if next_command is not None:
        rows.append(("", f"podracer {next_command} {path}{''.join(flags)}"))
    terminal = Terminal(file=sys.stdout if file is None else file)
    width = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        terminal.print(Text.assemble((f"{label:{width}}", "bold"), text), soft_wrap=True)
