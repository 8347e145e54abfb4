"""A panel of rich in the output of a notebook's cell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rich.console import RenderableType


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
