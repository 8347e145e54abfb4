"""Closed by default: no code comes from data, and nothing listens beyond the loopback interface."""

import ast
from pathlib import Path

import pytest
from child import call
from sockets import listeners

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("podracer/**/*.py"), *ROOT.glob("packages/*/podracer_*/**/*.py")])

# --- no code from data ----------------------------------------------------------------------------

MODULES = {
    "cloudpickle", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle", "runpy", "shelve",
    "yaml",
}  # fmt: skip
FUNCTIONS = {"__import__", "eval", "exec"}
METHODS = {"system", "popen", "execv", "execve", "spawnv", "load_module", "exec_module"}
ARGUMENTS = {("allow_pickle", True), ("shell", True)}

# A run and its own workers exchange a pickle over a pipe (decision 0016).
EXCEPTIONS = {
    ("podracer/envs/host/gymnasium.py", "pickle"),
    ("podracer/envs/host/gymnasium_spec.py", "pickle"),
    ("podracer/envs/host/gymnasium_worker.py", "pickle"),
}


def code_from_data(text: str) -> set[str]:
    """Return what a source file uses that can turn data into code."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found |= {node.func.id} & FUNCTIONS
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                is_os = node.func.value.id in ("os", "importlib")
                found |= {node.func.attr} & METHODS if is_os else set()
            for word in node.keywords:
                value = getattr(word.value, "value", None)
                found |= {f"{word.arg}=True"} if (word.arg, value) in ARGUMENTS else set()
    return found


@pytest.mark.figure(18)
def test_no_file_turns_data_into_code(cases):
    used = set()
    for path in cases(SOURCES):
        name = str(path.relative_to(ROOT))
        uses = {(name, use) for use in code_from_data(path.read_text())}
        used |= uses
        assert uses <= EXCEPTIONS
    assert used == EXCEPTIONS, "an exception that nothing needs any more"


# --- sockets --------------------------------------------------------------------------------------


@pytest.mark.figure(17)
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_command_listens(tmp_path, cases):
    run, host, pods = (tmp_path / name for name in ("run", "host", "pods"))
    commands = [
        ("train", "catch_a2c", "--frames", 100_000, "--run-dir", run),
        ("train", "cartpole_sebulba", "--frames", 20_480, "--run-dir", host),
        ("tournament", "catch_a2c", "--pods", 2, "--rounds", 1, "--run-dir", pods),
        ("sweep", "catch_a2c", "--frames", 100_000, "--seeds", 2, "--run-dir", tmp_path / "sweep"),
        ("resume", run),
        ("eval", run),
        ("play", run),
        ("report", run),
        ("fingerprint", run),
        ("leaderboard", pods),
        ("list",),
        ("doctor",),
    ]
    for arguments in cases(commands):
        with listeners() as found:
            code, _, error = call(*arguments)
        assert (code, found) == (0, set()), (arguments, error)
