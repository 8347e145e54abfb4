"""What a store has of a run or a tournament: its parts by name, and where each lies.

A part is a file, such as `config.json`, or a sealed checkpoint with all its files. Each is stored
in a folder of its own, `files/LEASE/COUNT/`, under its name there, and never written again.
`index/LEASE/COUNT` has the parts of the copy; the newest index counts. So nobody reads what a
machine still writes after its lease was taken over. What it may still delete was there while it
held the lease, and its index had left it out: its successor began with that index or a later one.
Stores need no other conditional write than the create of a lease.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from podracer.errors import CheckpointError, StorageError
from podracer.io.reading import MALFORMED, parse_object
from podracer.io.run_directory import check_room, fsync_directory, write_bytes
from podracer.io.seal import (
    CHECKPOINTS,
    CONFIG,
    MANIFEST,
    encode_sealed,
    is_there,
    read_sealed_json,
    verify_seal,
)
from podracer_cloud import store as stores
from podracer_cloud.lease import Lease

Report = Callable[[str], None]
BLOCK_BYTES = 2**20  # size of a part of a log: stores cannot append
_CHUNK = 2**23  # bytes of a request, which has a time limit
_INDEX, _FILES, _BLOCKS = "index", "files", "log"
_PLACE = re.compile(rf"^(?:{_INDEX}|{_FILES})/([0-9]+)/([0-9]+)(?:/|$)")
_STEP = re.compile(rf"(?:.*?/)?{CHECKPOINTS}/[0-9]{{12}}(?=/)")
_EARLIER = re.compile(  # objects of earlier versions; others may lie there, too
    rf"{_BLOCKS}/[0-9]{{6,}}|(pods/p[0-9]+r[0-9]+/)?"
    rf"({CHECKPOINTS}/[0-9]{{12}}/.+|config\.json|saved\.json|[a-z_]+\.jsonl)"
)


class Part(NamedTuple):
    """Place of a part, a folder for a checkpoint, and the facts of its file or manifest.

    Without a digest it comes from an earlier version.
    """

    path: str
    size: int
    sha256: str


class Contents:
    """Parts of the copy in a store, or of those below a folder of it.

    `parts` are those that `refresh` saw. The holder of a lease changes them by `put`, `put_step`
    and `del`; `commit` makes them the copy, which `committed` has. Methods raise what stores raise.
    """

    def __init__(self, store: Any, folder: str = "") -> None:
        self._store, self._folder = store, folder
        self.parts, self.committed = dict[str, Part](), dict[str, Part]()
        self._lease: Lease | None = None
        self._lease_number, self._count = 0, 0
        self._index = ""  # the newest that this lease has written
        self._paths: set[str] = set()  # parts and indexes that may be in the store

    @property
    def kind(self) -> str:
        """What it is a copy of: "run", "tournament", or "" for neither."""
        if CONFIG in self.parts:
            return "run"
        return "tournament" if stores.numbered(_BLOCKS, 1) in self.parts else ""

    def refresh(self) -> None:
        """See what the copy has."""
        parts = _read_parts(self._store).items()
        folder = self._folder
        self.parts = {n.removeprefix(folder): part for n, part in parts if n.startswith(folder)}
        self.committed = dict(self.parts)

    # --- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """Return a file, None if there is none; seals tell whether it is as it was written."""
        return self._read(name, "")

    def read_manifest(self, name: str) -> bytes | None:
        """Return the manifest of a checkpoint, None if there is none."""
        return self._read(name, f"/{MANIFEST}")

    def _read(self, name: str, file: str) -> bytes | None:
        if (part := self.parts.get(name)) is None:
            return None
        return stores.read_whole(
            self._store,
            f"{part.path}{file}",
            lambda content: part.sha256 in ("", _digest(content)),
        )

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a file of JSON, an empty one if there is none."""
        return parse_object(self.read(name))

    def read_log(self, begin: int = 0) -> bytes:
        """Return the log from the beginning of the block that has the byte `begin`."""
        numbers = range(begin // BLOCK_BYTES + 1, log_size(self.parts) // BLOCK_BYTES + 2)
        return b"".join(self.read(stores.numbered(_BLOCKS, number)) or b"" for number in numbers)

    def fetch_step(self, name: str, target: Path, report: Report) -> bool:
        """Bring a checkpoint, and return whether it is whole; report what is not."""
        if (manifest := self.read_manifest(name)) is None:
            return False
        if is_there(target / MANIFEST) and (target / MANIFEST).read_bytes() == manifest:
            return True
        shutil.rmtree(target, ignore_errors=True)
        try:
            path, files = self.parts[name].path, json.loads(manifest)["files"]
            facts = {_checked(file): files[file] for file in files}
            check_room(target, sum(fact["size"] for fact in facts.values()))
            with ThreadPoolExecutor(8) as pool:
                tasks = [
                    pool.submit(self._download, f"{path}/{file}", target / file, **fact)
                    for file, fact in facts.items()
                ]
            for task in tasks:
                task.result()
            write_bytes(target / MANIFEST, manifest)
            for folder, _, _ in os.walk(target):
                fsync_directory(Path(folder))
            verify_seal(target)
        except FileNotFoundError as fault:
            report(f"checkpoint skipped: {name} is not whole in the store: {fault}.")
        except (CheckpointError, *MALFORMED) as fault:
            report(f"checkpoint skipped: {name}: {fault}.")
        else:
            return True
        shutil.rmtree(target, ignore_errors=True)
        return False

    def _download(self, path: str, target: Path, size: int, sha256: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._store.head(path)["size"] != size:
            raise CheckpointError(f"{path} has not the size that was sealed")
        for _ in range(stores.READS):
            digest = hashlib.sha256()
            with open(target, "wb") as file:
                for start in range(0, size, _CHUNK):
                    end = min(size, start + _CHUNK)
                    chunk = self._store.get_range(path, start=start, end=end)
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() == sha256:
                return

    # --- writing ----------------------------------------------------------------------------------

    def adopt(self, lease: Lease) -> None:
        """Go on from these parts as the holder of a lease: then no earlier one changes them."""
        self._lease, self._lease_number, self._index = lease, lease.number, ""

    def put(self, name: str, content: bytes) -> None:
        """Store a file, unless it is there as it is."""
        sha256 = _digest(content)
        if name in self.parts and self.parts[name].sha256 == sha256:
            return
        path = self._new_path(_FILES, name)
        self._store.put(path, content)
        if stores.size_of(self._store, path) != len(content):
            raise StorageError(f"{path} did not arrive as a whole")
        self.parts[name] = Part(path, len(content), sha256)

    def put_log(self, log: Path, size: int) -> None:
        """Store a log up to a size; blocks that are full are there as they are."""
        with open(log, "rb") as file:
            for number in range(-(-size // BLOCK_BYTES)):
                name = stores.numbered(_BLOCKS, number + 1)
                part = self.parts.get(name)
                if part is None or part.size < BLOCK_BYTES or not part.sha256:
                    file.seek(number * BLOCK_BYTES)
                    self.put(name, file.read(min(BLOCK_BYTES, size - number * BLOCK_BYTES)))

    def put_step(self, name: str, source: Path) -> None:
        """Store a sealed checkpoint, unless it is there as it is."""
        manifest = (source / MANIFEST).read_bytes()
        sha256 = _digest(manifest)
        if name in self.parts and self.parts[name].sha256 == sha256:
            return
        files = read_sealed_json(source / MANIFEST)["files"]
        path = self._new_path(_FILES, name)
        for file in files:
            self._store.put(f"{path}/{file}", source / file)
        self._store.put(f"{path}/{MANIFEST}", manifest)
        sizes = stores.sizes_below(self._store, path)
        for file, facts in {**files, MANIFEST: {"size": len(manifest)}}.items():
            if sizes.get(f"{path}/{file}") != facts["size"]:
                raise StorageError(f"{path}/{file} did not arrive as a whole")
        self.parts[name] = Part(path, len(manifest), sha256)

    def commit(self) -> None:
        """Make the parts the copy, and delete what is none of it.

        Raises `LeaseLostError` before a deletion if another machine has the lease.
        """
        assert self._lease is not None
        if not self._index:
            self._paths |= set(map(_path_of, _own_sizes(self._store)))
        if not self._index or self.parts != self.committed:
            index = self._new_path(_INDEX)
            self._store.put(index, encode_sealed({"parts": self.parts}))
            self._lease.check()
            self.committed, self._index = dict(self.parts), index
        for path in sorted(self._paths - {part.path for part in self.parts.values()}):
            if path == self._index:
                continue
            is_step = _path_of(f"{path}/") == path
            for name in stores.sizes_below(self._store, path) if is_step else [path]:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(name)
            self._paths.discard(path)

    def _new_path(self, folder: str, name: str = "") -> str:
        self._count += 1
        path = stores.numbered(stores.numbered(folder, self._lease_number), self._count)
        path = f"{path}/{name}" if name else path
        self._paths.add(path)
        return path


def log_size(parts: Mapping[str, Part]) -> int:
    """Return the bytes of a log, which ends at the first block that is not full."""
    size = 0
    for number in itertools.count(1):
        part = parts.get(stores.numbered(_BLOCKS, number))
        block = min(part.size, BLOCK_BYTES) if part else 0
        size += block
        if block < BLOCK_BYTES:
            return size
    raise AssertionError


def _read_parts(store: Any) -> dict[str, Part]:
    for _ in range(stores.READS):
        names = stores.sizes_below(store, _INDEX)
        index = stores.read_sealed(store, max(names, key=_age)) if names else {}
        if index is not None:
            break
    else:
        raise StorageError("the copy changes faster than it can be read")
    try:
        parts = index["parts"].items()
        return {name: Part(str(path), int(n), str(sha256)) for name, (path, n, sha256) in parts}
    except MALFORMED:
        sizes = _own_sizes(store)
        return _listed_parts({name: sizes[name] for name in sizes if names or _age(name) == (0, 0)})


def _own_sizes(store: Any) -> dict[str, int]:
    """Return the sizes of the objects of copies: nothing else is read or deleted."""
    sizes = stores.sizes_below(store, "")
    return {n: size for n, size in sizes.items() if _PLACE.match(n) or _EARLIER.fullmatch(n)}


def _listed_parts(sizes: dict[str, int]) -> dict[str, Part]:
    """Return what a list shows: earlier versions had no index, or the newest is damaged."""
    parts: dict[str, Part] = {}
    for name in sorted(sizes, key=_age):
        path = _path_of(name)
        if not name.startswith(f"{_INDEX}/") and name in (path, f"{path}/{MANIFEST}"):
            parts[_PLACE.sub("", path)] = Part(path, sizes[name], "")
    return parts


def _age(name: str) -> tuple[int, int]:
    """Return the lease and the count of an object, zeros for one of an earlier version."""
    match = _PLACE.match(name)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _path_of(name: str) -> str:
    """Return the path of the part that an object belongs to."""
    match = _STEP.match(name)
    return match[0] if match else name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checked(name: str) -> str:
    """Return the name of a file of a step; raise `CheckpointError` for one that leads elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == MANIFEST:
        raise CheckpointError(f"{name[:80]!r} cannot be the name of a file of a checkpoint")
    return name
