"""A market: bars of several tickers at the same times, and its cut into three periods.

Axis letters of this package: N bars, D tickers, F features. Prices are float64, exact to the cent
through all sums here; the environment rounds them to float32 once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from podracer.types import ConfigError

PRICES = ("open", "high", "low", "close")
JUMP = 0.25  # a relative change of the close from one bar to the next that looks like a split
TRADING_DAYS = 252  # in a year


@dataclasses.dataclass(frozen=True)
class Market:
    """Bars, complete and checked: a value, equal where tickers and numbers are equal.

    Raises `ConfigError` naming the first cell that cannot be a bar.
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
        """How many bars a year has, with 252 trading days; for annual figures."""
        return TRADING_DAYS * len(self) / len(np.unique(self.times.astype("datetime64[D]")))

    def before(self, row: int) -> Market:
        """The bars before `row`, without a copy."""
        arrays = {name: getattr(self, name)[:row] for name in ("times", *PRICES, "volume")}
        return Market(self.tickers, **arrays)


@dataclasses.dataclass(frozen=True)
class Period:
    """The bars from `start` on, of a market that ends with the period.

    What lies before `start` is there for indicators to warm up on; what lies after the period is
    not here, so nothing computed of it can depend on it.
    """

    market: Market
    start: int = 0

    def __len__(self) -> int:
        return len(self.market) - self.start

    @property
    def times(self) -> np.ndarray:
        """The period's own, datetime64 `[n]`."""
        return self.market.times[self.start :]

    @property
    def close(self) -> np.ndarray:
        """The period's own closing prices, f64 `[n, D]`."""
        return self.market.close[self.start :]


@dataclasses.dataclass(frozen=True)
class Split:
    """Three disjoint periods: to train in, to choose by, to report from."""

    train: Period
    validation: Period
    backtest: Period


def split(
    market: Market, train_until: float | str = 0.6, validate_until: float | str = 0.8
) -> Split:
    """Cut a market in three, each a fraction of its bars or the last date of a period, such as
    `2019-05-25`. Raises `ConfigError` where a period would have fewer than two bars."""
    first = _rows_until(market, "train_until", train_until)
    second = _rows_until(market, "validate_until", validate_until)
    lengths = (first, second - first, len(market) - second)
    if min(lengths) < 2:
        raise ConfigError(
            f"train_until={train_until} and validate_until={validate_until} leave "
            f"{', '.join(map(str, lengths))} bars to train, validate and back-test with, but each "
            f"needs at least 2; the market has {len(market)}, from {show(market.times[0])} to "
            f"{show(market.times[-1])}."
        )
    return Split(
        Period(market.before(first)), Period(market.before(second), first), Period(market, second)
    )


def adjusted(market: Market) -> Market:
    """The same market with its jumps chained away: a close that differs from the one before it by
    more than 25 % is taken to be equal, and all prices from there on are scaled alike (volumes
    inversely). Prices before a jump stay, so an early period does not know of later splits."""
    ratio = market.close[1:] / market.close[:-1]
    factor = np.ones_like(market.close)
    factor[1:] = np.cumprod(np.where(np.abs(ratio - 1) > JUMP, 1 / ratio, 1.0), axis=0)
    scaled = {name: getattr(market, name) * factor for name in PRICES}
    return dataclasses.replace(market, **scaled, volume=market.volume / factor)


def check_jumps(market: Market) -> None:
    """Raise `ConfigError` naming the first close that looks like a split."""
    ratio = market.close[1:] / market.close[:-1]
    for row, column in np.argwhere(np.abs(ratio - 1) > JUMP)[:1]:
        before, after = market.close[row : row + 2, column]
        raise ConfigError(
            f"{market.tickers[column]} goes from {before:g} to {after:g} at "
            f"{show(market.times[row + 1])}, more than 25 % in one bar, which looks like a split: "
            "give adjusted prices, or adjust=true to chain such jumps away."
        )


def show(time: Any) -> str:
    """A time as short as it can be written: a date alone at midnight."""
    return str(np.datetime_as_string(time, unit="auto"))


def _rows_until(market: Market, name: str, until: float | str) -> int:
    """How many bars lie before the end of a period."""
    if isinstance(until, str):
        try:
            last = np.datetime64(until)
            unit: Any = np.datetime_data(last)[0]
            end = last + np.timedelta64(1, unit)  # a date ends with its day
        except ValueError:
            raise ConfigError(f"{name}={until} is no date: write it as 2019-05-25.") from None
        return int(np.searchsorted(market.times, end))
    if not 0 < until < 1:
        raise ConfigError(f"{name}={until} is no fraction between 0 and 1, and no date.")
    return int(until * len(market))


def _set(market: Market, name: str, value: Any) -> None:
    object.__setattr__(market, name, value)


def _frozen(values: Any, dtype: Any) -> np.ndarray:
    """An array that cannot be written; a copy, unless it could not be before."""
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
            f"times must ascend, but {show(times[row + 1])} comes after {show(times[row])}."
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
                f"the {name} of {market.tickers[column]} at {show(market.times[row])} is "
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
