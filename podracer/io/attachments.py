"""Attachments: what packages add to a run or a tournament, such as a mirror in an object store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from podracer.errors import ConfigError
from podracer.io.entry_points import installed, package_of
from podracer.names import nearest


class Attachment(Protocol):
    """Companion of a run or a tournament in process 0; a context manager.

    It is entered under the lock of the directory, before anything is recorded there, and left after
    the last seal. Entering it may raise `ConfigError`.
    """

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> None: ...

    def sealed(self) -> None:
        """Follow a seal of the run, or an event of the tournament; return at once, never raise.

        It is called in the thread of the checkpointer.
        """

    def figures(self) -> dict[str, float]:
        """Return numbers for the next record of the run."""
        ...


MakeAttachment = Callable[[Any], Attachment]
"""Function of the `RunInfo` of a run, or the `TournamentInfo` of a tournament."""

# The core knows the name, so that a mirrored run does not silently go on without podracer-cloud.
_KNOWN = ("mirror",)


def find_attachments(
    attach: Sequence[MakeAttachment | str], directory: Path
) -> list[MakeAttachment]:
    """Return the functions in `attach`, with those of packages in the places of `NAME:ARGUMENT`.

    A directory with a file `NAME.json` of an attachment goes on with it. Raises `ConfigError` for a
    name that no installed package has.
    """
    if wrong := [x for x in attach if not (callable(x) or isinstance(x, str))]:
        raise ConfigError(f"an attachment is a function or `NAME:ARGUMENT`, not {wrong[0]!r}.")
    names = {*_KNOWN, *installed("attachments")}
    names -= {x.partition(":")[0] for x in attach if isinstance(x, str)}
    recorded = [name for name in sorted(names) if (directory / f"{name}.json").is_file()]
    return [_named(x) if isinstance(x, str) else x for x in (*attach, *recorded)]


def _named(text: str) -> MakeAttachment:
    name, _, argument = text.partition(":")
    if (entry := installed("attachments").get(name)) is None:
        hint = nearest(name, {*_KNOWN, *installed("attachments"), *installed("callbacks")})
        told = f"no installed package has a callback or an attachment {name!r}: {hint}"
        raise ConfigError(package_of(name) or told)
    return entry.load()(argument)
