"""`podracer init`: the package that it writes works as it is, and mistakes are one sentence."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest

from podracer.cli.main import main
from podracer.testing.plugin import CACHE


def init(name):
    with pytest.raises(SystemExit) as leaving:
        main(["init", name])
    return leaving.value.code


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A written project with another name than the template's; the tests are inside its folder."""
    monkeypatch.chdir(tmp_path)
    assert init("rabbits") == 0
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


@pytest.mark.slow
def test_an_installed_project_is_found_by_its_names(project, tmp_path):
    site = tmp_path / "site"
    run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site, ".")
    code = f"import sys; sys.path.insert(0, {str(site)!r})\nfrom podracer.cli.main import main\n"

    def command(*arguments):
        text = f"{code}main({[*map(str, arguments)]!r})"
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = command("list")
    for line in ("REINFORCE on a board", "PPO on the same board", "Reach the goal on a board."):
        assert line in listed
    command("train", "rabbits", "--frames", 40_960, "--evaluations", 1, "--run-dir", "first")
    command("eval", "first", "--episodes", 8)
    command("play", "first")
    assert (tmp_path / "first" / "play.gif").read_bytes()[:6] == b"GIF89a"
    moved = ("--environment", "rabbits", "--frames", 4_096, "--evaluations", 0)
    command("train", "cartpole_ppo", *moved, "--run-dir", "second")


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


def test_nothing_of_the_template_is_left_in_a_written_project(project):
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) == 8
    for path in files:
        assert "my_project" not in f"{path}{path.read_text()}"


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
    assert init(name) == 78
    out, error = capsys.readouterr()
    assert sentence in error
    assert error.count("\n") == 1
    assert out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "kept"


def test_an_empty_folder_is_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rabbits").mkdir()
    assert init("rabbits") == 0
    assert (tmp_path / "rabbits" / "rabbits" / "agent.py").exists()
