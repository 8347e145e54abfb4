"""Evolution against the same agents without it."""

from pathlib import Path

import numpy as np

from benchmarks.reproduce.figure import (
    Axes,
    Case,
    Curve,
    Figure,
    Measured,
    Outcome,
    Reading,
    Scale,
    Values,
    Verdict,
)
from benchmarks.reproduce.published import PAPERS, published_columns

SEEDS = range(5)
PODS, ROUNDS, ROUND_FRAMES = 6, 4, 10_240
LOW, HIGH = 1e-5, 1e-1  # of the learning rates that the pods begin with
RULES = {"evolution": "Generational --group-size 2 --parents 1", "none": "Independent"}


def cases(scale: Scale) -> list[Case]:
    """Return a tournament for each seed with evolution, and one without."""
    return [_case(rule, seed) for seed in SEEDS for rule in RULES]


def _case(rule: str, seed: int) -> Case:
    name = f"{rule}-seed-{seed}"
    recipes = " ".join(f"{{folder}}/seed-{seed}-pod-{pod}.json" for pod in range(PODS))
    command = (
        f"tournament {recipes} --selection {RULES[rule]} --pods {PODS} --rounds {ROUNDS} "
        f"--round-frames {ROUND_FRAMES} --size {PODS} --episodes 128 --seed {seed} "
        f"--run-dir {{folder}}/{name}"
    )

    def read(printed: list[Values], folder: Path) -> Values:
        return _scores(folder / name)

    def write(folder: Path) -> None:
        _write_recipes(folder, seed)

    return Case(name, (tuple(command.split()),), read, write, timed=False)


def _write_recipes(folder: Path, seed: int) -> None:
    """Write a recipe for each pod: PPO on CartPole with a learning rate of its own."""
    from podracer import recipes
    from podracer.config.serialization import to_json
    from podracer.io.run_directory import write_json

    rng = np.random.default_rng(seed)
    experiment = recipes.find("cartpole_ppo")
    for pod in range(PODS):
        rate = float(np.exp(rng.uniform(np.log(LOW), np.log(HIGH))))
        one = experiment.with_fields({"agent": {"learning_rate": rate}, "devices": 1})
        write_json(folder / f"seed-{seed}-pod-{pod}.json", {"experiment": to_json(one)})


def _scores(directory: Path) -> Values:
    """Read a tournament: the score of every round, in the order of submission."""
    from podracer.tournament.events import Submitted
    from podracer.tournament.leaderboard import read_events

    scores = [event.score for event in read_events(directory) if isinstance(event, Submitted)]
    return {"scores": scores}


def curves(measured: Measured) -> list[Curve]:
    """Return the mean score of the pods over their frames, a mean over seeds."""
    labels = {"evolution": "with evolution, mean of the pods", "none": "without evolution, mean"}
    found = []
    for rule, label in labels.items():
        rows = [_rounds(values).mean(1) for name, values in measured.items() if rule in name]
        if rows:
            means = np.mean(rows, axis=0)
            points = tuple(
                (float((i + 1) * ROUND_FRAMES * PODS), float(y)) for i, y in enumerate(means)
            )
            found.append(Curve(label, points))
    return found


def _rounds(values: Values) -> np.ndarray:
    """Return the scores `[rounds, pods]`, as they came in."""
    return np.asarray(values["scores"]).reshape(-1, PODS)


def judge(measured: Measured) -> Verdict:
    """Compare the best agents, and the means of the pods, at the end."""
    best = {rule: [] for rule in RULES}
    mean = {rule: [] for rule in RULES}
    for seed in SEEDS:
        for rule in RULES:
            rounds = _rounds(measured[f"{rule}-seed-{seed}"])
            best[rule].append(rounds.max())
            mean[rule].append(rounds[-1].mean())
    gains = np.subtract(best["evolution"], best["none"])
    if gains.mean() <= 0:
        effect = "makes the pods better, but not the best of them"
    elif gains.min() < 0:
        effect = "helps on average, but not with every seed, which the verdict asks for"
    else:
        effect = "helps"
    reason = (
        f"Over {len(SEEDS)} seeds the best agent reaches {np.mean(best['evolution']):.0f} with "
        f"evolution and {np.mean(best['none']):.0f} without (500 is the most), the mean of the "
        f"pods ends at {np.mean(mean['evolution']):.0f} and {np.mean(mean['none']):.0f}: evolution "
        f"{effect}."
    )
    outcome = (
        Outcome.REPRODUCED if gains.min() >= 0 and gains.mean() > 0 else Outcome.NOT_REPRODUCED
    )
    return Verdict(outcome, reason)


def _published() -> tuple[Curve, ...]:
    curves = []
    for column, points in published_columns("finrl_evolution").items():
        evolved = column == "with_evolution"
        label = "with evolution" if evolved else "without, one of nine agents"
        curves.append(Curve(label, points, "published", Reading.VECTOR, faint=not evolved))
    return tuple(curves)


FIGURE = Figure(
    name="finrl-evolution",
    title="Evolution against none",
    paper=PAPERS["finrl"],
    place="figure on the effect of evolution, as in the project's documentation",
    claim="After 3,600 s evolution of ten agents reaches a back-test return of 4.63; the same "
    "agents without it end between 3.65 and 4.36, on average at 4.02.",
    measures="learning",
    published=_published(),
    axes=Axes("seconds of training", "value of the portfolio (1 at the start)"),
    our_axes=Axes("frames of all pods", "return in CartPole (500 is the most)"),
    run="`podracer tournament` of six pods of PPO on CartPole, whose learning rates are drawn from "
    "1e-5 to 0.1, four rounds of 10,240 frames: `--selection Generational` against `Independent`, "
    "the same frames, five seeds.",
    cases=cases,
    minutes=15,
    curves=curves,
    judge=judge,
    stand_in="CartPole",
    deviations=(
        "The data cannot be redistributed: the agents play CartPole instead.",
        "The paper selects by the back-test itself; ours by held-out episodes.",
    ),
)
