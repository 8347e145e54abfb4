"""Markets: what is refused, where periods end, and that nothing looks ahead."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podracer.errors import ConfigError
from podracer_trading.bars import load_market
from podracer_trading.indicators import (
    INDICATORS,
    compute_indicators,
    directional_index,
    ema,
    moving_average,
    moving_std,
    relative_strength_index,
    turbulence_index,
)
from podracer_trading.market import Market, adjust_for_splits, check_jumps, split_market
from podracer_trading.synthetic import optimal_wealth, synthetic_market, wave_market

SMALL = synthetic_market(tickers=3, bars=12)
HEADER = "date,ticker,open,high,low,close,volume"
ROWS = (
    "2019-05-23,A,10,11,9,10.5,100",
    "2019-05-23,B,20,21,19,20.5,200",
    "2019-05-24,A,10.5,12,10,11,150",
    "2019-05-24,B,20.5,21,20,21,0",
)


def later(market: Market, row: int) -> Market:
    """The same bars before `row`; after it others, in another order."""
    rows = np.arange(len(market))
    rows[row:] = np.random.default_rng(1).permutation(rows[row:])
    factor = np.where(np.arange(len(market)) < row, 1.0, 1.5)[:, None]
    names = ("open", "high", "low", "close", "volume")
    arrays = {name: getattr(market, name)[rows] * factor for name in names}
    return dataclasses.replace(market, **arrays)


# --- the value -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("close", np.nan, "close of S001 at 2010-01-06 is nan, but a price is a positive number"),
        ("low", -1.0, "low of S001 at 2010-01-06 is -1,"),
        ("high", 1.0, "high of S001 at 2010-01-06 is 1, but no price of a bar is above its high"),
        ("low", 1e4, "low of S001 at 2010-01-06 is 10000, but no price of a bar is below its low"),
        ("volume", -5.0, "volume of S001 at 2010-01-06 is -5, but a volume is 0 or a positive"),
    ],
)
def test_a_cell_that_is_no_bar_is_named(name: str, value: float, words: str) -> None:
    values = getattr(SMALL, name).copy()
    values[3, 1] = value
    with pytest.raises(ConfigError) as refusal:
        dataclasses.replace(SMALL, **{name: values})
    assert words in str(refusal.value)


# --- periods -------------------------------------------------------------------------------------


def test_periods_are_disjoint_and_complete() -> None:
    market = synthetic_market(tickers=2, bars=100)
    cut = split_market(market)
    assert [len(period) for period in (cut.train, cut.validation, cut.backtest)] == [60, 20, 20]
    times = np.concatenate([cut.train.times, cut.validation.times, cut.backtest.times])
    assert (times == market.times).all()
    assert (cut.validation.close == market.close[60:80]).all()
    assert cut.validation.market == market.head(80)  # with the past to warm up on, no future


@pytest.mark.parametrize("bars_per_day", [1, 3])
def test_no_period_depends_on_a_later_one(bars_per_day: int) -> None:
    """To the bit: train on validation, validation on back-test."""
    market = synthetic_market(tickers=3, bars=500 * bars_per_day, bars_per_day=bars_per_day)
    original = split_market(market)
    ends = (len(original.train), len(original.train) + len(original.validation))
    for end, same in zip(ends, (("train",), ("train", "validation")), strict=True):
        changed = split_market(later(market, end))
        for name in ("train", "validation", "backtest"):
            old, new = getattr(original, name).market, getattr(changed, name).market
            assert (old == new) == (name in same)
            for of in (compute_indicators, turbulence_index):
                assert np.array_equal(of(old), of(new)) == (name in same)


# --- splits of shares ----------------------------------------------------------------------------


def test_jumps_are_refused_or_chained_away() -> None:
    market = synthetic_market(tickers=3, bars=40)
    factor = np.ones_like(market.close)
    factor[20:, 1] = 0.5  # two shares for one
    names = ("open", "high", "low", "close")
    halved = {name: getattr(market, name) * factor for name in names}
    broken = dataclasses.replace(market, **halved, volume=market.volume / factor)
    with pytest.raises(ConfigError, match=r"S001 goes from .* at 2010-01-29, more than 25 %"):
        check_jumps(broken)
    check_jumps(market)
    mended = adjust_for_splits(broken)
    check_jumps(mended)
    returns = mended.close[1:] / mended.close[:-1]
    expected = market.close[1:] / market.close[:-1]
    expected[19, 1] = 1.0
    np.testing.assert_allclose(returns, expected, rtol=1e-12)
    traded, was = (x.close * x.volume for x in (mended, broken))
    np.testing.assert_allclose(traded, was, rtol=1e-12)
    assert adjust_for_splits(market) == market
    assert adjust_for_splits(broken.head(30)) == mended.head(30)  # what comes later changes nothing


# --- files ---------------------------------------------------------------------------------------


def written(path: Path, rows: tuple[str, ...] = ROWS, header: str = HEADER) -> Path:
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_a_csv_file(tmp_path: Path) -> None:
    market = load_market(written(tmp_path / "bars.csv", (ROWS[1], ROWS[0], ROWS[3], ROWS[2])))
    assert market.tickers == ("A", "B")
    assert [str(time)[:10] for time in market.times] == ["2019-05-23", "2019-05-24"]
    assert market.close.tolist() == [[10.5, 20.5], [11, 21]]
    assert market.volume.tolist() == [[100, 200], [150, 0]]
    by_ticker = load_market(written(tmp_path / "by_ticker.csv", (*ROWS[1::2], *ROWS[::2])))
    assert by_ticker == market
    minutes = tuple(row.replace("-23", "-23 09:30").replace("-24", "-23T09:31") for row in ROWS)
    market = load_market(written(tmp_path / "minutes.csv", minutes))
    assert [str(time)[11:16] for time in market.times] == ["09:30", "09:31"]
    odd = tuple(row.replace(",A,", ",NA,").replace(",B,", ",0700,") for row in ROWS)
    assert load_market(written(tmp_path / "odd.csv", odd)).tickers == ("0700", "NA")


def test_a_parquet_file(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    reader = pytest.importorskip("pyarrow.csv")
    expected = load_market(written(tmp_path / "bars.csv"))
    table = reader.read_csv(tmp_path / "bars.csv")  # dates as date32, numbers as int64
    for kind in (arrow.date32(), arrow.timestamp("ns"), arrow.string()):
        column = table["date"].cast(kind)
        changed = table.set_column(0, "date", column).append_column("note", table["ticker"])
        parquet.write_table(changed, tmp_path / "bars.parquet")
        assert load_market(tmp_path / "bars.parquet") == expected
    for kind, words in (("timestamp[us, tz=UTC]", "without a zone"), ("int64", "type int64")):
        zoned = arrow.timestamp("us", "UTC") if "tz" in kind else arrow.int64()
        column = table["date"].cast(arrow.timestamp("us")).cast(zoned)
        parquet.write_table(table.set_column(0, "date", column), tmp_path / "bars.parquet")
        with pytest.raises(ConfigError, match=words):
            load_market(tmp_path / "bars.parquet")


# --- indicators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bars_per_day", [1, 3])
def test_indicators_do_not_look_ahead(bars_per_day: int) -> None:
    market = synthetic_market(tickers=4, bars=300 * bars_per_day, bars_per_day=bars_per_day)
    whole = compute_indicators(market), turbulence_index(market)
    assert whole[1].any()
    for row in (1, 2, 61, 253 * bars_per_day + 1, len(market) - 1):
        past = market.head(row)
        assert np.array_equal(compute_indicators(past), whole[0][:row])
        assert np.array_equal(turbulence_index(past), whole[1][:row])


def test_indicators_against_stockstats() -> None:
    """Whose definitions FinRL uses."""
    stockstats = pytest.importorskip("stockstats")
    pandas = pytest.importorskip("pandas")
    market = synthetic_market(tickers=2, bars=200)
    ours = compute_indicators(market)
    names = ("open", "high", "low", "close", "volume")
    for column in range(2):
        frame = pandas.DataFrame({name: getattr(market, name)[:, column] for name in names})
        theirs = stockstats.wrap(frame)
        for i, name in enumerate(INDICATORS):
            start = 1 if name.startswith("boll") else 0  # one bar has no deviation: theirs is NaN
            expected = np.asarray(theirs[name])[start:]
            np.testing.assert_allclose(ours[start:, column, i], expected, rtol=1e-9, atol=1e-9)


def test_indicators_in_closed_form() -> None:
    line = np.arange(1.0, 101.0)[:, None]  # rises by 1 a bar
    assert moving_average(line, 30)[[0, 9, 99], 0].tolist() == [1.0, 5.5, 85.5]
    assert moving_std(line, 20)[0, 0] == 0
    assert moving_std(line, 20)[99, 0] == pytest.approx(np.sqrt(20 * 21 / 12))
    weights = 0.8 ** np.arange(100)[::-1]
    assert ema(line, 0.2)[-1, 0] == pytest.approx((weights @ line[:, 0]) / weights.sum())
    assert (relative_strength_index(line, 30)[1:] == 100).all()
    assert (relative_strength_index(line[::-1], 30)[1:] == 0).all()
    flat = np.ones((5, 1))
    assert (relative_strength_index(flat, 30) == 50).all()
    assert (directional_index(flat, flat, 30) == 0).all()
    assert (directional_index(line + 1, line, 30)[1:] == 100).all()
    up_and_down = 10 + np.array([0, 3, 2, 5, 4])[:, None]  # up 3, down 1, up 3, down 1
    a = 1 / 30
    up, down = (sum(m * a * (1 - a) ** (3 - i) for i, m in moves) for moves in
                (((0, 3), (2, 3)), ((1, 1), (3, 1))))  # fmt: skip
    assert relative_strength_index(up_and_down * 1.0, 30)[-1, 0] == pytest.approx(
        100 * up / (up + down)
    )


def test_turbulence_against_a_loop() -> None:
    market = synthetic_market(tickers=3, bars=300)
    index = turbulence_index(market)
    assert not index[:252].any()
    returns = np.diff(market.close, axis=0) / market.close[:-1]
    for day in (252, 253, 280, 299):
        past = [returns[d - 1] for d in range(max(day - 252, 1), day)]
        middle = sum(past) / len(past)
        covariance = sum(np.outer(x - middle, x - middle) for x in past) / (len(past) - 1)
        away = returns[day - 1] - middle
        assert index[day] == pytest.approx(away @ np.linalg.inv(covariance) @ away, rel=1e-9)


# --- made markets --------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 12), st.floats(0.01, 0.2), st.floats(0, 0.02))
def test_the_optimum_of_a_wave_by_dynamic_programming(bars: int, gain: float, cost: float) -> None:
    """Of all ways to hold cash or one of two tickers at each bar. The problem is linear in what is
    held, so no mixture is better."""
    if (1 - cost) / (1 + cost) * (1 + gain) <= 1:
        with pytest.raises(ConfigError, match="not worth"):
            optimal_wealth(bars, gain, 100.0, cost)
        return
    close = np.pad(
        wave_market(bars=bars + 2, gain=gain).close[:bars], ((0, 0), (1, 0)), constant_values=1
    )
    wealth = [100.0, 0.0, 0.0]  # the most, if held in cash, in the one, in the other
    for bar in range(1, bars):
        wealth = [w * close[bar, i] / close[bar - 1, i] for i, w in enumerate(wealth)]
        moved = [[0.0] * 3 for _ in range(3)]
        for i, j in itertools.product(range(3), repeat=2):
            fee = 1.0 if i == j else (1 - cost * (i > 0)) / (1 + cost * (j > 0))
            moved[i][j] = wealth[i] * fee
        wealth = [max(moved[i][j] for i in range(3)) for j in range(3)]
    assert max(wealth) == pytest.approx(optimal_wealth(bars, gain, 100.0, cost))
