"""Tournaments: pods that train, submit to a leaderboard, and restart from its best entries."""

from pathlib import Path

LOG = "leaderboard.jsonl"  # in each tournament's directory, see `leaderboard.py`


def is_tournament(directory: Path) -> bool:
    """Return whether a directory holds a tournament rather than a run."""
    return (directory / LOG).is_file()
