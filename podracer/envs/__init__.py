"""Environments and adapters, one file each.

`make` and `names` are imported when they are first used: a worker process of a host environment
imports this package and must not import JAX.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("ADAPTERS", "ENVIRONMENTS", "make", "names"):
        raise AttributeError(f"module 'podracer.envs' has no attribute {name!r}")
    from podracer.envs import catalog

    return getattr(catalog, name)
