"""Copies of tournaments in a store, and how they come back.

Below the address lie the log in blocks, `log/000001` and so on, and the rounds from which pods may
start, each as the run that it is. One after another the blocks make `leaderboard.jsonl`. A round
comes before the log that names it, and goes after the log that needs it no longer. What pods do
within a round is not copied: on another machine they begin it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podracer.errors import CheckpointError
from podracer.io import store as stores
from podracer.io.copies import fetch_files, put_records
from podracer.io.directories import LOG
from podracer.io.run_directory import own_directory, write_bytes
from podracer.io.seal import CONFIG, MANIFEST, is_there
from podracer.io.steps import SAVED, Report
from podracer.io.store import BLOCK_BYTES
from podracer.io.text import mode_of
from podracer.tournament.events import kept_entries, state_after
from podracer.tournament.leaderboard import Leaderboard, read_log

_CHECKPOINT = re.compile(r"(pods/p[0-9]+r[0-9]+)/checkpoints/[0-9]{12}")


class TournamentCopy:
    """Copy of a tournament in a store, see `podracer.io.mirror.Copy`.

    `board` is the writer of the tournament's log, which only `update` needs.
    """

    kind, mark, gather_seconds = "tournament", LOG, 1.0

    def __init__(self, directory: Path, store: Any, board: Leaderboard | None = None) -> None:
        self._directory, self._store, self._board = directory, store, board
        self._stored: set[str] = set()  # checkpoints
        self._size = 0  # bytes of the log that are copied
        self._events = 0

    def __str__(self) -> str:
        return f"{self._events} events, {len(self._stored)} entries"

    def is_same(self) -> bool:
        """Return whether one of the logs begins with the other one: each line seals those before.

        Two machines that went on from one copy have different ones.
        """
        log = self._log()
        end = min(len(log), stores.log_size(self._store))
        begin = max(0, end // BLOCK_BYTES - 1) * BLOCK_BYTES  # a line may go over a border
        return stores.read_blocks(self._store, begin)[: end - begin] == log[begin:end]

    def is_newer(self) -> bool:
        """Return whether the store has events that the directory lacks."""
        return stores.log_size(self._store) > len(self._log())

    def _log(self) -> bytes:
        """Return the log without a torn line."""
        path = self._directory / LOG
        log = path.read_bytes() if is_there(path) else b""
        return log[: log.rfind(b"\n") + 1]

    def look(self) -> None:
        """See what the store has, and remove what its log does not name.

        An entry that the log names was whole before. Others are of a machine that was lost: rounds
        are played again, perhaps to other bytes.
        """
        self._size = stores.log_size(self._store)
        stores.remove_blocks(self._store, self._size)
        lines = [*map(json.loads, self._log()[: self._size].splitlines())]
        self._events = len(lines)
        named = {line["checkpoint"] for line in lines if line["event"] == "submitted"}
        listed = stores.sizes_below(self._store, "pods")
        self._stored = {name for name in named if f"{name}/{MANIFEST}" in listed}
        rounds = {"/".join(name.split("/")[:2]) for name in listed}
        for name in sorted(rounds - set(map(_round, self._stored))):
            stores.remove_step(self._store, name)

    def update(self, check: Callable[[], None]) -> None:
        """Make the store like the disk at one moment: new entries, the log, then what retired."""
        assert self._board is not None
        state, size = self._board.snapshot()
        needed = {entry.checkpoint for entry in kept_entries(state)}
        for name in sorted(needed - self._stored):
            path = self._directory / name
            if is_there(path / MANIFEST):  # otherwise it was damaged or lost, and is reported
                self._put_entry(name, path, check)
        check()
        if size > self._size:
            stores.put_blocks(self._store, self._directory / LOG, self._size, size)
        self._size, self._events = size, state.events
        for name in sorted(self._stored - needed):
            self._stored.discard(name)
            stores.remove_step(self._store, name)
            stores.remove_step(self._store, _round(name))

    def _put_entry(self, name: str, path: Path, check: Callable[[], None]) -> None:
        round = _round(name)
        put_records(self._store, f"{round}/", path)
        for file in (CONFIG, SAVED):
            self._store.put(f"{round}/{file}", (self._directory / round / file).read_bytes())
        stores.put_step(self._store, name, path, check)
        self._stored.add(name)

    def fetch(self, report: Report) -> None:
        """Bring the log and the entries that it needs, the log last.

        An entry counts only with its digest on the leaderboard. Raises `CheckpointError` if the log
        is damaged, or if there are entries and none is whole.
        """
        log = stores.read_blocks(self._store)
        events, _, size = read_log(self._directory / LOG, log.splitlines(keepends=True))
        if not events:
            raise CheckpointError("the log in the store is damaged: it has no first line.")
        own_directory(self._directory / "pods")
        entries = {entry.id: entry for entry in kept_entries(state_after(events))}
        lost_names = [
            name
            for name, entry in entries.items()
            if not self._fetch_entry(entry.checkpoint, entry.digest, report)
        ]
        if lost_names and len(lost_names) == len(entries):
            raise CheckpointError(f"none of the {len(entries)} entries in the store is whole.")
        if lost_names:
            report(f"{', '.join(lost_names)} are lost: pods cannot start from them, and report it.")
        settings = json.loads(log[: log.find(b"\n")])
        write_bytes(self._directory / LOG, log[:size], mode=mode_of(settings))

    def _fetch_entry(self, name: str, digest: str, report: Report) -> bool:
        round, path = _round(name), self._directory / name
        manifest = stores.read_object(self._store, f"{name}/{MANIFEST}") or b""
        if hashlib.sha256(manifest).hexdigest() != digest:
            report(f"checkpoint skipped: {name} is not the one on the leaderboard.")
            return False
        if not is_there(path / MANIFEST) or (path / MANIFEST).read_bytes() != manifest:
            shutil.rmtree(self._directory / round, ignore_errors=True)  # an earlier attempt
        is_whole = stores.fetch_step(self._store, name, path, report)
        if is_whole:
            fetch_files(self._store, f"{round}/", self._directory / round, [SAVED])
        return is_whole


def _round(checkpoint: str) -> str:
    """Return the directory of an entry's round. Raises `CheckpointError` for one elsewhere."""
    if (match := _CHECKPOINT.fullmatch(checkpoint)) is None:
        raise CheckpointError(f"{checkpoint[:80]!r} cannot be the checkpoint of a round")
    return match[1]
