"""A run compiled for a target: memory, kernels, collectives and work of its programs."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from podracer.config.experiment import Experiment
from podracer.devices.fused import traced_for
from podracer.devices.memory import format_bytes
from podracer.errors import ConfigError, PodracerError
from podracer_plan.compilers import without_stderr
from podracer_plan.hlo import Counts, Loop
from podracer_plan.hlo import Program as Text
from podracer_plan.programs import Program, programs_of
from podracer_plan.targets import KINDS, LAUNCH_SECONDS, Target


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program. Numbers are of one device."""

    program: Program
    compiler_bytes: int  # arguments, results, temporaries and code of one of them
    temporary_bytes: int
    bytes_beside: int  # results that replace no argument, padding of arrays, code
    update: Loop  # an update of Anakin, else one call
    flops: int  # matrix products and convolutions of an update
    compile_seconds: float  # CPU time, tracing included

    @cached_property
    def work(self) -> Counts:
        """Kernels, bytes and collectives of an update."""
        return self.update.total()

    @property
    def waiting(self) -> dict[str, int]:
        """Bytes by part that lie beside a call, which the compiler does not see."""
        temporaries = (self.program.copies - 1) * self.temporary_bytes
        return {**self.program.waiting, "temporaries of other threads": temporaries}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by part, temporaries included."""
        call = {
            "activations and temporaries": self.temporary_bytes,
            "results, padding and code": self.bytes_beside,
        }
        return {**self.program.state, **call, **self.waiting}

    def to_json(self) -> dict[str, Any]:
        kernels, inner = self.work.kernels, list(self.update.walk())[1:]
        loops = [(x.scope, x.trips, x.total().kernels.total()) for x in inner]
        return {
            "role": self.program.role,
            "devices_of_host": self.program.devices,
            "state_bytes": sum(self.program.state.values()),
            "temporary_bytes": self.temporary_bytes,
            "bytes_beside": self.bytes_beside,
            "waiting_bytes": sum(self.waiting.values()),
            "compiler_bytes": self.compiler_bytes,
            "steps_per_update": self.program.steps,
            "kernels_per_update": kernels.total(),
            "kernels_per_step": round(kernels["rollout"] / self.program.length, 1),
            "kernels_per_minibatch": next((n for x, _, n in loops if x == "minibatches"), None),
            "loops": [{"scope": x, "trips": trips, "kernels": n} for x, trips, n in loops],
            "collectives_per_update": [dataclasses.asdict(x) for x in self.work.collectives],
            "flops_per_update": self.flops,
            "bytes_per_update": self.work.bytes,
            "compile_seconds": round(self.compile_seconds, 1),
        }


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """All programs of a run, compiled for a target."""

    recipe: str
    arch: str
    target: Target
    num_envs: int
    programs: list[Compiled]

    @property
    def memory(self) -> list[tuple[str, dict[str, int]]]:
        """Role and bytes by part of each kind of device; one device may have all roles."""
        parts = [(x.program.role, x.memory) for x in self.programs]
        if len(parts) > 1 and len(self.target.devices) == self.target.num_hosts:
            (_, learner), (_, actor) = parts
            shared = {f"{x} of actors" if x in learner else x: n for x, n in actor.items()}
            return [("device", learner | shared)]
        return parts

    @property
    def least_seconds(self) -> float | None:
        """Lower bound on the time of an update, None where the device's speed is not known.

        It is the longer of the time to launch all kernels and the time of all products at the
        device's peak. Bytes give no bound: a cache may hold them.
        """
        kind, first = self.target.kind, self.programs[0]
        if kind is None:
            return None
        launches = LAUNCH_SECONDS * first.work.kernels.total() if kind.platform == "cuda" else 0.0
        return max(launches, first.flops / kind.flops)

    @property
    def largest_bytes(self) -> int:
        """Memory of the fullest device."""
        return max(sum(parts.values()) for _, parts in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the memory of each device suffices, None where it is not known."""
        usable = self.target.usable_bytes
        return None if usable is None else self.largest_bytes <= usable

    def to_json(self) -> dict[str, Any]:
        """Return all facts as JSON; those of the first program stand at the top, too."""
        programs = [x.to_json() for x in self.programs]
        return {
            "recipe": self.recipe,
            "arch": self.arch,
            "target": self.target.name,
            "device": self.target.title,
            "devices": len(self.target.devices),
            "hosts": self.target.num_hosts,
            "num_envs": self.num_envs,
            **{k: v for k, v in programs[0].items() if k not in ("role", "devices_of_host")},
            "usable_bytes": self.target.usable_bytes,
            "fits": self.fits,
            "update_seconds_at_least": self.least_seconds,
            "programs": programs,
        }


def compile_run(experiment: Experiment, target: Target) -> CompiledRun:
    """Compile the programs of a run for a target.

    Raises `ConfigError` where the run is impossible there.
    """
    with traced_for(target.platform):
        programs = [compile_program(x, target) for x in programs_of(experiment, target)]
    num_envs = experiment.run_driver.num_envs * max(1, len(experiment.pods))
    return CompiledRun(experiment.recipe, experiment.arch, target, num_envs, programs)


def scaled(experiment: Experiment, devices: int) -> Experiment:
    """Return an experiment with so many times the environments, the frames and the replay.

    A population stays as it is: each of its pods is on one device.
    """
    if experiment.pods:
        return experiment

    def times(config: Any, *names: str) -> Any:
        return dataclasses.replace(config, **{x: devices * getattr(config, x) for x in names})

    agent: Any = experiment.agent
    if (replay := getattr(agent, "replay", None)) is not None:
        replay = times(replay, "capacity", "batch_size", "warmup")
        agent = dataclasses.replace(agent, replay=replay)
    experiment = dataclasses.replace(times(experiment, "frames"), agent=agent)
    return dataclasses.replace(experiment, driver=times(experiment.driver, "num_envs"))


def compile_program(program: Program, target: Target) -> Compiled:
    """Compile one program for a target, within `traced_for` its platform."""
    start = time.process_time()
    traced = program.function.trace(*program.arguments)
    try:
        lowered = traced.lower()
        compiled = lowered.compile()
        seconds, memory = time.process_time() - start, compiled.memory_analysis()
        text = _text(lowered, compiled)
    except jax.errors.JaxRuntimeError as error:
        raise _failure(str(error), program, target) from error
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    arrays -= memory.alias_size_in_bytes
    temporary, code = memory.temp_size_in_bytes, memory.generated_code_size_in_bytes
    bytes_beside = max(0, arrays - sum(program.state.values())) + code
    update, flops = Text(text).update, matrix_flops(traced.jaxpr.jaxpr)
    total = arrays + temporary + code
    return Compiled(program, total, temporary, bytes_beside, update, flops, seconds)


def _text(lowered: Any, compiled: Any) -> str:
    """Return the text of a compiled program.

    JAX cannot read all instructions of a compiler with a newer XLA than its own, such as a scatter
    on the SparseCore of a TPU. Such a program is compiled once more, and the compiler writes it.
    """
    try:
        with without_stderr():  # a trace of C++
            return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        with tempfile.TemporaryDirectory() as folder:
            lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
            paths = [*Path(folder).glob("*after_optimizations.txt")]
            if not paths:
                raise
            return paths[0].read_text()


def _failure(text: str, program: Program, target: Target) -> PodracerError:
    """Return the error of a compiler, in one sentence."""
    sizes = re.search(r"\(([\d.]+[KMG])\) exceeds available HBM \(([\d.]+[KMG])\)", text)
    if sizes is None or target.kind is None:
        reason = next(iter(text.splitlines()), "")
        return PodracerError(
            f"the compiler for {target.name} fails on the {program.role}: {reason}"
        )
    larger = [
        name
        for name, kind in KINDS.items()
        if kind.platform == target.kind.platform and kind.memory_bytes > target.kind.memory_bytes
    ]
    return ConfigError(
        f"the program of the {program.role} needs {sizes[1]} in the {sizes[2]} of a {target.title}:"
        " take fewer `driver.num_envs`, a smaller replay if it has one (`agent.replay.capacity`), "
        "or a target with more memory "
        f"({', '.join(larger) or 'none is known'})."
    )


def show(run: CompiledRun) -> str:
    """Return the facts as text."""
    target, count = run.target, len(run.target.devices)
    hosts = f" on {target.num_hosts} hosts" if target.num_hosts > 1 else ""
    lines = [
        f"{run.recipe} under {run.arch.capitalize()}: {run.num_envs:,} environments, "
        f"{count:,} x {target.title}{hosts}"
    ]
    for compiled in run.programs:
        facts, role = compiled.to_json(), compiled.program.role
        call, unit = ("a call", "rows") if role == "actor" else ("an update", "environment steps")
        memory = compiled.memory
        numbers = {
            f"{unit} of {call}": "steps_per_update",
            f"kernels of {call}": "kernels_per_update",
            "kernels of an environment step": "kernels_per_step",
            "kernels of a minibatch": "kernels_per_minibatch",
            f"FLOPs of {call}, matrix products": "flops_per_update",
            f"bytes that {call} moves": "bytes_per_update",
        }
        sizes = Counter((x.kind, x.bytes) for x in compiled.work.collectives)
        rows = [(name, format_bytes(n)) for name, n in memory.items() if n]
        rows += [(name, f"{facts[key]:,}") for name, key in numbers.items() if facts[key]]
        rows += [(f"{kind} x {n}", format_bytes(size)) for (kind, size), n in sizes.items()]
        rows += [("CPU seconds to trace and compile", str(facts["compile_seconds"]))]
        lines += ["", f"Each {role}:", *(f"  {name:42}{value:>14}" for name, value in rows)]
    if target.usable_bytes is not None:
        verb, usable = "fits" if run.fits else "does not fit", format_bytes(target.usable_bytes)
        lines += ["", f"It {verb} into the {usable} that a program may use there."]
    return "\n".join(lines)


def matrix_flops(jaxpr: Any, is_needed: Sequence[bool] = ()) -> int:
    """Return the operations of the matrix products and convolutions that the results need.

    A product's multiplication and addition count as two. A loop of unknown length counts once, a
    condition as its dearest branch. `is_needed` tells which results are needed, all if it is empty.
    """
    needed = {id(x) for x, keep in zip_longest(jaxpr.outvars, is_needed, fillvalue=True) if keep}
    total = 0
    for equation in reversed(jaxpr.eqns):
        outputs = [id(x) in needed for x in equation.outvars]
        if any(outputs):
            total += _flops(equation, outputs)
            needed |= {id(x) for x in equation.invars}
    return total


def _flops(equation: Any, is_needed: list[bool]) -> int:
    name, params, result = equation.primitive.name, equation.params, equation.outvars[0].aval
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * result.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        numbers, kernel = params["dimension_numbers"], equation.invars[1].aval
        per_output = kernel.size // kernel.shape[numbers.rhs_spec[0]]
        zeros = math.prod(params["lhs_dilation"])  # between the pixels, not multiplied
        return 2 * result.size * per_output // zeros
    if name == "cond":
        return max(matrix_flops(branch.jaxpr, is_needed) for branch in params["branches"])
    is_loop = name in ("scan", "while")  # another iteration may need what no result does
    times = params["length"] if name == "scan" else 1
    return times * sum(
        matrix_flops(x, () if is_loop or len(x.outvars) != len(is_needed) else is_needed)
        for x in jaxprs_in_params(params)
    )
