"""Back-tests: the greedy policy of a run in periods it was not trained in, and baselines."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.config.experiment import Experiment
from podracer.drivers.state import TrainState
from podracer.errors import ConfigError
from podracer.io.checkpoint import Choice
from podracer.io.paths import user_path
from podracer.rollout import ActorState, Purpose, init_actor, interact, purpose_key
from podracer.run.loading import load_run
from podracer.run.resume import check_same_environment
from podracer.types import Params
from podracer_trading.baselines import buy_and_hold, equal_weight, minimum_variance
from podracer_trading.environment import Trading, TradingState
from podracer_trading.market import Period, Periods, format_time
from podracer_trading.metrics import Performance, compute_performance

POLICY = "policy"


@dataclasses.dataclass(frozen=True)
class PortfolioHistory:
    """A portfolio at each of n bars, after the trades at that bar."""

    cash: np.ndarray  # f64 [n]
    shares: np.ndarray  # i32 [n, D]
    price: np.ndarray  # f64 [n, D], as the environment rounds it
    costs: np.ndarray  # f64 [n], fees paid at the bar

    @property
    def holdings(self) -> np.ndarray:
        """Value of the shares, f64 `[n, D]`."""
        return self.shares * self.price

    @property
    def equity(self) -> np.ndarray:
        """Value of cash and shares, f64 `[n]`."""
        return self.cash + self.holdings.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class PeriodResult:
    """Results of a policy and of the baselines in one period."""

    period: Period
    portfolio: PortfolioHistory  # the policy's
    curves: dict[str, np.ndarray]  # equity f64 [n] by name; `POLICY` is the first

    @property
    def metrics(self) -> dict[str, Performance]:
        """Performance of each curve."""
        bars_per_year = self.period.market.bars_per_year
        return {
            name: compute_performance(curve, bars_per_year) for name, curve in self.curves.items()
        }


@dataclasses.dataclass(frozen=True)
class Backtest:
    """Back-test of a run's policy at a checkpoint."""

    run: str
    updates: int
    periods: Periods
    validation: PeriodResult
    backtest: PeriodResult

    def to_json(self) -> dict[str, Any]:
        """Return all metrics as JSON values; NaN becomes null."""
        results = {"validation": self.validation, "backtest": self.backtest}
        dates = {"train": date_range(self.periods.train)}
        dates |= {name: date_range(result.period) for name, result in results.items()}
        return {
            "run": self.run,
            "updates": self.updates,
            "periods": dates,
            **{name: _metrics_to_json(result) for name, result in results.items()},
        }


def backtest(
    directory: str | Path,
    *,
    recipe: Experiment | str | None = None,
    checkpoint: Choice = "newest",
) -> Backtest:
    """Simulate the policy of the run in `directory` in its validation and back-test periods.

    `recipe` and `checkpoint` are those of `podracer.load`.

    Raises `ConfigError` for a run that does not trade, for one whose bars have changed since, and
    for periods too short for metrics; `CheckpointError` if no checkpoint is valid.
    """
    directory = user_path(directory)
    agent, env, state = load_trading(directory, checkpoint, recipe)
    params, periods = agent.actor_params(state.learner), (env.for_evaluation(), env.for_backtest())
    results = (evaluate_policy(agent, period, params, state.key) for period in periods)
    return Backtest(directory.resolve().name, int(state.update), env.periods, *results)


def load_trading(
    directory: Path, checkpoint: Choice, recipe: Experiment | str | None = None
) -> tuple[Agent, Trading, TrainState]:
    """Load a run that trades; takes and raises what `backtest` does."""
    run = load_run(directory, recipe, checkpoint=checkpoint)
    trading = trading_in(run.env)  # first, because it rejects other environments
    check_same_environment(directory, run.env)
    return run.agent, trading, run.state


def trading_in(environment: Any) -> Trading:
    """Return the environment that trades in one that restarts. Raises `ConfigError` for others."""
    if not isinstance(inner := getattr(environment, "inner", None), Trading):
        raise ConfigError(f"{environment.spec.name} has no back-test period.")
    return inner


def evaluate_policy(agent: Agent, env: Trading, params: Params, key: jax.Array) -> PeriodResult:
    """Compare a policy in the period of `env` with the baselines, at the same cash and cost."""
    portfolio = simulate(agent, env, params, key)
    terms = {"cash": env.cash, "cost": env.cost}
    curves = {
        POLICY: portfolio.equity,
        "buy and hold": buy_and_hold(env.bars, **terms),
        "equal weight": equal_weight(env.bars, **terms),
        "minimum variance": minimum_variance(env.bars, env.periods.train, **terms),
    }
    return PeriodResult(env.bars, portfolio, curves)


def simulate(agent: Agent, env: Trading, params: Params, key: jax.Array) -> PortfolioHistory:
    """Take greedy actions through the whole period of `env`, as one compiled scan.

    `env` is the result of `for_evaluation` or `for_backtest`.
    """
    key = purpose_key(key, Purpose.EVALUATE)

    def step(params: Params, actor: ActorState, t: jax.Array) -> tuple[ActorState, TradingState]:
        keys = jax.random.split(jax.random.fold_in(key, t), 2)
        actor, _ = interact(agent, env, params, actor, keys[:1], keys[1:], explore=False)
        return actor, actor.env_state

    @jax.jit
    def run_period(params: Params) -> TradingState:
        actor = init_actor(agent, env, key[None])
        steps = jnp.arange(len(env.bars) - 1)
        _, next_states = jax.lax.scan(partial(step, params), actor, steps)
        return jax.tree.map(
            lambda x, xs: jnp.concatenate([x, xs[:, 0]]), actor.env_state, next_states
        )

    states = jax.device_get(run_period(params))
    shares, price = states.shares, env.data.price.astype(np.float64)
    traded = np.abs(np.diff(shares, axis=0, prepend=shares[:1]))
    costs = env.cost * (traded * price).sum(axis=1)
    return PortfolioHistory(states.cash.to_float64(), shares, price, costs)


def date_range(period: Period) -> list[str]:
    """Return the first and the last bar of a period."""
    return [format_time(period.times[row]) for row in (0, -1)]


def _metrics_to_json(result: PeriodResult) -> dict[str, Any]:
    rows = {
        name: {k: v if math.isfinite(v) else None for k, v in dataclasses.asdict(metrics).items()}
        for name, metrics in result.metrics.items()
    }
    rows[POLICY]["costs"] = float(result.portfolio.costs.sum())
    return rows
