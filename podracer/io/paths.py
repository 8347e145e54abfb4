"""Paths that a user gives: a place in a file system of this machine, before anything is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

from podracer.errors import ConfigError

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # `Path` makes one slash of several
SCHEMES = ("s3", "gs", "az", "file")
"""Kinds of stores that can hold a run."""
COPIES: dict[Path, str] = {}
"""Addresses of the runs whose copies are read, by the temporary directories that hold these."""


def user_path(path: str | Path) -> Path:
    """Return a path with the home directory in the place of `~`.

    Raises `ConfigError` if there is none, for an address such as `s3://bucket/run`, and for a name
    that is not UTF-8: checkpoints are written by a library that would take it for another.
    """
    refuse_address(path)
    text = str(path)
    try:
        home = Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"there is no home directory for {text!r}: write the path without '~'."
        ) from None
    full = os.path.abspath(home)
    if not _is_utf8(full):
        raise ConfigError(
            f"{full!r} cannot be used, as its bytes are not UTF-8, or not in this locale: take "
            "another name, or a locale of UTF-8."
        )
    return home


def refuse_address(path: str | Path) -> None:
    """Raise `ConfigError` for an address such as `s3://bucket/run`."""
    text = str(path)
    if _ADDRESS.match(text):
        raise ConfigError(
            f"{text!r} is an address, but files are kept in directories of this machine: name a "
            "directory; `mirror` copies a run to an address, and other commands read it there."
        )


def address_of(path: str | Path) -> str | None:
    """Return the address in a store that a user gives, be it as a `Path`; None for a path.

    Raises `ConfigError` for an address of another kind than `SCHEMES`.
    """
    text = str(path)
    if (match := _ADDRESS.match(text)) is None:
        return None
    scheme, place = match[1].lower(), text[match.end() :].strip("/")
    if scheme not in SCHEMES or not place:
        kinds = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{text!r} is no address of a store that can hold a run: take {kinds}.")
    return f"{scheme}://{'/' if scheme == 'file' else ''}{place}"


def place_of(directory: Path) -> str:
    """Return what names a directory to the user: the address for a copy to be read."""
    return COPIES.get(directory, str(directory))


def in_addresses(sentence: str) -> str:
    """Return a sentence with the addresses in the places of directories of copies."""
    for directory, address in COPIES.items():
        sentence = sentence.replace(str(directory), address)
    return sentence


def _is_utf8(path: str) -> bool:
    try:
        return os.fsencode(path) == path.encode()
    except UnicodeEncodeError:
        return False
