"""Trading: markets, their indicators, and the environment."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from podracer.environment import AutoReset, auto_reset
from podracer.envs.trading.bars import load_market
from podracer.envs.trading.environment import Trading
from podracer.envs.trading.market import split_market
from podracer.envs.trading.synthetic import synthetic_market, wave_market

_SETTINGS = {field.name for field in dataclasses.fields(Trading)} - {"periods", "name", "period"}


def trading(
    source: str,
    *,
    train_until: float | str = 0.6,
    validate_until: float | str = 0.8,
    **options: Any,
) -> AutoReset:
    """Return the environment that trades in a market, restarting by itself.

    `source` is `synthetic`, `wave`, or a `.csv` or `.parquet` file. The environment trains in the
    first of three periods, see `split_market`. Further options are fields of `Trading` and
    arguments of `synthetic_market`, `wave_market` or `load_market`. Raises `ConfigError` for
    invalid values, and where a file needs pyarrow that is not installed.
    """
    settings = {name: options.pop(name) for name in _SETTINGS & options.keys()}
    make = {"synthetic": synthetic_market, "wave": wave_market}.get(
        source, partial(load_market, source)
    )
    periods = split_market(make(**options), train_until, validate_until)
    return auto_reset(Trading(periods, source, **settings))
