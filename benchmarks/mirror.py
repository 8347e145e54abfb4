"""Processes killed at random moments, and their runs continued in empty folders from a store.

    python benchmarks/mirror.py --kills 200                         # file://, in a temporary folder
    python benchmarks/mirror.py --kills 50 --address s3://bucket/x  # with the store's own variables

Each run is ended by the kernel after a random share of the processor's time that it needs, and
continued in an empty folder, under another host name, with nothing but the address. Its final state
must equal that of a run that was left alone. A run whose configuration had not reached the store is
begun again, as a launcher does.
Prints one JSON object. `--cost` measures instead what a mirror costs a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Quick

from podracer.cli.main import main as podracer
from podracer.io.checkpoint import stored_fingerprint
from podracer.run import training  # noqa: F401  imported before the fork, as the next is
from podracer_cloud.contents import Contents
from podracer_cloud.lease import Lease
from podracer_cloud.mirror import Mirror
from podracer_cloud.runs import RunCopy
from podracer_cloud.store import open_store, sizes_below

UNKNOWN = "before the store has the run"
FLAGS = (
    *("--num-envs", "16", "--rollout-length", "8", "--updates-per-chunk", "50", "--seed", "3"),
    *("--evaluations", "0", "--save-seconds", "0.05"),
    *("--devices", "1"),
)


def start(
    machine: str, log: Path, command: Callable[[], Sequence[str]], end_after: float = 0.0
) -> int:
    """Run a command on a machine, in a process of its own; return its number.

    Beside the log it leaves the fingerprint of the run, which the same process reads back. It is
    ended without a word after some seconds of the processor, if any. `command` is called there, as
    obstore cannot be used on both sides of a fork.
    """
    pid = os.fork()
    if pid:
        return pid
    signal.setitimer(signal.ITIMER_PROF, end_after)  # nothing handles its signal
    socket.gethostname = lambda: machine
    Lease.EXPIRY_SECONDS, Lease.BEAT_SECONDS = 0.5, 0.1
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 70
    try:
        arguments = command()
        podracer(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
        if code == 0:
            run = arguments[arguments.index("--run-dir") + 1]
            log.with_name("fingerprint").write_text(stored_fingerprint(Path(run))[1])
    finally:
        os._exit(code)


def finish(pid: int) -> tuple[int, resource.struct_rusage]:
    """Return the exit code of a process, and what it used."""
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage


def train(
    machine: str, folder: Path, address: str | None, frames: int, end_after: float = 0.0
) -> int:
    arguments = command_of(folder, address, frames)
    return start(machine, folder.parent / "log", lambda: arguments, end_after)


def command_of(folder: Path, address: str | None, frames: int) -> tuple[str, ...]:
    mirror = ("--attach", f"mirror:{address}") if address else ()
    return ("train", "catch", "--run-dir", str(folder), *mirror, *FLAGS, "--frames", str(frames))


def kill_and_continue(
    folder: Path, address: str, frames: int, seconds: float, expected: str
) -> tuple[str, float]:
    """Kill a run after some seconds and continue it elsewhere; return where it was, and seconds."""
    code, _ = finish(train("first", folder / "first", address, frames, seconds))
    if code != -signal.SIGPROF:
        assert code == 0, (folder / "log").read_text()
        return "had ended", 0.0
    shutil.rmtree(folder / "first", ignore_errors=True)

    def command() -> Sequence[str]:
        phase = phase_at(address)
        (folder / "phase").write_text(phase)
        if phase == UNKNOWN:
            return command_of(folder / "second", address, frames)
        return ("resume", address, "--run-dir", str(folder / "second"))

    begin = time.monotonic()
    code, _ = finish(start("second", folder / "log", command))
    phase = (folder / "phase").read_text()
    digest = (folder / "fingerprint").read_text() if code == 0 else ""
    assert (code, digest) == (0, expected), (phase, code, (folder / "log").read_text())
    return phase, time.monotonic() - begin


def phase_at(address: str) -> str:
    """Return how far a copy has come."""
    try:
        store = open_store(address)
        contents = Contents(store)
        contents.refresh()
    except Exception:
        return UNKNOWN
    if contents.kind != "run":
        return UNKNOWN
    paths = tuple(part.path for part in contents.parts.values())
    if not all(name.startswith(paths) for name in sizes_below(store, "files")):
        return "within the copy of a checkpoint"
    return "between copies" if "saved.json" in contents.parts else "before the first copy"


def kills(number: int, address: str | None, frames: int, seed: int) -> None:
    folder, rng = Path(tempfile.mkdtemp(prefix="mirror-")), random.Random(seed)
    for name in ("warm", "alone"):  # the first one compiles
        (folder / name).mkdir()
        code, usage = finish(train("alone", folder / name / "run", None, frames))
        assert code == 0, (folder / name / "log").read_text()
        seconds = usage.ru_utime + usage.ru_stime
    expected = (folder / "alone" / "fingerprint").read_text()
    phases: Counter[str] = Counter()
    trial, longest = 0, 0.0
    while sum(phases.values()) - phases["had ended"] < number:
        place = folder / str(trial)
        place.mkdir()
        store = f"{address}/{trial}" if address else f"file://{place / 'store'}"
        moment = rng.uniform(0.5, 1.0) * seconds
        phase, continued = kill_and_continue(place, store, frames, moment, expected)
        phases[phase] += 1
        longest, trial = max(longest, continued), trial + 1
        shutil.rmtree(place)
        print(trial, phase, f"{moment:.2f} s", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    equal = sum(phases.values()) - phases.pop("had ended", 0)
    print(json.dumps({"kills": equal, "equal": equal, "phases": dict(phases)}))


def cost(address: str | None, frames: int, trials: int) -> None:
    """Print what copies of checkpoints take of the processor, and of time, without a run."""
    folder = Path(tempfile.mkdtemp(prefix="mirror-"))
    (folder / "one").mkdir()
    run = folder / "one" / "run"
    code, _ = finish(train("one", run, None, frames))
    assert code == 0, (folder / "one" / "log").read_text()
    sizes = [path.stat().st_size for path in run.glob("checkpoints/*/**/*") if path.is_file()]
    steps = len(list(run.glob("checkpoints/*")))
    copies: list[tuple[float, float]] = []
    for trial in range(trials + 1):
        begin = time.process_time(), time.monotonic()
        store = f"{address}/{trial}" if address else f"file://{folder / str(trial)}"
        with Mirror(run, store, RunCopy, new=False) as mirror:
            mirror.sealed()
        assert not mirror.figures()["mirror_faults"]
        copies.append((time.process_time() - begin[0], time.monotonic() - begin[1]))
    lease = Lease(open_store(store), store, "somebody", RunCopy.kind)
    lease.claim(time.sleep, print)
    begin = time.process_time(), time.monotonic()
    for _ in range(100):
        lease.beat()
    beat = (time.process_time() - begin[0]) / 100
    shutil.rmtree(folder)
    cpu, wall = (statistics.median(x) / steps for x in zip(*copies[1:], strict=True))
    per_minute = cpu + beat * 60 / Lease.BEAT_SECONDS
    print(json.dumps({
        "objects": len(sizes) // steps,
        "bytes": sum(sizes) // steps,
        "cpu_ms_of_a_copy": round(1000 * cpu, 2),
        "wall_ms_of_a_copy": round(1000 * wall, 2),
        "cpu_ms_of_a_heartbeat": round(1000 * beat, 2),
        "percent_of_a_core_at_a_copy_a_minute": round(per_minute / 60 * 100, 3),
    }))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cost", type=int, default=0, help="number of measurements of the cost")
    parser.add_argument("--address")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action=Quick, const={"kills": 1, "frames": 100_000})
    options = parser.parse_args()
    if options.cost:
        cost(options.address, options.frames, options.cost)
    else:
        kills(options.kills, options.address, options.frames, options.seed)
