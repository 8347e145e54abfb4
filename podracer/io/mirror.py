"""Copy of a run in an object store, so that the run outlives its disk.

Below the address lie the run directory's own files: `config.json`, `saved.json`, the records up to
the newest seal, and `checkpoints/<step>/`, each with its `manifest.json` last. After each seal
`Mirror` makes the store like the disk, in threads of its own: a store that is slow or gone costs
its copy and nothing else. What was copied is read by `copies.py`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io.edits import encode_sealed, read_object
from podracer.io.lease import Lease, LeaseLostError
from podracer.io.paths import address_of
from podracer.io.run_directory import write_json
from podracer.io.seal import CHECKPOINTS, CONFIG, MANIFEST, is_there, read_sealed_json
from podracer.io.steps import SAVED, newest_saved, read_meta, step_directories
from podracer.io.store import (
    manifest_of,
    open_store,
    read_json,
    reason,
    saved_step,
    sizes_below,
    step_names,
)
from podracer.io.store import read_object as read_stored
from podracer.io.text import print_stderr

MIRROR = "mirror.json"  # in the run directory: the address, and who writes there
CLOSE_SECONDS = 60.0  # for the last copy, at the end of a run
LONGEST_PAUSE = 60.0  # seconds between two attempts while the store is gone

_LOG = logging.getLogger("podracer")


class Mirror:
    """Copier of a run's sealed checkpoints and records to a store; a context manager.

    Entering it takes the lease. Leaving it waits for the last copy, for up to `CLOSE_SECONDS`.

    Raises `ConfigError` if another machine writes there, or if the copy is newer or of another run.
    The start of a `new` run is refused, too, if the store cannot be written.
    """

    def __init__(self, run: Path, address: str, *, new: bool) -> None:
        self.address = address
        self._run, self._is_new = run, new
        self._store = open_store(address, writes=True)
        self._lease = Lease(self._store, address, "")
        self._wake, self._closing, self._ended = (threading.Event() for _ in range(3))
        self._seals: deque[float] = deque()  # times of seals that are not copied
        self._stored: set[str] = set()  # steps whose copies are whole
        self._remains: set[str] = set()  # steps of which the store has something else
        self._config = b""  # the copied one
        self._is_claimed = False
        self._copied, self._faults, self._lag = -1, 0, 0.0
        self._trouble = ""  # the last fault, while it lasts

    def __enter__(self) -> Mirror:
        self._lease = Lease(self._store, self.address, identify(self._run, self.address))
        try:
            self._claim()
        except ConfigError:
            raise
        except Exception as error:
            if self._is_new:
                raise ConfigError(f"{self.address} cannot be written: {reason(error)}.") from error
            self._report_fault(error)
        self._worker = threading.Thread(target=self._work, name="podracer-mirror", daemon=True)
        self._worker.start()
        threading.Thread(target=self._beat, name="podracer-lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._wake.set()
        self._worker.join(CLOSE_SECONDS)
        if self._seals and not self._ended.is_set():  # the end of a lease was said
            state = f"it has update {max(self._copied, 0)} of {max(newest_step(self._run), 0)}"
            trouble = f"{state} ({self._trouble or 'the store is slow'})"
            text = "the copy at %s is behind: %s; podracer resume %s copies the rest."
            _LOG.warning(text, self.address, trouble, self._run)
        self._ended.set()
        with contextlib.suppress(Exception):  # it expires by itself
            self._lease.release()

    def notify(self) -> None:
        """Copy what has been sealed, soon; return at once."""
        self._seals.append(time.monotonic())
        self._wake.set()

    def figures(self) -> dict[str, float]:
        """Return the seconds by which the copy is behind, and the number of faults so far."""
        lag = time.monotonic() - self._seals[0] if self._seals else 0.0
        return {"mirror_lag": lag, "mirror_faults": self._faults}

    def summary(self) -> str:
        """Return what was copied where, in words."""
        state = f"update {self._copied}" if self._copied >= 0 else "no checkpoint"
        state += ", behind the run" if self._seals else f", copied within {self._lag:.1f} s"
        return f"{self.address}  {state}" + (f", {self._faults} faults" if self._faults else "")

    # --- threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        num_failures = 0
        while not self._ended.is_set():
            if num_failures:
                pause = min(2.0 ** (num_failures - 1), LONGEST_PAUSE)
                wait = self._ended if self._closing.is_set() else self._closing
                wait.wait(min(pause, 1.0) if self._closing.is_set() else pause)
            else:
                self._wake.wait()
            self._wake.clear()
            num_seals = len(self._seals)
            if num_seals == 0:
                if self._closing.is_set():
                    return
                continue
            try:
                self._synchronize()
            except LeaseLostError as error:
                self._end(error)
                return
            except Exception as error:
                num_failures += 1
                self._report_fault(error)
                continue
            if num_failures:
                _LOG.warning("%s can be written again; it has what was saved.", self.address)
            num_failures, self._trouble = 0, ""
            for sealed_at in [self._seals.popleft() for _ in range(num_seals)]:
                self._lag = max(self._lag, time.monotonic() - sealed_at)
            if self._closing.is_set():
                self._wake.set()

    def _beat(self) -> None:
        while not self._ended.wait(Lease.BEAT_SECONDS):
            try:
                if self._lease.is_held:
                    self._lease.beat()
            except LeaseLostError as error:
                self._end(error)
            except Exception:  # the next copy tells more
                self._faults += 1

    def _end(self, error: Exception) -> None:
        """Copy nothing any more."""
        self._trouble = str(error)
        if not self._ended.is_set():
            _LOG.warning("%s", error)
        self._ended.set()
        self._wake.set()

    def _report_fault(self, error: Exception) -> None:
        """Count a fault, and say the first of several in a row."""
        self._faults += 1
        if not self._trouble:
            text = "the run cannot be copied to %s: %s; it goes on, and so do the attempts."
            _LOG.warning(text, self.address, reason(error))
        self._trouble = reason(error)

    # --- the copy ---------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Take the lease, and see what the store has."""
        self._lease.claim(self._ended.wait, print_stderr)
        config = read_json(self._store, CONFIG)
        if config and not is_same_run(config, self._run):
            problem = (
                f"{self.address} holds another run: choose another address, or continue that run: "
                f"podracer resume {self.address} --run-dir DIR"
            )
        elif config and saved_step(self._store) > newest_step(self._run):
            problem = (
                f"the copy at {self.address} is newer than {self._run}: podracer resume "
                f"{self.address} --run-dir {self._run}"
            )
        else:
            for name in step_names(self._store):
                path = self._run / CHECKPOINTS / name / MANIFEST
                manifest = path.read_bytes() if is_there(path) else None
                is_whole = manifest and read_stored(self._store, manifest_of(name)) == manifest
                (self._stored if is_whole else self._remains).add(name)
            self._is_claimed = True
            return
        self._lease.release()
        raise ConfigError(problem)

    def _synchronize(self) -> None:
        """Make the store like the disk: new steps first, then what was retired."""
        if not self._is_claimed:
            try:
                self._claim()
            except ConfigError as error:  # while the store was away
                raise LeaseLostError(f"the run goes on without a copy: {error}") from error
        self._lease.check()
        config = (self._run / CONFIG).read_bytes()
        if config != self._config:
            self._store.put(CONFIG, config)
            self._config = config
        paths = step_directories(self._run / CHECKPOINTS)
        steps = {path.name: path for path in paths if is_there(path / MANIFEST)}
        newest = max(steps, default="")
        for name in sorted(steps.keys() - self._stored, reverse=True):
            try:
                if name == newest:
                    self._put_records(steps[name])
                self._put_step(steps[name])
            except (CheckpointError, OSError):
                if is_there(steps[name]):  # otherwise it was retired meanwhile
                    raise
        if newest not in self._stored:
            return
        if int(newest) != self._copied:
            self._store.put(SAVED, encode_sealed({"step": int(newest)}))
            self._copied = int(newest)
        for name in sorted((self._stored | self._remains) - steps.keys()):
            self._remove_step(name)

    def _put_records(self, path: Path) -> None:
        """Copy the records up to the seal of a step, before it: no copy of one lacks them."""
        for name, seal in read_meta(path)["metadata"]["records"].items():
            with open(self._run / name, "rb") as file:
                self._store.put(name, file.read(seal["size"]))

    def _put_step(self, path: Path) -> None:
        prefix, files = f"{CHECKPOINTS}/{path.name}", read_sealed_json(path / MANIFEST)["files"]
        if path.name in self._remains:
            self._remove_step(path.name)
        self._remains.add(path.name)
        for name in files:
            self._store.put(f"{prefix}/{name}", path / name)
        sizes = sizes_below(self._store, prefix)
        for name, facts in files.items():
            if sizes.get(f"{prefix}/{name}") != facts["size"]:
                raise StorageError(f"{prefix}/{name} did not arrive as a whole")
        manifest = (path / MANIFEST).read_bytes()
        self._lease.check()
        self._store.put(manifest_of(path.name), manifest)
        self._remains.discard(path.name)
        self._stored.add(path.name)

    def _remove_step(self, name: str) -> None:
        """Remove a step, its manifest first: what is left of it is no checkpoint."""
        self._remains.add(name)
        self._stored.discard(name)
        for path in (manifest_of(name), *sizes_below(self._store, f"{CHECKPOINTS}/{name}")):
            with contextlib.suppress(FileNotFoundError):
                self._store.delete(path)
        self._remains.discard(name)


def recorded_address(run: Path) -> str | None:
    """Return the address to which the run in a directory is copied, None if it is not."""
    address = read_object(run / MIRROR).get("address")
    return address_of(address) if isinstance(address, str) else None


def identify(run: Path, address: str) -> str:
    """Return what identifies a directory as the writer at an address, and record it there.

    A directory that was copied or moved is another one: two machines may have it.
    """
    place = f"{socket.gethostname()}:{run.resolve()}"
    record = read_object(run / MIRROR)
    if (record.get("address"), record.get("place")) != (address, place):
        record = {"address": address, "place": place, "holder": uuid.uuid4().hex}
        write_json(run / MIRROR, record)
    return str(record.get("holder"))


def is_same_run(config: dict[str, Any], run: Path) -> bool:
    """Return whether a `config.json` is of the run in a directory."""
    identity = config.get("run")
    return identity is not None and identity == read_object(run / CONFIG).get("run")


def newest_step(run: Path) -> int:
    """Return the newest step that a run has ever sealed, -1 without one."""
    step = newest_saved(run)
    return -1 if step is None else step
