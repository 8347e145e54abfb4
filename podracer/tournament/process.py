"""Process of a pod: `python -m podracer.tournament.process DIRECTORY [RECIPE ...]`.

It does one attempt at the round in the directory, and saves and ends when its engine ends. What is
slow to import comes after that is arranged. Only the engine names the recipes, which are imported:
no file does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from podracer.io.exits import exit_despite_threads, own_process
from podracer.io.processes import stop_with_parent
from podracer.io.text import redacted_output


def main(directory: str, *recipes: str) -> NoReturn:
    """Run one attempt and exit with its code."""
    stop_with_parent()
    from podracer.tournament import pod

    with own_process(), redacted_output():
        exit_despite_threads(pod.run_alone(Path(directory).absolute(), recipes))


if __name__ == "__main__":
    main(*sys.argv[1:])
