"""The plan of a run: what it needs and how long it takes, with the source of each number."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.devices.memory import format_bytes
from podracer.plan.memory import Memory


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of an update: its seconds, and how they were measured."""

    name: str
    seconds: float
    source: str


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of an update and of its parts, and what they leave out."""

    parts: list[Part]
    update_seconds: float | None  # less than the sum of the parts where these overlap
    source: str
    unknown: list[str]
    is_bound: bool = False  # so that an update takes at least these seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs, as far as it is known; None is what is not."""

    recipe: str
    arch: str
    machine: str
    hosts: int
    devices: int  # of all hosts
    num_envs: int
    rollout_length: int
    memory: list[Memory]
    usable_bytes: int | None  # of each device
    largest_num_envs: int | None  # that fit, where `num_envs` do not; 0 if none does
    speed: Speed
    steps_per_second: float | None
    frames: int
    hours: float | None
    dollars: float | None
    unknown: list[str]  # what the plan does not know, a sentence each

    @property
    def fits(self) -> bool | None:
        """Whether the memory of each device suffices."""
        if self.usable_bytes is None:
            return None
        return all(memory.total <= self.usable_bytes for memory in self.memory)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        data = dataclasses.asdict(self)
        del data["speed"]["unknown"]
        for entry, memory in zip(data["memory"], self.memory, strict=True):
            entry["total"] = memory.total
        return {**data, "fits": self.fits}


def show(plan: Plan) -> str:
    """Return the plan as text."""
    per_host = plan.devices // plan.hosts
    hosts = f"{plan.hosts} host{'s' * (plan.hosts > 1)}"
    return "\n".join(
        [
            f"{plan.recipe} under {plan.arch.capitalize()}: {plan.num_envs:,} environments, T "
            f"{plan.rollout_length}, on {hosts} with {per_host} x {plan.machine}",
            *_memory_lines(plan),
            *_part_lines(plan.speed),
            "",
            *_cost_lines(plan),
            "",
            "What this plan does not know:",
            *(f"- {sentence}" for sentence in plan.unknown),
        ]
    )


def _memory_lines(plan: Plan) -> list[str]:
    lines = []
    for memory in plan.memory:
        whose = "" if memory.role == "device" else f"{memory.role}'s "
        number = f", {memory.devices} on each host" if memory.devices > 1 or whose else ""
        lines += ["", f"Memory of each {whose}device{number}"]
        parts = {name: size for name, size in memory.parts.items() if size}
        lines += [f"  {name:42}{format_bytes(size):>12}" for name, size in parts.items()]
        lines.append(f"  {'all':42}{format_bytes(memory.total):>12}")
        if memory.host_bytes:
            of_host = format_bytes(memory.devices * memory.host_bytes)
            lines.append(f"  {'and of the memory of each host':42}{of_host:>12}")
    if plan.usable_bytes is None:
        return [*lines, "How much memory the device has is not known."]
    usable = f"the {format_bytes(plan.usable_bytes)} that a program may use there"
    if plan.fits:
        return [*lines, f"It fits into {usable}."]
    lines.append(f"It does not fit into {usable}.")
    if plan.largest_num_envs:
        lines.append(f"The largest batch that fits: --num-envs {plan.largest_num_envs}.")
    elif plan.largest_num_envs == 0:
        lines.append(
            "No number of environments makes it fit: take a smaller network or replay "
            "(--capacity), a shorter rollout or more devices."
        )
    return lines


def _part_lines(speed: Speed) -> list[str]:
    if speed.update_seconds is None or not speed.parts:
        return []
    lines = ["", "Time of an update, by part"]
    total = sum(part.seconds for part in speed.parts)
    for part in speed.parts:
        share = part.seconds / total if total else 0.0
        time = f"{format_seconds(part.seconds):>12}  {share:>4.0%}"
        lines.append(f"  {part.name:12}{time}  {part.source}")
    overlap = "" if speed.update_seconds > 0.99 * total else "        parts overlap"
    return [*lines, f"  {'all':12}{format_seconds(speed.update_seconds):>12}{overlap}"]


def _cost_lines(plan: Plan) -> list[str]:
    source = plan.speed.source
    if plan.steps_per_second is None or plan.hours is None:
        return [f"Speed, hours and price are not known: {source}."]
    most, least = ("at most ", "at least ") if plan.speed.is_bound else ("", "")
    fitted = ", if it fitted" if plan.fits is False else ""
    hours = format_seconds(3600 * plan.hours)
    lines = [
        f"Speed: {most}{plan.steps_per_second:,.0f} steps a second ({source})",
        f"Time: {least}{hours} for {plan.frames:,} steps{fitted}",
    ]
    if plan.dollars is None:
        return [*lines, "Price: not known: --price gives that of a host for an hour"]
    price = f"${plan.dollars:,.2f}" if plan.dollars >= 0.01 else "less than $0.01"
    return [*lines, f"Price: {least}{price}{fitted}"]


def format_seconds(seconds: float) -> str:
    """Return a time as text in the unit that suits it."""
    units = (
        ("days", 172_800, 86_400),
        ("hours", 3600, 3600),
        ("min", 60, 60),
        ("s", 1, 1),
        ("ms", 1e-3, 1e-3),
        ("us", 0, 1e-6),
    )
    rounded = float(f"{seconds:.3g}")
    unit, least, size = next(entry for entry in units if rounded >= entry[1])
    number = max(seconds, least) / size
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
