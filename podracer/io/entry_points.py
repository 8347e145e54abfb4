"""Entry points of installed packages, read from their metadata: listing them imports nothing."""

from __future__ import annotations

import ast
import json
import re
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from typing import Any

# Fields that runs of earlier versions had, and that a package's classes have now.
_FIELDS = {
    "agents": (
        "batch_norm", "batch_norm_targets", "munchausen", "policy_period",
        "scaled_return_max", "spectral_norm", "spherical", "squashed_scale",
    ),
}  # fmt: skip


_CONTENT = Path(__file__).with_name("packages.json").read_text(encoding="utf-8")
PACKAGES = {
    package: (*names, *_FIELDS.get(package, ())) for package, names in json.loads(_CONTENT).items()
}
"""Names of the packages in the folder `packages/`, for messages where one is not installed.

`docs/tables.py` writes the file, from their entry points.
"""


def installed(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of the group `podracer.KIND` of all packages, by name.

    The kinds are addresses, agents, attachments, callbacks, commands, engines, environments, kinds,
    recipes and reports.
    """
    return {entry.name: entry for entry in entry_points(group=f"podracer.{kind}")}


def package_of(name: str) -> str:
    """Return a sentence on the package that has a name, as of a command or a class; "" if none."""
    for package, names in PACKAGES.items():
        if name.partition(":")[0] in names:
            return f"{name} is in podracer-{package}: `pip install -e packages/{package}`."
    return ""


def installed_class(name: Any) -> type | None:
    """Return the class of an installed package that files name so; None if there is none."""
    entry = (installed("agents") | installed("kinds")).get(name)
    return None if entry is None else entry.load()


def missing_packages(entry: EntryPoint) -> list[str]:
    """Return what is not installed of the extra that is named as an entry, of its package."""
    requirements = "\n".join((entry.dist and entry.dist.requires) or ())
    names = re.findall(rf"^([\w.-]+).*\bextra == .{re.escape(entry.name)}\W", requirements, re.M)
    return [name for name in names if not any(distributions(name=name))]


def summary(entry: EntryPoint) -> str:
    """Return the first line of the docstring of a function or class, read from its source."""
    folders, source, parts = None, None, entry.module.split(".")
    for depth in range(1, len(parts) + 1):
        module = PathFinder.find_spec(".".join(parts[:depth]), folders)
        if module is None:
            return f"installed, {entry.value}"
        folders, source = module.submodule_search_locations, module.origin
    return _first_line(Path(source or ""), entry.attr) or f"installed, {entry.value}"


def _first_line(source: Path, name: str) -> str:
    try:
        statements = ast.parse(source.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return ""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
