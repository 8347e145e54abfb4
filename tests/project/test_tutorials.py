"""The tutorials, followed from top to bottom in an empty folder, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from follow import steps

from podracer.run.console import line

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


def test_the_tutorial_on_atari_shows_who_waits_as_a_line_of_a_run_does():
    shown = re.search("`(idle [^`]+)`", (TUTORIALS[0].parent / "05-atari.md").read_text())
    assert shown[1] in line({"updates": 1, "actor_idle": 0.55, "learner_idle": 0.0}, 1)
