"""The command line in a process of its own, which saves and ends with this one.

`python -m podracer_plan.child` is such a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from podracer.io.exits import PREEMPTED, handled, preemptions
from podracer.io.processes import stop_with_parent
from podracer.io.reading import parse_object
from podracer.io.text import print_stderr

PODRACER = ("-m", "podracer_plan.child")


@contextlib.contextmanager
def child_process(
    arguments: Sequence[str], program: Sequence[str] = PODRACER, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run `podracer` within the context, its output a pipe; at the end ask it to stop, and wait.

    So does SIGTERM or SIGHUP, on the main thread, which exits with 75 once the command has saved
    and ended. The handler raises nothing, so that none comes between a process and its record. The
    command also saves and ends where this process is killed.
    """
    processes, numbers = list[subprocess.Popen[str]](), list[int]()

    def stop(*signals: Any) -> None:
        numbers.extend(signals[:1])
        for process in processes:
            process.terminate()

    command = [sys.executable, *program, *arguments]
    reader, writer = os.pipe()  # whose end, with this process, stops the command
    with (
        handled(preemptions(), stop),
        open(reader) as stdin,
        open(writer, "w"),
        subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, text=True, **options
        ) as process,
    ):
        processes.append(process)
        try:
            if numbers:
                stop()
            yield process
        finally:
            stop()
    if numbers:
        print_stderr(f"ended by {signal.Signals(numbers[0]).name}, after the command that it ran.")
        raise SystemExit(PREEMPTED)


def printed_objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of a command, where other packages may print, too."""
    yield from filter(None, map(parse_object, lines))


if __name__ == "__main__":
    stop_with_parent()  # before what is slow to import
    from podracer.cli.main import main

    main()
