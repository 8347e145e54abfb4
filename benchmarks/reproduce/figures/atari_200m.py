"""200 M frames of Atari in an hour."""

from benchmarks.reproduce.figure import (
    Axes,
    Case,
    Curve,
    Figure,
    Measured,
    Outcome,
    Reading,
    Scale,
    Verdict,
)
from benchmarks.reproduce.published import PAPERS
from benchmarks.reproduce.read import FRAME_SKIP, pong_case

FRAMES = 200e6
THREADS = {"laptop": 2, "accelerator": 8}


def cases(scale: Scale) -> list[Case]:
    """Return the speed of learning at an actor batch of 64."""
    threads = THREADS[scale]
    return [pong_case("rate", threads=threads, num_envs=64 * threads, length=60)]


def hours(measured: Measured) -> float:
    """Return the hours that 200 M frames would take."""
    return FRAMES / (FRAME_SKIP * measured["rate"]["training"]) / 3600


def curves(measured: Measured) -> list[Curve]:
    """Return the modeled hours."""
    if "rate" not in measured:
        return []
    return [Curve("hours at the measured speed", ((FRAMES, hours(measured)),), "modeled")]


def judge(measured: Measured) -> Verdict:
    """Compare the modeled hours with the published one."""
    rate = FRAME_SKIP * measured["rate"]["training"]
    # The run itself was not made, so it is not reproduced at any rate.
    outcome = Outcome.SHAPE if hours(measured) <= 1.2 else Outcome.NOT_REPRODUCED
    reason = (
        f"At the measured {rate / 1e3:.1f} K frames a second 200 M would take "
        f"{hours(measured):.1f} hours (modeled, not measured)."
    )
    return Verdict(outcome, reason)


FIGURE = Figure(
    name="atari-200m",
    title="200 M frames of Atari in an hour",
    paper=PAPERS["podracer"],
    place="section on Sebulba",
    claim="200 M frames take about an hour and about $2.88 on a TPU of 8 cores.",
    measures="rate",
    published=(Curve("8 TPU cores", ((FRAMES, 1.0),), "published", Reading.PRINTED),),
    axes=Axes("emulator frames", "hours", log_x=True, log_y=True),
    run="The speed of IMPALA on Pong with an actor batch of 64, from which hours are computed.",
    cases=cases,
    minutes=2,
    curves=curves,
    judge=judge,
    deviations=("The paper names no game and no score; the run itself was not made.",),
)
