"""The command that begins a package of the user's own: `podracer init`."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated

from podracer.cli.values import Mark
from podracer.errors import ConfigError
from podracer.io.run_directory import check_room, write_bytes

# A package that works as it is, under this name. The wheel has it here, a clone in `examples/`.
_TEMPLATE_NAME = "my_project"
_IN_WHEEL = Path(__file__).parent / _TEMPLATE_NAME
_IN_CLONE = Path(__file__).parents[2] / "examples" / _TEMPLATE_NAME
TEMPLATE = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", re.ASCII)  # a distribution's, too


@dataclasses.dataclass(frozen=True)
class InitOptions:
    """Write a small package with an environment, an agent, recipes and tests of your own."""

    name: Annotated[str, Mark.POSITIONAL]
    """Name of the package, and of the folder that is made here."""


def init(options: InitOptions) -> int:
    """Run `podracer init`: write the package, and print what to do next."""
    name, folder = options.name, Path(options.name)
    _check(name, folder)
    check_room(folder)
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            target = folder / str(source.relative_to(TEMPLATE)).replace(_TEMPLATE_NAME, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target, source.read_bytes().replace(_TEMPLATE_NAME.encode(), name.encode()))
            print(f"  {target}")
    print(f"Next      cd {name}")
    print(f"          podracer train {name}.recipes:{name}")
    print('          pip install -e ".[test]" && python -m pytest')
    return 0


def _check(name: str, folder: Path) -> None:
    """Raise `ConfigError` where a package cannot have the name, or the folder is in use."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        close = name.replace("-", "_")
        is_free = _NAME.fullmatch(close) and not keyword.iskeyword(close)
        raise ConfigError(
            f"{name!r} is no name of a package: take letters, digits and underscores, such as "
            f"{close if is_free else _TEMPLATE_NAME}."
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{name} exists here already: take another name or another folder.")
    from podracer import envs, recipes

    if name in recipes.RECIPES or name in (*envs.ENVIRONMENTS, *envs.ADAPTERS):
        raise ConfigError(f"podracer has an environment or a recipe {name}: take another name.")
    text = (TEMPLATE / _TEMPLATE_NAME / "recipes.py").read_text(encoding="utf-8")
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    if name in used:  # a recipe of this name would hide it
        raise ConfigError(f"the recipes of the package use {name}: take another name.")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # an empty folder is a module without a file
        raise ConfigError(f"Python has a module {name} already: take another name.")
