"""The fault matrix: which faults the tests put podracer through, and how many came out right.

A test belongs to a figure by its mark, and is one case of it. One that goes through many cases
counts them with the fixture `cases`:

    @pytest.mark.figure(3)
    def test_damage_is_found(cases):
        for trial in cases(range(200)):
            assert ...

`pytest -m figure --fault-matrix docs/fault-matrix.json` prints the table and writes it as JSON,
`--figures 9,14` runs the tests of these figures only. As a program, this file puts the record into
docs/reliability.md.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "docs" / "fault-matrix.json"
BEGIN, END = "<!-- fault matrix -->\n", "<!-- end of the fault matrix -->\n"
PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "numpy", "gymnasium")


class Figure(NamedTuple):
    fault: str
    goal: str


FIGURES = {
    1: Figure("SIGKILL at random moments, then resume: bit-exact", "200/200, 80 during a save"),
    2: Figure(
        "killed at every file-system call of save, seal and collection", "all of 100 or more"
    ),
    3: Figure("damaged checkpoints: found, and the step before restored", "400/400"),
    4: Figure("SIGTERM: nothing lost, exit code 75", "50/50"),
    5: Figure("a fault in any thread of Sebulba: clean exit with its cause", "1000/1000"),
    6: Figure("a component that hangs: named, with all stacks", "50/50"),
    7: Figure("an environment's process killed: replaced, the others untouched", "100/100"),
    8: Figure("kinds of bad data from environments: caught", "12/12"),
    9: Figure("values that are not finite: caught in their update, never saved", "12/12"),
    10: Figure("checkpoints of another schema or version: refused", "15/15"),
    11: Figure("every step is counted once, over kills and replacements", "300/300"),
    12: Figure("start and stop: no thread, process, file or memory left", "100/100"),
    13: Figure("faults of pods and of the tournament's driver: nothing lost or doubled", "200/200"),
    14: Figure("writers of the leaderboard killed: no acknowledged row lost", "400/400"),
    15: Figure("entries scored again from their checkpoints: equal bits", "20/20"),
    16: Figure("hostile files and names: nothing runs, nothing escapes", "100/100"),
    17: Figure("sockets that listen beyond the loopback interface: none", "every command"),
    18: Figure("files without pickle, eval and other code from data", "every file"),
    19: Figure("a lost peer process: the others end within 12 s, resume is exact", "5/5"),
    20: Figure("bad configurations: refused before any compile", "60/60"),
    21: Figure("an environment ten times slower: named, the others go on", "85 % of throughput"),
    22: Figure("orders of events between actors and learner: no deadlock", "every order"),
    23: Figure("killed every 20 s for ten minutes: finished, bit-exact", "30 kills, goodput 60 %"),
    24: Figure("sinks that fail: the run goes on", "2 % of throughput"),
    25: Figure("guards whose removal a test notices", "9 of 10"),
    26: Figure("stores that fail, machines that are lost: the copy comes back exactly", "200/200"),
}


# --- what a test reports --------------------------------------------------------------------------


class Cases:
    """Counts the cases that one test goes through."""

    def __init__(self) -> None:
        self.counts: list[list[Any]] = []  # passed, total, figure
        self.notes: list[str] = []

    def __call__(self, items: Collection[Any]) -> Iterator[Any]:
        """Yield the items; one has passed when the next is asked for."""
        count = [0, len(items), None]
        self.counts.append(count)
        for item in items:
            yield item
            count[0] += 1

    def add(self, passed: int, total: int, figure: int | None = None) -> None:
        """Count cases that were not gone through one by one, of one figure where a test has two."""
        self.counts.append([int(passed), total, figure])

    def note(self, text: str) -> None:
        """Show a measured quantity beside the count, "p99 5 ms"."""
        self.notes.append(text)


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[Cases]:
    counter = Cases()
    yield counter
    request.node.user_properties.append(("cases", (counter.counts, counter.notes)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "figure(number, ...): rows of the fault matrix")
    path = config.getoption("--fault-matrix")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-matrix", metavar="FILE", help="write the fault matrix as JSON")
    parser.addoption("--figures", metavar="N,N", help="run the tests of these figures only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--figures")
    numbers = FIGURES.keys() if chosen is None else set(map(int, chosen.split(",")))
    for item in list(items):
        figures = [number for mark in item.iter_markers("figure") for number in mark.args]
        if unknown := set(figures) - FIGURES.keys():
            raise pytest.UsageError(f"{item.nodeid}: the fault matrix has no figure {unknown}")
        item.user_properties.append(("figures", figures))
        if chosen is not None and not numbers & set(figures):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


# --- the record -----------------------------------------------------------------------------------


class Recorder:
    """Collects what tests report (from all processes of xdist) and writes the record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: dict[str, list[pytest.TestReport]] = {}
        self.tests: dict[str, dict[str, Any]] = {}  # those that have ended, not the skipped ones

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once its fixtures are torn down, unless it was skipped."""
        properties = dict(report.user_properties)
        reports = self.reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in ("setup", "call") or any(earlier.skipped for earlier in reports):
            return
        failed = any(earlier.failed for earlier in reports)
        counts, notes = properties.get("cases", ([], []))
        if not counts or (failed and all(passed == total for passed, total, _ in counts)):
            counts = [*counts, (int(not failed), 1, None)]
        figures = properties.get("figures", ())
        self.tests[report.nodeid] = {
            "figures": figures, "failed": failed, "counts": counts, "notes": notes,
        }  # fmt: skip

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Replace the rows of the record that have no more cases than were counted now."""
        record = json.loads(self.path.read_text()) if self.path.exists() else {}
        about = provenance()
        for number in map(str, FIGURES):
            row = self._row(int(number))
            if row["total"] and row["total"] >= record.get(number, row)["total"]:
                record[number] = row | about
        self.path.write_text(json.dumps(record, indent=1) + "\n")
        terminalreporter.write_line("\n" + table(record))

    def _row(self, number: int) -> dict[str, Any]:
        tests = {name: test for name, test in self.tests.items() if number in test["figures"]}
        counts = [c for test in tests.values() for c in test["counts"] if c[2] in (None, number)]
        return {
            "passed": sum(passed for passed, _, _ in counts),
            "total": sum(total for _, total, _ in counts),
            "notes": sorted({note for test in tests.values() for note in test["notes"]}),
            "failed": sorted(name for name, test in tests.items() if test["failed"]),
        }


def provenance() -> dict[str, str]:
    """Return the commit that was tested, the date, the machine and the versions."""
    processor = platform.processor() or platform.machine()
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return {
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{processor}, {os.cpu_count()} cores, {platform.system()}",
        "versions": ", ".join([f"python {platform.python_version()}", *versions]),
    }


# --- the table ------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown: one row for each figure, and where they were measured."""
    lines = ["| | fault and promise | goal | passed | measured | counted at |", "|---" * 6 + "|"]
    for number, (fault, goal) in FIGURES.items():
        row = record.get(str(number), {"passed": 0, "total": 0, "notes": [], "failed": []})
        passed = f"{row['passed']}/{row['total']}" if row["total"] else "not run"
        failed = f", **{len(row['failed'])} failed**" if row["failed"] else ""
        notes = "; ".join(_summed(row["notes"]))
        where = f"{row['commit']}, {row['date']}" if row["total"] else ""
        lines.append(f"| {number} | {fault} | {goal} | {passed}{failed} | {notes} | {where} |")
    commits: dict[str, dict[str, None]] = {}  # those of one day, machine and versions
    for row in record.values():
        about = f"{row['date']}, {row['machine']}, {row['versions']}"
        commits.setdefault(about, {})[row["commit"]] = None
    for about, names in commits.items():
        lines += ["", f"{', '.join(names)}: {about}."]
    return "\n".join(lines) + "\n"


def _summed(notes: Sequence[str]) -> list[str]:
    """Return the notes of several tests, counts of one thing (such as "2 refused") as their sum."""
    sums: dict[str, int] = {}
    others = []
    for note in notes:
        counts = [part.split(" ", 1) for part in note.split(", ")]
        if all(number.isdecimal() for number, *_ in counts):
            for number, label in counts:
                sums[label] = sums.get(label, 0) + int(number)
        else:
            others.append(note)
    return [*(f"{number} {label}" for label, number in sums.items()), *others]


def with_table(page: str, record: dict[str, Any]) -> str:
    """Return the page with this record's table in the place of the one that it has."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + table(record) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RECORD.read_text())))
