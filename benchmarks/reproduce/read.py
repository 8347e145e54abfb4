"""What several figures share: readers of what commands measured, and the speed on Pong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.reproduce.figure import Case, Values
from podracer.errors import PodracerError
from podracer.io.sinks import read_metrics
from podracer.scores.score import NOT_EVALUATED, final_score, whole_return

FRAME_SKIP = 4  # papers count frames of the emulator


def anakin_rate(printed: list[Values], folder: Path) -> Values:
    """Read `bench.py anakin --json`."""
    training = printed[-1]["training"]
    return {
        "environments": printed[-1]["num_envs"],
        "devices": printed[-1]["devices"],
        "device": printed[-1]["device"],
        "steps_per_second": training["steps_per_second"],
        "compile_seconds": training["compile_seconds"],
    }


def recipe_rate(printed: list[Values], folder: Path) -> Values:
    """Read the last line of `bench.py recipe --json`."""
    last = printed[-1]
    return {
        "environments": last["num_envs"],
        "device": last["device"],
        "steps_per_second": last["training"]["steps_per_second"],
        "memory_bytes": last["state_bytes"] + last["temporary_bytes"],
    }


def pong_case(name: str, *, threads: int, num_envs: int, length: int) -> Case:
    """Return a case of the speed of IMPALA's shallow network on Pong under Sebulba."""
    command = (
        f"bench sebulba --environment atari:pong --hidden 256 --threads-per-actor {threads} "
        f"--num-envs {num_envs} --rollout-length {length} --seconds 10 --repetitions 1 "
        "--parts acting learning training --json"
    )
    return Case(name, (tuple(command.split()),), sebulba_rate)


def sebulba_rate(printed: list[Values], folder: Path) -> Values:
    """Read `bench.py sebulba --json`: steps of single environments per second."""
    rates = printed[-1]["steps_per_second"]
    return {
        "device": printed[-1]["device"],
        **{k: rates[k] for k in ("acting", "learning", "training")},
    }


def learning_curve(run: str) -> Callable[[list[Values], Path], Values]:
    """Return a reader of a run's evaluations: frames, seconds and returns.

    It raises `PodracerError` where the last one is no score.
    """

    def read(printed: list[Values], folder: Path) -> Values:
        records = read_metrics(folder / run / "metrics.jsonl")
        _, reason = final_score(records)
        if reason not in ("", NOT_EVALUATED):
            raise PodracerError(f"{run} has no final score: {reason}.")
        records = [record for record in records if whole_return(record) is not None]
        return {
            "frames": [record["frames"] for record in records],
            "seconds": [round(record["seconds"], 2) for record in records],
            "returns": [round(record["evaluation_return"], 4) for record in records],
        }

    return read
