"""The rule of core and packages: budgets of lines, and packages that only use the core's names."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import podracer
from podracer.io.entry_points import PACKAGES

ROOT = Path(__file__).parents[2]
CORE = ROOT / "podracer"
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))

# Lines of `.py`, `.pyi`, `.html`, `.js` and `.css` files in each room of the core. A feature enters
# with lines removed, or it becomes a package. Lower a number whenever a room has become smaller.
BUDGETS = {
    "": 3045,  # the contract: files beside the rooms
    "agents": 6250,
    "checks": 795,
    "cli": 2325,
    "config": 570,
    "devices": 1860,
    "drivers": 4045,
    "envs": 3280,
    "io": 2950,
    "networks": 1470,
    "ops": 1200,
    "recipes": 1040,
    "reports": 1715,
    "run": 3020,
    "scores": 890,
    "tournament": 2220,
}
MOST = 37_000  # lines of the core


def lines(room: str) -> int:
    paths = (CORE / room).rglob("*") if room else CORE.iterdir()
    kinds = {".py", ".pyi", ".html", ".js", ".css"}
    return sum(path.read_bytes().count(b"\n") for path in paths if path.suffix in kinds)


def test_no_room_of_the_core_is_above_its_budget():
    rooms = {path.name for path in CORE.iterdir() if any(path.glob("**/*.py"))}
    assert rooms | {""} == BUDGETS.keys()
    above = {room: f"{lines(room)} of {n}" for room, n in BUDGETS.items() if lines(room) > n}
    assert above == {}
    assert sum(map(lines, BUDGETS)) <= MOST


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import anywhere in a file; the name is "" for a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def test_the_core_imports_no_package():
    modules = {module.split(".")[0] for path in CORE.rglob("*.py") for module, _ in imported(path)}
    assert {name for name in modules if name.startswith("podracer_")} == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_package_uses_public_names_of_the_core_and_no_other_package(folder):
    own = f"podracer_{folder.name}"
    for path in (folder / own).rglob("*.py"):
        for module, name in imported(path):
            root, *parts = module.split(".")
            assert root == own or not root.startswith("podracer_"), f"{path} imports {module}"
            if root == "podracer":
                private = [part for part in (*parts, name) if part.startswith("_")]
                assert not private, f"{path} imports {module}.{name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_package_declares_what_it_is(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    version = podracer.__version__
    assert (project["name"], project["version"]) == (f"podracer-{folder.name}", version)
    assert f"podracer-rl=={version}" in project["dependencies"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()  # its wheel has it
    page = re.sub(r"\s+", " ", (folder / "README.md").read_text())
    assert "For whom:" in page
    assert "It leaves if" in page
    assert f"({folder.name}/README.md)" in (folder.parent / "README.md").read_text()
    assert "podracer_testing.plugin" in (folder / "tests" / "conftest.py").read_text()


@pytest.mark.parametrize("name", ["environments", "games", "offline", "trading"])
def test_a_list_of_environments_shows_how_their_names_go_on(name):
    folder = ROOT / "packages" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for prefix, place in project["entry-points"]["podracer.environments"].items():
        module, function = place.split(":")
        body = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text()).body
        (made,) = (x for x in body if isinstance(x, ast.FunctionDef) and x.name == function)
        assert f"{prefix}:" in ast.get_docstring(made).partition("\n")[0]


def test_the_table_of_names_has_the_packages():
    assert PACKAGES.keys() == {folder.name for folder in FOLDERS}
