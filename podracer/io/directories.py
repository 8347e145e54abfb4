"""What a directory holds: a run or a tournament."""

from pathlib import Path

LOG = "leaderboard.jsonl"  # in each tournament's directory, see `tournament/leaderboard.py`


def is_tournament(directory: Path) -> bool:
    """Return whether a directory holds a tournament rather than a run."""
    return (directory / LOG).is_file()
