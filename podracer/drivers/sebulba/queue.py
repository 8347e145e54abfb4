"""Bounded queue that can be closed; every wait ends with an item, the closing or a timeout."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
WAKE_SECONDS = 1.0  # a waiting thread wakes this often, even if no other wakes it


class Closed(Exception):
    """Raised by every operation on a closed queue, also by those already waiting."""


class ClosableQueue(Generic[T]):
    """First-in, first-out queue of at most `depth` items."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T) -> None:
        """Wait for room, then add an item. Raises `Closed`."""
        with self._changed:
            while len(self._items) >= self._depth:  # a closed one is empty
                self._changed.wait(WAKE_SECONDS)
            self._add(item)

    def put_newest(self, item: T) -> None:
        """Add an item at once; a full queue loses its oldest. Raises `Closed`."""
        with self._changed:
            if len(self._items) >= self._depth:
                self._items.popleft()
            self._add(item)

    def get(self, seconds: float = float("inf")) -> T:
        """Wait for the oldest item and take it. Raises `Closed` or `TimeoutError`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._items and not self._closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                self._changed.wait(min(remaining, WAKE_SECONDS))
            self.check_open()
            self._changed.notify_all()
            return self._items.popleft()

    def get_newest(self) -> T | None:
        """Take all items and return the newest, or None if there is none. Never waits."""
        with self._changed:
            self.check_open()
            newest = self._items[-1] if self._items else None
            self._items.clear()
            self._changed.notify_all()
            return newest

    def check_open(self) -> None:
        if self._closed:
            raise Closed

    def close(self) -> None:
        """End every wait, present and future, with `Closed`, and drop the items."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def occupancy(self) -> float:
        """Share of the queue that is filled, in [0, 1]."""
        return len(self._items) / self._depth

    def _add(self, item: T) -> None:
        self.check_open()
        self._items.append(item)
        self._changed.notify_all()
