"""Runs of the command line in child processes, to be killed, stopped and compared."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podracer.cli.main import main
from podracer.io.checkpoint import stored_fingerprint
from podracer_testing.plugin import CACHE

TIMINGS = ("seconds", "frames_per_second", "actor_idle", "learner_idle", "queue_occupancy")


def exit_code(*arguments):
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return leaving.value.code


def wait_until(condition, seconds=120.0):
    """What a condition returns once it holds."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return result


def command(*arguments):
    return [
        sys.executable,
        "-c",
        "from podracer.cli.main import main; main()",
        *map(str, arguments),
    ]


def environment(**extra):
    """A child's environment: CPU only, the tests' compile cache."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **extra,
    }


def start(*arguments, **extra):
    return subprocess.Popen(
        command(*arguments),
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=240):
    """Exit code, standard output and error of a child that must end by itself."""
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, error = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{error}") from None
    return process.returncode, out, error


def call(*arguments, **extra):
    return finish(start(*arguments, **extra))


def wait_for_lines(process, run: Path, lines: int, timeout=240):
    """Until the run has recorded so many lines, or has ended."""
    path = run / "metrics.jsonl"
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)
    if process.poll() is None:
        process.kill()
        raise AssertionError(f"no progress in {timeout} s")


def records(run: Path):
    """What a run recorded, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - set(TIMINGS)
    names = {name for name in names if not re.search("time_|machine_", name)}
    return [{name: value for name, value in line.items() if name in names} for line in lines]


def fingerprint(run: Path):
    """The digest that `podracer fingerprint` prints, without another process."""
    return stored_fingerprint(run, "newest")[1]
