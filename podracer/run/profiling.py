"""Profile of a run: a trace of some of its updates."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path

import jax

from podracer.drivers.common import Progress

_LOG = logging.getLogger("podracer")


def profiled(
    reports: Generator[Progress], num_updates: int, directory: Path
) -> Generator[Progress]:
    """Yield a driver's reports; write a trace of `num_updates` updates or more to a directory.

    It begins after the first report, when all is compiled, and ends with one.
    """
    first: int | None = None
    is_tracing = False
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python would slow the run down, and fill it
    try:
        for progress in reports:
            if first is None:
                first = progress.updates
                jax.profiler.start_trace(
                    directory, create_perfetto_trace=True, profiler_options=options
                )
                is_tracing = True
            elif is_tracing and progress.updates - first >= num_updates:
                is_tracing = False
                _end(directory, progress.updates - first)
            yield progress
    finally:
        reports.close()
        if is_tracing:
            _end(directory, None)


def _end(directory: Path, num_updates: int | None) -> None:
    jax.profiler.stop_trace()
    traces = sorted(directory.glob("plugins/profile/*/perfetto_trace.json.gz"))
    _LOG.warning(
        "A trace of %s is in %s: open it in the viewer of Perfetto, or the directory by `xprof`.",
        "the run to its end" if num_updates is None else f"{num_updates:,} updates",
        traces[-1] if traces else directory,
    )
