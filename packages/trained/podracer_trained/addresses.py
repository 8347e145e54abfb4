"""Addresses of the trained agents, `trained://NAME`: the runs that this package holds."""

from __future__ import annotations

import shutil
from pathlib import Path

from podracer.errors import ConfigError
from podracer.io.seal import CONFIG
from podracer.io.steps import Choice, identity_of
from podracer.names import nearest

FOLDER = Path(__file__).parent / "agents"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if (path / CONFIG).is_file()))


def resolve(address: str, choice: Choice | None, directory: Path | None) -> Path:
    """Return the directory of the run at an address, see `podracer.io.addresses.local_run`.

    A `directory` gets the run to go on with it, or holds it already. Raises `ConfigError` for a
    name that no trained agent has, and for a directory that holds something else.
    """
    name = address.partition("://")[2]
    if name not in NAMES:
        raise ConfigError(f"{address} is no trained agent: {nearest(name, NAMES)}")
    run = FOLDER / name
    if directory is None:
        return run
    if not directory.is_dir() or not any(directory.iterdir()):
        shutil.copytree(run, directory, dirs_exist_ok=True)
    elif identity_of(directory) != identity_of(run):
        raise ConfigError(f"{directory} holds something else: name a new directory.")
    return directory
