"""The commands for runs that trade: `podracer backtest`, `promote` and `rollback`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from podracer.cli.arguments import RunPath, parse
from podracer.cli.run_options import AtCheckpoint, output_file

if TYPE_CHECKING:
    from podracer.trading.backtest import Backtest

ModelsPath = Annotated[Path, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class BacktestOptions:
    """Flags of `podracer backtest`."""

    run: RunPath
    """Directory of the run."""
    checkpoint: AtCheckpoint = "newest"
    out: Path | None = None
    """Path of the HTML file. By default backtest.html in the run."""
    json: bool = False
    """Print one JSON object."""


def backtest(arguments: Sequence[str]) -> int:
    """Run `podracer backtest`: compare a run's policy with the baselines."""

    options = parse(
        BacktestOptions, "backtest", arguments,
        about="Compare the policy of a trading run with the baselines, as a table and a page.",
    )  # fmt: skip
    from podracer.experiments.hosts import use_compilation_cache
    from podracer.trading.backtest import backtest
    from podracer.trading.page import write_page

    use_compilation_cache()
    out = output_file(options.out, options.run / "backtest.html", (".html", ".htm"))
    result = backtest(options.run, checkpoint=options.checkpoint)
    page = write_page(result, out)
    if options.json:
        print(json.dumps(result.to_json()))
    else:
        _print_table(result)
        print(page)
    return 0


def _print_table(result: Backtest) -> None:
    from podracer.trading.backtest import date_range
    from podracer.trading.page import rows

    for title, outcome in (("Validation", result.validation), ("Back-test", result.backtest)):
        print(f"{title}, {' to '.join(date_range(outcome.period))}")
        table = rows(outcome)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *numbers in table:
            cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
            print("  ".join([name.ljust(widths[0]), *cells]).rstrip())
        print()


@dataclasses.dataclass(frozen=True)
class PromoteOptions:
    """Flags of `podracer promote`."""

    models: ModelsPath
    """Directory of the models; made if there is none."""
    run: RunPath
    """Directory of the run whose checkpoint may become the current model."""
    checkpoint: AtCheckpoint = "newest"


def promote(arguments: Sequence[str]) -> int:
    """Run `podracer promote`: return 0 if the run is now the current model, 1 if refused."""

    options = parse(
        PromoteOptions, "promote", arguments,
        about="Make a run the current model if it is better. Exits with 1 if it is not.",
    )  # fmt: skip
    from podracer.experiments.hosts import use_compilation_cache
    from podracer.trading.delivery import promote

    use_compilation_cache()
    decision = promote(options.models, options.run, checkpoint=options.checkpoint)
    promoted = decision.action == "promote"
    current = options.models / decision.model
    print(f"{'Promoted' if promoted else 'Refused'}: the current model is {current}")
    print(f"Validation, {' to '.join(decision.window)}")
    for name, gain in (
        (decision.run, decision.score),
        ("current until now", decision.previous_score),
    ):
        if gain is not None:
            print(f"  {name:40} {100 * gain:+.2f} %")
    return 0 if promoted else 1


@dataclasses.dataclass(frozen=True)
class RollbackOptions:
    """Flags of `podracer rollback`."""

    models: ModelsPath
    """Directory of the models."""


def rollback(arguments: Sequence[str]) -> int:
    """Run `podracer rollback`: make the previous model the current one again."""

    options = parse(
        RollbackOptions, "rollback", arguments, about="Make the previous model current again."
    )
    from podracer.trading.delivery import rollback

    decision = rollback(options.models)
    print(f"Rolled back: the current model is {options.models / decision.model}")
    return 0
