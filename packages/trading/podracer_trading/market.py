"""A market: bars of several tickers at the same times, and its split into three periods.

Axis letters of this package: N bars, D tickers, F indicators. Prices are float64, exact to the cent
through all sums here; the environment rounds them to float32 once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from typing import Any

import numpy as np

from podracer.errors import ConfigError

PRICES = ("open", "high", "low", "close")
SPLIT_THRESHOLD = 0.25  # relative change of the close between bars that looks like a split
TRADING_DAYS = 252  # in a year
_DATE = re.compile(r"[\d-]+([T ][\d:.]+)?")
_DATES_PER_YEAR = (TRADING_DAYS, 365, 52, 12, 4)


@dataclasses.dataclass(frozen=True)
class Market:
    """Bars of several tickers: a hashable value, equal where tickers and numbers are equal.

    Raises `ConfigError` with the first number that is invalid.
    """

    tickers: tuple[str, ...]  # [D]
    times: np.ndarray = dataclasses.field(
        compare=False, repr=False
    )  # datetime64[us] [N], ascending
    open: np.ndarray = dataclasses.field(compare=False, repr=False)  # f64 [N, D], as the next four
    high: np.ndarray = dataclasses.field(compare=False, repr=False)
    low: np.ndarray = dataclasses.field(compare=False, repr=False)
    close: np.ndarray = dataclasses.field(compare=False, repr=False)
    volume: np.ndarray = dataclasses.field(compare=False, repr=False)  # shares in the bar
    digest: str = dataclasses.field(init=False)  # SHA-256 of times and numbers

    def __post_init__(self) -> None:
        _set(self, "tickers", tuple(map(str, self.tickers)))
        _set(self, "times", _frozen(self.times, "datetime64[us]"))
        for name in (*PRICES, "volume"):
            _set(self, name, _frozen(getattr(self, name), np.float64))
        _check_axes(self)
        _check_cells(self)
        sha = hashlib.sha256()
        for name in ("times", *PRICES, "volume"):
            sha.update(getattr(self, name).tobytes())
        _set(self, "digest", sha.hexdigest())

    def __len__(self) -> int:
        return len(self.times)

    @property
    def bars_per_year(self) -> float:
        """Number of bars in a year, to annualize returns.

        The calendar is that of 252, 365, 52, 12 or 4 trading dates a year which is nearest to the
        market's own frequency; of less than two months, 252.
        """
        days = np.unique(self.times.astype("datetime64[D]"))
        years = (days[-1] - days[0]).astype(int) / 365.25
        a_year = TRADING_DAYS
        if years > 1 / 6:
            a_year = min(_DATES_PER_YEAR, key=lambda n: abs(math.log(n * years / (len(days) - 1))))
        return a_year * len(self) / len(days)

    def head(self, num_bars: int) -> Market:
        """Return the first `num_bars` bars, without a copy."""
        arrays = {name: getattr(self, name)[:num_bars] for name in ("times", *PRICES, "volume")}
        return Market(self.tickers, **arrays)


@dataclasses.dataclass(frozen=True)
class Period:
    """The bars from `start` on, of a market that ends with the period.

    Indicators are warmed up on the bars before `start`. Bars after the period are left out, so that
    nothing that is computed from the period can depend on them.
    """

    market: Market
    start: int = 0

    def __len__(self) -> int:
        return len(self.market) - self.start

    @property
    def times(self) -> np.ndarray:
        """Times of the period's own bars, datetime64 `[n]`."""
        return self.market.times[self.start :]

    @property
    def close(self) -> np.ndarray:
        """Closing prices of the period's own bars, f64 `[n, D]`."""
        return self.market.close[self.start :]


@dataclasses.dataclass(frozen=True)
class Periods:
    """Three disjoint periods: for training, for model selection, and for the report."""

    train: Period
    validation: Period
    backtest: Period


def split_market(
    market: Market, train_until: float | str = 0.6, validate_until: float | str = 0.8
) -> Periods:
    """Split a market into train, validation and back-test periods.

    `train_until` and `validate_until` are fractions of the bars, or the last dates of the first two
    periods, such as `2019-05-25`. Raises `ConfigError` where a period would have fewer than two
    bars.
    """
    train_end = _num_bars_until(market, "train_until", train_until)
    validation_end = _num_bars_until(market, "validate_until", validate_until)
    lengths = (train_end, validation_end - train_end, len(market) - validation_end)
    if min(lengths) < 2:
        raise ConfigError(
            f"train_until={train_until} and validate_until={validate_until} leave "
            f"{', '.join(map(str, lengths))} bars to train, validate and back-test with, but each "
            f"needs at least 2; the market has {len(market)}, from "
            f"{format_time(market.times[0])} to {format_time(market.times[-1])}."
        )
    return Periods(
        Period(market.head(train_end)),
        Period(market.head(validation_end), train_end),
        Period(market, validation_end),
    )


def adjust_for_splits(market: Market) -> Market:
    """Return a market without the jumps that look like splits.

    A close that differs from the previous one by more than 25 % is taken to be equal to it. All
    later prices are scaled by the same factor, volumes inversely. Prices before a jump stay, so an
    early period does not depend on later splits.
    """
    ratio = market.close[1:] / market.close[:-1]
    factor = np.ones_like(market.close)
    factor[1:] = np.cumprod(np.where(np.abs(ratio - 1) > SPLIT_THRESHOLD, 1 / ratio, 1.0), axis=0)
    scaled = {name: getattr(market, name) * factor for name in PRICES}
    return dataclasses.replace(market, **scaled, volume=market.volume / factor)


def check_jumps(market: Market) -> None:
    """Raise `ConfigError` with the first close that looks like a split."""
    ratio = market.close[1:] / market.close[:-1]
    for row, column in np.argwhere(np.abs(ratio - 1) > SPLIT_THRESHOLD)[:1]:
        old_close, new_close = market.close[row : row + 2, column]
        raise ConfigError(
            f"{market.tickers[column]} goes from {old_close:g} to {new_close:g} at "
            f"{format_time(market.times[row + 1])}, more than 25 % in one bar, which looks like a "
            "split: give adjusted prices, or adjust=true to remove such jumps."
        )


def format_time(time: Any) -> str:
    """Return a time as a short string: the date alone at midnight."""
    return str(np.datetime_as_string(time, unit="auto"))


def _num_bars_until(market: Market, name: str, period_end: float | str) -> int:
    """Return the number of bars before the end of a period."""
    if isinstance(period_end, str):
        try:
            if not _DATE.fullmatch(period_end):  # such as "today", which moves
                raise ValueError
            last = np.datetime64(period_end)
            unit: Any = np.datetime_data(last)[0]
            end = last + np.timedelta64(1, unit)  # a date ends with its day
        except ValueError:
            raise ConfigError(
                f"{name}={period_end} is no date without a time zone: write it as 2019-05-25."
            ) from None
        return int(np.searchsorted(market.times, end))
    if not 0 < period_end < 1:
        raise ConfigError(f"{name}={period_end} is neither a fraction between 0 and 1 nor a date.")
    return int(period_end * len(market))


def _set(market: Market, name: str, value: Any) -> None:
    object.__setattr__(market, name, value)


def _frozen(values: Any, dtype: Any) -> np.ndarray:
    """Return a read-only array: a copy, unless the values are read-only already."""
    array = np.asarray(values, dtype)
    if array.flags.writeable:
        array = array.copy()
        array.setflags(write=False)
    return array


def _check_axes(market: Market) -> None:
    tickers, times = market.tickers, market.times
    if not tickers or len(set(tickers)) < len(tickers) or not all(tickers):
        raise ConfigError(f"a market needs tickers with different names, not {tickers}.")
    if times.ndim != 1 or not times.size:
        raise ConfigError(f"a market needs a list of times, not the shape {times.shape}.")
    for row in np.flatnonzero(~(times[1:] > times[:-1]))[:1]:
        raise ConfigError(
            f"times must ascend, but {format_time(times[row + 1])} comes after "
            f"{format_time(times[row])}."
        )
    for name in (*PRICES, "volume"):
        shape = getattr(market, name).shape
        if shape != (len(times), len(tickers)):
            raise ConfigError(
                f"{name} has the shape {shape}, but {len(times)} times of {len(tickers)} tickers "
                f"make ({len(times)}, {len(tickers)})."
            )


def _check_cells(market: Market) -> None:
    def refuse(name: str, bad: np.ndarray, rule: str) -> None:
        for row, column in np.argwhere(bad)[:1]:
            value = getattr(market, name)[row, column]
            raise ConfigError(
                f"the {name} of {market.tickers[column]} at {format_time(market.times[row])} is "
                f"{value:g}, but {rule}."
            )

    for name in PRICES:
        value = getattr(market, name)
        refuse(name, ~((value > 0) & np.isfinite(value)), "a price is a positive number")
    volume = market.volume
    refuse("volume", ~((volume >= 0) & np.isfinite(volume)), "a volume is 0 or a positive number")
    highest, lowest = np.maximum(market.open, market.close), np.minimum(market.open, market.close)
    refuse("high", market.high < highest, "no price of a bar is above its high")
    refuse("low", market.low > lowest, "no price of a bar is below its low")
