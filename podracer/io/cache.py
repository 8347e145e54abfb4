"""The folder of compiled programs: private, and without entries that cannot be read.

JAX runs the machine code that it finds there, and never replaces an entry: one that was left half
written by a kill or a full disk would be refused, with a warning, by every later process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import zlib
from pathlib import Path
from typing import Any

_CHECKED = ".checked"  # its time is the time of the last look
_WRITING = 60.0  # seconds in which another process may still write an entry
_ZSTD = b"\x28\xb5\x2f\xfd"  # with which a frame begins


def prepare_cache(folder: Path) -> bool:
    """Make a folder that its owner alone can use, and drop the entries that are half written.

    Returns False where that is impossible, or where the folder belongs to somebody else.
    """
    try:
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.stat().st_uid != os.geteuid():
                return False
            path.chmod(0o700)
        _drop_broken_entries(folder)
    except OSError:
        return False
    return True


def _drop_broken_entries(folder: Path) -> None:
    """Delete what is broken of the entries since the last look."""
    marker, start = folder / _CHECKED, time.time()
    last_look = marker.stat().st_mtime if marker.exists() else 0.0
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process looks, too
            if last_look <= entry.stat().st_mtime < start - _WRITING and not _is_whole(entry):
                entry.unlink()
    marker.touch()
    os.utime(marker, (start - _WRITING, start - _WRITING))


def _is_whole(entry: Path) -> bool:
    data = entry.read_bytes()
    try:
        decompressor: Any = _zstd_decompressor() if data.startswith(_ZSTD) else zlib.decompressobj()
        decompressor.decompress(data)
    except ImportError:
        return True  # nobody knows
    except Exception:  # each decompressor has its own
        return False
    return decompressor.eof


def _zstd_decompressor() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("compression.zstd").ZstdDecompressor()
    return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()
