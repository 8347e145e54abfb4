"""The commands for runs that trade: `podracer backtest`, `promote` and `rollback`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from podracer.cli.arguments import RunPath, parse

if TYPE_CHECKING:
    from podracer.trading.backtest import Backtest

ModelsPath = Annotated[Path, tyro.conf.Positional]


def backtest(arguments: Sequence[str]) -> int:
    """`podracer backtest`: a run's policy beside the baselines, as a table and as a page."""

    @dataclasses.dataclass(frozen=True)
    class BacktestCommand:
        run: RunPath
        """The run's directory."""
        out: Path | None = None
        """The HTML file; by default backtest.html in the run."""
        json: bool = False
        """Print one JSON object."""

    parsed = parse(BacktestCommand, "backtest", arguments)
    from podracer.experiments.training import use_compilation_cache
    from podracer.trading.backtest import backtest
    from podracer.trading.page import write_page

    use_compilation_cache()
    result = backtest(parsed.run)
    page = write_page(result, parsed.out or parsed.run / "backtest.html")
    if parsed.json:
        print(json.dumps(result.to_json()))
    else:
        _show(result)
        print(page)
    return 0


def _show(result: Backtest) -> None:
    from podracer.trading.backtest import dates
    from podracer.trading.page import rows

    for name, outcome in (("Validation", result.validation), ("Back-test", result.backtest)):
        print(f"{name}, {' to '.join(dates(outcome.period))}")
        shown = rows(outcome)
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for first, *rest in shown:
            cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        print()


def promote(arguments: Sequence[str]) -> int:
    """`podracer promote`: 0 if the run's policy is now the current model, 1 if it was refused."""

    @dataclasses.dataclass(frozen=True)
    class Promote:
        models: ModelsPath
        """The directory of models; made if there is none."""
        run: RunPath
        """The run whose newest checkpoint is to become the current model."""

    parsed = parse(Promote, "promote", arguments)
    from podracer.experiments.training import use_compilation_cache
    from podracer.trading.delivery import promote

    use_compilation_cache()
    decision = promote(parsed.models, parsed.run)
    promoted = decision.action == "promote"
    current = parsed.models / decision.model
    print(f"{'Promoted' if promoted else 'Refused'}: the current model is {current}")
    print(f"Validation, {' to '.join(decision.window)}")
    for name, gain in ((decision.run, decision.score), ("current until now", decision.before)):
        if gain is not None:
            print(f"  {name:40} {100 * gain:+.2f} %")
    return 0 if promoted else 1


def rollback(arguments: Sequence[str]) -> int:
    """`podracer rollback`: the model before the current one is current again."""

    @dataclasses.dataclass(frozen=True)
    class Rollback:
        models: ModelsPath
        """The directory of models."""

    parsed = parse(Rollback, "rollback", arguments)
    from podracer.trading.delivery import rollback

    decision = rollback(parsed.models)
    print(f"Rolled back: the current model is {parsed.models / decision.model}")
    return 0
