"""The tutorials, followed from top to bottom in an empty folder, as a reader would.

Commands run in a shell. A Python block whose first line is a comment with the name of a file is
saved there; any other is run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("[0-9]*.md"))
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\w+\.\w+)\n")


def test_there_are_nine_tutorials():
    assert len(TUTORIALS) == 9


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment = {**kept, "PATH": path}  # without what the tests set
    for language, block in BLOCK.findall(page.read_text()):
        if file := FILE.match(block):
            (tmp_path / file[1]).write_text(block)
            continue
        command = [sys.executable, "-c", block] if language == "python" else ["bash", "-ec", block]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        print(done.stdout)
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
