"""Environments and adapters, one file each.

Public names are imported when they are first used: a worker process of a Gymnasium environment
imports this package and must not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podracer.envs.catalog import ADAPTERS as ADAPTERS
    from podracer.envs.catalog import ENVIRONMENTS as ENVIRONMENTS
    from podracer.envs.catalog import make as make
    from podracer.envs.catalog import names as names
    from podracer.envs.host.gymnasium import Gymnasium as Gymnasium

_HOME = dict.fromkeys(("ADAPTERS", "ENVIRONMENTS", "make", "names"), "catalog") | {
    "Gymnasium": "host.gymnasium"
}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'podracer.envs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"podracer.envs.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
