"""Paths that a user gives: a place in a file system of this machine, before anything is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

from podracer.errors import ConfigError

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # `Path` makes one slash of several


def user_path(path: str | Path) -> Path:
    """Return a path with the home directory in the place of `~`.

    Raises `ConfigError` if there is none, for an address such as `s3://bucket/run`, and for a name
    that is not UTF-8: checkpoints are written by a library that would take it for another.
    """
    text = str(path)
    if ADDRESS.match(text):
        raise ConfigError(
            f"{text!r} is an address, but files are kept in directories of this machine: name a "
            "directory; podracer-cloud copies runs to addresses, and reads them there."
        )
    try:
        home = Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"there is no home directory for {text!r}: write the path without '~'."
        ) from None
    full = os.path.abspath(home)
    try:
        is_utf8 = os.fsencode(full) == full.encode()
    except UnicodeEncodeError:
        is_utf8 = False
    if not is_utf8:
        raise ConfigError(
            f"{full!r} cannot be used, as its bytes are not UTF-8, or not in this locale: take "
            "another name, or a locale of UTF-8."
        )
    return home
