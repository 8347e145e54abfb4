"""The back-test: its books against the environment's, its figures, its page; and no leak."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from charts import blocks

import podracer
from podracer.agent import Agent
from podracer.agents.ppo import PPO
from podracer.cli.main import main
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.io.addresses import COPIES
from podracer.io.checkpoint import stored_fingerprint
from podracer_trading.backtest import POLICY, backtest, evaluate_policy, simulate
from podracer_trading.baselines import buy_and_hold
from podracer_trading.delivery import promote
from podracer_trading.environment import Trading
from podracer_trading.market import Market, Period, split_market
from podracer_trading.metrics import compute_performance
from podracer_trading.synthetic import synthetic_market

EXPERIMENT = Experiment(
    recipe="trading",
    environment="trading:synthetic,tickers=3,bars=200",
    agent=PPO(learning_rate=1e-3, normalize_observations=True),
    driver=AnakinConfig(8, 16, 4),
    frames=12 * 128,
    evaluations=3,
    evaluation_episodes=1,
    devices=1,
)


def unused(*_: Any) -> Any:
    raise NotImplementedError


def scripted(env: Trading) -> Agent:
    """Agent that plays the actions `[T, D]` that are its parameters; its memory is the time."""

    def act(params: Any, carry: Any, timestep: Any, keys: Any, explore: bool) -> Any:
        return params[carry], (), carry + 1

    def carry(num_envs: int) -> jax.Array:
        return jnp.zeros(num_envs, jnp.int32)

    return Agent(spec=env.spec, init=unused, act=act, learn=unused, carry=carry)


def rolled(env: Trading, actions: np.ndarray) -> Any:
    return simulate(scripted(env), env, jnp.asarray(actions, jnp.float32), jax.random.key(0))


# --- books ---------------------------------------------------------------------------------------


def write_csv(market: Market, path: Path) -> Path:
    lines = ["date,ticker,open,high,low,close,volume"]
    for row, column in np.ndindex(*market.close.shape):
        names = ("open", "high", "low", "close", "volume")
        cells = [repr(float(getattr(market, name)[row, column])) for name in names]
        lines.append(",".join([str(market.times[row])[:10], market.tickers[column], *cells]))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_books_are_the_environments() -> None:
    """Cash, shares, equity and costs, bar by bar and to the bit: all sums are exact in float32."""
    market = synthetic_market(tickers=5, bars=900)
    close = np.round(np.clip(market.close, 20, 200) * 4) / 4
    market = dataclasses.replace(market, open=close, high=close, low=close, close=close)
    env = Trading(
        split_market(market), cash=2e4, cost=1 / 64, turbulence_threshold=6.0
    ).for_backtest()
    actions = np.random.default_rng(0).uniform(-1.1, 1.3, (179, 5))
    book = rolled(env, actions)

    step, key = jax.jit(env.step), jax.random.key(0)
    state, shown = env.reset(key)
    assert len(book.equity) == len(env.bars) == 180
    assert (book.costs[0], book.equity[0]) == (0, 2e4)
    for bar in range(1, 180):
        state, shown = step(key, state, jnp.float32(actions[bar - 1]))
        assert book.cash[bar] == float(state.cash)
        assert (book.shares[bar] == state.shares).all()
        assert book.equity[bar] == env.wealth(state)
        gain = book.equity[bar] - book.equity[bar - 1]
        assert gain * env.reward_scale == shown.reward
        held = book.shares[bar - 1] @ (book.price[bar] - book.price[bar - 1])
        assert book.costs[bar] == held - gain
    assert shown.last
    assert book.costs.sum() > 1000
    assert (book.price == env.bars.close).all()


def test_to_buy_once_is_to_buy_and_hold() -> None:
    """Whole shares against parts of them; a decision on one bar is a purchase on the next."""
    env = Trading(
        split_market(synthetic_market(tickers=5, bars=300)),
        cash=1e8, cost=0.01, max_shares=10**6, min_trade=0.0, turbulence_threshold=1e9,
    ).for_backtest()  # fmt: skip
    actions = np.zeros((59, 5))
    actions[0] = 1e8 / 5 / 1.01 / env.bars.close[1] / 1e6
    book = rolled(env, actions)
    later = Period(env.bars.market, env.bars.start + 1)
    held = buy_and_hold(later, cash=1e8, cost=0.01)
    np.testing.assert_allclose(book.equity[2:], held[1:], rtol=1e-5)
    assert book.equity[1] == pytest.approx(1e8 / 1.01, rel=1e-5)
    assert book.costs.sum() == pytest.approx(1e8 - 1e8 / 1.01, rel=1e-4)


def test_a_policy_stands_beside_the_baselines() -> None:
    env = Trading(
        split_market(synthetic_market(tickers=3, bars=300)), cash=5e5, cost=0.002
    ).for_evaluation()
    outcome = evaluate_policy(scripted(env), env, jnp.zeros((59, 3)), jax.random.key(0))
    assert list(outcome.curves) == [POLICY, "buy and hold", "equal weight", "minimum variance"]
    assert (outcome.curves[POLICY] == 5e5).all()
    assert math.isnan(outcome.metrics[POLICY].sharpe)
    hold = buy_and_hold(env.periods.validation, cash=5e5, cost=0.002)
    assert outcome.metrics["buy and hold"] == compute_performance(hold, 252)
    assert all(curve[0] == 5e5 and len(curve) == 60 for curve in outcome.curves.values())


def test_the_page_of_a_copy_is_written_where_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a run at an address is deleted with the process."""
    files: list[Path] = []
    result = types.SimpleNamespace(to_json=dict)
    monkeypatch.setitem(COPIES, tmp_path, "s3://bucket/run")
    monkeypatch.setattr("podracer.cli.run_options.RunOptions.reopen", lambda _: None)
    monkeypatch.setattr("podracer_trading.backtest.backtest", lambda *_, **__: result)
    monkeypatch.setattr("podracer_trading.page.write_page", lambda _, file: files.append(file))
    with pytest.raises(SystemExit):
        main(["backtest", str(tmp_path), "--json"])
    assert files == [Path("backtest.html")]


# --- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return podracer.train(EXPERIMENT, run_dir=tmp_path_factory.mktemp("runs") / "run").run_dir


@pytest.mark.slow
@podracer.struct
class Own(PPO):
    """PPO under a name that no file can bring back."""


def own() -> Experiment:
    return dataclasses.replace(EXPERIMENT, agent=Own(), frames=128, evaluations=0)


def test_a_run_with_an_agent_of_ones_own_names_its_recipe(tmp_path: Path, monkeypatch: Any) -> None:
    run = podracer.train(own(), run_dir=tmp_path / "run").run_dir
    with pytest.raises(ConfigError, match="name its recipe"):
        backtest(run)
    monkeypatch.setitem(sys.modules, "recipes_of_ones_own", types.SimpleNamespace(own=own))
    flags = [str(run), "--recipe", "recipes_of_ones_own:own"]
    for arguments in (["backtest", *flags], ["promote", str(tmp_path / "models"), *flags]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    assert promote(tmp_path / "models", run, recipe=own()).action == "refuse"


def test_the_validation_is_the_runs_own(run: Path) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    book = backtest(run).validation.portfolio
    gained = (book.equity[-1] - book.equity[0]) * 2**-13
    assert gained == pytest.approx(last["evaluation_return"], rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_the_command_prints_and_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["backtest", str(run)])
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert "Back-test, 2010-08-13 to 2010-10-07" in out
    assert out.count("minimum variance") == 2
    page = (run / "backtest.html").read_text()
    page = re.sub("<script>.*?</script>", "", page, flags=re.DOTALL)
    periods, kinds = ("Back-test", "Validation"), ("equity", "holdings")
    assert list(blocks(page)) == [f"{period} {kind}" for period in periods for kind in kinds]
    result = backtest(run).backtest
    equity = blocks(page)["Back-test equity"][0]["data"]
    drawn = {x["meta"]: x["y"] for x in equity if not x["showlegend"]}
    assert drawn["policy"] == pytest.approx(result.curves["policy"], rel=1e-5)
    assert "2010-08-12" in page  # the end of the validation period
    assert "slippage" in page
    assert not any(word in page for word in ("http://", "https://"))

    with pytest.raises(SystemExit) as left:
        main(["backtest", str(run), "--json", "--out", str(run / "other.html")])
    figures = json.loads(capsys.readouterr().out)
    assert left.value.code == 0
    assert (run / "other.html").exists()
    assert figures["periods"]["backtest"] == ["2010-08-13", "2010-10-07"]
    assert figures["updates"] == 13  # twelve, and one more for steps that only reset
    expected = backtest(run).backtest.metrics["equal weight"]
    assert figures["backtest"]["equal weight"]["sharpe"] == expected.sharpe
    assert figures["backtest"]["policy"]["costs"] >= 0


@pytest.mark.slow
def test_the_backtest_period_changes_nothing_else(tmp_path: Path) -> None:
    """Two files that differ after the validation period: the same training, the same scores, the
    same choice, to the bit; other figures in the back-test. And such a change is noticed."""
    market = synthetic_market(tickers=3, bars=200)
    last = np.flatnonzero(market.times == np.datetime64("2010-08-12"))[0] + 1
    order = np.concatenate([np.arange(last), np.arange(last, 200)[::-1]])
    names = ("open", "high", "low", "close", "volume")
    shuffled = {name: getattr(market, name)[order] for name in names}
    scale = np.where(np.arange(200) < last, 1.0, 1.05)[:, None]
    altered = {name: values * scale for name, values in shuffled.items()}
    found = []
    for name, bars in (("one", market), ("other", dataclasses.replace(market, **altered))):
        (tmp_path / name).mkdir()
        path = write_csv(bars, tmp_path / name / "bars.csv")
        cuts = "train_until=2010-06-17,validate_until=2010-08-12"
        again = dataclasses.replace(EXPERIMENT, environment=f"trading:{path},{cuts}")
        runs = [
            podracer.train(again, seed=seed, run_dir=tmp_path / name / f"run{seed}").run_dir
            for seed in (0, 1)
        ]
        lines = [(run / "metrics.jsonl").read_text().splitlines() for run in runs]
        scores = [json.loads(line).get("evaluation_return") for each in lines for line in each]
        state = [stored_fingerprint(run) for run in runs]
        decisions = [promote(tmp_path / name / "models", run) for run in runs]
        chosen = [(each.action, each.score, each.previous_score) for each in decisions]
        results = [backtest(run) for run in runs]
        validation = [result.to_json()["validation"] for result in results]
        tested = [result.to_json()["backtest"] for result in results]
        found.append(((state, scores, chosen, validation), tested))
    (one, one_tested), (other, other_tested) = found
    assert one == other
    assert all(a["equal weight"] != b["equal weight"] for a, b in zip(
        one_tested, other_tested, strict=True))  # fmt: skip

    write_csv(market, tmp_path / "other" / "bars.csv")
    with pytest.raises(ConfigError, match=r"periods.backtest.market.digest changed since: bring"):
        backtest(tmp_path / "other" / "run0")
    with pytest.raises(ConfigError, match="began in another environment"):
        promote(tmp_path / "other" / "models", tmp_path / "other" / "run0")
