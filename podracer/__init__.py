"""Scalable reinforcement learning on accelerators: the Podracer architectures on JAX.

    import podracer
    result = podracer.train("catch", seed=1)

A name is imported when it is first used, so that `import podracer` and a mistyped command cost
nothing. `__init__.pyi` lists the names, for type checkers and for this file.
"""

import ast
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from podracer.io.text import redact_log

__version__ = "0.2.0"  # the distribution is `podracer-rl`

if sys.platform == "win32":  # without file locks and signals as they are elsewhere
    raise ImportError("podracer runs on Linux and macOS; on Windows install it inside WSL 2.")

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]

redact_log()  # in Python as in the command line
_LOG = logging.getLogger("podracer")
if "ipykernel" in sys.modules and not logging.getLogger().handlers:
    _LOG.addHandler(logging.StreamHandler())  # a plain sentence in a notebook, whoever logs first
    _LOG.propagate = False


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(str(_MODULES[name])), name)
    if not name.startswith("_") and importlib.util.find_spec(f"podracer.{name}"):
        return importlib.import_module(f"podracer.{name}")  # such as `agents`
    raise AttributeError(f"module 'podracer' has no attribute {name!r}{_elsewhere(name)}")


def _elsewhere(name: str) -> str:
    """Return where an agent is that is no name of the package, or which name is near."""
    if name.startswith("_"):  # such as those that notebooks ask for
        return ""
    from podracer.names import nearest

    if name in ("TD3", "Rainbow"):
        return f": it is podracer.agents.{'ddpg.td3' if name == 'TD3' else 'dqn.rainbow'}(...)."
    agents = ast.parse(Path(__file__).with_name("agents").joinpath("__init__.py").read_text())
    names = [x.name for node in agents.body if isinstance(node, ast.ImportFrom) for x in node.names]
    if name in names:
        return f": it is podracer.agents.{name}."
    page = "docs/api lists the names, and `from podracer.agents import ...` brings all agents."
    return f": {nearest(name, __all__, page)}"


def __dir__() -> list[str]:
    return __all__
