"""Copies of tournaments in a store, and how they come back.

A copy has the log in blocks, `log/000001` and so on, and the rounds from which pods may start, each
as the run that it is. One after another the blocks make `leaderboard.jsonl`. What pods do within a
round is not copied: on another machine they begin it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from podracer.errors import CheckpointError
from podracer.io.directories import LOG
from podracer.io.run_directory import own_directory, write_bytes
from podracer.io.seal import CONFIG, MANIFEST, is_there
from podracer.io.steps import SAVED
from podracer.io.text import mode_of
from podracer.tournament.events import kept_entries, state_after
from podracer.tournament.leaderboard import read_log
from podracer_cloud.contents import BLOCK_BYTES, Contents, Report, log_size
from podracer_cloud.runs import fetch_files, put_records

if TYPE_CHECKING:
    from podracer.tournament.orchestrator import TournamentInfo

_CHECKPOINT = re.compile(r"(pods/p[0-9]+r[0-9]+)/checkpoints/[0-9]{12}")


class TournamentCopy:
    """Copy of a tournament in a store, see `Copy`.

    `board`, which only `update` needs, has the tournament's `snapshot`.
    """

    kind, mark, gather_seconds = "tournament", LOG, 1.0

    def __init__(
        self, directory: Path, contents: Contents, board: TournamentInfo | None = None
    ) -> None:
        self._directory, self._contents, self._board = directory, contents, board

    def __str__(self) -> str:
        parts = self._contents.committed
        events = self._log()[: log_size(parts)].count(b"\n")
        entries = sum(_CHECKPOINT.fullmatch(name) is not None for name in parts)
        return f"{events} events, {entries} entries"

    def is_same(self) -> bool:
        """Return whether one of the logs begins with the other one: each line seals those before.

        Two machines that went on from one copy have different ones.
        """
        log = self._log()
        end = min(len(log), log_size(self._contents.parts))
        begin = max(0, end // BLOCK_BYTES - 1) * BLOCK_BYTES  # a line may go over a border
        return self._contents.read_log(begin)[: end - begin] == log[begin:end]

    def is_newer(self) -> bool:
        """Return whether the store has events that the directory lacks."""
        return log_size(self._contents.parts) > len(self._log())

    def _log(self) -> bytes:
        """Return the log without a torn line."""
        path = self._directory / LOG
        log = path.read_bytes() if is_there(path) else b""
        return log[: log.rfind(b"\n") + 1]

    def update(self) -> None:
        """Make the store like the disk at one moment: the log, and the entries that it needs."""
        assert self._board is not None
        contents, (state, size) = self._contents, self._board.snapshot()
        needed = {entry.checkpoint: entry.digest for entry in kept_entries(state)}
        for name, digest in sorted(needed.items()):
            is_stored = name in contents.parts and contents.parts[name].sha256 == digest
            # One that is not there was damaged or lost, and is reported.
            if not is_stored and is_there(self._directory / name / MANIFEST):
                self._put_entry(name)
        contents.put_log(self._directory / LOG, size)
        rounds = set(map(_round, needed))
        for name in [name for name in contents.parts if name.startswith("pods/")]:
            is_entry = name in needed or not _CHECKPOINT.fullmatch(name)
            if not is_entry or "/".join(name.split("/")[:2]) not in rounds:
                del contents.parts[name]
        contents.commit()

    def _put_entry(self, name: str) -> None:
        round, path = _round(name), self._directory / name
        put_records(self._contents, f"{round}/", path)
        for file in (CONFIG, SAVED):
            content = (self._directory / round / file).read_bytes()
            self._contents.put(f"{round}/{file}", content)
        self._contents.put_step(name, path)

    def fetch(self, report: Report) -> None:
        """Bring the log and the entries that it needs, the log last.

        An entry counts only with its digest on the leaderboard. Raises `CheckpointError` if the log
        is damaged, or if there are entries and none is whole.
        """
        log = self._contents.read_log()
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
        manifest = self._contents.read_manifest(name) or b""
        if hashlib.sha256(manifest).hexdigest() != digest:
            report(f"checkpoint skipped: {name} is not the one on the leaderboard.")
            return False
        if not is_there(path / MANIFEST) or (path / MANIFEST).read_bytes() != manifest:
            shutil.rmtree(self._directory / round, ignore_errors=True)  # an earlier attempt
        is_whole = self._contents.fetch_step(name, path, report)
        if is_whole:
            fetch_files(self._contents, f"{round}/", self._directory / round, [SAVED])
        return is_whole


def _round(checkpoint: str) -> str:
    """Return the directory of an entry's round. Raises `CheckpointError` for one elsewhere."""
    if (match := _CHECKPOINT.fullmatch(checkpoint)) is None:
        raise CheckpointError(f"{checkpoint[:80]!r} cannot be the checkpoint of a round")
    return match[1]
