"""Trading: markets, their indicators, the environment, and the figures of a back-test."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from podracer.environment import AutoReset, auto_reset
from podracer.envs.trading.bars import load
from podracer.envs.trading.environment import Trading
from podracer.envs.trading.market import split
from podracer.envs.trading.synthetic import synthetic, wave

_SETTINGS = {field.name for field in dataclasses.fields(Trading)} - {"split", "name", "period"}


def trading(
    source: str,
    *,
    train_until: float | str = 0.6,
    validate_until: float | str = 0.8,
    **options: Any,
) -> AutoReset:
    """The environment that trades in a market: `synthetic`, `wave`, or the user's own `.csv` or
    `.parquet` file. It trains in the first of three periods, see `market.split`.

    Further options are those of `Trading` and of the market's maker: `synthetic`, `wave` or `load`.
    Raises `ConfigError` for what cannot be, and where a file needs pyarrow that is not installed.
    """
    settings = {name: options.pop(name) for name in _SETTINGS & options.keys()}
    make = {"synthetic": synthetic, "wave": wave}.get(source, partial(load, source))
    periods = split(make(**options), train_until, validate_until)
    return auto_reset(Trading(periods, source, **settings))
