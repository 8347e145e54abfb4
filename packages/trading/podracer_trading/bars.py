"""Markets from files of bars."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from podracer.arguments import typed
from podracer.errors import ConfigError
from podracer.io.paths import user_path
from podracer_trading.market import PRICES, Market, adjust_for_splits, check_jumps, format_time

NUMBERS = (*PRICES, "volume")
COLUMNS = ("date", "ticker", *NUMBERS)
READERS = {".csv": "pyarrow.csv", ".parquet": "pyarrow.parquet"}


@typed
def load_market(path: str | Path, *, adjust: bool = False) -> Market:
    """Read a market from a `.csv` or `.parquet` file with a row for each bar of each ticker.

    The columns are date (ISO 8601, local time of the exchange, such as `2019-05-24` or `2019-05-24
    09:30`), ticker, open, high, low, close and volume; others are ignored. The rows of each ticker
    are in order of time, and all tickers have the same times. `adjust` removes jumps that look like
    splits, see `adjust_for_splits`. Raises `ConfigError` with the first invalid row or value.
    """
    path = user_path(path)
    if path.suffix not in READERS:
        raise ConfigError(f"{path} is neither a .csv nor a .parquet file.")
    arrow, reader = map(importlib.import_module, ("pyarrow", READERS[path.suffix]))
    table = _read(path, arrow, reader)
    invalid = [name for name in COLUMNS if table.column_names.count(name) != 1]
    if invalid:
        raise ConfigError(
            f"{path} must have each of the columns {', '.join(COLUMNS)} once, but has "
            f"{table.column_names.count(invalid[0])} of {invalid[0]}."
        )
    if not table.num_rows:
        raise ConfigError(f"{path} has no rows.")
    times, row_of = np.unique(_times(path, arrow, table["date"]), return_inverse=True)
    tickers, column_of = _tickers(path, arrow, table["ticker"])
    cells = row_of * len(tickers) + column_of
    _check_rows(path, times, tickers, row_of, column_of, cells)

    def grid(name: str) -> np.ndarray:
        values = np.empty(len(cells))
        values[cells] = _cast(path, arrow, table[name], "float64", "numbers").to_numpy()
        return values.reshape(len(times), len(tickers))

    market = Market(tuple(tickers), times, **{name: grid(name) for name in NUMBERS})
    if adjust:
        return adjust_for_splits(market)
    check_jumps(market)
    return market


def _read(path: Path, arrow: Any, reader: Any) -> Any:
    """Return the file as a table of pyarrow."""
    try:
        if path.suffix == ".parquet":
            return reader.read_table(path)
        kinds = {**dict.fromkeys(NUMBERS, arrow.float64()), "date": arrow.string()}
        options = reader.ConvertOptions(column_types={**kinds, "ticker": arrow.string()})
        return reader.read_csv(path, convert_options=options)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"{path.absolute()} cannot be read: {error}") from error


def _times(path: Path, arrow: Any, column: Any) -> np.ndarray:
    """Return a column as datetime64[us] `[rows]`."""
    kind, types = column.type, arrow.types
    text = types.is_string(kind) or types.is_large_string(kind)
    if getattr(kind, "tz", None) or not (types.is_temporal(kind) or text):
        raise ConfigError(
            f"{path}: dates are of the type {kind}, but must be times without a zone, or text "
            "such as 2019-05-24 09:30."
        )
    rule = "times such as 2019-05-24 or 2019-05-24 09:30"
    return _complete(path, "date", _cast(path, arrow, column, "timestamp[us]", rule)).to_numpy()


def _tickers(path: Path, arrow: Any, column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted names `[D]`, and the index of each row's ticker in them `[rows]`."""
    text = _complete(path, "ticker", _cast(path, arrow, column, "string", "tickers"))
    codes = text.combine_chunks().dictionary_encode()
    names, index = np.unique(codes.dictionary.to_pylist(), return_inverse=True)
    return names, index[codes.indices.to_numpy()]


def _cast(path: Path, arrow: Any, column: Any, kind: str, rule: str) -> Any:
    try:
        return column.cast(kind)
    except arrow.ArrowException as error:
        raise ConfigError(f"{path}: a column that must hold {rule} does not: {error}.") from error


def _complete(path: Path, name: str, column: Any) -> Any:
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise ConfigError(f"{path}: row {row + 1} has no {name}.")
    return column


def _check_rows(
    path: Path,
    times: np.ndarray,
    tickers: np.ndarray,
    row_of: np.ndarray,
    column_of: np.ndarray,
    cells: np.ndarray,
) -> None:
    """Raise `ConfigError` unless every ticker has every time once, in order of time."""

    def bar(cell: Any) -> str:
        return f"{tickers[cell % len(tickers)]} at {format_time(times[cell // len(tickers)])}"

    unique_cells, first_rows = np.unique(cells, return_index=True)
    if len(unique_cells) < len(cells):
        repeated = np.setdiff1d(np.arange(len(cells)), first_rows)[0]
        raise ConfigError(f"{path}: row {repeated + 1} repeats the bar of {bar(cells[repeated])}.")
    by_ticker = np.argsort(column_of, kind="stable")
    unsorted = (np.diff(row_of[by_ticker]) < 0) & (np.diff(column_of[by_ticker]) == 0)
    for row in np.sort(by_ticker[1:][unsorted])[:1]:
        raise ConfigError(
            f"{path}: row {row + 1}, the bar of {bar(cells[row])}, comes after a later one of the "
            "same ticker: sort the rows by date."
        )
    if len(unique_cells) < len(times) * len(tickers):
        missing = np.setdiff1d(np.arange(len(times) * len(tickers)), unique_cells)[0]
        raise ConfigError(
            f"{path}: there is no bar of {bar(missing)}, which other tickers have: leave "
            "the ticker or the time out, or fill the gap."
        )
