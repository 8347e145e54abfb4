"""Object stores with faults, and runs that are copied to them without being trained."""

import hashlib
import itertools
import json
import threading
from pathlib import Path

import jax
import numpy as np

from podracer.io.checkpoint import Checkpointer
from podracer.io.seal import CONFIG, seal_json
from podracer_cloud import mirror
from podracer_cloud import store as stores
from podracer_cloud.contents import Contents
from podracer_cloud.lease import Lease
from podracer_cloud.mirror import Mirror
from podracer_cloud.runs import RunCopy
from podracer_cloud.store import open_store

OPERATIONS = ("put", "get", "get_range", "head", "list", "list_with_delimiter", "delete")


class MachineLost(BaseException):
    """The machine ends here: no handler of `Exception` goes on after it."""


class Store:
    """A store that passes each operation to the real one, behind `fault(operation, name, call)`.

    `fault` returns what the operation returns, by `call()` or otherwise, or raises. It may be
    exchanged while the store is in use. `log` has the operations so far.
    """

    def __init__(self, real, fault=lambda operation, name, call: call()):
        self.real, self.fault, self.log = real, fault, []

    def __getattr__(self, operation):
        assert operation in OPERATIONS, operation

        def call(*arguments, **options):
            name = str(arguments[0]) if arguments else ""
            self.log.append((operation, name))
            function = getattr(self.real, operation)
            return self.fault(operation, name, lambda: function(*arguments, **options))

        return call

    def names(self, operation):
        return [name for one, name in self.log if one == operation]


def moments(store: Store, machine, every: bool):
    """Numbers of a machine's operations from 1 on: each, or some before which a wait may harm."""
    store.log.clear()
    machine()
    if every:
        return range(1, len(store.log) + 1)
    kinds = {}
    for number, (operation, name) in reversed([*enumerate(store.log, 1)]):
        if operation == "put" and name.startswith("index/"):
            kinds["after an index"] = number + 1
        if operation in ("put", "delete") or name == "":
            kinds[operation, name.partition("/")[0], "checkpoints" in name] = number
    return sorted(kinds.values())


def pause_machine(store: Store, number: int, machine, successor) -> None:
    """Let a machine stand still before operation `number` while its successor works.

    Both go on to their ends.
    """
    paused, woken, left = threading.Event(), threading.Event(), itertools.count(1)

    def fault(operation, name, call):
        if next(left) == number:
            paused.set()
            assert woken.wait(60.0)
        return call()

    store.fault = fault
    thread = threading.Thread(target=machine)
    thread.start()
    while thread.is_alive() and not paused.wait(0.005):
        pass
    if paused.is_set():
        successor()
    woken.set()
    thread.join()
    assert paused.is_set()


def use(monkeypatch, address, fault=lambda operation, name, call: call()):
    """Put a store with faults in the place of the one at an address; return it."""
    store = Store(open_store(address, writes=True), fault)
    for module in (mirror, stores):
        monkeypatch.setattr(module, "open_store", lambda *_, **__: store)
    return store


def hurry(monkeypatch, expiry=0.4):
    """Let leases expire soon, and the end of a run wait shortly."""
    monkeypatch.setattr(Lease, "EXPIRY_SECONDS", expiry)
    monkeypatch.setattr(Lease, "BEAT_SECONDS", expiry / 8)
    monkeypatch.setattr(mirror, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(mirror, "CLOSE_SECONDS", 60.0)


def state(step):
    """The state that is saved at a step."""
    return {"w": jax.random.normal(jax.random.key(step), (64, 5)), "step": np.int64(step)}


class Run:
    """A run that saves and does nothing else; its mirror is entered with it."""

    def __init__(self, directory: Path, address: str | None, identity="a"):
        self.directory, is_new = directory, not (directory / CONFIG).exists()
        directory.mkdir(exist_ok=True, parents=True)
        self.mirror = None if address is None else Mirror(directory, address, RunCopy, new=is_new)
        self.identity = {"id": identity, "experiment": "e"}

    def __enter__(self):
        if self.mirror is not None:
            self.mirror.__enter__()
        self.checkpointer = Checkpointer(
            self.directory, keep=2, sealed=self.mirror.sealed if self.mirror else lambda: None
        )
        if not (self.directory / CONFIG).exists():
            seal_json(self.directory / CONFIG, {"run": self.identity, "experiment": {}})
        if self.mirror is not None:
            self.mirror.sealed()
        return self

    def __exit__(self, *error):
        self.checkpointer.close()
        if self.mirror is not None:
            self.mirror.__exit__(*error)

    def save(self, *steps, best=None):
        path = self.directory / "metrics.jsonl"
        for step in steps:
            lines = path.read_bytes() if path.exists() else b""
            path.write_bytes(lines + json.dumps({"updates": step}).encode() + b"\n")
            content = path.read_bytes()
            seal = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            metadata = {"records": {path.name: seal}, "best": best and {"updates": best}}
            self.checkpointer.save(step, state(step), metadata)
            self.checkpointer.wait()


def files_of(directory: Path):
    """The files of a run that its copy has, by name."""
    own = {"lock", "mirror.json"}
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in own
    }


def stored(store: Path, name: str) -> Path:
    """Where a part of the copy lies in a store that is a directory."""
    contents = Contents(open_store(f"file://{store}"))
    contents.refresh()
    return store / contents.parts[name].path


def copied(store: Path, *, alone=True):
    """The files of the copy in a store that is a directory, by name; `alone` there by default."""
    contents, files = Contents(open_store(f"file://{store}")), {}
    contents.refresh()
    for name, part in contents.parts.items():
        path = store / part.path
        found = files_of(path) if path.is_dir() else {"": path.read_bytes()}
        files |= {f"{name}/{file}".rstrip("/"): content for file, content in found.items()}
    if not alone:
        return files
    objects = [name.partition("/")[0] for name in files_of(store)]
    assert set(objects) <= {"leases", "index", "files"}, sorted(set(objects))
    assert (objects.count("index"), objects.count("files")) == (1, len(files))
    return files
