"""The speed of discovering an update rule."""

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
from benchmarks.reproduce.read import recipe_rate

PUBLISHED = 3e6
FULL = 61_440
SIZES = (512, 2048, 8192, FULL)


def cases(scale: Scale) -> list[Case]:
    """Return a case for each number of environments, with a small rule on a laptop.

    An accelerator is measured with the paper's number alone.
    """
    sizes = SIZES if scale == "laptop" else (FULL,)
    units = ["--units", "32"] if scale == "laptop" else []
    command = ["bench", "recipe", "lpg_paper", *units, "--repetitions", "3", "--json", "--sizes"]
    return [Case(f"{size}-environments", ((*command, str(size)),), recipe_rate) for size in sizes]


def curves(measured: Measured) -> list[Curve]:
    """Return the speed over environments."""
    points = sorted((float(v["environments"]), v["steps_per_second"]) for v in measured.values())
    return [Curve("LPG in tabular worlds", tuple(points))] if points else []


def judge(measured: Measured) -> Verdict:
    """Compare the speed at the paper's number of environments."""
    rate = measured[f"{FULL}-environments"]["steps_per_second"]
    outcome = Outcome.REPRODUCED if rate >= PUBLISHED else Outcome.NOT_REPRODUCED
    reason = (
        f"With as many environments {rate / 1e6:.2f} M steps a second, {rate / PUBLISHED:.3g} "
        "times the published 3 M on 16 TPU cores."
    )
    return Verdict(outcome, reason)


FIGURE = Figure(
    name="lpg-rate",
    title="LPG: speed of discovering a rule",
    paper=PAPERS["podracer"],
    place="section on Anakin, meta-learning",
    claim="More than 3 M steps a second on 16 cores, with 60 K environments and 1 K policies.",
    measures="rate",
    published=(
        Curve("16 TPU cores, at least", ((60_000, PUBLISHED),), "published", Reading.PRINTED),
    ),
    axes=Axes("environments", "steps a second", log_x=True, log_y=True),
    run="`bench.py recipe lpg_paper` with 512 to 61,440 environments, 64 in a lifetime.",
    cases=cases,
    minutes=3,
    curves=curves,
    judge=judge,
    deviations=(
        "On a laptop the rule's LSTM has 32 units instead of 256, which makes it about eight times "
        "as fast; on an accelerator it has 256.",
        "The paper's worlds are not published; ours are five kinds of tabular worlds and chains.",
    ),
)
