"""The time and the price of discovering an update rule."""

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

STEPS = 2.6e11  # 24 h at 3 M steps a second
ENVIRONMENTS = {"laptop": 512, "accelerator": 61_440}


def cases(scale: Scale) -> list[Case]:
    """Return the speed with the paper's rule."""
    size = str(ENVIRONMENTS[scale])
    command = ("bench", "recipe", "lpg_paper", "--repetitions", "2", "--json", "--sizes", size)
    return [Case("rate", (command,), recipe_rate)]


def curves(measured: Measured) -> list[Curve]:
    """Return the modeled hours of the whole run."""
    if "rate" not in measured:
        return []
    return [Curve("hours at the measured speed", ((STEPS, hours(measured)),), "modeled")]


def hours(measured: Measured) -> float:
    """Return the hours that the published run would take."""
    return STEPS / measured["rate"]["steps_per_second"] / 3600


def judge(measured: Measured) -> Verdict:
    """Say how long it would take."""
    reason = (
        f"The whole run was not made: at the measured {measured['rate']['steps_per_second']:,.0f} "
        f"steps a second it would take {hours(measured):,.3g} hours (modeled, not measured)."
    )
    return Verdict(Outcome.NOT_POSSIBLE, reason)


FIGURE = Figure(
    name="lpg-price",
    title="LPG: time and price of a rule",
    paper=PAPERS["podracer"],
    place="section on Anakin, meta-learning",
    claim="A rule takes about 24 hours and about $100 at prices of preemptible TPUs of April 2021.",
    measures="rate",
    published=(Curve("16 TPU cores", ((STEPS, 24),), "published", Reading.DERIVED),),
    axes=Axes("environment steps", "hours", log_x=True, log_y=True),
    run="The speed of `bench.py recipe lpg_paper` with the paper's rule, from which hours "
    "are computed.",
    cases=cases,
    minutes=1,
    curves=curves,
    judge=judge,
    impossible="The whole run takes days on a laptop.",
    deviations=(
        "The number of steps is not published: it is 24 hours at 3 M steps a second.",
        "A price for our hours is not given: a laptop has none.",
    ),
)
