"""The lease of a mirror: one machine writes the copy of a run or a tournament in a store.

`leases/000001` below the address names it. It was made by a conditional create, and is written
again at each heartbeat. Where there is a `leases/000002`, it was taken over. No number is deleted,
so none is created twice. A lease expires when nobody writes it for a minute by the clock of the
store: clocks of machines differ. Stores need no other conditional write than a create.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from obstore.exceptions import AlreadyExistsError

from podracer.errors import ConfigError, PodracerError, StorageError
from podracer.io.seal import encode_sealed
from podracer_cloud.store import newest_number, numbered, read_sealed, size_of

CLOCK = "leases/clock"  # object that tells the time of a store
_LEASES = "leases"


class LeaseLostError(PodracerError):
    """Lease that another machine has taken over."""

    exit_code = 77


class Lease:
    """Right to write the copy of a run or a tournament, its `kind`, at an address.

    `holder` identifies its directory, which takes over from itself without waiting.
    """

    EXPIRY_SECONDS = 60.0  # after the last heartbeat
    BEAT_SECONDS = 15.0

    def __init__(self, store: Any, address: str, holder: str, kind: str) -> None:
        self._store, self._address, self._holder = store, address, holder
        self._kind, self._claim = kind, uuid.uuid4().hex
        self._number = 0  # 0 while no lease is held

    @property
    def number(self) -> int:
        """Its number, larger than that of any before; 0 while it is not held."""
        return self._number

    def claim(self, wait: Callable[[float], Any], report: Callable[[str], None]) -> None:
        """Take the lease; wait until the one of a machine that has gone has expired.

        Raises `ConfigError` if another machine holds it, and what the store raises.
        """
        number = newest_number(self._store, _LEASES)
        while True:
            record = self._read(number) or {}
            if record.get("claim") == self._claim:  # the answer to its create was lost
                self._number = number
                return
            is_free = record.get("released") or record.get("holder") == self._holder
            if number and not is_free:
                self._await_expiry(number, record, wait, report)
            try:
                self._store.put(_name(number + 1), self._record(), mode="create")
            except AlreadyExistsError:
                number += 1
                continue
            self._number = number + 1
            return

    def check(self) -> None:
        """Raise `LeaseLostError` if another machine has the lease, `StorageError` if nobody has."""
        number = self._number
        record = self._read(number)
        is_own = record is not None and record.get("claim", self._claim) == self._claim
        if is_own and size_of(self._store, _name(number + 1)) is None:
            return
        successor = self._read(newest_number(self._store, _LEASES)) or {}
        if successor.get("claim", self._claim) == self._claim:  # the store was emptied, or is away
            raise StorageError(
                f"the lease at {self._address} is gone, perhaps with all that the store had: if it "
                f"does not come back, only a resume of the {self._kind} copies there again"
            )
        self._number = 0
        host = str(successor.get("host", "another machine"))[:100]
        raise LeaseLostError(
            f"{host!r} writes the copy at {self._address} now: this {self._kind} goes on "
            "without it."
        )

    def beat(self) -> None:
        """Renew the lease. Raises `LeaseLostError` if another machine has taken over."""
        number = self._number
        self.check()
        self._write(number)

    def release(self) -> None:
        """Let another machine take over at once."""
        if self._number:
            self.check()
            number, self._number = self._number, 0
            self._write(number, released=True)

    def _await_expiry(
        self,
        number: int,
        record: dict[str, Any],
        wait: Callable[[float], Any],
        report: Callable[[str], None],
    ) -> None:
        host = str(record.get("host", "another machine"))[:100]
        first = self._store.head(_name(number))
        age = (self._store_time() - first["last_modified"]).total_seconds()
        remaining = self.EXPIRY_SECONDS - max(age, 0.0)
        if remaining <= 0:
            return
        report(
            f"{host!r} wrote at {self._address} {max(age, 0.0):.0f} s ago: if it does not go on, "
            f"this {self._kind} takes over in {remaining:.0f} s."
        )
        deadline = time.monotonic() + remaining
        while (left := deadline - time.monotonic()) > 0:
            wait(min(left, self.BEAT_SECONDS / 3))
            latest = self._store.head(_name(number))
            if any(latest[key] != first[key] for key in ("e_tag", "last_modified")):
                if (self._read(number) or {}).get("released"):
                    return
                age = (self._store_time() - latest["last_modified"]).total_seconds()
                raise ConfigError(
                    f"{self._address} is written by {host!r}, whose heartbeat is {max(age, 0):.0f} "
                    f"s old: wait for that {self._kind} to end or stop it, or choose another "
                    "address."
                )

    def _read(self, number: int) -> dict[str, Any] | None:
        """Return what a lease says, nothing for one that cannot be read, None for none."""
        return read_sealed(self._store, _name(number))

    def _write(self, number: int, *, released: bool = False) -> None:
        self._store.put(_name(number), self._record(released))

    def _record(self, released: bool = False) -> bytes:
        record = {"holder": self._holder, "claim": self._claim, "host": socket.gethostname()}
        return encode_sealed({**record, "released": released, "time": time.time()})

    def _store_time(self) -> Any:
        """Return the time of the store's own clock."""
        self._store.put(CLOCK, b"now")
        return self._store.head(CLOCK)["last_modified"]


def _name(number: int) -> str:
    return numbered(_LEASES, number)
