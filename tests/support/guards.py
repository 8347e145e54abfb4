"""Guards of the package, each with the test that must notice when it is taken out.

`guards.txt` lists them, and `mutants.py` has the ways to take one out.
"""

from pathlib import Path
from typing import NamedTuple


class Guard(NamedTuple):
    file: str  # in podracer/, or with the path of its package
    function: str  # `name`, `Class.method` or `outer.inner`
    name: str  # an identifier of the function
    test: str  # in tests/
    mark: str = "not slow"  # of the cases that are tried

    @property
    def source(self) -> str:
        """Path of the file in the repository."""
        return _in_repository(self.file, "podracer")

    @property
    def case(self) -> str:
        """Test with the path of its file in the repository."""
        return _in_repository(self.test, "tests")


def _in_repository(path: str, folder: str) -> str:
    return path if path.startswith("packages/") else f"{folder}/{path}"


_LINES = Path(__file__).with_suffix(".txt").read_text().splitlines()
GUARDS = [Guard(*line.split()) for line in _LINES if line and not line.startswith("#")]
