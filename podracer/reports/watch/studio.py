"""Films of runs that somebody who watches asked for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Protocol


class Filmed(Protocol):
    """Run with a directory, and with the film that it has."""

    path: Path

    @property
    def film(self) -> Path | None: ...


class Studio:
    """Process of `podracer play`, one at a time, and what it said of a run that has no film."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._path = Path()
        self._notes: dict[Path, str] = {}
        self._has_changed = False

    def start(self, run: Filmed) -> bool:
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

    def note(self, run: Filmed) -> str:
        """Return what there is to say of a run: it is being filmed, or why it has no film."""
        is_filmed = self._process is not None and run.path == self._path
        return "being filmed" if is_filmed else self._notes.get(run.path, "")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()
