"""Engine that runs the pods of a tournament on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from podracer.errors import ConfigError
from podracer.io.run_directory import write_bytes
from podracer.tournament.engine import EngineLost, MakeEngine, open_log
from podracer.tournament.report import last_line

if TYPE_CHECKING:  # slow to import, and not needed by `ray_cluster.py`
    from podracer.tournament.config import Tournament

_LOG = logging.getLogger("podracer")
SILENCE_SECONDS = 15.0  # after which Ray counts as lost; it reports every second
START_SECONDS = 60.0  # for the first time
NONCE = ".nonce"  # file by which a machine sees that it has this tournament's directory
CLOSE_SECONDS = 5.0  # to disconnect from Ray


_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)(|KiB|MiB|GiB|TiB)")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def ray(tournament: Tournament) -> MakeEngine:
    """Return what makes the engine of a tournament on a Ray cluster.

    Raises `ConfigError` where Ray is not installed, or what a pod reserves is invalid.
    """
    options = ray_options(tournament)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'the engine ray needs the package ray: pip install -e "packages/cloud[ray]".'
        )
    return lambda directory, recipes: RayEngine(
        directory, options, recipes, tournament.node_seconds
    )


def ray_options(tournament: Tournament) -> dict[str, Any]:
    """Return Ray's options of a pod: what it reserves, and how it is placed."""
    if (gpus := tournament.pod_gpus) > 1 and gpus % 1:
        raise ConfigError(f"pod_gpus must not be a fraction above 1, but it is {gpus}.")
    resources = parse_resources(tournament.pod_resources)
    options: dict[str, Any] = {"num_cpus": tournament.pod_cpus, "num_gpus": gpus}
    if memory := resources.pop("memory", 0.0):
        options["memory"] = int(memory)
    if resources:
        options["resources"] = resources
    if tournament.pod_placement == "spread":
        options["scheduling_strategy"] = "SPREAD"
    return options


def parse_resources(text: str) -> dict[str, float]:
    """Return amounts by name from text such as TPU=4,memory=8GiB; memory is in bytes.

    Raises `ConfigError` for anything else, and for what has a field of its own.
    """
    resources: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, amount = part.partition("=")
        match = _AMOUNT.fullmatch(amount)
        unit = match[2] if match else ""
        if not match or not name or name in resources or (unit and name != "memory"):
            raise ConfigError(
                f"pod_resources must be amounts by name, such as TPU=4,memory=8GiB, not {part!r}."
            )
        if name.upper() in ("CPU", "GPU"):
            raise ConfigError(f"{name} has a setting of its own: `pod_{name.lower()}s`.")
        resources[name] = float(match[1]) * _UNITS[unit]
    return resources


class RayEngine:
    """Engine that runs each attempt in a Ray actor, on any machine that shares the directory.

    `options` are Ray's for an actor: what each attempt reserves and how it is placed. `recipes` are
    those of `LocalEngine`, which all machines must be able to import. If no machine can hold an
    attempt, it is refused, unless `node_seconds` allows time for one to join. Ray retries nothing:
    only the orchestrator decides. Ray itself is held by a separate process,
    `podracer_cloud.ray_cluster`, because Ray ends the process that holds it when the cluster is
    lost.
    """

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, Any] = MappingProxyType({"num_cpus": 1.0}),
        recipes: Sequence[str] = (),
        node_seconds: float = 0.0,
    ) -> None:
        self._directory, self._log = directory, directory / "ray.txt"
        self._recipes, self._nodeless = recipes, ""
        nonce = secrets.token_hex(16)
        write_bytes(directory / NONCE, nonce.encode())
        settings = {
            "options": dict(options),
            "recipes": list(recipes),
            "node_seconds": node_seconds,
            "nonce": nonce,
        }
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "podracer_cloud.ray_cluster", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, Lines(self._process.stdout.fileno())
        self._deadline = time.monotonic() + START_SECONDS
        self._running, self.waiting, self.is_ready = set[int](), set[int](), False

    def start(self, token: int, directory: Path) -> None:
        self._running.add(token)
        self.waiting.add(token)
        self._tell("start", token, str(directory.absolute()))

    def poll(self) -> dict[int, int]:
        replies = self._replies.read()
        if replies is None:
            raise self._lost(last_line(self._log) or "it has ended")
        if replies:
            self._deadline = time.monotonic() + SILENCE_SECONDS
        if time.monotonic() > self._deadline:
            raise self._lost("Ray does not answer")
        finished: dict[int, int] = {}
        for reply in replies:
            match reply:
                case ["ready"]:
                    self.is_ready = True
                case ["begun", token]:
                    self.waiting.discard(token)
                case ["ended", token, code]:
                    finished[token] = code
                case ["notice", text]:
                    _LOG.warning("%s", text)
                case ["refused", text]:
                    raise ConfigError(text)
                case ["lost", text]:
                    raise self._lost(text)
        self._running -= finished.keys()
        self.waiting -= finished.keys()
        return finished

    def stop(self, token: int) -> None:
        self._tell("stop", token)

    def kill(self, token: int) -> None:
        self._tell("kill", token)

    def close(self) -> None:
        with contextlib.suppress(EngineLost):
            for token in self._running:
                self.kill(token)
        self._running.clear()
        self._commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also ends processes of Ray
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _tell(self, *command: str | int) -> None:
        try:
            self._commands.write(json.dumps(command).encode() + b"\n")
        except (BrokenPipeError, ValueError):
            raise self._lost(last_line(self._log) or "it has ended") from None

    def _lost(self, reason: str) -> EngineLost:
        flag = f" --recipe {','.join(self._recipes)}" if self._recipes else ""
        return EngineLost(
            f"the engine is lost ({reason}); continue with podracer resume {self._directory}{flag}"
        )


class Lines:
    """Reader of JSON values, one a line, from a pipe."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._partial_line = pipe, b""

    def read(self) -> list[Any] | None:
        """Return the values since the last call, or None at the end of the pipe; never wait."""
        try:
            read = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        return [json.loads(line) for line in lines] if read else None
