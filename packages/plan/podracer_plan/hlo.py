"""What a compiled program does, counted in its text: kernels, collectives, bytes, by loop.

A fusion, a copy, a library call or a collective is a kernel; parameters, tuples, bitcasts and
constants are free. A loop's body counts as often as XLA knows it to run, and once where it does not
know, which is the loop over the updates of a chunk.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

SCOPES = ("rollout", "minibatches")
"""Names of `jax.named_scope` that kernels are counted by."""
_FREE = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "add-dependency", "async-update"),
}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SLICES = ("dynamic-slice", "gather", "dynamic-update-slice")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)")
_CALL = re.compile(r"(.*?) ([\w\-]+)\((.*)")  # the shape, which may be a tuple, opcode, operands
_ASYNC = re.compile(r"\(\(.*?\), (.*), [su]32\[\].*\)")  # ((operands), result, context)
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+\w*|c64|c128)\[([\d,]*)\]")
_TRIPS = re.compile(r'known_trip_count":\{"n":"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction of a computation."""

    name: str
    opcode: str
    size: int  # bytes of the result
    operands: tuple[str, ...]
    text: str
    is_root: bool

    def attribute(self, name: str) -> str:
        """Return the computation that an attribute such as `calls` names, "" without one."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """Computations that a call runs, or of which a condition runs one."""
        if match := re.search(r"branch_computations=\{([^}]*)\}", self.text):
            return re.findall(r"%?([\w.\-]+)", match[1])
        if self.opcode == "conditional":
            return [self.attribute("true_computation"), self.attribute("false_computation")]
        return [self.attribute("to_apply") or self.attribute("calls")]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Reduction, or another exchange between devices."""

    kind: str
    bytes: int  # size of the result on one device


@dataclasses.dataclass(frozen=True)
class Counts:
    """Work of a part of a program, on one device."""

    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    """Number of kernels by the scope of `SCOPES` that they are in, "" for no scope."""
    bytes: int = 0
    """Bytes that the kernels read and write."""
    collectives: tuple[Collective, ...] = ()

    def __add__(self, work: Counts) -> Counts:
        return Counts(
            self.kernels + work.kernels,
            self.bytes + work.bytes,
            self.collectives + work.collectives,
        )

    def __mul__(self, times: int) -> Counts:
        kernels = Counter({name: times * n for name, n in self.kernels.items()})
        return Counts(kernels, times * self.bytes, times * self.collectives)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Loop, or the whole program, with the work of one iteration, inner loops apart."""

    scope: str
    trips: int | None
    body: Counts
    loops: tuple[Loop, ...]

    def total(self) -> Counts:
        """Return the work of one iteration, inner loops included."""
        return sum((x.total() * (x.trips or 1) for x in self.loops), self.body)

    def walk(self) -> Iterator[Loop]:
        """Yield this loop and all within it."""
        yield self
        for loop in self.loops:
            yield from loop.walk()


class Program:
    """Text of a compiled program, `compiled.as_text()`."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, dict[str, Instruction]] = {}
        name = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                name = head[2]
                self._computations[name] = {}
                if head[1]:
                    self._entry = name
            elif line.startswith("}"):
                name = ""
            elif name and (match := _LINE.match(line)):
                instruction = _parse(match[2], match[3], is_root=bool(match[1]))
                self._computations[name][instruction.name] = instruction

    @cached_property
    def whole(self) -> Loop:
        """The program, and the loops in it."""
        return self._loop(self._entry, "", 1)

    @property
    def update(self) -> Loop:
        """The loop over updates, the largest whose length XLA does not know; else the program."""
        unknown = [x for x in self.whole.walk() if x.trips is None]
        return max(unknown, key=lambda x: x.total().kernels.total(), default=self.whole)

    def _loop(self, computation: str, scope: str, trips: int | None) -> Loop:
        body, loops = Counts(), list[Loop]()
        instructions = self._computations.get(computation, {})
        for x in instructions.values():
            own_scope = _scope(x.text) or scope
            if x.opcode == "while":
                loops.append(self._loop(x.attribute("body"), own_scope, self._trips(x)))
            elif x.opcode in ("call", "conditional", "async-start"):
                called = (self._loop(name, own_scope, 1) for name in x.called)
                # A condition counts as its branch with most kernels.
                called = max(called, key=lambda branch: branch.total().kernels.total())
                body += called.body
                loops += called.loops
            elif x.opcode not in _FREE and not x.opcode.endswith("-done"):
                kind = x.opcode.removesuffix("-start")
                collectives = (Collective(kind, x.size),) if kind in _COLLECTIVES else ()
                body += Counts(Counter([own_scope]), self._traffic(x, instructions), collectives)
        return Loop(scope, trips, body, tuple(loops))

    def _trips(self, loop: Instruction) -> int | None:
        """Return the number of iterations of a loop, None where it is not known.

        A GPU's program and a CPU's have it; of a TPU's the condition compares with a constant.
        """
        if match := _TRIPS.search(loop.text):
            return int(match[1])
        condition = self._computations.get(loop.attribute("condition"), {})
        for x in condition.values():
            if x.is_root and x.opcode == "compare" and "direction=LT" in x.text:
                bound = condition[x.operands[1]].text if x.operands[1] in condition else ""
                if match := re.match(r"constant\((\d+)\)", bound):
                    return int(match[1])
        return None

    def _traffic(self, x: Instruction, computation: dict[str, Instruction]) -> int:
        """Return the bytes that a kernel reads and writes; of a slice only the slice."""
        opcode = x.opcode.removesuffix("-start")
        if opcode == "dynamic-update-slice":
            return 2 * _size(computation, x.operands[1])
        if opcode in ("dynamic-slice", "gather"):
            return 2 * x.size
        fused = self._computations.get(x.attribute("calls"), {}) if opcode == "fusion" else {}
        size = x.size
        for number, operand in enumerate(x.operands):
            start = f"parameter({number})"
            name = next((y.name for y in fused.values() if y.text.startswith(start)), "")
            uses = [y for y in fused.values() if name in y.operands]
            if uses and all(y.opcode in _SLICES and y.operands[0] == name for y in uses):
                size += sum(_slice_bytes(fused, y) for y in uses)
            else:
                size += _size(computation, operand)
        return size


def _slice_bytes(computation: dict[str, Instruction], x: Instruction) -> int:
    """Return the bytes of a slice; of an update in place less the result, of which it is a part."""
    if x.opcode == "dynamic-update-slice":
        return _size(computation, x.operands[1]) - x.size
    return x.size


def _size(computation: dict[str, Instruction], name: str) -> int:
    return computation[name].size if name in computation else 0


def _parse(name: str, text: str, *, is_root: bool) -> Instruction:
    shape, opcode, call = _CALL.match(_COMMENT.sub("", text)).groups()  # type: ignore[union-attr]
    if opcode.endswith("-start"):
        shape = _ASYNC.sub(r"\1", shape)
    operands = tuple(re.findall(r"%([\w.\-]+)", call.partition("), ")[0]))
    return Instruction(name, opcode, _bytes(shape), operands, f"{opcode}({call}", is_root)


def _bytes(shape: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        bits = 8 if kind == "pred" else int(re.sub(r"\D.*", "", kind.lstrip("bsufc")) or 32)
        total += math.prod(map(int, filter(None, dims.split(",")))) * max(bits // 8, 1)
    return total


def _scope(text: str) -> str:
    """Return the outermost of `SCOPES` that an instruction is in."""
    match = re.search(r'op_name="([^"]*)"', text)
    scope = re.search(rf"\b({'|'.join(SCOPES)})\b", match[1]) if match else None
    return scope[1] if scope else ""
