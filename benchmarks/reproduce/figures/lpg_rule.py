"""A discovered update rule under Sebulba."""

from benchmarks.reproduce.figure import Axes, Case, Curve, Figure, Measured, Outcome, Scale, Verdict
from benchmarks.reproduce.published import PAPERS
from benchmarks.reproduce.read import learning_curve

SEEDS = (0, 1, 2)
CATCH_LEARNED = 0.9
PONG_LEARNED = -18.0  # constant and random play end at -21 to -19.5


def cases(scale: Scale) -> list[Case]:
    """Return for each seed a rule and Catch under it, and Pong under the first rule."""
    found = []
    for seed in SEEDS:
        discover = f"train lpg --seed {seed} --devices 1 --run-dir {{folder}}/rule-{seed}"
        store = f"rule {{folder}}/rule-{seed} --out {{folder}}/rule-{seed}.npz"
        use = (
            f"train catch_a2c --arch sebulba --frames 1000000 --seed {seed} --devices 1 "
            f"--update-rule {{folder}}/rule-{seed}.npz --run-dir {{folder}}/catch-{seed}"
        )
        commands = tuple(tuple(command.split()) for command in (discover, store, use))
        found.append(Case(f"catch-{seed}", commands, learning_curve(f"catch-{seed}"), timed=False))
    pong = (
        "train pong_ppo --frames 100000 --evaluations 1 --devices 1 "
        "--update-rule {folder}/rule-0.npz --run-dir {folder}/pong"
    )
    return [*found, Case("pong", (tuple(pong.split()),), learning_curve("pong"), timed=False)]


def curves(measured: Measured) -> list[Curve]:
    """Return the final return of Catch for each rule."""
    points = tuple(
        (float(seed), measured[f"catch-{seed}"]["returns"][-1])
        for seed in SEEDS
        if f"catch-{seed}" in measured
    )
    return [Curve("return in Catch under Sebulba", points)]


def judge(measured: Measured) -> Verdict:
    """Say what was learned in Catch and in Pong."""
    catch = [measured[f"catch-{seed}"]["returns"][-1] for seed in SEEDS]
    pong = measured["pong"]["returns"][-1]
    learned = min(catch) >= CATCH_LEARNED and pong >= PONG_LEARNED
    returns = ", ".join(f"{score:.2f}" for score in catch)
    reason = (
        f"Rules that Anakin discovered train agents under Sebulba: Catch ends at {returns}; "
        f"Pong, after 400,000 frames, at {pong:.1f}, which is "
        f"{'better' if pong >= PONG_LEARNED else 'hardly better'} than random play."
    )
    return Verdict(Outcome.REPRODUCED if learned else Outcome.NOT_REPRODUCED, reason)


FIGURE = Figure(
    name="lpg-rule",
    title="LPG: the rule carried into Sebulba",
    paper=PAPERS["podracer"],
    place="section on Anakin, meta-learning",
    claim="A rule discovered by Anakin was loaded into Sebulba agents and tested on Atari.",
    measures="learning",
    axes=Axes("seed of the rule", "final return (1 is the best)"),
    run="`podracer train lpg` for 60 M frames, `podracer rule`, and with its file `podracer train "
    "catch_a2c --arch sebulba --update-rule FILE`; Pong with the first rule.",
    cases=cases,
    minutes=10,
    curves=curves,
    judge=judge,
    deviations=("The rules are small: LSTMs of 32 units, 60 M frames instead of about 2.6e11.",),
)
