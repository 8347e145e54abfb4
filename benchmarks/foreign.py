"""What scripts with other libraries share: turns of a contender, flags of a reference, gymnax.

They run in Pythons of their own, so nothing of podracer is imported here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

NAMES = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}  # podracer's own, equal to these


def take_turns(hello: dict[str, Any], lap_of: Callable[[str], Callable[[], Any]]) -> None:
    """Print a JSON object, then for each line of the standard input run the lap that it asks for.

    The seconds of each lap are printed, as `harness.Process` reads them.
    """
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        lap = lap_of(line)
        began, used = time.perf_counter(), time.process_time()
        lap()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def parse(about: str | None) -> argparse.Namespace:
    """Return the flags, which `references.py` gives."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--library", required=True)
    parser.add_argument("--agent", required=True)
    parser.add_argument("--environment", required=True, help="podracer's name of it")
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--evaluations", type=int, required=True)
    parser.add_argument("--episodes", type=int, required=True, help="of an evaluation")
    parser.add_argument("--policy", choices=["greedy", "sampled"], required=True)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--scratch", required=True, help="directory for checkpoints")
    parser.add_argument("--repository", help="checkout of a library that is no package")
    return parser.parse_args()


class Report:
    """Prints a JSON line for each seed, with the seconds since the line before it."""

    def __init__(self, *packages: str) -> None:
        self.versions = versions_of(*packages)
        self.began, self.used = time.perf_counter(), 0.0  # the process began with this, nearly

    def __call__(self, seed: int, curve: Sequence[Any], distinct: int | None, **more: Any) -> None:
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        record = {
            "seed": seed,
            "frames": int(curve[-1][0]),
            "score": float(curve[-1][1]),
            "distinct_episodes": distinct,
            "curve": [[int(frames), round(float(value), 4)] for frames, value in curve],
            "seconds": seconds - self.began,
            "cpu_seconds": cpu_seconds - self.used,
            "versions": self.versions,
            **more,
        }
        self.began, self.used = seconds, cpu_seconds
        print(json.dumps(record), flush=True)


class OneDone:
    """An environment of gymnax 1, whose steps have one `done` and no information, as before it."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
        observation, state, reward, terminated, truncated, _ = self.env.step(
            key, state, action, params
        )
        return observation, state, reward, terminated | truncated, {}


def gymnax_environment(name: str) -> tuple[OneDone, Any]:
    """Return the environment that podracer calls `name`, and its parameters."""
    import gymnax

    name, *fields = name.removeprefix("gymnax:").split(",")
    values = {key: int(value) for key, _, value in (field.partition("=") for field in fields)}
    env, params = gymnax.make(NAMES.get(name, name))
    return OneDone(env), params.replace(**values)


def distinct_episodes(returns: Any, lengths: Any) -> int:
    """Return how many episodes differ in return or length."""
    return len(set(zip(map(float, returns), map(int, lengths), strict=True)))
