"""Sockets that this process and its descendants listen on, beyond the loopback interface."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
LISTENS = "0A"


def entries(directory: str, pattern: str) -> list[Path]:
    """Return the paths in a directory of /proc, none where the process has ended meanwhile."""
    with contextlib.suppress(OSError):
        return list(Path(directory).glob(pattern))
    return []


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    found = {pid}
    for path in entries(f"/proc/{pid}/task", "*/children"):
        with contextlib.suppress(OSError):
            found |= {member for child in path.read_text().split() for member in family(int(child))}
    return found


def open_addresses() -> set[str]:
    """Return the addresses, beyond the loopback, at which this process's family listens."""
    inodes = set()
    for pid in family(os.getpid()):
        for link in entries(f"/proc/{pid}/fd", "*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link))
    rows = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        row[1]
        for row in rows
        if (row[3] == LISTENS or row[1].endswith(row[2])) and f"socket:[{row[9]}]" in inodes
        if row[1].split(":")[0] not in LOOPBACK
    }


@contextlib.contextmanager
def listeners() -> Iterator[set[str]]:
    """Collect the open addresses while the context lasts."""
    found: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            found.update(open_addresses())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
