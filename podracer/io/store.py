"""Object stores that hold runs: how one is opened, and what lies in it.

A store is one of obstore's. `open_store` is the only place that makes one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterator
from typing import Any

from podracer.errors import CheckpointError, ConfigError, StorageError, install_command
from podracer.io.seal import CHECKPOINTS, MANIFEST
from podracer.io.steps import SAVED

LARGEST_OBJECT = 2**32  # bytes of one that is read as a whole
_STEP = re.compile(rf"{CHECKPOINTS}/([0-9]{{12}})/.+")


def open_store(address: str, *, writes: bool = False) -> Any:
    """Return the store at an address, a directory that is made if it `writes` to one.

    Raises `ConfigError` if there can be none.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(
            f"{address} needs the package obstore: {install_command('mirror')}."
        ) from error
    # A mirror tries again by itself, and says so. Settings of clients come from the environment.
    retries = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=20)}
    is_directory = address.startswith("file:")
    options: Any = {"mkdir": writes} if is_directory else {"retry_config": retries}
    try:
        return from_url(address, **options)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(f"{address} is no store: {reason(error)}.") from error


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """Raise `StorageError` for a fault of the store."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, TimeoutError, ConnectionError, NotImplementedError) as error:
        raise StorageError(f"{address} cannot be read: {reason(error)}.") from error


def read_object(store: Any, name: str) -> bytes | None:
    """Return the content of an object, None if there is none."""
    try:
        result = store.get(name)
        if result.meta["size"] > LARGEST_OBJECT:
            raise CheckpointError(f"{name} is larger than {LARGEST_OBJECT:,} bytes")
        return bytes(result.bytes())
    except FileNotFoundError:
        return None


def read_json(store: Any, name: str) -> dict[str, Any]:
    """Return the JSON in an object, an empty dictionary if there is none."""
    try:
        content = json.loads(read_object(store, name) or b"")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def sizes_below(store: Any, prefix: str) -> dict[str, int]:
    """Return the sizes of all objects below a prefix, by name."""
    return {item["path"]: item["size"] for chunk in store.list(prefix) for item in chunk}


def saved_step(store: Any) -> int:
    """Return the newest step that was copied, -1 without one."""
    step = read_json(store, SAVED).get("step")
    return step if type(step) is int and 0 <= step < 10**12 else -1


def step_names(store: Any) -> set[str]:
    """Return the names of the steps of which the store lists something."""
    matches = map(_STEP.fullmatch, sizes_below(store, CHECKPOINTS))
    return {match[1] for match in matches if match}


def manifest_of(name: str) -> str:
    """Return the name of a step's manifest in the store."""
    return f"{CHECKPOINTS}/{name}/{MANIFEST}"


def reason(error: BaseException) -> str:
    """Return the first line of an error; those of stores go on for pages."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.partition(": <?xml")[0].rstrip(". ")
