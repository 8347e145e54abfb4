"""The speed of the published notebook, over the number of environments."""

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
from benchmarks.reproduce.read import anakin_rate, learning_curve

PUBLISHED = 4.41e6
ENVIRONMENTS = 1024
LEARNS = 0.9  # mean return; 1 is the best


def cases(scale: Scale) -> list[Case]:
    """Return a case for each number of environments on a device; on a laptop one that learns."""
    exponents, devices = (range(5, 11), 2) if scale == "laptop" else (range(7, 18, 2), 1)
    found = []
    for batch in (2**exponent for exponent in exponents):
        command = f"bench anakin --devices {devices} --envs-per-device {batch} --json"
        found.append(Case(f"{batch}-environments", (tuple(command.split()),), anakin_rate))
    if scale == "accelerator":
        return found
    train = ("train", "catch", "--devices", "1", "--run-dir", "{folder}/learning")
    return [*found, Case("learning", (train,), learning_curve("learning"), timed=False)]


def curves(measured: Measured) -> list[Curve]:
    """Return the speeds over all environments."""
    points = sorted(
        (float(values["environments"]), values["steps_per_second"])
        for name, values in measured.items()
        if name != "learning"
    )
    return [Curve("greedy Q(lambda) on Catch", tuple(points))] if points else []


def judge(measured: Measured) -> Verdict:
    """Compare the best speed, and whether the agent learned."""
    rates = {
        v["environments"]: v["steps_per_second"] for k, v in measured.items() if k != "learning"
    }
    best = max(rates, key=lambda environments: rates[environments])
    reached = rates[best] >= PUBLISHED
    reason = (
        f"At best {rates[best] / 1e6:.2f} M steps a second, with {best:,} environments, "
        f"{rates[best] / PUBLISHED:.3g} times the published 4.41 M on 8 TPU cores"
    )
    if "learning" in measured:
        score = measured["learning"]["returns"][-1]
        reached &= score >= LEARNS
        reason += f"; the agent learned to a return of {score:.2f} of 1"
    fewer = max(rate for environments, rate in rates.items() if environments <= ENVIRONMENTS)
    reason += f"; with {ENVIRONMENTS:,} or fewer {fewer / 1e6:.2f} M."
    return Verdict(Outcome.REPRODUCED if reached else Outcome.NOT_REPRODUCED, reason)


FIGURE = Figure(
    name="notebook",
    title="The Anakin notebook: Catch",
    paper=PAPERS["podracer"],
    place="official notebook, the output of its last cell",
    claim="4.41 M steps a second with 1,024 environments on a TPU of 8 cores; 1.64 M steps in "
    "0.37 s after 4.08 s of compilation.",
    measures="rate",
    published=(
        Curve("8 TPU cores", ((ENVIRONMENTS, PUBLISHED),), "published", Reading.PRINTED),
    ),
    axes=Axes("parallel environments", "steps a second", log_x=True),
    run="`bench.py anakin` with the notebook's network, rollouts of 16 and 100 updates a "
    "dispatch: 32 to 1,024 environments on each of two CPU devices, on an accelerator 2^7 to 2^17; "
    "and `podracer train catch`.",
    cases=cases,
    minutes=1,
    curves=curves,
    judge=judge,
    deviations=(
        "The notebook times one dispatch that was not warmed up; ours are medians of warm ones.",
        "A laptop measured that it learns: to a return of 1 of 1.",
        "The notebook copies the parameters for each environment; ours has one copy.",
    ),
)  # fmt: skip
