"""A process that is killed at its n-th change to the files of a run, for the tests of crash points.

A server imports JAX once, with `crash_points.c` preloaded, and forks a process for each request:
`save RUN N` saves a step and dies at call N, `check RUN` restores and saves again.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class Server:
    """The server, which `directory` is for; a context manager."""

    def __init__(self, directory: Path) -> None:
        library = directory / "crash_points.so"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")

    def ask(self, *request: object) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(word) for word in request]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def state(step: int) -> dict:
    import numpy as np

    return {"a": np.full(300, step, np.float32), "b": np.arange(step, step + 3, dtype=np.int32)}


def best(step: int) -> dict:
    return {"best": {"updates": step}}


def save(run: str, number: str, journal: str) -> dict:
    """Save step 3, the new best, after 0 to 2, of which 1 is then deleted; killed at a call."""
    from podracer.io.checkpoint import Checkpointer

    calls = ctypes.CDLL(None)
    log = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    calls.crash_at(run.encode(), int(number), log)
    with Checkpointer(Path(run), keep=2) as checkpointer:
        checkpointer.save(3, state(3), best(3))
    return {"calls": calls.crash_calls()}


def prepare(run: str) -> dict:
    from podracer.io.checkpoint import Checkpointer

    with Checkpointer(Path(run), keep=2) as checkpointer:
        for step in (0, 1, 2):
            checkpointer.save(step, state(step), best(0))
    return {}


def check(run: str) -> dict:
    """Restore the newest step and its best, and save one more; return what was found and said."""
    from podracer.io import text
    from podracer.io.checkpoint import Checkpointer, fingerprint, load

    reports: list[str] = []
    text.print_stderr = reports.append
    with Checkpointer(Path(run), keep=2) as checkpointer:
        restored = checkpointer.restore(state(0))
        is_right = fingerprint(restored.state) == fingerprint(state(restored.step))
        checkpointer.save(4, state(4), restored.metadata)
    for choice, step in (("newest", 4), ("best", restored.metadata["best"]["updates"])):
        after = load(Path(run), state(0), choice)
        is_right = is_right and fingerprint(after.state) == fingerprint(state(step))
    left = sorted(path.name for path in (Path(run) / "checkpoints").iterdir())
    return {"step": restored.step, "right": is_right, "said": reports, "left": left}


def main() -> None:
    import podracer.io.checkpoint  # noqa: F401

    for line in sys.stdin:
        name, *arguments = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            answer = {"save": save, "prepare": prepare, "check": check}[name](*arguments)
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answer = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, **json.loads(answer or b"{}")}), flush=True)


def lose_unsynced(journal: Path) -> None:
    """Empty every file whose last change was not synced, as a power cut may."""
    dirty: set[str] = set()
    for line in journal.read_text().splitlines():
        kind, name, target = line.split("\t")
        if kind in "cw":
            dirty.add(name)
        elif kind == "s" or kind == "u":
            dirty.discard(name)
        elif kind == "r":
            moved = {path for path in dirty if path == name or path.startswith(f"{name}/")}
            dirty = (dirty - moved) | {target + path[len(name) :] for path in moved}
    for path in dirty:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.truncate(path, 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
