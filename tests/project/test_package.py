"""What is distributed: a wheel that works without the repository, and an archive of the sources."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import podracer
from podracer.cli.main import version
from podracer.envs.catalog import ADAPTERS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_trains_and_plays_in_an_empty_folder(tmp_path):
    pytest.importorskip("hatchling")
    built, site, folder = tmp_path / "built", tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}

    def run(*command, **options):
        subprocess.run([sys.executable, *map(str, command)], check=True, **options)

    run("-m", "hatchling", "build", "--directory", built, cwd=ROOT)
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    inside = {"cwd": folder, "env": {**kept, "PYTHONPATH": str(site)}}
    where = f"import podracer; assert podracer.__file__.startswith({str(site)!r})"
    run("-c", where, **inside)
    run("-m", "podracer", "train", "catch", "--frames", 20_000, "--run-dir", "run", **inside)
    run("-m", "podracer", "play", "run", **inside)
    assert (folder / "run" / "play.gif").read_bytes()[:6] == b"GIF89a"
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    metadata = f"podracer_rl-{podracer.__version__}.dist-info"
    packages = {name.split("/")[0] for name in names}
    assert packages == {"podracer", metadata}
    template = ("pyproject.toml", ".gitignore", "my_project/agent.py", "tests/test_my_project.py")
    for file in ("py.typed", *(f"cli/my_project/{name}" for name in template)):
        assert f"podracer/{file}" in names
    with tarfile.open(archive) as file:
        sources = [name.partition("/")[2] for name in file.getnames()]
    assert "tests/project/test_package.py" in sources
    assert not any(name.startswith("benchmarks/results/") for name in sources)


def test_one_version_and_one_name_are_used_everywhere():
    """The version is declared in the package; what cannot read it repeats it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dynamic"]) == ("podracer-rl", ["version"])
    said = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    for path in (ROOT / "deploy").iterdir():
        said += re.findall(r"\bpodracer:(\d+\.[\w.]+)", path.read_text()) if path.is_file() else []
    assert len(said) > 5
    assert set(said) == {podracer.__version__}
    assert podracer.__version__ in version()


def test_on_windows_one_sentence_says_where_it_runs():
    code = "import sys; sys.platform = 'win32'; import podracer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    sentence = "podracer runs on Linux and macOS; on Windows install it inside WSL 2."
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}"


def test_every_extra_that_is_asked_for_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    asked = {x for page in pages for x in re.findall(r"-e \"\.\[([a-z-]+)\]", page.read_text())}
    asked |= {adapter.extra for adapter in ADAPTERS.values() if adapter.extra}
    assert len(asked) > 5
    assert asked <= set(extras)


def test_nothing_advises_to_install_from_an_index_that_does_not_have_us():
    """A stranger could take the name there before the release, which deletes this test."""
    folders = ("podracer", "podracer_trading", "docs", "examples", "benchmarks", "deploy")
    files = [ROOT / "README.md", *(path for name in folders for path in (ROOT / name).rglob("*"))]
    for path in files:
        if path.suffix in (".md", ".py", ".toml", ".yaml", ".html"):
            assert not re.search(r"install[^\n]*podracer-rl|\"podracer-rl", path.read_text()), path
