"""What PPO of other libraries shares as a contender of `ppo.py`: its flags, and how it takes turns.

It runs in the Python of a peer, so nothing of podracer is imported here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def flags(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags that `ppo.py` gives to each contender."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--activation", default="tanh", choices=["tanh", "relu"])
    return parser


def take_turns(
    repeat: Callable[[], Any],
    options: argparse.Namespace,
    compile_seconds: float,
    packages: Sequence[str],
    commits: Mapping[str, str] | None = None,
) -> None:
    """Print one JSON object, then run a repetition for each line of the standard input.

    `harness.elsewhere` reads them. `commits` are those of libraries that are no packages.
    """
    versions = {name: importlib.metadata.version(name) for name in packages}
    hello = {
        "steps": options.envs * options.length * options.updates,
        "compile_seconds": compile_seconds,
        "peer": {**(commits or {}), **versions},
    }
    print(json.dumps(hello), flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        repeat()
        lap = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        print(json.dumps(lap), flush=True)
