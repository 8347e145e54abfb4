"""Addresses of runs, such as `s3://bucket/run`, which packages read by the part before `://`."""

from __future__ import annotations

from pathlib import Path

from podracer.errors import ConfigError
from podracer.io.entry_points import installed, package_of
from podracer.io.paths import ADDRESS, user_path
from podracer.io.steps import Choice

COPIES: dict[Path, str] = {}
"""Addresses of the runs whose copies are read, by the temporary directories that hold these."""


def address_of(path: str | Path) -> str | None:
    """Return the address that a user gives, be it as a `Path`; None for a path.

    Raises `ConfigError` for an address that no installed package reads.
    """
    text = str(path)
    if (match := ADDRESS.match(text)) is None:
        return None
    scheme, place = match[1].lower(), text[match.end() :].strip("/")
    if scheme in installed("addresses") and place:
        return f"{scheme}://{'/' if scheme == 'file' else ''}{place}"
    missing = "" if scheme in installed("addresses") else package_of(f"{scheme}://")
    raise ConfigError(missing or f"{text!r} is no address that can hold a run.")


def local_run(
    run: str | Path, choice: Choice | None = None, *, directory: Path | None = None
) -> Path:
    """Return the directory of a run: a path, or where a package brings the run at an address.

    It comes into a `directory` to be resumed there. Otherwise it comes into a temporary one to be
    read, with the checkpoint of the choice, and none without one.
    """
    if (address := address_of(run)) is None:
        return user_path(run)
    resolve = installed("addresses")[address.partition(":")[0]].load()
    place = resolve(address, choice, directory)
    if directory is None:
        COPIES[place] = address
    return place


def output_folder(directory: Path) -> Path:
    """Return where a command writes a file about a run by default: not in a copy, which ends."""
    return Path() if directory in COPIES else directory


def in_addresses(sentence: str) -> str:
    """Return a sentence, or a path, with the addresses in the places of directories of copies."""
    for directory, address in COPIES.items():
        sentence = sentence.replace(str(directory), address)
    return sentence
