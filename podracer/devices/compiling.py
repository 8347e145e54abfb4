"""Compilation beside other work."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from podracer.io.exits import COMPILER

T = TypeVar("T")


class CompileInThread(Generic[T]):
    """Function that prepares a call here, makes it in a thread, and returns its future.

    That happens once. What JAX traces depends on settings of the thread, so it is traced here.
    """

    def __init__(self, prepare: Callable[..., Callable[[], T]]) -> None:
        self._prepare = prepare
        self._future: Future[T] | None = None
        self.seconds = 0.0  # from the start to the end, once it has ended

    def __call__(self, *args: Any) -> Future[T]:
        """Start the call, unless it has begun, and return its future."""
        if self._future is None:
            start, executor = time.perf_counter(), ThreadPoolExecutor(1, COMPILER)
            call = self._prepare(*args)

            def timed() -> T:
                result = call()
                self.seconds = time.perf_counter() - start
                return result

            self._future = executor.submit(timed)
            executor.shutdown(wait=False)  # after this one
        return self._future
