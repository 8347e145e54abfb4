"""Anakin over the number of devices."""

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
from benchmarks.reproduce.read import anakin_rate


def cases(scale: Scale) -> list[Case]:
    """Return a case for one and for two devices; an accelerator here is a single one."""
    if scale == "accelerator":
        return []
    commands = {
        devices: f"bench anakin --devices {devices} --envs-per-device 128 --json"
        for devices in (1, 2)
    }
    return [
        Case(f"{devices}-devices", (tuple(command.split()),), anakin_rate)
        for devices, command in commands.items()
    ]


def curves(measured: Measured) -> list[Curve]:
    """Return the speed over devices."""
    points = sorted((float(v["devices"]), v["steps_per_second"]) for v in measured.values())
    return [Curve("Catch, CPU devices", tuple(points))] if points else []


def judge(measured: Measured) -> Verdict:
    """Compare the speed of two devices with twice that of one."""
    one, two = (measured[f"{n}-devices"]["steps_per_second"] for n in (1, 2))
    reason = (
        f"Two CPU devices are {two / one:.2f} times as fast as one, {two / one / 2:.0%} of linear; "
        "two points show no scaling to 128 cores, which cannot be had here."
    )
    return Verdict(Outcome.NOT_POSSIBLE, reason)


FIGURE = Figure(
    name="anakin-scaling",
    title="Anakin over devices",
    paper=PAPERS["podracer"],
    place="Figure 4a",
    claim="The speed grows almost linearly from 16 to 128 TPU cores.",
    measures="rate",
    published=(
        Curve(
            "TPU cores",
            ((16, 7e6), (32, 15e6), (64, 30e6), (128, 60e6)),
            "published",
            Reading.AXIS,
        ),
    ),
    axes=Axes("devices", "steps a second", log_x=True, log_y=True),
    run="`bench.py anakin` on one and on two virtual CPU devices, 128 environments on each.",
    cases=cases,
    minutes=1,
    curves=curves,
    judge=judge,
    deviations=("The environment of the published figure is not named; ours is Catch.",),
)
