"""The mutation check: without any one of the guards, the test that is named beside it fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from mutants import mutants

ROOT = Path(__file__).parents[2]


class Guard(NamedTuple):
    """A line of `guards.txt`."""

    file: str  # in podracer/, or with the path of its package
    function: str  # `name`, `Class.method` or `outer.inner`
    name: str  # an identifier of the function
    test: str  # in tests/
    mark: str = "not slow"  # of the cases that are tried

    @property
    def source(self) -> str:
        return self.file if self.file.startswith("packages/") else f"podracer/{self.file}"

    @property
    def case(self) -> str:
        return self.test if self.test.startswith("packages/") else f"tests/{self.test}"


LINES = (ROOT / "tests" / "support" / "guards.txt").read_text().splitlines()
GUARDS = [Guard(*line.split()) for line in LINES if line and not line.startswith("#")]


def name_of(guard: Guard) -> str:
    return f"{guard.file}:{guard.function}:{guard.name}"


@pytest.mark.parametrize("guard", GUARDS, ids=name_of)
def test_a_guard_can_be_taken_out_and_its_test_exists(guard):
    assert mutants((ROOT / guard.source).read_text(), guard.function, guard.name)
    file, _, test = guard.case.partition("::")
    assert re.search(rf"^def {test}\(" if test else "^def test", (ROOT / file).read_text(), re.M)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the package and its tests, with the times of files, so that bytecode holds."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("podracer", "tests", "packages/cloud"):
        shutil.copytree(ROOT / folder, copy / folder)
    shutil.copy2(ROOT / "pyproject.toml", copy)
    return copy


def run(tree: Path, mark: str, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-m", mark, "--timeout", "120", *tests],
        cwd=tree,
        # No bytecode: a file that was changed twice within a second would be taken from it.
        env=os.environ
        | {"PYTHONPATH": f"{tree}:{tree}/packages/cloud", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mark", sorted({guard.mark for guard in GUARDS}))
def test_with_all_guards_the_tests_pass(mark, tree):
    result = run(tree, mark, *sorted({guard.case for guard in GUARDS if guard.mark == mark}))
    assert result.returncode == 0, result.stdout


@pytest.mark.figure(25)
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("guard", GUARDS, ids=name_of)
def test_without_a_guard_its_test_fails(guard, tree):
    """For one of its mutants at least; `-s` shows those that go unnoticed, too."""
    path = tree / guard.source
    text, outcomes = path.read_text(), {}
    for mutant in mutants(text, guard.function, guard.name):
        path.write_text(mutant.source)
        try:
            outcomes[mutant.change] = run(tree, guard.mark, guard.case).returncode
        finally:
            path.write_text(text)
        failed = outcomes[mutant.change] == pytest.ExitCode.TESTS_FAILED
        print("noticed  " if failed else "unnoticed", name_of(guard), mutant.change)
    assert pytest.ExitCode.TESTS_FAILED in outcomes.values(), outcomes
