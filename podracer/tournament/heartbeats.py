"""Signs of life of running attempts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

FILES = ("metrics.jsonl", "log.txt")  # they grow while a round is alive


class Heartbeats:
    """Time since each attempt started, was asked to stop, or was first seen to have recorded.

    All by the monotonic clock of this process: that of the machine which writes the files may
    differ, and the wall clock may be set, or go on while the machine sleeps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, float] = {}  # by token
        self._changes: dict[int, list[int]] = {}  # modification times of the files, by token

    def beat(self, token: int) -> None:
        """Count from now."""
        self._times[token] = self._clock()

    def silence(self, token: int, directory: str) -> float:
        """Return the seconds since the last beat, after a look at the files of the round."""
        changes = []
        for name in FILES:
            with contextlib.suppress(OSError):
                changes.append(os.stat(f"{directory}/{name}").st_mtime_ns)
        if changes != self._changes.get(token, []):
            self._changes[token] = changes
            self.beat(token)
        return self._clock() - self._times[token]

    def forget(self, token: int) -> None:
        """Forget an attempt that has ended."""
        del self._times[token]
        self._changes.pop(token, None)
