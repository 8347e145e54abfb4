"""What is distributed: a wheel that works without the repository, and an archive of the sources."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

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
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"podracer", f"podracer-{version}.dist-info"}
    assert "podracer/py.typed" in names
    with tarfile.open(archive) as file:
        sources = [name.partition("/")[2] for name in file.getnames()]
    assert "tests/project/test_package.py" in sources
    assert not any(name.startswith("benchmarks/results/") for name in sources)
