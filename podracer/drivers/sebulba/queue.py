"""The one queue: bounded, closable, and never waited on without a time-out."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
WAKE_SECONDS = 1.0  # a wait looks up this often even if nobody wakes it


class Closed(Exception):
    """The queue was closed while, or before, something waited on it."""


class ClosableQueue(Generic[T]):
    """First in, first out, at most `depth` items. Closing wakes and ends every wait at once."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T) -> None:
        """Wait for room, then add. Raises `Closed`."""
        with self._changed:
            while len(self._items) >= self._depth:  # a closed one is empty
                self._changed.wait(WAKE_SECONDS)
            self._add(item)

    def put_newest(self, item: T) -> None:
        """Add at once; a full queue loses its oldest item. Raises `Closed`."""
        with self._changed:
            if len(self._items) >= self._depth:
                self._items.popleft()
            self._add(item)

    def get(self, seconds: float = float("inf")) -> T:
        """Wait for an item and take it. Raises `Closed`, or `TimeoutError` after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._items and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._changed.wait(min(left, WAKE_SECONDS))
            if self._closed:
                raise Closed
            self._changed.notify_all()
            return self._items.popleft()

    def get_newest(self) -> T | None:
        """Take everything and give back the newest, or None if there is nothing. Never waits."""
        with self._changed:
            if self._closed:
                raise Closed
            newest = self._items[-1] if self._items else None
            self._items.clear()
            self._changed.notify_all()
            return newest

    def close(self) -> None:
        """End every wait, now and later, with `Closed`. What is still in it is dropped."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    def _add(self, item: T) -> None:
        if self._closed:
            raise Closed
        self._items.append(item)
        self._changed.notify_all()
