"""The parts of the live page, as they are now."""

from __future__ import annotations

import contextlib
import fnmatch
import html
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from podracer.io.directories import LOG
from podracer.io.paths import refuse_address
from podracer.reports.page import section
from podracer.reports.watch.files import signature
from podracer.reports.watch.runs import Studio, WatchedRun, find_runs, run_sections

Parts = dict[str, str]  # HTML by the name of the part, in their order

RUNS = 60  # shown at most, those that wrote last
SHORTEST_PAUSE = 1.0  # seconds between two looks at the files
SHARE = 0.05  # share of a core that making the page takes at most


class Watcher:
    """View of a directory that holds a run, a sweep, several of them, or a tournament.

    It only reads, and only while somebody asks for `parts`. Runs whose names match `pattern` are
    shown. With `films` somebody may ask for the film of a run, which another process makes.
    """

    def __init__(self, directory: Path, pattern: str = "*", *, films: bool = False) -> None:
        refuse_address(directory)
        self._directory, self._pattern = Path(directory), pattern
        self._studio = Studio() if films else None
        self._lock = threading.Lock()
        self._runs: dict[Path, WatchedRun] = {}
        self._shown: list[WatchedRun] = []  # whose films can be asked for
        self._signature: tuple[int, ...] | None = None  # a tournament's log
        self._parts: Parts = {}
        self._next_look = 0.0

    @property
    def title(self) -> str:
        return self._directory.resolve().name

    def parts(self) -> Parts:
        """Return the parts, made anew if files have changed, from any thread."""
        with self._lock:
            start = time.monotonic()
            if start >= self._next_look:
                self._look()
                end = time.monotonic()
                self._next_look = end + max(SHORTEST_PAUSE, (end - start) / SHARE)
            return self._parts

    def film(self, number: int) -> Path | None:
        """Return the film of a run by its number on the page, None if there is none."""
        with self._lock:
            return self._shown[number].film if 0 <= number < len(self._shown) else None

    def start_film(self, number: int) -> bool:
        """Begin to film the newest policy of a run, unless that is off or another one is filmed."""
        with self._lock:
            if self._studio is None or not 0 <= number < len(self._shown):
                return False
            return self._studio.start(self._shown[number])

    def close(self) -> None:
        """End the process that makes a film."""
        if self._studio is not None:
            self._studio.close()

    def _look(self) -> None:
        if log := signature(self._directory / LOG):
            if log != self._signature:
                self._parts = _collect(lambda: _tournament(self._directory))
            self._signature = log
            return
        run_paths = [
            x for x in find_runs(self._directory) if fnmatch.fnmatch(x.name, self._pattern)
        ]
        paths = sorted(run_paths[-RUNS:], key=lambda path: path.name)
        has_changed = paths != list(self._runs) or not self._parts
        has_changed = (self._studio is not None and self._studio.has_changed()) or has_changed
        self._runs = {path: self._runs.get(path) or WatchedRun(path) for path in paths}
        for run in self._runs.values():
            with contextlib.suppress(Exception):  # the disk's, or of what a file holds: it stays so
                has_changed = run.update() or has_changed
        if has_changed:
            runs = list(self._runs.values())
            self._parts, self._shown = (
                _parts_of(runs, len(run_paths), self._studio) if runs else (_NOTHING, [])
            )


_UNREADABLE = "unreadable"
_NOTHING = {"overview": "<p>There is no run here yet.</p>"}


def _tournament(directory: Path) -> Iterator[tuple[str, str]]:
    from podracer.reports.tournament import tournament_sections
    from podracer.reports.tournament_log import read_tournament_log

    return tournament_sections(read_tournament_log(directory))


def _parts_of(
    runs: list[WatchedRun], num_runs: int, studio: Studio | None
) -> tuple[Parts, list[WatchedRun]]:
    """Return the parts of runs, and those runs whose films they show by their places.

    A run whose files end a part stands by itself, below the others.
    """
    parts = _collect(lambda: run_sections(runs, num_runs, studio))
    if _UNREADABLE not in parts or len(runs) == 1:
        return parts, runs
    alone = [(run, _collect(partial(run_sections, [run], 1))) for run in runs]
    sound = [run for run, own_parts in alone if _UNREADABLE not in own_parts]
    num_left_out = num_runs - len(runs)
    num_sound = len(sound) + num_left_out
    parts = _collect(lambda: run_sections(sound, num_sound, studio)) if sound else {}
    for number, (run, own_parts) in enumerate(alone):
        if run not in sound:
            content = "".join(part for name, part in own_parts.items() if name != "films")
            parts[f"alone-{number}"] = section(html.escape(run.path.name), content)
    return parts, sound


def _collect(sections: Callable[[], Iterator[tuple[str, str]]]) -> Parts:
    """Return all parts up to one that cannot be made of what the files hold, which is said.

    They may hold anything, and a page must not end by that.
    """
    parts: Parts = {}
    try:
        for name, content in sections():
            parts[name] = content
    except Exception as error:
        reason = html.escape(f"{type(error).__name__}: {error}"[:500])
        parts[_UNREADABLE] = f"<p>The rest cannot be shown. {reason}</p>"
    return parts
