"""The back-test: its books against the environment's, its figures, its page; and no leak."""

from __future__ import annotations

import dataclasses
import json
import math
import re
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
from podracer_trading.backtest import POLICY, backtest, evaluate_policy, simulate
from podracer_trading.baselines import buy_and_hold
from podracer_trading.environment import Trading
from podracer_trading.market import Period, split_market
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


# --- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return podracer.train(EXPERIMENT, run_dir=tmp_path_factory.mktemp("runs") / "run").run_dir


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
