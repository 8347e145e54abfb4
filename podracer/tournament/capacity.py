"""Capacity: how many pods of a tournament may run, by the file `DIR/capacity`, and who leaves."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from podracer.tournament.events import PodState

CAPACITY = "capacity"

_NUMBER = re.compile(r"[0-9]{1,4}")
_LOG = logging.getLogger("podracer")


class CapacityFile:
    """Reader of a tournament's capacity, which anybody may write at any time."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CAPACITY
        self._refused = ""  # the last text that was no number

    def read(self) -> int | None:
        """Return the number in the file, None if there is none; warn once of anything else."""

        def open_without_waiting(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK)  # not even for the writer of a named pipe

        try:
            with open(self.path, "rb", opener=open_without_waiting) as file:
                text = file.read(64).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            text = str(error.strerror)
        if _NUMBER.fullmatch(text):
            return int(text)
        if text and text != self._refused:  # an empty file is about to be written
            _LOG.warning("%s is ignored: it must hold 0 to 9999, not %r.", self.path, text)
        self._refused = text
        return None


def weakest_first(pods: Mapping[int, PodState]) -> list[int]:
    """Return the numbers of pods: those without an entry first, then by ascending score."""

    def strength(number: int) -> tuple[bool, float, int]:
        newest = pods[number].newest
        return newest is not None, newest.score if newest else 0.0, -number

    return sorted(pods, key=strength)
