"""The documentation as a site: `pip install -e ".[docs]" && python docs/build.py`.

Writes `build/site/index.html`, for a browser or any web server. The pages of the repository are
copied into `build/pages` first, with those outside of `docs/`, the notebooks with their outputs,
one for each source file that a page links to, and the tables of `tables.py`. Every link leads to
the copy, so the pages read the same in the repository. A link that leads nowhere is an error.
"""

import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tables

ROOT = Path(__file__).parents[1]
PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "docs/README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/compiled.md": "compiled.md",
    "benchmarks/reproduction.md": "reproduction.md",
    "benchmarks/results.md": "results.md",
    "deploy/README.md": "deployment.md",
    "packages/agents/README.md": "packages/agents.md",
    "packages/cloud/README.md": "packages/cloud.md",
    "packages/deploy/README.md": "packages/deploy.md",
    "packages/environments/README.md": "packages/environments.md",
    "packages/games/README.md": "packages/games.md",
    "packages/offline/README.md": "packages/offline.md",
    "packages/plan/README.md": "packages/plan.md",
    "packages/testing/README.md": "packages/testing.md",
    "packages/trading/README.md": "packages/trading.md",
    "packages/trained/README.md": "packages/trained.md",
}
NOTEBOOKS = "examples/notebooks/"
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}
CONTENTS = """
```{toctree}
:hidden:
:caption: Learn
:glob:
tutorials/*
```
```{toctree}
:hidden:
:caption: Notebooks
:glob:
notebooks/*
```
```{toctree}
:hidden:
:caption: Use
coming-from
agents
sebulba
scaling
tournaments
meta-learning
reports
troubleshooting
reliability
stability
security
deployment
```
```{toctree}
:hidden:
:caption: Extend
add-an-agent
add-an-environment
packages/agents
packages/cloud
packages/deploy
packages/environments
packages/games
packages/offline
packages/plan
packages/testing
packages/trading
packages/trained
contributing
```
```{toctree}
:hidden:
:caption: Understand
data-flow
numerics
decisions/README
```
```{toctree}
:hidden:
:caption: Measure
results
reproduction
benchmarks
compiled
changelog
```
```{toctree}
:hidden:
:caption: Look up
environments
settings
glossary
api/train
api/agents
api/environments
api/networks
api/types
api/fields
api/ops
api/replay
api/schedules
api/reductions
api/drivers
api/tournaments
api/errors
api/packages
```
"""
DECISIONS = """
```{toctree}
:hidden:
:glob:
0*
```
"""


def page_of(path: str) -> str:
    """Return the page of the site that shows a file or a folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith(NOTEBOOKS):
        return f"notebooks/{Path(path).stem}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def target_of(path: str, link: str) -> str | None:
    """Return the file of the repository that a link in one leads to, None if it leads outside."""
    if not link or ":" in link:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if not (ROOT / target).exists():
        raise SystemExit(f"{path} links to {link}, which is not there")
    return target


def assemble(pages: Path) -> None:
    """Copy all pages below a folder, their links leading to each other."""
    folders = [ROOT / "docs", *(ROOT / "docs" / name for name in ("api", "decisions", "tutorials"))]
    paths = [str(f.relative_to(ROOT)) for folder in folders for f in folder.glob("*.md")]
    texts = {path: (ROOT / path).read_text() for path in {*paths, *PAGES}}
    del texts["docs/README.md"]  # whose place the contents take
    texts |= {path: make() for path, make in tables.OF_THE_SITE.items()}
    notebooks = sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))
    texts |= {str(path.relative_to(ROOT)): page_of_notebook(path) for path in notebooks}
    linked = set()
    for path, text in sorted(texts.items()):

        def replace(link: re.Match[str], path: str = path) -> str:
            target = target_of(path, link[2])
            if target is None:
                return link[0]
            linked.add(target)
            page = posixpath.relpath(page_of(target), posixpath.dirname(page_of(path)) or ".")
            return f"{link[1]}{page}{link[3] or ''}{link[4]}"

        write(pages / page_of(path), LINK.sub(replace, text))
    for page, contents in (("index.md", CONTENTS), ("decisions/README.md", DECISIONS)):
        write(pages / page, (pages / page).read_text() + contents)
    shutil.copytree(ROOT / "docs" / "images", pages / "images")
    shutil.copy(ROOT / "docs" / "architecture.svg", pages)
    for path in sorted(linked):
        if page_of(path).startswith("source/"):
            write(pages / page_of(path), source_page(path, linked))


def source_page(path: str, linked: set[str]) -> str:
    """Return a page with a file, or with the list of the programs in a folder."""
    title = f"---\norphan: true\n---\n\n# `{path}`\n\n"
    if (ROOT / path).is_file():
        language = LANGUAGES.get(Path(path).suffix, "text")
        return f"{title}`````{language}\n{(ROOT / path).read_text().rstrip()}\n`````\n"
    folder = posixpath.dirname(page_of(path))
    lines = []
    for file in sorted(x for x in (ROOT / path).iterdir() if x.suffix in (".py", ".ipynb")):
        target = f"{path}/{file.name}"
        page = posixpath.relpath(page_of(target), folder)
        has_page = target in linked or file.suffix == ".ipynb"
        lines.append(f"- [`{file.name}`]({page})" if has_page else f"- `{file.name}`")
    return title + "\n".join(lines) + "\n"


def page_of_notebook(path: Path) -> str:
    """Return a page with the cells of a notebook and what they printed and drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif picture := output["data"].get("image/png"):
                parts.append(f'<img alt="" src="data:image/png;base64,{picture.strip()}">')
    return "\n\n".join(parts) + "\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> None:
    build = ROOT / "build"
    for folder in ("pages", "site"):
        shutil.rmtree(build / folder, ignore_errors=True)
    assemble(build / "pages")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", ROOT / "docs"]
    code = subprocess.call([*command, build / "pages", build / "site"])
    print(f"{build / 'site' / 'index.html'}" if code == 0 else "the site has errors")
    sys.exit(code)


if __name__ == "__main__":
    main()
