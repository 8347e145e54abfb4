"""Tournaments: pods that train, submit to a leaderboard, and start again from it."""

from pathlib import Path

LOG = "leaderboard.jsonl"  # in each tournament's directory; `leaderboard.py` says what it holds


def is_tournament(directory: Path) -> bool:
    """Whether a directory is that of a tournament and not of a run."""
    return (directory / LOG).is_file()
