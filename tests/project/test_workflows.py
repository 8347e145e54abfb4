"""The workflows of `.github` are valid, run files that exist, and publish without a token."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from follow import command_of

import podracer

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


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


def test_there_are_workflows_for_tests_docs_releases_and_a_gpu():
    assert {path.stem for path in FILES} == {"test", "docs", "release", "gpu"}
    assert workflow("release")[True] == {"push": {"tags": ["v*"]}}  # `on` is a word for true
    publish = workflow("release")["jobs"]["publish"]
    assert publish["needs"] == "check"
    assert publish["permissions"] == {"id-token": "write"}
    assert workflow("gpu")["jobs"]["accelerator"]["runs-on"] == ["self-hosted", "gpu"]


def test_the_checks_of_a_release_can_be_run():
    script = ROOT / ".ci" / "release"
    assert script.stat().st_mode & 0o111
    done = subprocess.run([script, "no_check"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for check in ("build", "install", "packages", "tutorials", "upgrade", "docs", "signatures"):
        assert check in done.stderr


def test_the_commands_of_a_release_are_on_their_pages():
    pages = tomllib.loads((ROOT / ".ci" / "release.toml").read_text())
    packages = {str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/README.md")}
    assert pages.keys() == {"README.md", *packages}
    for page, commands in pages.items():
        for beginning in commands:
            assert command_of(ROOT / page, beginning).startswith(("podracer ", "python - <<"))
    with pytest.raises(ValueError, match="no command that begins with podracer fly"):
        command_of(ROOT / "README.md", "podracer fly")


def test_breaks_of_signatures_are_named_and_none_before_the_first_release(tmp_path):
    script = tmp_path / ".ci" / "signatures.py"
    script.parent.mkdir()
    script.write_text((ROOT / ".ci" / "signatures.py").read_text())
    page = tmp_path / "docs" / "api" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(".. autofunction:: podracer.mean_of\n")

    def run(*flags):
        done = subprocess.run(
            [sys.executable, script, *flags], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert run() == (0, "1 signatures, and none of a release yet: --record writes them after one\n")
    assert run("--record") == (0, "")
    assert run()[0] == 0
    record = script.with_suffix(".json")
    record.write_text(record.read_text().replace("podracer.mean_of", "podracer.mean_off"))
    since = f"1 signatures, 1 new since {podracer.__version__}, 1 breaks"
    assert run() == (1, f"{since}\n  podracer.mean_off is gone\n")
