"""The names of podracer that a program uses, and those of them that no page of `docs/api` has."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import podracer

PAGES = Path(__file__).parents[2] / "docs" / "api"


def undocumented(source: str) -> list[str]:
    """Return the names of podracer in a program that are private or on no page."""
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)$", pages, re.M))
    modules = {f"podracer.{module.name}" for module in pkgutil.iter_modules(podracer.__path__)}
    tree, names = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("podracer"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names |= set(re.findall(r"^podracer(?:\.\w+)+$", ast.unparse(node)))
    names -= {inner for name in names for inner in names if name.startswith(f"{inner}.")}

    def is_documented(name: str) -> bool:
        module, _, thing = name.rpartition(".")
        if thing.startswith("_"):
            return False
        in_module = module in documented and hasattr(importlib.import_module(module), thing)
        return name in documented or in_module

    return sorted(name for name in names - modules if not is_documented(name))
