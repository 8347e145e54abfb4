"""The workflows of `.github` are valid, run files that exist, and publish without a token."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_runs_files_that_exist(path):
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        assert job["runs-on"]
        assert job["steps"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "@" in step.get("uses", "@")
            for word in shlex.split(step.get("run", "")):
                if re.fullmatch(r"(\.ci|docs|benchmarks|podracer)/[\w./]+", word):
                    assert (ROOT / word).is_file(), word
    assert "secrets." not in path.read_text()
