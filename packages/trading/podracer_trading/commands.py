"""The commands for runs that trade: `podracer backtest`, `promote` and `rollback`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from podracer.cli.arguments import parse
from podracer.cli.run_options import AtCheckpoint, RunOptions, output_file
from podracer.cli.values import Mark, RunPath
from podracer.io.addresses import output_folder
from podracer.io.text import print_json

ModelsPath = Annotated[Path, Mark.POSITIONAL]


@dataclasses.dataclass(frozen=True)
class BacktestOptions:
    """Flags of `podracer backtest`."""

    run: RunPath
    """Directory of the run."""
    recipe: str | None = None
    """Recipe that made the run, if agent or network are your own."""
    checkpoint: AtCheckpoint = "newest"
    output: Path | None = None
    """Path of the HTML file. By default backtest.html in the run."""
    json: bool = False
    """Print one JSON object."""


def backtest(arguments: Sequence[str]) -> int:
    """Compare a trading run with the baselines, as a table and a page."""
    options = parse(BacktestOptions, "backtest", arguments, description=backtest.__doc__ or "")
    from podracer.devices.startup import use_compilation_cache
    from podracer_trading import page
    from podracer_trading.backtest import backtest as compare

    use_compilation_cache()
    page_of_run = output_folder(options.run) / "backtest.html"
    file = output_file(options.output, page_of_run, (".html", ".htm"))
    experiment = RunOptions(options.run, options.recipe).reopen()
    result = compare(options.run, recipe=experiment, checkpoint=options.checkpoint)
    path = page.write_page(result, file)
    if options.json:
        print_json(result.to_json())
        return 0
    for title, outcome in (("Validation", result.validation), ("Back-test", result.backtest)):
        print(page.heading(title, outcome))
        rows = page.rows(outcome)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *numbers in rows:
            cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
            print("  ".join([name.ljust(widths[0]), *cells]).rstrip())
        print()
    print(path)
    return 0


@dataclasses.dataclass(frozen=True)
class PromoteOptions:
    """Flags of `podracer promote`."""

    models: ModelsPath
    """Directory of the models; made if there is none."""
    run: RunPath
    """Directory of the run whose checkpoint may become the current model."""
    recipe: str | None = None
    """Recipe that made the run and the current model, if agent or network are your own."""
    checkpoint: AtCheckpoint = "newest"


def promote(arguments: Sequence[str]) -> int:
    """Make a run the current model if it is better; exit with 1 if it is not."""
    options = parse(PromoteOptions, "promote", arguments, description=promote.__doc__ or "")
    from podracer.devices.startup import use_compilation_cache
    from podracer_trading import delivery

    use_compilation_cache()
    experiment = RunOptions(options.run, options.recipe).reopen()
    decision = delivery.promote(
        options.models, options.run, recipe=experiment, checkpoint=options.checkpoint
    )
    promoted = decision.action == "promote"
    current = options.models / decision.model
    print(f"{'Promoted' if promoted else 'Refused'}: the current model is {current}")
    print(f"Validation, {' to '.join(decision.window)}")
    scores = {decision.run: decision.score, "current until now": decision.previous_score}
    for name, gain in scores.items():
        if gain is not None:
            print(f"  {name:40} {100 * gain:+.2f} %")
    return 0 if promoted else 1


@dataclasses.dataclass(frozen=True)
class RollbackOptions:
    """Flags of `podracer rollback`."""

    models: ModelsPath
    """Directory of the models."""


def rollback(arguments: Sequence[str]) -> int:
    """Make the previous model current again."""
    options = parse(RollbackOptions, "rollback", arguments, description=rollback.__doc__ or "")
    from podracer_trading import delivery

    decision = delivery.rollback(options.models)
    print(f"Rolled back: the current model is {options.models / decision.model}")
    return 0
