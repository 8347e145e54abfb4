"""A published figure as a value: its source, its points, the commands behind ours, its verdict.

A verdict is never better than its points. It counts what was measured, on a machine that was quiet
where a rate is claimed, and only once all cases of a scale are there. A laptop shows the shape of a
rate, and a task that stands in for the published one shows no more than a shape either.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Scale = Literal["laptop", "accelerator"]
SCALES: tuple[Scale, ...] = ("laptop", "accelerator")
Values = dict[str, Any]  # what a case measured
Measured = Mapping[str, Values]  # by the name of the case
Points = tuple[tuple[float, float], ...]

MAX_BUSY = 0.1  # share of the processors that other programs may use while a rate is measured


class Reading(enum.StrEnum):
    """How a published number was read."""

    PRINTED = "printed by its authors"
    VECTOR = "recovered from the vector figure, to about 0.1 %"
    BITMAP = "read by eye off a bitmap, to about 3 %"
    AXIS = "the axis's labels; the points themselves were not recovered"
    SECONDARY = "quoted by others, not checked in the original"
    DERIVED = "computed by us from published numbers"


class Outcome(enum.StrEnum):
    """What a verdict says in short."""

    REPRODUCED = "reproduced"
    SHAPE = "shape reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_POSSIBLE = "not possible here"
    NOT_RUN = "not run yet"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome, and the sentence that says why."""

    outcome: Outcome
    reason: str


@dataclasses.dataclass(frozen=True)
class Paper:
    """Short name of a paper, and its reference."""

    name: str
    reference: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points `(x, y)` with a label; `name` says which kind of points they are."""

    label: str
    points: Points
    kind: Literal["published", "measured", "modeled"] = "measured"
    reading: Reading | None = None  # of published points
    faint: bool = False  # one of many, or of another system

    @property
    def name(self) -> str:
        """Label that tells published, measured and modeled points apart."""
        ends = {"published": "published", "measured": "ours", "modeled": "modeled, not measured"}
        return f"{self.label} ({ends[self.kind]})"


@dataclasses.dataclass(frozen=True)
class Axes:
    """Names and units of the axes, and which of them are logarithmic."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """Measurement made of commands of `podracer`; `{folder}` in them is the figure's own folder.

    `bench` is `python benchmarks/bench.py`. A command whose `--run-dir` exists is resumed.
    """

    name: str  # also of a file
    commands: tuple[tuple[str, ...], ...]
    read: Callable[[list[Values], Path], Values]
    """Function of the JSON objects that the commands printed, and of the folder."""
    inputs: Callable[[Path], None] | None = None
    """Function that writes files into the folder before the commands."""
    timed: bool = True
    """Whether it measures speed, which counts only where the machine was quiet."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured case: its values and where they come from."""

    figure: str
    case: str
    scale: Scale
    values: Values
    context: Values  # machine, versions, commit; `busy` is the share of other programs, if known
    error: str = ""  # why there are no values

    @property
    def is_busy(self) -> bool:
        """Whether other programs used much of the machine."""
        return (self.context.get("busy") or 0.0) > MAX_BUSY


def no_cases(scale: Scale) -> Sequence[Case]:
    """Return no cases, for a figure that is not run."""
    return ()


def no_curves(measured: Measured) -> list[Curve]:
    """Return no curves."""
    return []


def no_verdict(measured: Measured) -> Verdict:
    """Return the verdict on a figure that has cases but no judge."""
    return Verdict(Outcome.NOT_RUN, "There is nothing to compare with yet.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """Figure or number of a paper."""

    name: str
    """Name on the command line."""
    title: str
    paper: Paper
    place: str
    """Place in the paper: a figure, table or section."""
    page: int | None = None
    """Page, None where our notes do not have it."""
    claim: str
    """Published claim, a sentence."""
    measures: Literal["rate", "learning"]
    """Whether the claim is about speed, which a laptop cannot reproduce."""
    published: tuple[Curve, ...] = ()
    """Published points; none where no number could be read."""
    axes: Axes
    our_axes: Axes | None = None
    """Axes of a chart of our own, where our points do not share those of the published ones."""
    run: str = ""
    """Description of what is run, a sentence."""
    cases: Callable[[Scale], Sequence[Case]] = no_cases
    minutes: float = 0.0
    """Time of the laptop's cases on two quiet cores."""
    curves: Callable[[Measured], list[Curve]] = no_curves
    """Function of what was measured that returns our curves."""
    judge: Callable[[Measured], Verdict] = no_verdict
    """Function that judges the measured cases of one scale, once all are there."""
    impossible: str = ""
    """Reason why the figure cannot be measured here, a sentence."""
    missing: Callable[[], str] = lambda: ""
    """Function that says, in a sentence, what the cases need and this machine lacks."""
    stand_in: str = ""
    """What stands in for a task that cannot be had."""
    deviations: Sequence[str] = ()
    """Differences from the published setting, a sentence each."""

    def measured(self, records: Iterable[Record], scale: Scale) -> dict[str, Values]:
        """Return the values of this figure's records at a scale, by case."""
        return {
            record.case: record.values
            for record in records
            if (record.figure, record.scale) == (self.name, scale) and not record.error
        }

    def our_curves(self, records: Sequence[Record]) -> list[Curve]:
        """Return our points of every scale."""
        found = []
        for scale in SCALES:
            where = ", accelerator" * (scale == "accelerator")
            if measured := self.measured(records, scale):
                found += [
                    dataclasses.replace(curve, label=curve.label + where)
                    for curve in self.curves(measured)
                ]
        return found


def verdict(figure: Figure, records: Sequence[Record]) -> Verdict:
    """Return the verdict on a figure by its records: of an accelerator, else of a laptop."""
    partial = ""
    for scale in reversed(SCALES):
        names = {case.name for case in figure.cases(scale)}
        measured = figure.measured(records, scale)
        if not names or not measured.keys() & names:
            continue
        if missing := names - measured.keys():
            counts = f"{len(names) - len(missing)} of {len(names)}"
            partial = partial or f"{counts} cases have been run at the scale of a {scale}."
            continue
        timed = {case.name for case in figure.cases(scale) if case.timed}
        if any(
            record.is_busy and record.case in timed
            for record in records
            if (record.figure, record.scale) == (figure.name, scale)
        ):
            partial = partial or "The machine was busy with other work: run it on a quiet one."
            continue
        judged = _capped(figure, scale, figure.judge(measured))
        return judged if scale == "laptop" else _with_machine(judged, figure, records)
    if figure.impossible:
        return Verdict(Outcome.NOT_POSSIBLE, figure.impossible)
    return Verdict(
        Outcome.NOT_RUN, partial or f"`python -m benchmarks.reproduce {figure.name}` runs it."
    )


def _with_machine(judged: Verdict, figure: Figure, records: Sequence[Record]) -> Verdict:
    """Return a verdict whose reason names the accelerator."""
    keys = ("machine", "note")
    about = {
        ", ".join(record.context[key] for key in keys if key in record.context)
        for record in records
        if (record.figure, record.scale) == (figure.name, "accelerator") and not record.error
    }
    return Verdict(judged.outcome, f"{judged.reason} Measured on {' and '.join(sorted(about))}.")


def _capped(figure: Figure, scale: Scale, judged: Verdict) -> Verdict:
    if judged.outcome is not Outcome.REPRODUCED:
        return judged
    limits = []
    if figure.measures == "rate" and scale == "laptop":
        limits.append("A laptop can show the shape, not the rate.")
    if figure.stand_in:
        limits.append(f"{figure.stand_in} stands in for the published task.")
    if not limits:
        return judged
    return Verdict(Outcome.SHAPE, " ".join([judged.reason, *limits]))
