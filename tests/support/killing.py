"""Orchestrators of tournaments that are killed at an event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from podracer.tournament.leaderboard import Leaderboard


class Killed(BaseException):
    """The orchestrator is gone, as by SIGKILL: nothing after this point happens."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Iterator[None]:
    """The block ends in a kill at its event `at`, counted from 0: before or after it is written."""
    append, count = Leaderboard.append, 0

    def killing(self, event):
        nonlocal count
        count += 1
        if count == at + 1 and not after:
            raise Killed
        written = append(self, event)
        if count == at + 1:
            raise Killed
        return written

    with monkeypatch.context() as patches:
        patches.setattr(Leaderboard, "append", killing)
        with pytest.raises(Killed):
            yield
