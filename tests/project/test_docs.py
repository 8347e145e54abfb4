"""README and docs are true: their Python runs, their commands and flags exist, their links lead on.

Commands and flags are those of shell blocks and of inline code, as `podracer train` or `--seed`.
A block that cannot run here says so above itself: `<!-- not run: needs an accelerator -->`.
"""

import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import flags_of_commands, flags_of_recipes
from pages import ROOT, blocks, run_page

import podracer
from podracer import recipes
from podracer.cli.arguments import take_values
from podracer.cli.pods import SweepOptions
from podracer.cli.recipe_flags import find_experiment, parse_experiment
from podracer.cli.train import TrainOptions
from podracer.io.entry_points import PACKAGES

FOLDERS = (".", "benchmarks", "deploy", "docs", "docs/*", "examples/*")
PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(f"{folder}/*.md"))]
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("packages/**/README.md"))]
HISTORY = ROOT / "CHANGELOG.md"  # it names what is gone
OF_PACKAGES = {name for names in PACKAGES.values() for name in names}
OWN_FLAGS = {"--game", "--leak", "--update-rule"}  # of recipes and rules, before the others
OF_NO_COMMAND = {"--help", "--version"}
FOREIGN = ("--xla_",)  # how flags of other programs begin
# Tables whose last column alone has our names: the others have earlier ones, or those of others.
WITH_OTHER_NAMES = ("CHANGELOG", "docs/coming-from")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def page_id(page: Path) -> str:
    return name(page).removesuffix(".md")


# Those of tutorials are run with their commands, by test_tutorials.py.
WITH_CODE = [page for page in PAGES if blocks(page) and page.parent.name != "tutorials"]
LONG = (
    "docs/add-an-environment",
    "docs/add-an-agent",
    "docs/coming-from",
    "docs/troubleshooting",
)  # they train


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page_id(page), marks=pytest.mark.slow if page_id(page) in LONG else ()
        )
        for page in WITH_CODE
    ],
)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, monkeypatch)


@pytest.mark.parametrize("page", WITH_CODE, ids=page_id)
def test_a_block_that_imports_needs_no_other_block(page):
    """Or its first line says so: the page's own test would not notice."""
    for block in blocks(page):
        if block.imports:
            assert not block.foreign_names(), f"{name(page)}:{block.line}"


def commands(page: Path) -> list[list[str]]:
    """The `podracer` commands of a page's shell blocks and inline code, as words."""
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S))
    texts = re.findall(r"\bpodracer ([a-z-][^;|>\n]*)", text.replace("\\\n", " "))
    inline = [span.split()[1:] for span in spans(page) if span.startswith("podracer ")]
    return [*(shlex.split(command, comments=True) for command in texts), *inline]


def spans(page: Path) -> list[str]:
    """The inline code of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    if page_id(page) in WITH_OTHER_NAMES:
        text = re.sub(r"^\|.*\|(?=[^|]*\|$)", "", text, flags=re.M)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


@pytest.fixture(scope="module")
def flags():
    return flags_of_commands(), flags_of_recipes()


def unknown(words: list[str], allowed: set[str]) -> set[str]:
    """The flags among the words that are neither allowed nor another program's."""
    names = (word.partition("=")[0] for word in words if word.startswith("--"))
    own = {name for name in names if not name.startswith(FOREIGN)}
    return {flag for flag in own if not {flag, re.sub(r"(^--|\.)no-", r"\1", flag)} & allowed}


@pytest.mark.parametrize(
    "page", [page for page in ALL_PAGES if commands(page) and page != HISTORY], ids=page_id
)
def test_commands_of_a_page_and_their_flags_exist(page, flags):
    of_commands, of_recipes = flags
    every_recipe = {flag for row in of_recipes.values() for flag in row}
    for command, *arguments in commands(page):
        if command.startswith("-"):
            assert command in OF_NO_COMMAND
            continue
        if {command, *arguments[:1]} & (OF_PACKAGES - of_commands.keys() - of_recipes.keys()):
            continue  # not installed here
        if command in ("...", "COMMAND"):  # any
            allowed = {"--help", *every_recipe}
        else:
            assert command in of_commands, f"{name(page)}: podracer {command}"
            allowed = {*of_commands[command], *OWN_FLAGS}
        if command in ("train", "sweep", "plan", "tune"):
            recipe = arguments[0] if arguments and arguments[0] in of_recipes else None
            allowed |= (
                set(of_recipes[recipe]) if recipe and "--arch" not in arguments else every_recipe
            )
        words = f"{name(page)}: podracer {command} {shlex.join(arguments)}"
        if arguments and ":" in arguments[0]:  # a recipe of one's own, whose agents have names
            arguments = [re.sub(r"^--\w+\.", "--", x) for x in arguments]
        assert not unknown(arguments, allowed), words


PLACEHOLDER = re.compile(r"[$|&]|\.\.\.|^[A-Z/a-z]*[A-Z]+$")


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_id)
def test_values_in_commands_of_a_page_are_read(page):
    """Of those that name a recipe of the library and no file."""
    options = {"train": TrainOptions(), "sweep": SweepOptions()}
    for command, *arguments in commands(page):
        recipe, *flags = arguments or [""]
        is_whole = not any(PLACEHOLDER.search(word) for word in flags)
        if command in options and recipe in recipes.RECIPES and is_whole and page != HISTORY:
            flags = take_values(flags, {"update_rule": str})[1]
            _, experiment, flags = find_experiment([recipe, *flags])
            if "--help" not in flags:
                parse_experiment(command, flags, experiment, options[command])[1].check()


@pytest.mark.parametrize("page", ALL_PAGES, ids=page_id)
def test_links_of_a_page_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, heading = link.partition("#")
        if ":" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name(page)} links to {target}"
        if heading and file.suffix == ".md":
            assert heading in headings(file), f"{name(page)} links to {link}"


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_public_name_has_its_place_in_the_reference():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto\w+:: podracer\.(\S+)$", text, re.M)
    assert sorted(name for name in listed if "." not in name) == podracer.__all__
    assert len(set(listed)) == len(listed)
    for name in listed:
        pkgutil.resolve_name(f"podracer.{name}")
        assert not re.search(r"\b_", name)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning():
    pytest.importorskip("sphinx")
    build = [sys.executable, str(ROOT / "docs" / "build.py")]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = (ROOT / "build" / "site" / "api" / f"{page.stem}.html").read_text()
        assert len(text) > 10_000
        signatures = re.sub("<[^>]+>", "", text)
        assert not re.search(r"Annotated|Suppress|\*args, \*\*kwargs", signatures), page.stem
