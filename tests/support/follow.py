"""A page of the documentation, followed from top to bottom in a folder, as a reader would.

Commands run in a shell. A Python block whose first line is a comment with the name of a file is
saved there; any other is run. Only the standard library is imported: `.ci/release` uses it too.
"""

import re
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\w+\.\w+)\n")


def steps(page: Path, folder: Path, python: str) -> Iterator[list[str]]:
    """Yield the commands of a page, each once the files above it are in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for language, block in BLOCK.findall(page.read_text()):
        if file := FILE.match(block):
            (folder / file[1]).write_text(block)
        elif language == "python":
            yield [python, "-c", block]
        else:
            yield ["bash", "-ec", block]


def command_of(page: Path, beginning: str) -> str:
    """Return the command, inline or of a block, or the Python block that begins so on a page."""
    text = page.read_text().replace("\\\n", "")
    for language, block in BLOCK.findall(text):
        if language == "python" and block.startswith(beginning):
            return f"python - <<'END'\n{block}END\n"
    command = re.search(rf"(?:^|`)({re.escape(beginning)}[^`#\n]*)", text, re.M)
    if command is None:
        raise ValueError(f"{page} has no command that begins with {beginning}")
    return command[1].strip()
