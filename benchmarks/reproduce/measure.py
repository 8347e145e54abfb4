"""Measuring: the commands of each case in processes of their own, recorded as each case ends."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.machine import host
from benchmarks.reproduce.figure import Case, Figure, Record, Scale, Values
from benchmarks.reproduce.records import append_record, read_records
from podracer.devices.machine import num_cores
from podracer_plan.child import PODRACER, child_process, printed_objects

BENCH = Path(__file__).parents[1] / "bench.py"
RECORDS = "records.jsonl"
Show = Callable[[str], None]
_TAIL = 400  # characters of what a failed command said last


def measure_figures(
    figures: Iterable[Figure], scale: Scale, out: Path, show: Show, done: Callable[[], None]
) -> list[Record]:
    """Measure the cases that have no record in `out` yet, and append each one as it ends.

    A case that failed, and a rate that was measured while the machine was busy, are tried again.
    `done` is called after each figure. Returns the records of cases that failed.
    """
    failed = []
    out.mkdir(parents=True, exist_ok=True)
    figures = list(figures)
    for number, figure in enumerate(figures, 1):
        cases = figure.cases(scale)
        timed = {case.name for case in cases if case.timed}
        known = {
            record.case
            for record in read_records(out / RECORDS)
            if (record.figure, record.scale) == (figure.name, scale)
            and not record.error
            and not (record.is_busy and record.case in timed)
        }
        show(f"[{number}/{len(figures)}] {figure.name}: {figure.title}")
        if not cases:
            show(f"    nothing to run at the scale of a {scale}: {figure.impossible or figure.run}")
        elif reason := figure.missing():
            show(f"    not run: {reason}")
            cases = ()
        for place, case in enumerate(cases, 1):
            if case.name in known:
                show(f"    {case.name}: measured before")
                continue
            show(f"    {case.name} ({place} of {len(cases)}) begins")
            began = time.perf_counter()
            record = _measure(figure, case, scale, out)
            append_record(out / RECORDS, record)
            if record.error:
                failed.append(record)
            is_doubtful = record.is_busy and case.timed
            outcome = record.error or ("machine was busy" if is_doubtful else "done")
            show(f"    {case.name}: {outcome} ({time.perf_counter() - began:.0f} s)")
        done()
    return failed


def _measure(figure: Figure, case: Case, scale: Scale, out: Path) -> Record:
    """Run the commands of a case, and return its record."""
    folder = out / "runs" / figure.name
    folder.mkdir(parents=True, exist_ok=True)
    if case.inputs is not None:
        case.inputs(folder)
    began, others, used = time.perf_counter(), seconds_of_machine(), _child_seconds()
    values: Values = {}
    printed: list[Values] = []
    shown, error = [], ""
    for template in case.commands:
        arguments = _resumed([part.format(folder=folder) for part in template])
        script = ["python", "benchmarks/bench.py"]
        is_bench = template[0] == "bench"
        shown.append(shlex.join([*script, *template[1:]] if is_bench else ["podracer", *template]))
        code, lines = run_command(arguments)
        printed += printed_objects(lines)
        if code:
            error = f"exit code {code}: {' '.join(lines)[-_TAIL:]}"
            break
    else:
        try:
            values = case.read(printed, folder)
        except Exception as fault:  # which must not lose the other cases
            error = f"its output cannot be read: {type(fault).__name__}: {fault}"[:_TAIL]
    seconds, cpu_seconds = time.perf_counter() - began, _child_seconds() - used
    context = {
        **host(),
        "cores": num_cores(),
        "commands": shown,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }
    if others is not None and (busy_seconds := seconds_of_machine()) is not None:
        total = seconds * (os.cpu_count() or 1)
        context["busy"] = round(max(0.0, busy_seconds - others - cpu_seconds) / total, 3)
    record = Record(figure.name, case.name, scale, values, context, error)
    if record.is_busy:
        values.pop("seconds", None)  # of a learning curve, where they say nothing now
    return record


def _resumed(arguments: list[str]) -> list[str]:
    """Return the command that continues a run, if the directory of `--run-dir` holds one."""
    if "--run-dir" in arguments:
        run = Path(arguments[arguments.index("--run-dir") + 1])
        if (run / "config.json").exists() or (run / "leaderboard.jsonl").exists():
            return ["resume", str(run)]
    return arguments


def run_command(arguments: list[str]) -> tuple[int, list[str]]:
    """Run `podracer` or `bench.py`; return its exit code and the lines that it printed.

    If this process is stopped, so is the command. If it is killed, `podracer` stops, which saves a
    run.
    """
    program = PODRACER
    if arguments[0] == "bench":
        program, arguments = [str(BENCH)], arguments[1:]
    with child_process(arguments, program, stderr=subprocess.STDOUT, errors="replace") as process:
        output = process.communicate()[0]
    return process.returncode, output.splitlines()


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds_of_machine() -> float | None:
    """Return the processor seconds that all programs used since the start, None if unknown."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system = (int(x) for x in first[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
