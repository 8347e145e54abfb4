"""A discovered rule on Catch."""

from pathlib import Path

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
from benchmarks.reproduce.read import learning_curve

SEEDS = (0, 1, 2)
LEARNED = 0.99  # share of balls, after 1,000 updates of the published notebook
FRAMES_PER_UPDATE = 2 * 29  # environments and steps of a rollout
RULE = Path("disco_103.npz")


def missing() -> str:
    """Say where the rule comes from, unless it is there."""
    if RULE.is_file():
        return ""
    return f"put {RULE} of github.com/google-deepmind/disco_rl into this directory."


def cases(scale: Scale) -> list[Case]:
    """Return a run for each seed."""
    return [_case(f"seed-{seed}", seed) for seed in SEEDS]


def _case(name: str, seed: int) -> Case:
    command = (
        f"train catch_disco --update-rule {RULE} --devices 1 --seed {seed} "
        f"--run-dir {{folder}}/{name}"
    )
    return Case(name, (tuple(command.split()),), learning_curve(name), timed=False)


def curves(measured: Measured) -> list[Curve]:
    """Return the share of balls that are caught, by seed; a return is 1 or -1."""
    return [
        Curve(
            name.replace("-", " "),
            tuple(
                (frames / FRAMES_PER_UPDATE, (1 + score) / 2)
                for frames, score in zip(values["frames"], values["returns"], strict=True)
            ),
        )
        for name, values in sorted(measured.items())
    ]


def judge(measured: Measured) -> Verdict:
    """Say after how many updates each seed had learned Catch, and what it had at the end."""
    first = [
        next((x for x, share in curve.points if share >= LEARNED), None)
        for curve in curves(measured)
    ]
    ends = ", ".join(f"{curve.points[-1][1]:.0%}" for curve in curves(measured))
    texts = ["never" if x is None else f"{x:.0f} updates" for x in first]
    outcome = Outcome.NOT_REPRODUCED if None in first else Outcome.REPRODUCED
    return Verdict(
        outcome,
        f"Seeds {', '.join(map(str, SEEDS))} first reach {LEARNED:.0%} after {', '.join(texts)}; "
        f"after 1,000 updates they are at {ends}.",
    )


FIGURE = Figure(
    name="disco-catch",
    title="Disco103 learns Catch",
    paper=PAPERS["discorl"],
    place="notebook on Catch, and the README of a port of it",
    claim="The rule Disco103 learns Catch to 99 % in 1,000 updates; a port reports 36, 95 and "
    "100 % after 300, 350 and 400.",
    measures="learning",
    published=(
        Curve(
            "the port disco-torch",
            ((300, 0.36), (350, 0.95), (400, 1.0)),
            "published",
            Reading.SECONDARY,
        ),
    ),
    axes=Axes("updates", "share of balls that are caught"),
    run="`podracer train catch_disco --update-rule disco_103.npz` for 1,000 updates, three seeds, "
    "with the published file in the working directory.",
    cases=cases,
    minutes=10,
    curves=curves,
    judge=judge,
    missing=missing,
    deviations=("The boards differ: 10 x 5 here, 8 x 8 in the published code.",),
)
