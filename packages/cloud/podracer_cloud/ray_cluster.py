"""Process that holds the connection to Ray for `RayEngine`; each attempt at a round is a Ray actor.

    stdin   ["start", 7, "DIRECTORY"], ["stop", 7], ["kill", 7]    one a line
    stdout  ["ready"]: attempts may start; ["begun", 7]: on a machine; ["ended", 7, 0]: exit code
            ["notice", TEXT], ["refused", TEXT], ["lost", TEXT]; [] every second while Ray answers

An attempt begins with a look at its node: the code, the versions and the tournament's directory
must be the driver's. A node that differs is named and not used again. Without RAY_ADDRESS it starts
a cluster of this machine alone, for as long as it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podracer.io.processes import request_signal_at_parent_death
from podracer.tournament.engine import EngineLost, open_log
from podracer_cloud.code import code_and_versions
from podracer_cloud.ray_engine import NONCE, Lines

SAVE_SECONDS = 60.0  # for pods whose orchestrator is gone
PENDING = 32  # attempts that wait for room in Ray; the others wait here, where it costs nothing
NOTICE_SECONDS = 30.0  # a pod waits for room before a notice says so
NODELESS_SECONDS = 600.0  # for a machine to come back, if all that can hold a pod were lost
PREEMPTED, KILLED = 75, -9


class Attempt:
    """Ray actor that owns the process of one attempt, which saves and ends when the actor does.

    Its node may have another podracer, or none: Ray sends this class itself, not its name, so
    nothing of podracer may be used outside the methods.
    """

    def __init__(self) -> None:
        import threading

        self._has_started = threading.Event()  # calls of a stop and a kill may overtake `run`

    def begin(
        self, root: str, nonce: str, recipes: Sequence[str], expected: Mapping[str, str]
    ) -> tuple[str, str]:
        """Return the id of this node, and why it cannot run the attempt; "" if it can."""
        import importlib
        import pathlib
        import time

        node = importlib.import_module("ray").get_runtime_context().get_node_id()
        try:
            code = importlib.import_module("podracer_cloud.code")
            actual = code.code_and_versions(recipes)
        except Exception as error:  # another version, or none
            return (
                node,
                f"it lacks this podracer or podracer-cloud ({type(error).__name__}: {error})",
            )
        for name, value in expected.items():
            if actual.get(name) != value:
                return node, f"its {name} is {actual.get(name)}, the driver's is {value}"
        deadline = time.monotonic() + 10.0  # a network file system may show the file late
        while time.monotonic() < deadline:
            try:
                next(pathlib.Path(root).iterdir(), None)  # NFS then looks again
                if (pathlib.Path(root) / NONCE).read_text() == nonce:
                    return node, ""
            except OSError:
                pass
            time.sleep(0.2)
        return node, f"it does not have the tournament's directory {root}"

    def run(self, directory: str, recipes: Sequence[str], gpus: float) -> int:
        """Run the attempt and return the exit code of its process."""
        import pathlib
        import time

        from podracer.tournament.engine import LocalEngine

        self._engine = LocalEngine(recipes, gpu_share=gpus if 0.0 < gpus < 1.0 else 1.0)
        self._engine.start(0, pathlib.Path(directory))
        self._has_started.set()
        while not (codes := self._engine.poll()):
            time.sleep(0.1)
        return codes[0]

    def stop(self) -> None:
        """Ask the process to save and end."""
        if self._has_started.wait(60.0):
            self._engine.stop(0)

    def kill(self) -> None:
        """Kill the process at once."""
        if self._has_started.wait(60.0):
            self._engine.kill(0)


@dataclasses.dataclass
class RayAttempt:
    """An attempt, its actor and where it runs."""

    directory: str
    actor: Any = None  # while Ray has it
    excluded: frozenset[str] = frozenset()  # nodes that the actor avoids
    node: str = ""  # its id, once the attempt has begun


class Cluster:
    """Attempts by token on a connected Ray cluster."""

    def __init__(self, ray: Any, settings: Mapping[str, Any], say: Callable[..., None]) -> None:
        self._ray, self._settings, self._say = ray, settings, say
        self._options = dict(settings["options"])
        self._recipes = settings["recipes"]
        self._expected = code_and_versions(self._recipes)
        self._own_node = ray.get_runtime_context().get_node_id()
        # One call waits, others stop and kill.
        self._actor = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=4)(Attempt)
        self._attempts: dict[int, RayAttempt] = {}
        self._replies = queue.SimpleQueue[tuple[int, Any, Any]]()  # token, actor, reply
        self._refused: dict[str, str] = {}  # by node: why it is not used
        self._failed_on: dict[str, str] = {}  # by a round's directory: node of its last attempt
        self._nodes: dict[str, Mapping[str, Any]] = {}  # the live ones
        self._has_begun = self._has_noticed = self._is_ready = self._is_over = False
        self._waiting_since = self._nodeless_since = math.inf

    # --- commands -----------------------------------------------------------------------------

    def start(self, token: int, directory: str) -> None:
        """Start an attempt as soon as a machine has room for it."""
        self._attempts[token] = RayAttempt(directory)

    def stop(self, token: int) -> None:
        """Ask an attempt to save and end."""
        self._end(token, "stop", PREEMPTED)

    def kill(self, token: int) -> None:
        """Kill an attempt at once."""
        self._end(token, "kill", KILLED)

    def _end(self, token: int, method: str, code: int) -> None:
        attempt = self._attempts.get(token)
        if attempt is not None and attempt.node:
            getattr(attempt.actor, method).remote()
        elif attempt is not None:  # it waits for room
            self._finish(token, code)

    def _withdraw(self, attempt: RayAttempt) -> None:
        """Take an attempt from Ray."""
        if attempt.actor is not None:
            self._ray.kill(attempt.actor)
        attempt.actor = None

    # --- attempts -----------------------------------------------------------------------------

    def poll(self) -> None:
        """Follow the attempts that Ray has reported on since the last call."""
        while not self._replies.empty():
            token, actor, reply = self._replies.get()
            attempt = self._attempts.get(token)
            if attempt is not None and attempt.actor is actor:
                self._follow(token, attempt, reply)
        queued = [token for token, x in self._attempts.items() if x.actor is None]
        pending = sum(not x.node for x in self._attempts.values()) - len(queued)
        for token in queued[: max(0, PENDING - pending)] if self._is_ready else ():
            self._submit(token, self._attempts[token])

    def _submit(self, token: int, attempt: RayAttempt) -> None:
        attempt.excluded, options = self._excluded(attempt.directory), dict(self._options)
        if attempt.excluded:
            nodes = ",".join(sorted(attempt.excluded))
            options["label_selector"] = {"ray.io/node-id": f"!in({nodes})"}
        attempt.actor = self._actor.options(**options).remote()
        root = str(Path(attempt.directory).parents[1])
        arguments = (root, self._settings["nonce"], self._recipes, self._expected)
        self._await(token, attempt.actor, attempt.actor.begin.remote(*arguments))

    def _await(self, token: int, actor: Any, reference: Any) -> None:
        """Have `poll` follow the attempt when the reference is ready, at no cost until then."""
        reference.future().add_done_callback(lambda x: self._replies.put((token, actor, x)))

    def _follow(self, token: int, attempt: RayAttempt, reply: Any) -> None:
        if (error := reply.exception()) is not None:
            self._lose(token, attempt, error)
        elif attempt.node:  # it has ended
            self._finish(token, reply.result())
        else:
            node, reason = reply.result()
            if reason:
                self._refuse(node, reason)
                self._withdraw(attempt)  # and submit it again
                return
            attempt.node, self._has_begun = node, True
            self._say("begun", token)
            arguments = (attempt.directory, self._recipes, self._options.get("num_gpus", 0.0))
            self._await(token, attempt.actor, attempt.actor.run.remote(*arguments))

    def _finish(self, token: int, code: int) -> None:
        attempt = self._attempts.pop(token)
        self._withdraw(attempt)  # it may be alive, on the other side of a cut network
        if code == 0:
            self._failed_on.pop(attempt.directory, None)
        elif attempt.node:
            self._failed_on[attempt.directory] = attempt.node
        self._say("ended", token, code)

    def _lose(self, token: int, attempt: RayAttempt, error: BaseException) -> None:
        """Report an attempt whose machine, worker or connection is lost."""
        lines = str(error).strip().splitlines() or [""]
        place = self._name(attempt.node) if attempt.node else "a node"
        with contextlib.suppress(OSError), open_log(Path(attempt.directory) / "log.txt") as log:
            log.write(f"{place} was lost: {type(error).__name__}: {lines[0]}\n".encode())
        is_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
        self._finish(token, KILLED if is_memory else EngineLost.exit_code)

    # --- nodes --------------------------------------------------------------------------------

    def _refuse(self, node: str, reason: str) -> None:
        if node not in self._refused:
            self._refused[node] = reason
            self._say("notice", f"{self._name(node)} is not used: {reason}.")

    def _name(self, node: str) -> str:
        fields = self._nodes.get(node, {})
        host, address = (fields.get(f"NodeManager{x}", "?") for x in ("Hostname", "Address"))
        return f"node {host} ({address}, {node[:8]})"

    def _usable(self) -> set[str]:
        """Return the live nodes that can hold a pod when they are empty and were not refused."""
        needs = _needs(self._options)
        return {
            node
            for node, fields in self._nodes.items()
            if node not in self._refused
            and all(fields["Resources"].get(name, 0.0) >= n for name, n in needs.items())
        }

    def _excluded(self, directory: str) -> frozenset[str]:
        """Return the nodes that an attempt avoids: the refused and, if there is another, its last.

        Ray gives an attempt a node that has just been lost for as long as it has not noticed.
        """
        last = self._failed_on.get(directory)
        is_avoidable = last is not None and len(self._usable() - {last}) > 0
        return frozenset(self._refused.keys() | ({last} if is_avoidable and last else set()))

    def _sizes(self) -> str:
        needs = _needs(self._options)
        lacking = {n: f["Resources"] for n, f in self._nodes.items() if n not in self._refused}
        sizes = [f"{self._name(n)} has {_amounts(needs, has)}" for n, has in lacking.items()]
        sizes += [f"{self._name(n)} is not used: {self._refused[n]}" for n in self._refused]
        remainder = [f"{len(sizes) - 16} more nodes"] if len(sizes) > 16 else []
        text = "; ".join(sizes[:16] + remainder) or "there is no node"
        return f"a pod takes {_amounts(needs, needs)}, and {text}"

    def beat(self) -> None:
        """Look at the nodes once a second; say what waits, and refuse what no node can hold."""
        nodes = self._ray.nodes()  # hangs, as any call of Ray may, when the cluster is gone
        self._nodes = {fields["NodeID"]: fields for fields in nodes if fields["Alive"]}
        if self._own_node not in self._nodes:
            print("Ray has lost this machine", file=sys.stderr, flush=True)
            os._exit(1)  # Ray's regular exit might never end
        for attempt in self._attempts.values():
            is_pending = attempt.actor is not None and not attempt.node
            if is_pending and attempt.excluded != self._excluded(attempt.directory):
                self._withdraw(attempt)
        usable, patience = self._usable(), self._settings["node_seconds"]
        if self._is_over:
            return
        if not self._is_ready and not usable and not patience:
            text = f"no node of the cluster can hold a pod: {self._sizes()}"
            self._say("refused", f"{text}; nodes that may join are waited for with node_seconds.")
            self._is_over = True
            return
        if not self._is_ready:
            self._is_ready = True
            self._say("ready")
        self._look_at_room(bool(usable), patience)

    def _look_at_room(self, is_usable: bool, patience: float) -> None:
        clock = time.monotonic()
        num_begun = sum(bool(attempt.node) for attempt in self._attempts.values())
        num_waiting = len(self._attempts) - num_begun
        self._waiting_since = min(self._waiting_since, clock) if num_waiting else math.inf
        if clock - self._waiting_since > NOTICE_SECONDS and not self._has_noticed:
            self._has_noticed = True
            pods = "1 pod waits" if num_waiting == 1 else f"{num_waiting} pods wait"
            self._say("notice", f"{pods} for a machine: {self._sizes()}.")
        if is_usable or num_begun:
            self._nodeless_since = math.inf
            return
        if self._nodeless_since == math.inf:
            self._nodeless_since = clock
            if self._has_begun or patience:
                self._say("notice", f"all pods wait for a node that can hold one: {self._sizes()}.")
        if self._has_begun and not self._refused:
            patience = max(patience, NODELESS_SECONDS)
        if self._is_ready and clock - self._nodeless_since >= patience:
            self._is_over = True
            self._say("lost", f"no node of the cluster can hold a pod: {self._sizes()}")

    def leave(self) -> None:
        """Ask all running attempts to save and end, and wait for them up to a limit."""
        deadline = time.monotonic() + SAVE_SECONDS
        for token in list(self._attempts):
            self.stop(token)
        while self._attempts and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.05)
        self._ray.shutdown()


def _needs(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the amounts that an attempt takes, by the names that Ray gives them in nodes."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    needs = {name: options[option] for option, name in names.items() if options.get(option)}
    return {**needs, **options.get("resources", {})}


def _amounts(needs: Mapping[str, float], amounts: Mapping[str, float]) -> str:
    """Return amounts of what is needed as text, such as "2 CPU, 8 GiB memory"."""
    texts = [
        f"{x / 2**30:.3g} GiB memory" if n == "memory" else f"{x:g} {n}"
        for n, x in ((name, amounts.get(name, 0.0)) for name in needs)
    ]
    return ", ".join(texts) or "no resources"


def connect() -> Any:
    """Return the module `ray`, connected to RAY_ADDRESS or to a new cluster closed to others."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        # Ray listens on all interfaces unless this machine is not part of a cluster; other
        # users of this machine do not know the token.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    ray = importlib.import_module("ray")
    ray.init(address or "local", include_dashboard=False, log_to_driver=False)
    return ray


def _say(descriptor: int, *value: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # then the commands end as well
        os.write(descriptor, json.dumps(value).encode() + b"\n")


def main(settings: str) -> None:
    """Execute commands from standard input until it ends; see `RayEngine` for the settings."""
    request_signal_at_parent_death(signal.SIGCONT)
    say = functools.partial(_say, os.dup(1))
    os.dup2(2, 1)  # Ray's output goes to the log
    cluster, commands = Cluster(connect(), json.loads(settings), say), Lines(0)
    last_beat = -math.inf
    while (lines := commands.read()) is not None:
        for verb, *arguments in lines:
            {"start": cluster.start, "stop": cluster.stop, "kill": cluster.kill}[verb](*arguments)
        if time.monotonic() - last_beat > 1.0:
            cluster.beat()
            say()
            last_beat = time.monotonic()
        cluster.poll()
        time.sleep(0.05)
    cluster.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
