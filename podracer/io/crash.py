"""The file `crash.json` of a run that failed: the error, how far the run came, and all stacks."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from podracer.io.code import installed_versions
from podracer.io.run_directory import write_json
from podracer.io.text import print_stderr, redact

CRASH = "crash.json"
PREVIOUS_CRASH = "crash.previous.json"


def write_crash(directory: Path, error: BaseException, **facts: Any) -> None:
    """Write `crash.json`: the error with its exit code, facts of the run, and all stacks.

    A failed write is only reported on stderr, because it must not hide the original error. Secrets
    are redacted, see `text.redact`.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        f"{names.get(ident, 'unknown')} ({ident})": "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    }
    crash = {
        "code": getattr(error, "exit_code", 70),
        "exception": type(error).__qualname__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "threads": stacks,
        **facts,
    }
    try:
        facts = redact(json.loads(json.dumps(crash, default=str, skipkeys=True)))
        facts["versions"] = {"platform": platform.platform(), **installed_versions()}
        write_json(Path(directory) / CRASH, facts, mode=0o600)
    except OSError as failure:
        print_stderr(f"{CRASH} could not be written: {failure}")


def retire_crash(directory: Path) -> None:
    """Rename the `crash.json` of an earlier attempt, which a run that goes on has overcome."""
    with contextlib.suppress(FileNotFoundError):
        (directory / CRASH).replace(directory / PREVIOUS_CRASH)
