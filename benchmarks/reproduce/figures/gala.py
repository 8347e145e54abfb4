"""Gossip between actor-learners."""

import numpy as np

from benchmarks.reproduce.figure import Axes, Case, Curve, Figure, Measured, Outcome, Scale, Verdict
from benchmarks.reproduce.published import PAPERS
from benchmarks.reproduce.read import learning_curve

SEEDS = range(5)
LEARNERS, ENVIRONMENTS, FRAMES = 8, 8, 819_200
TASK = (
    "catch_a2c --environment cartpole --learning-rate 1e-3 --updates-per-chunk 4 "
    "--evaluations 8 --evaluation-policy sampled --devices 1"
)
_SWEEP = f"sweep {TASK} --num-envs {ENVIRONMENTS} --frames {FRAMES // LEARNERS} --seeds {LEARNERS}"
LABELS = {
    "gradients": "synchronous A2C: averaged gradients",
    "gossip": "gossip on a directed ring, every fourth update",
    "none": "learners that never meet",
}
COMMANDS = {
    "gradients": f"train {TASK} --num-envs {LEARNERS * ENVIRONMENTS} --frames {FRAMES}",
    "gossip": f"{_SWEEP} --average ring --every 4",
    "none": _SWEEP,
}


def cases(scale: Scale) -> list[Case]:
    """Return a run of each kind and seed."""
    return [_case(kind, seed) for seed in SEEDS for kind in COMMANDS]


def _case(kind: str, seed: int) -> Case:
    name = f"{kind}-seed-{seed}"
    command = f"{COMMANDS[kind]} --seed {seed * LEARNERS} --run-dir {{folder}}/{name}"
    return Case(name, (tuple(command.split()),), learning_curve(name), timed=False)


def curves(measured: Measured) -> list[Curve]:
    """Return the learning curve of each kind, a mean over seeds and learners."""
    found = []
    for kind, label in LABELS.items():
        runs = [values for name, values in measured.items() if name.startswith(kind)]
        if runs:
            # A learner counts its own frames.
            frames = np.linspace(0, FRAMES, len(runs[0]["frames"]) + 1)[1:]
            returns = np.mean([run["returns"] for run in runs], axis=0)
            found.append(Curve(label, tuple(zip(frames.tolist(), returns.tolist(), strict=True))))
    return found


def judge(measured: Measured) -> Verdict:
    """Compare the mean returns of all evaluations, which count how fast a learner learns, too."""
    mean = {
        kind: np.array([np.mean(measured[f"{kind}-seed-{seed}"]["returns"]) for seed in SEEDS])
        for kind in COMMANDS
    }
    texts = [
        f"{LABELS[kind]} {x.mean():.0f} ({x.min():.0f} to {x.max():.0f})"
        for kind, x in mean.items()
    ]
    is_as_good = mean["gossip"].mean() >= mean["gradients"].mean()
    return Verdict(
        Outcome.REPRODUCED if is_as_good else Outcome.NOT_REPRODUCED,
        f"Mean return over all evaluations, mean of 5 seeds: {'; '.join(texts)}; 500 is the most. "
        "A test of the bound shows that the learners stay close; rates were not compared, because "
        "these learners share a machine.",
    )


FIGURE = Figure(
    name="gala",
    title="Gossip instead of synchronous averaging",
    paper=PAPERS["gala"],
    place="abstract",
    claim="Learners that average parameters by gossip on a directed graph stay close to each "
    "other, have a higher frame rate and are more robust than synchronous A2C.",
    measures="learning",
    axes=Axes("steps", "return"),
    our_axes=Axes("frames of all learners", "return of sampled episodes of CartPole"),
    run="`podracer sweep --average ring --every 4`: eight A2C learners of eight environments each "
    "on CartPole, beside one learner of all 64 environments and learners that never meet; "
    "819,200 frames in all, five seeds.",
    cases=cases,
    minutes=3,
    curves=curves,
    judge=judge,
    stand_in="CartPole",
    deviations=(
        "The paper's learners are processes that wait for nobody; ours take turns in one program.",
    ),
)
