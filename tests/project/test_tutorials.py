"""The tutorials, followed from top to bottom in an empty folder, as a reader would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from follow import steps

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("[0-9]*.md"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment = {**kept, "PATH": path}  # without what the tests set
    for command in steps(page, tmp_path, sys.executable):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        print(done.stdout)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
