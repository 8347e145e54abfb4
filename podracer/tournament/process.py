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

from podracer.io.signals import exit_despite_threads, request_signal_at_parent_death


def main(directory: str, *recipes: str) -> int:
    """Run one attempt. Returns the exit code."""
    request_signal_at_parent_death(signal.SIGCONT)  # or a stopped process could not end
    threading.Thread(target=_watch_parent, daemon=True).start()
    from podracer.tournament import pod

    code = pod.run_alone(Path(directory).absolute(), recipes)
    exit_despite_threads(code)
    return code


def _watch_parent() -> None:
    """Stop and save when standard input ends."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
