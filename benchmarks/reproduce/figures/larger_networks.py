"""Larger networks: frames and seconds to a return."""

import statistics

from benchmarks.reproduce.figure import Axes, Case, Curve, Figure, Measured, Outcome, Scale, Verdict
from benchmarks.reproduce.published import PAPERS
from benchmarks.reproduce.read import learning_curve

NETWORKS = ((8, 1), (16, 1), (16, 2), (32, 1))  # channels and residual blocks
SEEDS = range(5)
TARGET = 15.0  # return


def cases(scale: Scale) -> list[Case]:
    """Return a run of each network and seed."""
    found = []
    for seed in SEEDS:
        for channels, blocks in NETWORKS:
            name = _name(channels, blocks, seed)
            command = (
                f"train breakout_resnet_ppo --channels {channels} --blocks {blocks} --seed {seed} "
                f"--devices 1 --run-dir {{folder}}/{name}"
            )
            found.append(Case(name, (tuple(command.split()),), learning_curve(name), timed=False))
    return found


def _name(channels: int, blocks: int, seed: int) -> str:
    return f"channels-{channels}-blocks-{blocks}-seed-{seed}"


def curves(measured: Measured) -> list[Curve]:
    """Return the mean learning curve of each network over its seeds."""
    found = []
    for channels, blocks in NETWORKS:
        runs = _runs(measured, channels, blocks)
        if runs:
            means = map(statistics.mean, zip(*(run["returns"] for run in runs), strict=True))
            points = tuple(zip(map(float, runs[0]["frames"]), means, strict=True))
            blocks_text = "1 block" if blocks == 1 else f"{blocks} blocks"
            seeds_text = "1 seed" if len(runs) == 1 else f"mean of {len(runs)} seeds"
            label = f"{channels} channels, {blocks_text}, {seeds_text}"
            found.append(Curve(label, points))
    return found


def _runs(measured: Measured, channels: int, blocks: int) -> list[dict]:
    names = (_name(channels, blocks, seed) for seed in SEEDS)
    return [measured[name] for name in names if name in measured]


def to_target(run: dict, over: str) -> float:
    """Return frames or seconds of the first evaluation at the target, infinity if there is none."""
    pairs = zip(run[over], run["returns"], strict=True)
    return next((float(spent) for spent, score in pairs if score >= TARGET), float("inf"))


def judge(measured: Measured) -> Verdict:
    """Compare the median frames to the target of the smallest and the larger networks."""
    frames, parts = {}, []
    for channels, blocks in NETWORKS:
        runs = _runs(measured, channels, blocks)
        value = statistics.median(to_target(run, "frames") for run in runs)
        text = f"{value / 1e3:,.0f} K" if value < float("inf") else "not reached"
        if all("seconds" in run for run in runs) and value < float("inf"):
            seconds = statistics.median(to_target(run, "seconds") for run in runs)
            text += f" in {seconds:,.0f} s"
        frames[channels, blocks] = value
        parts.append(f"{channels} channels and {blocks} block{'s' * (blocks > 1)}: {text}")
    smallest, *larger = frames.values()
    outcome = Outcome.REPRODUCED if max(larger) < smallest else Outcome.NOT_REPRODUCED
    reason = f"Median frames to a return of {TARGET:g} over 5 seeds: {'; '.join(parts)}."
    reason += " Frames do not show whether larger ones cost nothing extra."
    return Verdict(outcome, reason)


FIGURE = Figure(
    name="larger-networks",
    title="Larger networks learn from less data",
    paper=PAPERS["podracer"],
    place="section on Sebulba",
    claim="More channels and residual blocks improve data efficiency significantly, at no extra "
    "cost on cores that were not full; no number is given.",
    measures="learning",
    axes=Axes("steps", "return of sampled episodes"),
    run="`podracer train breakout_resnet_ppo --channels C --blocks B`: PPO on MinAtar Breakout "
    "for 500,000 steps, five seeds of each network.",
    cases=cases,
    minutes=27,
    curves=curves,
    judge=judge,
    stand_in="MinAtar Breakout",
    deviations=(
        "PPO under Anakin instead of V-trace under Sebulba, so that seeds take minutes.",
        "One learning rate for all networks, which no network was tuned for.",
        "The cost is not equal on a CPU: a step of training takes 68, 98, 135 and 143 microseconds "
        "of a core, from the smallest network to the largest (medians of five turns, AMD EPYC).",
    ),
)
