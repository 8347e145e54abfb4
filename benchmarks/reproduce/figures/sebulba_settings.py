"""Sebulba over actor threads, and over the length of rollouts."""

from benchmarks.reproduce.figure import Axes, Case, Curve, Figure, Measured, Outcome, Scale, Verdict
from benchmarks.reproduce.published import PAPERS
from benchmarks.reproduce.read import FRAME_SKIP, pong_case

ENVIRONMENTS = 64
THREADS = {"laptop": (1, 2, 4), "accelerator": (1, 2, 4, 8)}
LENGTHS = (20, 60, 120)


def cases(scale: Scale) -> list[Case]:
    """Return a case for each number of threads at T 20, and for each other T with two threads."""
    settings = [(threads, LENGTHS[0]) for threads in THREADS[scale]]
    settings += [(2, length) for length in LENGTHS[1:]]
    return [
        pong_case(
            f"threads-{threads}-length-{length}",
            threads=threads, num_envs=ENVIRONMENTS, length=length,
        )
        for threads, length in settings
    ]  # fmt: skip


def curves(measured: Measured) -> list[Curve]:
    """Return the speeds over T with two threads, acting and learning."""
    return [
        Curve(f"{what}, over T", _over_length(measured, part))
        for part, what in (("acting", "acting alone"), ("training", "learning"))
    ]


def _over_length(measured: Measured, part: str) -> tuple[tuple[float, float], ...]:
    names = {length: f"threads-2-length-{length}" for length in LENGTHS}
    return tuple(
        (float(length), FRAME_SKIP * measured[name][part])
        for length, name in names.items()
        if part in measured.get(name, {})
    )


def judge(measured: Measured) -> Verdict:
    """Say how the speed changes with threads and with T."""
    base = measured["threads-1-length-20"]
    two, long = measured["threads-2-length-20"], measured["threads-2-length-120"]
    gains = {
        "a second actor thread": two["training"] / base["training"] - 1,
        "rollouts of 120 instead of 20": long["training"] / two["training"] - 1,
    }
    reason = ", ".join(f"{gain:+.0%} by {what}" for what, gain in gains.items())
    rises = all(gain > 0.05 for gain in gains.values())
    outcome = Outcome.REPRODUCED if rises else Outcome.NOT_REPRODUCED
    return Verdict(outcome, f"Learning changes by {reason}.")


FIGURE = Figure(
    name="sebulba-settings",
    title="Sebulba over threads and T",
    paper=PAPERS["podracer"],
    place="section on Sebulba",
    claim="Several actor threads for each core, and longer trajectories, keep the cores busy.",
    measures="rate",
    axes=Axes("steps of a rollout (T)", "emulator frames a second"),
    run="`bench.py sebulba` with IMPALA's shallow network on Pong and 64 environments: one, "
    "two and four actor threads at T 20, and T 20, 60 and 120 with two threads.",
    cases=cases,
    minutes=6,
    curves=curves,
    judge=judge,
)
