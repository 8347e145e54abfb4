"""The layout: imports go down only, files and functions stay short."""

import ast
import warnings
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
    ("policy", "drivers"),
    ("drivers.anakin", "drivers.sebulba", "drivers.selection"),
    ("drivers.population",),
    ("config",),
    ("recipes",),
    ("run",),
    ("tournament",),
    ("reports",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

LINES_OF_ONE_IDEA = 400  # a longer file is a question, not a fault
MAX_LINES_OF_A_FUNCTION = 60  # of its body
MAX_LINES_SET_BY_HAND = 20  # `fmt: skip`, for tables


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


def test_no_circle_of_files():
    """Deferred imports count, too."""
    files = {module_of(path): path for path in FILES}
    graph = {module: (imports(path) & files.keys()) - {module} for module, path in files.items()}
    while free := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in free:
            del graph[module]
    assert sorted(graph) == []


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


def test_few_lines_are_set_by_hand():
    assert sum(path.read_text().count("fmt: skip") for path in FILES) <= MAX_LINES_SET_BY_HAND
