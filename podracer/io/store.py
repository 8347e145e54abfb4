"""Object stores that hold runs and tournaments: how one is opened, and what lies in it.

A store is one of obstore's. `open_store` is the only place that makes one.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from podracer.errors import CheckpointError, ConfigError, StorageError, install_command
from podracer.io.reading import MALFORMED, parse_object
from podracer.io.run_directory import check_room, fsync_directory, write_bytes
from podracer.io.seal import CONFIG, MANIFEST, is_there, read_sealed_json, verify_seal
from podracer.io.steps import Report

LARGEST_OBJECT = 2**32  # bytes of one that is read as a whole
BLOCK_BYTES = 2**20  # bytes of a log that one object has: stores cannot append
_CHUNK = 2**23  # bytes of a request, which has a time limit
_BLOCKS = "log"
_MACHINE_ROLE = re.compile(r"//169\.254\.|//metadata[./]")  # servers that give a machine its role


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
    from obstore.exceptions import BaseError

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


def read_json(store: Any, name: str) -> dict[str, Any]:
    """Return the JSON in an object, an empty dictionary if there is none."""
    return parse_object(read_object(store, name))


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


def kind_at(store: Any) -> str:
    """Return what a store has a copy of: "run", "tournament", or "" for neither."""
    if read_json(store, CONFIG):
        return "run"
    return "" if size_of(store, numbered(_BLOCKS, 1)) is None else "tournament"


# --- logs -----------------------------------------------------------------------------------------

# Stores cannot append, so a log is a sequence of blocks, which ends at the first that is not full.


def log_size(store: Any) -> int:
    """Return the bytes of a log in a store."""
    listed, size = sizes_below(store, _BLOCKS), 0
    for number in itertools.count(1):
        name = numbered(_BLOCKS, number)
        if (block := listed.get(name)) != BLOCK_BYTES:  # a list may be stale
            block = size_of(store, name) or 0
        size += block
        if block < BLOCK_BYTES:
            return size
    raise AssertionError


def read_blocks(store: Any, begin: int = 0) -> bytes:
    """Return a log from the beginning of the block that has the byte `begin`."""
    blocks, is_full = list[bytes](), True
    while is_full:
        number = begin // BLOCK_BYTES + 1 + len(blocks)
        blocks.append(read_object(store, numbered(_BLOCKS, number)) or b"")
        is_full = len(blocks[-1]) == BLOCK_BYTES
    return b"".join(blocks)


def put_blocks(store: Any, path: Path, begin: int, end: int) -> None:
    """Copy the bytes of a log from `begin` to `end`; those before `begin` are there.

    The first block comes last: by it all others count.
    """
    with open(path, "rb") as file:
        for number in reversed(range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))):
            file.seek(number * BLOCK_BYTES)
            block = file.read(min(BLOCK_BYTES, end - number * BLOCK_BYTES))
            name = numbered(_BLOCKS, number + 1)
            store.put(name, block)
            if size_of(store, name) != len(block):
                raise StorageError(f"{name} did not arrive as a whole")


def remove_blocks(store: Any, size: int) -> None:
    """Remove what a machine that was lost has left behind a log of this size."""
    for name in sizes_below(store, _BLOCKS):
        if name > numbered(_BLOCKS, size // BLOCK_BYTES + 1):
            store.delete(name)


# --- checkpoints ----------------------------------------------------------------------------------


def put_step(store: Any, prefix: str, path: Path, check: Any) -> None:
    """Copy a sealed directory, its manifest last, in the place of anything else there.

    `check` is called before the manifest; it raises where nothing more may be written.
    """
    remove_step(store, prefix)
    files = read_sealed_json(path / MANIFEST)["files"]
    for name in files:
        store.put(f"{prefix}/{name}", path / name)
    sizes = sizes_below(store, prefix)
    for name, facts in files.items():
        if sizes.get(f"{prefix}/{name}") != facts["size"]:
            raise StorageError(f"{prefix}/{name} did not arrive as a whole")
    check()
    store.put(f"{prefix}/{MANIFEST}", (path / MANIFEST).read_bytes())


def remove_step(store: Any, prefix: str) -> None:
    """Remove a step, its manifest first: what is left of it is no checkpoint."""
    for name in (f"{prefix}/{MANIFEST}", *sizes_below(store, prefix)):
        with contextlib.suppress(FileNotFoundError):
            store.delete(name)


def fetch_step(store: Any, prefix: str, target: Path, report: Report) -> bool:
    """Bring a step, and return whether it is whole; report what is not."""
    manifest = read_object(store, f"{prefix}/{MANIFEST}")
    if manifest is None:
        return False
    if is_there(target / MANIFEST) and (target / MANIFEST).read_bytes() == manifest:
        return True
    shutil.rmtree(target, ignore_errors=True)
    try:
        files = json.loads(manifest)["files"]
        sizes = {_checked(name): facts["size"] for name, facts in files.items()}
        check_room(target, sum(sizes.values()))
        with ThreadPoolExecutor(8) as pool:
            tasks = [
                pool.submit(_download, store, f"{prefix}/{name}", target / name, size)
                for name, size in sizes.items()
            ]
        for task in tasks:
            task.result()
        write_bytes(target / MANIFEST, manifest)
        for folder, _, _ in os.walk(target):
            fsync_directory(Path(folder))
        verify_seal(target)
    except FileNotFoundError as fault:
        report(f"checkpoint skipped: {prefix} is not whole in the store: {fault}.")
    except (CheckpointError, *MALFORMED) as fault:
        report(f"checkpoint skipped: {prefix}: {fault}.")
    else:
        return True
    shutil.rmtree(target, ignore_errors=True)
    return False


def _download(store: Any, name: str, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if store.head(name)["size"] != size:
        raise CheckpointError(f"{name} has not the size that was sealed")
    with open(target, "xb") as file:
        for start in range(0, size, _CHUNK):
            file.write(store.get_range(name, start=start, end=min(size, start + _CHUNK)))
        file.flush()
        os.fsync(file.fileno())


def _checked(name: str) -> str:
    """Return the name of a file of a step; raise `CheckpointError` for one that leads elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == MANIFEST:
        raise CheckpointError(f"{name[:80]!r} cannot be the name of a file of a checkpoint")
    return name
