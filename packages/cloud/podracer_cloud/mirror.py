"""Mirror of a run or a tournament in an object store, so that it outlives its disk.

After each change `Mirror` makes the store like the disk, in threads of its own: a store that is
slow or gone costs its copy and nothing else. `contents.py` says what lies below the address.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from podracer.errors import ConfigError
from podracer.io.addresses import address_of
from podracer.io.reading import read_object
from podracer.io.run_directory import write_json
from podracer.io.text import print_stderr
from podracer_cloud.contents import Contents
from podracer_cloud.lease import Lease, LeaseLostError
from podracer_cloud.store import open_store, reason

MIRROR = "mirror.json"  # in the directory: the address, and who writes there
CLOSE_SECONDS = 60.0  # for the last copy, at the end of a run
LONGEST_PAUSE = 60.0  # seconds between two attempts while the store is gone

OTHER = (
    "{address} holds another {kind}: choose another address, or continue that {kind}: podracer "
    "resume {address} --run-dir DIR"
)
_LOG = logging.getLogger("podracer")


class Copy(Protocol):
    """What lies in a directory, and what a store has of it. Any method raises what stores raise.

    `is_same`: the store has the run or tournament of the directory. `is_newer`: it has more of it.
    `update` makes the store like the disk, `fetch` brings everything into the directory. `str` is
    what the store has, in words.
    """

    kind: str  # what `kind_at` returns for it
    mark: str  # name of the file by which the directory has begun; it comes back last
    gather_seconds: float  # for which changes are gathered before they are copied

    def is_same(self) -> bool: ...
    def is_newer(self) -> bool: ...
    def update(self) -> None: ...
    def fetch(self, report: Callable[[str], None]) -> None: ...


class Mirror:
    """Copier of a run or a tournament to a store; a context manager.

    Entering it takes the lease. Leaving it waits for the last copy, for up to `CLOSE_SECONDS`.

    Raises `ConfigError` if another machine writes there, or if the copy is newer or of another run.
    The start of a `new` run is refused, too, if the store cannot be written.
    """

    def __init__(
        self, directory: Path, address: str, kind: Callable[[Path, Contents], Copy], *, new: bool
    ) -> None:
        self.address = address
        self._directory, self._is_new = directory, new
        self._store = open_store(address, writes=True)
        self._contents = Contents(self._store)
        self._copy = kind(directory, self._contents)
        self._lease = Lease(self._store, address, "", self._copy.kind)
        self._wake, self._closing, self._ended = (threading.Event() for _ in range(3))
        self._changes: deque[float] = deque()  # times of changes that are not copied
        self._is_claimed = False
        self._faults, self._lag = 0, 0.0
        self._trouble = ""  # the last fault, while it lasts

    def __enter__(self) -> Mirror:
        holder = identify(self._directory, self.address)
        self._lease = Lease(self._store, self.address, holder, self._copy.kind)
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
        self._heart = threading.Thread(target=self._beat, name="podracer-lease", daemon=True)
        self._heart.start()
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._closing.set()
        self._wake.set()
        self._worker.join(CLOSE_SECONDS)
        if self._changes and not self._ended.is_set():  # the end of a lease was said
            state = f"it has {self._copy}" if self._is_claimed else "nothing was copied"
            trouble = f"{state} ({self._trouble or 'the store is slow'})"
            text = "the copy at %s is behind: %s; podracer resume %s copies the rest."
            _LOG.warning(text, self.address, trouble, self._directory)
        self._ended.set()
        self._heart.join(Lease.BEAT_SECONDS)  # its last write would take the released lease again
        with contextlib.suppress(Exception):  # it expires by itself
            self._lease.release()
        if kind is None:
            print_stderr(f"Mirror    {self.summary()}")

    def sealed(self) -> None:
        """Copy what has changed, soon; return at once."""
        self._changes.append(time.monotonic())
        self._wake.set()

    def figures(self) -> dict[str, float]:
        """Return the seconds by which the copy is behind, and the number of faults so far."""
        try:
            lag = time.monotonic() - self._changes[0]
        except IndexError:  # nothing waits; the worker may have taken the last one just now
            lag = 0.0
        return {"mirror_lag": lag, "mirror_faults": self._faults}

    def summary(self) -> str:
        """Return what was copied where, in words."""
        state = str(self._copy) if self._is_claimed else "nothing was copied"
        copied = f", copied within {self._lag:.1f} s"
        state += f", behind the {self._copy.kind}" if self._changes else copied
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
                self._closing.wait(self._copy.gather_seconds)
            self._wake.clear()
            num_changes = len(self._changes)
            if num_changes == 0:
                if self._closing.is_set():
                    return
                continue
            try:
                if not self._is_claimed:
                    self._claim()
                self._lease.check()
                self._copy.update()
            except LeaseLostError as error:
                self._end(str(error))
                return
            except ConfigError as error:  # a late claim: the store was away at the start
                self._end(f"the {self._copy.kind} goes on without a copy: {error}")
                return
            except Exception as error:
                num_failures += 1
                self._report_fault(error)
                continue
            if num_failures:
                _LOG.warning("%s can be written again; it has what was saved.", self.address)
            num_failures, self._trouble = 0, ""
            for changed_at in [self._changes.popleft() for _ in range(num_changes)]:
                self._lag = max(self._lag, time.monotonic() - changed_at)
            if self._closing.is_set():
                self._wake.set()

    def _beat(self) -> None:
        while not self._ended.wait(Lease.BEAT_SECONDS):
            try:
                if self._lease.number:
                    self._lease.beat()
            except LeaseLostError as error:
                self._end(str(error))
            except Exception:  # the next copy tells more
                self._faults += 1

    def _end(self, trouble: str) -> None:
        """Copy nothing any more."""
        self._trouble = trouble
        if not self._ended.is_set():
            _LOG.warning("%s", trouble)
        self._ended.set()
        self._wake.set()

    def _report_fault(self, error: Exception) -> None:
        """Count a fault, and say the first of several in a row."""
        self._faults += 1
        if not self._trouble:
            text = "the %s cannot be copied to %s: %s; it goes on, and so do the attempts."
            _LOG.warning(text, self._copy.kind, self.address, reason(error))
        self._trouble = reason(error)

    def _claim(self) -> None:
        """Take the lease, and go on from what the store has."""
        self._lease.claim(self._ended.wait, print_stderr)
        self._contents.refresh()
        kind = self._contents.kind
        if kind and (kind != self._copy.kind or not self._copy.is_same()):
            problem = OTHER.format(address=self.address, kind=kind)
        elif kind and self._copy.is_newer():
            problem = (
                f"the copy at {self.address} is newer than {self._directory}: podracer resume "
                f"{self.address} --run-dir {self._directory}"
            )
        else:
            self._contents.adopt(self._lease)
            self._is_claimed = True
            return
        with contextlib.suppress(Exception):  # it expires by itself
            self._lease.release()
        raise ConfigError(problem)


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
