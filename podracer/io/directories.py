"""What a directory holds: a run or a tournament."""

import contextlib
import shlex
from pathlib import Path

from podracer.io.reading import read_lines

LOG = "leaderboard.jsonl"  # in each tournament's directory, see `tournament/leaderboard.py`


def is_tournament(directory: Path) -> bool:
    """Return whether a directory holds a tournament rather than a run."""
    return (directory / LOG).is_file()


def holds_begun_tournament(directory: Path) -> bool:
    """Return whether a tournament's log has its first line.

    Without it, as after a kill before it was written, the tournament never began.
    """
    if not is_tournament(directory):
        return False
    return next(read_lines(directory / LOG), b"").endswith(b"\n")


def short_path(path: Path) -> str:
    """Return a path, relative if it lies in the working directory."""
    with contextlib.suppress(OSError, ValueError):  # elsewhere, or the directory is gone
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    return str(path)


def quoted_path(path: Path) -> str:
    """Return a path as `short_path` does, as a shell takes it."""
    text = shlex.quote(short_path(path))
    return f"./{text}" if text.startswith("-") else text
