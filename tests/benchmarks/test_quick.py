"""The command behind each number runs: those of `benchmarks/README.md`, in small."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from child import environment

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ((?:`[^`]*`(?:, )?)+) \|", re.M)
LEFT_OUT = {
    "accelerator.py": "measures accelerators",
    "results_suite.py": "has tests of its own",
    "references.py": "runs other libraries",
    "pictures.py": "draws, and writes into docs/",
    "screenshots.py": "needs a browser",
}


def commands():
    """Yield the arguments of Python in the table of commands, those of other libraries left out."""
    table = (ROOT / "benchmarks" / "README.md").read_text().partition("\n## The commands\n")[2]
    for row in ROW.findall(table):
        script = ""
        for text in re.findall("`([^`]*)`", row):
            own = re.sub(r" --\S+( \S*(PYTHON|FILE|CHECKOUT)\S*)+", "", text)
            first, _, flags = re.sub(r"^.*\bpython (benchmarks/)?", "", own).partition(" ")
            script = script if first == "..." else first
            if script != "-m":
                yield f"{script} {flags}".strip()


COMMANDS = sorted(set(commands()))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", [x for x in COMMANDS if x.split()[0] not in LEFT_OUT])
def test_a_command_runs_in_small(command, tmp_path):
    script, *flags = shlex.split(command)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *flags, "--quick"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{ROOT}"),
        capture_output=True,
        text=True,
        check=False,
    )
    needs = r"(?:needs the package|No module named|is in) '?(\w+(?:-\w+)?)"
    needed = re.search(needs, done.stderr)
    package = needed and needed[1].replace("-", "_")
    if done.returncode and package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
