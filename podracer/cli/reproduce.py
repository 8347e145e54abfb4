"""The command that measures the papers' figures: `podracer reproduce`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from podracer.cli.arguments import parse
from podracer.io.names import nearest

if TYPE_CHECKING:
    from podracer.reproduce.figure import Figure, Record, Scale


@dataclasses.dataclass(frozen=True)
class ReproduceOptions:
    """Flags of `podracer reproduce`."""

    figures: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of the figures to measure; by default all of them."""
    scale: Literal["laptop", "accelerator"] = "laptop"
    """Size of the measurements: minutes each on two cores, or what needs a GPU or a TPU."""
    out: Path = Path("runs/reproduction")
    """Directory of the records, the runs and the page. What is measured there is not repeated."""
    list: bool = False
    """Print the figures with their minutes and verdicts, and measure nothing."""
    page: bool = False
    """Write the page from what has been measured, and measure nothing."""


def reproduce(arguments: Sequence[str]) -> int:
    """Run `podracer reproduce`: measure published figures, and write the page that judges them."""
    options = parse(
        ReproduceOptions, "reproduce", arguments,
        about="Measure the papers' figures and write a page with each published curve under ours. "
        "It continues where it stopped; figures that were not measured in --out are shown with "
        "the project's own points.",
    )  # fmt: skip
    from podracer.io.run_directory import check_room
    from podracer.reproduce.figures import FIGURES
    from podracer.reproduce.measure import RECORDS, measure_figures
    from podracer.types import ConfigError, PodracerError

    for name in options.figures:
        if name not in FIGURES:
            raise ConfigError(f"There is no figure {name!r}: {nearest(name, FIGURES)}")
    figures = [FIGURES[name] for name in options.figures or FIGURES]
    if options.list:
        _print_list(figures, _records(options.out / RECORDS), options.scale)
        return 0

    def write() -> None:
        _write_pages(list(FIGURES.values()), options.out)

    failed = []
    check_room(options.out)
    if not options.page:
        failed = measure_figures(figures, options.scale, options.out, _show, write)
    write()
    _print_verdicts(figures, _records(options.out / RECORDS))
    print(options.out / "index.html")
    if failed:
        names = ", ".join(f"{record.case} of {record.figure}" for record in failed)
        raise PodracerError(f"cases failed, which the same command repeats: {names}.")
    return 0


def _show(text: str) -> None:
    print(text, flush=True)


def _records(path: Path) -> list[Record]:
    from podracer.reproduce.records import SHIPPED, read_records, shown_records

    return shown_records(read_records(path), read_records(SHIPPED))


def _write_pages(figures: Sequence[Figure], out: Path) -> None:
    from podracer.io.run_directory import write_bytes
    from podracer.reproduce.measure import RECORDS
    from podracer.reproduce.page import html_page, markdown_page

    records = _records(out / RECORDS)
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "index.html", html_page(figures, records).encode())
    write_bytes(out / "reproduction.md", markdown_page(figures, records).encode())


def _print_list(figures: Sequence[Figure], records: Sequence[Record], scale: Scale) -> None:
    from podracer.reproduce.figure import verdict

    for figure in figures:
        is_known = scale == "laptop" and figure.cases(scale)
        minutes = f"{figure.minutes:.0f} min" if is_known else "-"
        outcome = verdict(figure, records).outcome.value
        print(f"  {figure.name:24} {minutes:>7}  {outcome:18} {figure.title}")


def _print_verdicts(figures: Sequence[Figure], records: Sequence[Record]) -> None:
    from podracer.reproduce.figure import verdict

    for figure in figures:
        judged = verdict(figure, records)
        print(f"{figure.name}: {judged.outcome.value}. {judged.reason}")
