"""`podracer init`: the package that it writes works as it is, and mistakes are one sentence."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest
from child import exit_code

from podracer_testing.plugin import CACHE


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A written project with another name than the template's; the tests are inside its folder."""
    monkeypatch.chdir(tmp_path)
    assert exit_code("init", "rabbits") == 0
    monkeypatch.chdir(tmp_path / "rabbits")
    return tmp_path / "rabbits"


def run(*arguments):
    """Run a module of Python as a user does, without what these tests set, but their cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(
        command, env={**kept, **cache}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_tests_of_a_written_project_pass(project):
    assert "4 passed" in run("pytest", "-q", "-n", "0", "-p", "no:cacheprovider")


def test_a_written_project_trains_without_an_installation(project):
    recipe = "rabbits.recipes:rabbits"
    flags = ("--frames", 10_240, "--evaluations", 0, "--run-dir", "runs/a")
    out = run("podracer", "train", recipe, "--width", 4, *flags)
    assert f"podracer play runs/a --recipe {recipe}" in out


def test_the_entry_points_of_a_written_project_lead_to_its_functions(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    for module in ("rabbits", "rabbits.environment", "rabbits.agent", "rabbits.recipes"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    groups = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"podracer.environments", "podracer.recipes"}
    for group, entries in groups.items():
        for name, value in entries.items():
            assert name.startswith("rabbits")
            assert callable(EntryPoint(name, value, group).load())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my-project", "is no name of a package: take letters, digits and underscores, such as my"),
        ("class", "'class' is no name of a package"),
        ("json", "Python has a module json already"),
        ("catch", "podracer has an environment or a recipe catch"),
        ("make", "the recipes of the package use make"),
        ("full", "full exists here already"),
    ],
)
def test_a_name_that_cannot_be_is_one_sentence(name, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    assert exit_code("init", name) == 78
    out, error = capsys.readouterr()
    assert sentence in error
    assert error.count("\n") == 1
    assert out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "kept"
