"""Object stores that hold runs and tournaments: how one is opened, and its objects read.

A store is one of obstore's. `open_store` is the only place that makes one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import from_url

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io.reading import MALFORMED, parse_object
from podracer.io.seal import encode_sealed

LARGEST_OBJECT = 2**32  # bytes of one that is read as a whole
READS = 5  # attempts: an answer may be damaged, and a copy change meanwhile
_MACHINE_ROLE = re.compile(r"//169\.254\.|//metadata[./]")  # servers that give a machine its role


def open_store(address: str, *, writes: bool = False) -> Any:
    """Return the store at an address, a directory that is made if it `writes` to one.

    Raises `ConfigError` if there can be none.
    """
    # A mirror tries again by itself, and says so. Settings of clients come from the environment.
    retries = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=20)}
    is_directory = address.startswith("file:")
    folders = {"mkdir": writes, "automatic_cleanup": True}  # no folder stays that is empty
    options: Any = folders if is_directory else {"retry_config": retries}
    try:
        return from_url(address, **options)
    except (BaseError, OSError, ValueError) as error:
        problem = reason(error)
        if is_directory and not writes:
            problem = "there is no directory that can be read"
        raise ConfigError(f"{address} is no store: {problem}.") from error


def reading(address: str) -> contextlib.AbstractContextManager[None]:
    """Raise `StorageError` for a fault of the store within the context."""
    return _faults(f"{address} cannot be read")


def writing(address: str) -> contextlib.AbstractContextManager[None]:
    """Raise `StorageError` for a fault of the store within the context."""
    return _faults(f"{address} cannot be written")


@contextlib.contextmanager
def _faults(problem: str) -> Iterator[None]:
    try:
        yield
    except (BaseError, TimeoutError, ConnectionError, NotImplementedError) as error:
        raise StorageError(f"{problem}: {reason(error)}.") from error


def reason(error: BaseException) -> str:
    """Return the first line of an error; those of stores go on for pages."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if _MACHINE_ROLE.search(line):  # asked where there is nothing else
        return "there are no credentials, such as AWS_ACCESS_KEY_ID, and this machine has no role"
    return line.partition(": <?xml")[0].rstrip(". ")


# --- objects --------------------------------------------------------------------------------------


def read_object(store: Any, name: str) -> bytes | None:
    """Return the content of an object, None if there is none."""
    try:
        result = store.get(name)
        if result.meta["size"] > LARGEST_OBJECT:
            raise CheckpointError(f"{name} is larger than {LARGEST_OBJECT:,} bytes")
        return bytes(result.bytes())
    except FileNotFoundError:
        return None


def read_whole(store: Any, name: str, is_whole: Callable[[bytes], bool]) -> bytes | None:
    """Return the content of an object, read again while it is not whole; None if there is none."""
    content = None
    for _ in range(READS):
        content = read_object(store, name)
        if content is None or is_whole(content):
            break
    return content


def is_sealed(raw: bytes) -> bool:
    """Return whether these bytes are exactly a sealed file."""
    try:
        body = json.loads(raw)
        del body["sha256"]
        return encode_sealed(body) == raw
    except MALFORMED:
        return False


def read_sealed(store: Any, name: str) -> dict[str, Any] | None:
    """Return the sealed JSON in an object, an empty one if it is not whole; None if none."""
    content = read_whole(store, name, is_sealed)
    if content is None:
        return None
    return parse_object(content) if is_sealed(content) else {}


def size_of(store: Any, name: str) -> int | None:
    """Return the size of an object, None if there is none."""
    try:
        return store.head(name)["size"]
    except FileNotFoundError:
        return None


def sizes_below(store: Any, prefix: str) -> dict[str, int]:
    """Return the sizes of all objects below a prefix, by name; the list may be stale."""
    return {item["path"]: item["size"] for chunk in store.list(prefix) for item in chunk}


def newest_number(store: Any, prefix: str) -> int:
    """Return the largest number among `prefix/000001` and so on, 0 without one."""
    names = (name.rpartition("/")[2] for name in sizes_below(store, prefix))
    number = max((int(name) for name in names if name.isdecimal()), default=0)
    while size_of(store, numbered(prefix, number + 1)) is not None:  # a list may be stale
        number += 1
    return number


def numbered(prefix: str, number: int) -> str:
    """Return the name of an object by its number, from 1 on."""
    return f"{prefix}/{number:06d}"
