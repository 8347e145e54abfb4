"""The mutation check: without any one of the guards, the test that is named beside it fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from guards import GUARDS, Guard

ROOT = Path(__file__).parents[2]


def name_of(guard: Guard) -> str:
    return f"{guard.file}:{guard.line.strip().splitlines()[0][:40]}"


@pytest.mark.parametrize("guard", GUARDS, ids=name_of)
def test_a_guard_stands_once_in_its_file_and_its_test_exists(guard):
    assert (ROOT / "podracer" / guard.file).read_text().count(guard.line) == 1
    file, _, test = guard.test.partition("::")
    assert re.search(
        rf"^def {test}\(" if test else "^def test", (ROOT / "tests" / file).read_text(), re.M
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the package and its tests, with the times of files, so that bytecode holds."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("podracer", "tests"):
        shutil.copytree(ROOT / folder, copy / folder)
    shutil.copy2(ROOT / "pyproject.toml", copy)
    return copy


def run(tree: Path, mark: str, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-m", mark, "--timeout", "120", *(f"tests/{test}" for test in tests)],
        cwd=tree,
        # No bytecode: a file that was changed twice within a second would be taken from it.
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mark", sorted({guard.mark for guard in GUARDS}))
def test_with_all_guards_the_tests_pass(mark, tree):
    result = run(tree, mark, *sorted({guard.test for guard in GUARDS if guard.mark == mark}))
    assert result.returncode == 0, result.stdout


@pytest.mark.figure(25)
@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=name_of)
def test_without_a_guard_its_test_fails(guard, tree):
    path = tree / "podracer" / guard.file
    text = path.read_text()
    path.write_text(text.replace(guard.line, guard.without))
    try:
        result = run(tree, guard.mark, guard.test)
    finally:
        path.write_text(text)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
