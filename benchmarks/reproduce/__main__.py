"""Measure the papers' figures, and write a page with each published curve under ours.

    python -m benchmarks.reproduce [FIGURE ...] [--scale accelerator] [--out DIRECTORY]
    python -m benchmarks.reproduce --list     the figures with their minutes and verdicts
    python -m benchmarks.reproduce --page     the page from what has been measured

It continues where it stopped. Figures that were not measured in --out are shown with the project's
own points.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reproduce.figure import SCALES, Figure, Record, Scale, verdict
from benchmarks.reproduce.figures import FIGURES
from benchmarks.reproduce.measure import RECORDS, measure_figures
from benchmarks.reproduce.page import html_page, markdown_page
from benchmarks.reproduce.records import project_records, read_records, shown_records
from podracer.errors import ConfigError, PodracerError
from podracer.io.exits import STOPPED, exit_on_stop, own_process
from podracer.io.paths import user_path
from podracer.io.run_directory import check_room, write_bytes
from podracer.io.text import explain_error, print_stderr
from podracer.names import nearest
from podracer.run.errors import classify_error


def reproduce(arguments: Sequence[str]) -> None:
    """Measure published figures, and write the page that judges them."""
    options = _parser().parse_args(arguments)
    out = user_path(options.out)
    for name in options.figures:
        if name not in FIGURES:
            raise ConfigError(f"There is no figure {name!r}: {nearest(name, FIGURES)}")
    figures = [FIGURES[name] for name in options.figures or FIGURES]
    if options.list:
        _print_list(figures, _records(out), options.scale)
        return
    failed = []
    check_room(out)
    if not options.page:
        failed = measure_figures(figures, options.scale, out, _show, lambda: _write_pages(out))
    _write_pages(out)
    records = _records(out)
    for figure in figures:
        judged = verdict(figure, records)
        print(f"{figure.name}: {judged.outcome.value}. {judged.reason}")
    print(out / "index.html")
    if failed:
        names = ", ".join(f"{record.case} of {record.figure}" for record in failed)
        raise PodracerError(f"cases failed, which the same command repeats: {names}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="default: all of them")
    parser.add_argument(
        "--scale", choices=SCALES, default="laptop",
        help="minutes each on two cores, or what needs a GPU or a TPU",
    )  # fmt: skip
    parser.add_argument(
        "--out", default="runs/reproduction",
        help="directory of records, runs and page; what was measured there is not repeated",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the figures, measure nothing")
    parser.add_argument("--page", action="store_true", help="write the page, measure nothing")
    return parser


def _show(text: str) -> None:
    print(text, flush=True)


def _records(out: Path) -> list[Record]:
    return shown_records(read_records(out / RECORDS), project_records())


def _write_pages(out: Path) -> None:
    figures, records = list(FIGURES.values()), _records(out)
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "index.html", html_page(figures, records).encode())
    write_bytes(out / "reproduction.md", markdown_page(figures, records).encode())


def _print_list(figures: Sequence[Figure], records: Sequence[Record], scale: Scale) -> None:
    for figure in figures:
        is_known = scale == "laptop" and figure.cases(scale)
        minutes = f"{figure.minutes:.0f} min" if is_known else "-"
        outcome = verdict(figure, records).outcome.value
        print(f"  {figure.name:24} {minutes:>7}  {outcome:18} {figure.title}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and exit with a code of `docs/reliability.md`."""
    code = 0
    try:
        with own_process(), exit_on_stop():
            reproduce(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print_stderr("stopped by Ctrl-C.")
        code = STOPPED
    except Exception as error:
        code = explain_error(classify_error(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
