"""Process of a pod: `python -m podracer.tournament.process DIRECTORY [RECIPE ...]`.

It does one attempt at the round in the directory, and saves and ends when its engine ends. What is
slow to import comes after that is arranged. Only the engine names the recipes, which are imported:
no file does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from podracer.io.signals import (
    exit_despite_threads,
    own_process,
    request_signal_at_parent_death,
)


def main(directory: str, *recipes: str) -> NoReturn:
    """Run one attempt and exit with its code."""
    request_signal_at_parent_death(signal.SIGCONT)  # or a stopped process could not end
    threading.Thread(target=_watch_parent, daemon=True).start()
    from podracer.tournament import pod

    with own_process():
        exit_despite_threads(pod.run_alone(Path(directory).absolute(), recipes))


def _watch_parent() -> None:
    """Stop and save when standard input ends."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
