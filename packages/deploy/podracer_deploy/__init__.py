"""Trained policies for other programs: as files, and as actions over HTTP."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podracer_deploy.export.files import export_policy as export_policy


def __getattr__(name: str) -> Any:
    """Import `export_policy` when it is first used: a mistyped command does not wait for JAX."""
    if name != "export_policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from podracer_deploy.export.files import export_policy

    return export_policy
