"""How programs of the tests are compiled, and the collectives in their text."""

import itertools
import re

import numpy as np


def request(devices, num_updates=1):
    """The argument by which a chunk makes some updates, for no host with a request of its own."""
    return np.tile(np.int32([0, num_updates]), (devices, 1))


def unordered(text):
    """Pairs of successive collectives of a compiled program that do not wait for each other."""
    return [
        (first, second)
        for waits in _collectives_by_computation(text)
        for first, second in itertools.pairwise(waits)
        if first not in waits[second]
    ]


def _collectives_by_computation(text):
    """Of a compiled program: for each computation, its instructions that reduce over devices (by
    themselves or in what they call), each with the instructions that it waits for."""
    computations, name = {}, None
    for line in text.splitlines():
        if opening := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            name = opening[1]
            computations[name] = {}
        elif instruction := re.match(r"\s+(?:ROOT )?%(\S+) = (.*)$", line):
            code = re.sub(r"metadata=\{.*", "", instruction[2])
            computations[name][instruction[1]] = (code, re.findall(r"%([\w.\-]+)", code))

    def reduces(code, names):
        if re.search(
            r" (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)", code
        ):
            return True
        return any(
            reduces(*inner) for name in names for inner in computations.get(name, {}).values()
        )

    for instructions in computations.values():
        waits = {}
        for name, (_, names) in instructions.items():  # in an order that can be executed
            direct = [other for other in names if other in waits]
            waits[name] = set(direct).union(*(waits[other] for other in direct))
        yield {name: waits[name] for name in instructions if reduces(*instructions[name])}
