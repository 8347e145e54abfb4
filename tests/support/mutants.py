"""The mutation check: without any one of the guards in `guards.txt`, the test beside it fails.

    python tests/support/mutants.py [PART OF A FILE'S NAME]

tries all guards, or those of some files, in a copy of the tree, and lists what each test noticed.
The package `cloud` must be installed.

A mutant is a function's file with one thing taken out that mentions a name. A raise, a call or the
assignment of an item or a field does not happen; a condition is never true, a filter always; `and`,
`or`, `&` and `|` lose an operand, a call a named argument, a list a tuple; `f(x, ...)` and
`where(c, x, y)` become `x`, a `with` its block, `except BaseException` `Exception`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Guard(NamedTuple):
    """A line of `guards.txt`."""

    file: str  # in podracer/, or with the path of its package
    function: str  # `name`, `Class.method` or `outer.inner`
    name: str  # an identifier of the function
    test: str  # in tests/
    mark: str = "not slow"  # of the cases that are tried

    @property
    def source(self) -> str:
        return self.file if self.file.startswith("packages/") else f"podracer/{self.file}"

    @property
    def case(self) -> str:
        return self.test if self.test.startswith("packages/") else f"tests/{self.test}"


def guards() -> list[Guard]:
    lines = Path(__file__).with_name("guards.txt").read_text().splitlines()
    return [Guard(*line.split()) for line in lines if line and not line.startswith("#")]


class Mutant(NamedTuple):
    change: str  # with its line in the file
    source: str


class _Change(NamedTuple):
    parent: ast.AST
    field: str
    index: int | None  # in the parent's list
    new: ast.AST | None

    def apply(self) -> None:
        value = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, self.new)
        else:
            value[self.index : self.index + 1] = [self.new] if self.new else []

    def __str__(self) -> str:
        value = getattr(self.parent, self.field)
        old = value if self.index is None else value[self.index]
        line = getattr(old, "lineno", 0)
        new = "nothing" if self.new is None else ast.unparse(self.new).splitlines()[0]
        return f"line {line}: {ast.unparse(old).splitlines()[0]} -> {new}"


def find(tree: ast.Module, path: str) -> Any:
    """Return the function `name`, `Class.method` or `outer.inner`. Raises `LookupError`."""
    node: Any = tree
    for name in path.split("."):
        kinds = ast.FunctionDef | ast.ClassDef
        inner = (x for x in ast.walk(node) if isinstance(x, kinds) and x is not node)
        node = next((x for x in inner if x.name == name), tree)
        if node is tree:
            raise LookupError(f"there is no {path}")
    return node


def mutants(source: str, function: str, name: str) -> list[Mutant]:
    """Return the mutants of a function where it mentions an identifier."""
    found = []
    for number, change in enumerate(_changes(find(ast.parse(source), function), name)):
        tree = ast.parse(source)
        list(_changes(find(tree, function), name))[number].apply()
        found.append(Mutant(str(change), ast.unparse(ast.fix_missing_locations(tree))))
    return found


def _changes(function: ast.AST, name: str) -> Iterator[_Change]:
    for parent in _walk(function):
        for field, value in ast.iter_fields(parent):
            places: Any = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, node in places:
                if isinstance(node, ast.AST) and _mentions(node, name):
                    for new in _without(parent, field, node):
                        yield _Change(parent, field, index, new)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through a function, but not into the errors that it raises."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Raise):
            yield from _walk(child)


def _mentions(node: ast.AST, name: str) -> bool:
    return any(
        name in (getattr(x, field, "") for field in ("id", "attr", "arg")) for x in ast.walk(node)
    )


def _without(parent: ast.AST, field: str, node: Any) -> Iterator[ast.AST | None]:
    """Yield what may stand in the place of a node; None where it is left out."""
    match node:
        case (
            ast.Raise()
            | ast.Expr(ast.Call())
            | ast.Assign(targets=[ast.Subscript() | ast.Attribute()])
        ):
            yield ast.Pass()
        case ast.With(items=[ast.withitem(optional_vars=None)]):
            yield ast.If(ast.Constant(True), node.body, [])
        case ast.With(items=[*others, ast.withitem(optional_vars=None)]):
            yield ast.copy_location(ast.With(others, node.body), node)
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, x, _]):
            yield x
        case ast.Call(args=[x, *_]) if not isinstance(parent, ast.Expr):
            yield x
        case ast.keyword():
            yield None
        case ast.Tuple() if isinstance(parent, ast.List):
            yield None
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            yield from (node.left, node.right)
        case ast.Name("BaseException") if isinstance(parent, ast.ExceptHandler):
            yield ast.Name("Exception")
    match parent, field:
        case ast.If() | ast.While() | ast.IfExp(), "test":
            yield ast.Constant(False)
        case ast.comprehension(), "ifs":
            yield ast.Constant(True)
        case ast.BoolOp(), "values":
            yield ast.Constant(isinstance(parent.op, ast.And))


def failure(tree: Path, *cases: str, mark: str) -> str:
    """Return what pytest says where one of some tests with a mark fails in a tree, else ""."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", mark, "--timeout", "120", *cases],
        cwd=tree,
        # No bytecode: a file that was changed twice within a second would be taken from it.
        env=os.environ
        | {"PYTHONPATH": f"{tree}:{tree}/packages/cloud", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{cases} cannot be run: {done.stdout.decode()}")
    return done.stdout.decode() if done.returncode else ""


def is_noticed(tree: Path, guard: Guard) -> bool:
    """Return whether the test notices a mutant; those before it are listed."""
    path = tree / guard.source
    text = path.read_text()
    for mutant in mutants(text, guard.function, guard.name):
        path.write_text(mutant.source)
        noticed = bool(failure(tree, guard.case, mark=guard.mark))
        path.write_text(text)
        print("noticed  " if noticed else "unnoticed", *guard[:3], mutant.change, flush=True)
        if noticed:
            return True
    return False


if __name__ == "__main__":
    chosen = [guard for guard in guards() if re.search("|".join(sys.argv[1:]), guard.file)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("podracer", "tests", "packages/cloud", "packages/testing"):
            shutil.copytree(ROOT / part, tree / part)
        shutil.copy2(ROOT / "pyproject.toml", tree)
        for mark in sorted({guard.mark for guard in chosen}):
            cases = sorted({guard.case for guard in chosen if guard.mark == mark})
            if text := failure(tree, *cases, mark=mark):
                sys.exit(f"a test fails with its guard:\n{text}")
        missed = [guard for guard in chosen if not is_noticed(tree, guard)]
    print(f"{len(chosen) - len(missed)}/{len(chosen)}", *missed, sep="\n")
