"""The layout: imports go down only, files and functions stay short, agents share little."""

import ast
import difflib
import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "podracer"
FILES = sorted(ROOT.rglob("*.py"))

# Rooms from the ground up; those on one floor do not import each other.
FLOORS = (
    ("errors", "names"),
    ("arguments",),
    ("fields",),
    ("types",),
    ("io",),
    ("environment", "scores"),
    ("devices",),
    ("frames", "ops", "schedules"),
    ("agent",),
    ("networks", "rollout", "replay", "checks"),
    ("agents.common", "envs"),
    ("agents.continuous", "agents.planning", "agents.rules"),
    ("agents",),
    ("evaluate",),
    ("policy", "drivers", "drivers.exchange"),
    ("drivers.anakin", "drivers.sebulba", "drivers.selection", "drivers.averaging"),
    ("drivers.population",),
    ("config",),
    ("recipes",),
    ("run",),
    ("tournament",),
    ("reports",),
    ("cli",),
    ("__init__", "__main__"),
    ("testing",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

LINES_OF_ONE_IDEA = 400  # a longer file is a question, not a fault
MAX_LINES_OF_A_FUNCTION = 60  # of its body
MAX_LINES_SET_BY_HAND = 20  # `fmt: skip`, for tables
MAX_SHARED_LINES = 0.4  # of the larger of two agents' files


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def room_of(module: str) -> str:
    """The longest name in FLOOR that a module (without `podracer.`) begins with."""
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(name for name in names if name in FLOOR)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, without `podracer.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "podracer" and inner:
                is_module = (ROOT / inner.replace(".", "/")).is_dir() or (
                    ROOT / f"{inner.replace('.', '/')}.py"
                ).is_file()
                found.add(inner if is_module else inner.rpartition(".")[0] or "__init__")
    return found


def test_imports_go_down_only():
    """Deferred imports count, too. A room may import itself and what stands below it."""
    upwards = []
    for path in FILES:
        own = room_of(module_of(path))
        for module in sorted(imports(path)):
            room = room_of(module)
            if room != own and FLOOR[room] >= FLOOR[own]:
                upwards.append(f"{name_of(path)} imports podracer.{module}")
    assert upwards == []


def test_the_check_of_imports_can_fail():
    assert FLOOR[room_of("reports.run")] > FLOOR[room_of("run.training")]
    assert room_of("agents.rules.lpg.rule") == "agents.rules"
    assert "types" in imports(ROOT / "agent.py")


def test_no_circle_of_files():
    """Deferred imports count, too."""
    files = {module_of(path): path for path in FILES}
    graph = {module: (imports(path) & files.keys()) - {module} for module, path in files.items()}
    while free := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in free:
            del graph[module]
    assert sorted(graph) == []


FLAG = re.compile(r"(?<![\w(-])--[a-z]")


def test_only_the_command_line_speaks_of_flags():
    """Errors and warnings below it name fields, which `cli/sentences.py` makes flags of."""
    assert FLAG.search("take --evaluations 0")
    assert not FLAG.search("var(--text) a--b")
    found = []
    for path in FILES:
        if path.is_relative_to(ROOT / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_warning = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("warning", "error", "warn", "_warn")
            )
            if isinstance(node, ast.Raise) or is_warning:
                texts = (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))
                found += [
                    f"{name_of(path)}:{node.lineno}: {text}"
                    for text in texts
                    if isinstance(text, str) and FLAG.search(text)
                ]
    assert found == []


def test_functions_stay_short():
    long = []
    for path in FILES:
        text = path.read_text()
        if (lines := text.count("\n")) > LINES_OF_ONE_IDEA:
            warnings.warn(f"{name_of(path)} has {lines} lines: is it one idea?", stacklevel=1)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1 if ast.get_docstring(node) else 0 :]
                lines = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
                if lines > MAX_LINES_OF_A_FUNCTION:
                    long.append(f"{name_of(path)}: {node.name} has {lines} lines")
    assert long == []


TESTS = sorted([*ROOT.parent.glob("tests/**/*.py"), *ROOT.parent.glob("packages/*/tests/*.py")])
PUBLIC = {"_exit", "_replace"}  # of the standard library


def private_names(text: str) -> Iterator[str]:
    """Yield private names of others that a test touches: in attributes, imports and patches."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(ast.Name("self" | "cls")):
                pass
            case ast.Attribute(_, name) if _is_private(name):
                yield ast.unparse(node)
            case ast.ImportFrom(str(module), names) if module.split(".")[0] == "podracer":
                yield from (f"{module}.{x.name}" for x in names if _is_private(x.name))
            case ast.Constant(str(path)) if re.fullmatch(r"podracer(\.\w+)+", path):
                yield from (path for name in path.split(".") if _is_private(name))
            case ast.Call(ast.Attribute(_, "setattr"), [_, ast.Constant(str(name)), *_]):
                yield from [name] if _is_private(name) else []


def _is_private(name: str) -> bool:
    return re.match(r"_[a-zA-Z]", name) is not None and name not in PUBLIC


def test_no_test_touches_a_private_name():
    assert list(private_names("self._x; a._replace(b); a.b; from podracer import run")) == []
    touching = """
from podracer.run import _save
run._save()
patch.setattr(run, "_save", None)
patch.setattr("podracer.run._save", None)
"""
    assert len(list(private_names(touching))) == 4
    found = {path: list(private_names(path.read_text())) for path in TESTS}
    assert {path: x for path, x in found.items() if x} == {}


def test_few_lines_are_set_by_hand():
    assert sum(path.read_text().count("fmt: skip") for path in FILES) <= MAX_LINES_SET_BY_HAND


@functools.cache
def body_lines(path: Path) -> list[str]:
    """Stripped lines of function bodies, without comments and docstrings.

    Imports, fields and signatures are left out: the contract makes them alike.
    """
    text = path.read_text()
    inside: set[int] = set()
    texts: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            inside |= set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [x for n, x in lines if n in inside - texts and x and not x.startswith("#")]


def shared(one: Path, other: Path) -> float:
    """The share of the larger file's bodies whose lines stand in the other, in the same order."""
    a, b = body_lines(one), body_lines(other)
    equal = max(_matching(a, b), _matching(b, a))  # the matcher depends on the order
    return equal / max(len(a), len(b))


def _matching(a: list[str], b: list[str]) -> int:
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


AGENTS = [path for path in sorted((ROOT / "agents").glob("*.py")) if path.stem != "__init__"]
PARTS_OF_ROOMS = ("lpg/discovery.py", "lpg/student.py", "disco/student.py")
AGENTS += [ROOT / "agents/rules" / name for name in PARTS_OF_ROOMS]


def test_agents_share_little():
    alike = []
    for one, other in itertools.combinations(AGENTS, 2):
        share = shared(one, other)
        if share > MAX_SHARED_LINES:
            alike.append(f"{name_of(one)} and {name_of(other)} share {share:.3f} of their lines")
    assert alike == []
