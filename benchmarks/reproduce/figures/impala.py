"""IMPALA's results under Sebulba."""

from benchmarks.reproduce.figure import Axes, Case, Curve, Figure, Measured, Outcome, Scale, Verdict
from benchmarks.reproduce.published import PAPERS
from benchmarks.reproduce.read import learning_curve

SEEDS = (100, 101, 102)  # those of the results suite, whose scores count here
SOLVED = 18.0


def cases(scale: Scale) -> list[Case]:
    """Return a run of Pong for each seed; one on a laptop."""
    return [
        Case(
            f"pong-{seed}",
            (
                ("train", "pong_impala", "--evaluation-episodes", "30",
                 "--seed", str(seed), "--run-dir", f"{{folder}}/pong-{seed}"),
            ),
            learning_curve(f"pong-{seed}"),
            timed=False,
        )
        for seed in (SEEDS[:1] if scale == "laptop" else SEEDS)
    ]  # fmt: skip


def curves(measured: Measured) -> list[Curve]:
    """Return the learning curves."""
    return [
        Curve("Pong, a seed", tuple(zip(v["frames"], v["returns"], strict=True)))
        for v in measured.values()
    ]


def judge(measured: Measured) -> Verdict:
    """Say whether Pong was learned."""
    scores = [values["returns"][-1] for values in measured.values()]
    outcome = Outcome.REPRODUCED if min(scores) >= SOLVED else Outcome.NOT_REPRODUCED
    return Verdict(outcome, f"Pong ends at {', '.join(f'{x:.1f}' for x in scores)}.")


FIGURE = Figure(
    name="impala",
    title="IMPALA's results under Sebulba",
    paper=PAPERS["podracer"],
    place="section on Sebulba",
    claim="Sebulba with V-trace easily reproduces the results of IMPALA; no scores are given.",
    measures="learning",
    axes=Axes("steps", "return"),
    run="`podracer train pong_impala`, 8 M steps: three seeds on an accelerator, one on a laptop, "
    "where it takes an hour and a half.",
    cases=cases,
    curves=curves,
    judge=judge,
    stand_in="Pong, one of its 57 games,",
)
