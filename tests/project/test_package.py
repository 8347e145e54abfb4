"""What is distributed: a wheel that works without the repository, and an archive of the sources."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import podracer
from podracer.cli.main import version

ROOT = Path(__file__).parents[2]


def test_one_version_and_one_name_are_used_everywhere():
    """The version is declared in the package; what cannot read it repeats it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dynamic"]) == ("podracer-rl", ["version"])
    said = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    for path in (ROOT / "deploy").iterdir():
        said += re.findall(r"\bpodracer:(\d+\.[\w.]+)", path.read_text()) if path.is_file() else []
    assert len(said) > 5
    assert set(said) == {podracer.__version__}
    assert podracer.__version__ in version()


def test_on_windows_one_sentence_says_where_it_runs():
    code = "import sys; sys.platform = 'win32'; import podracer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    sentence = "podracer runs on Linux and macOS; on Windows install it inside WSL 2."
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}"
