"""The greedy policy of a run, taken through periods it never trained in, beside the baselines."""

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
from podracer.envs.trading.environment import Trading, TradingState, backtest_environment
from podracer.envs.trading.market import Period, Split, show
from podracer.experiments.loading import load_run
from podracer.experiments.run_setup import check_same_environment
from podracer.rollout import ActorState, Purpose, init_actor, interact, purpose_key
from podracer.trading.baselines import buy_and_hold, equal_weight, minimum_variance
from podracer.trading.metrics import Performance, performance
from podracer.types import Params

POLICY = "policy"


@dataclasses.dataclass(frozen=True)
class Book:
    """What was held at each bar of a period, after the trades there; the first bar has none."""

    cash: np.ndarray  # f64 [n]
    shares: np.ndarray  # i32 [n, D]
    price: np.ndarray  # f64 [n, D], as the environment has it
    costs: np.ndarray  # f64 [n], fees paid at the bar

    @property
    def holdings(self) -> np.ndarray:
        """What the shares are worth, f64 `[n, D]`."""
        return self.shares * self.price

    @property
    def equity(self) -> np.ndarray:
        """With the cash, f64 `[n]`."""
        return self.cash + self.holdings.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a policy and of the baselines in one period."""

    period: Period
    book: Book
    curves: dict[str, np.ndarray]  # equity f64 [n]; that of `POLICY` first

    @property
    def figures(self) -> dict[str, Performance]:
        """Of each curve."""
        a_year = self.period.market.bars_per_year
        return {name: performance(curve, a_year) for name, curve in self.curves.items()}


@dataclasses.dataclass(frozen=True)
class Backtest:
    """A run's policy at its newest checkpoint."""

    run: str
    updates: int
    split: Split
    validation: Outcome
    backtest: Outcome

    def to_json(self) -> dict[str, Any]:
        """All figures; a ratio to nothing is null."""
        periods = {"validation": self.validation, "backtest": self.backtest}
        train = {"train": dates(self.split.train)}
        return {
            "run": self.run,
            "updates": self.updates,
            "periods": {**train, **{name: dates(x.period) for name, x in periods.items()}},
            **{name: _figures(outcome) for name, outcome in periods.items()},
        }


def backtest(directory: str | Path) -> Backtest:
    """Roll the policy of the run in `directory` through its validation and its back-test period.

    Raises `ConfigError` for a run that does not trade, for one whose bars have changed since, and
    for periods too short for figures; `CheckpointError` if there is no checkpoint to trust.
    """
    directory = Path(directory)
    agent, env, state = load_run(directory)
    examined = backtest_environment(env)  # first, for its sentence about any other environment
    check_same_environment(directory, env)
    params = agent.actor_params(state.learner)
    validation, tested = (
        examine(agent, each, params, state.key)
        for each in (examined.inner.for_evaluation(), examined.inner)
    )
    name, updates = directory.resolve().name, int(state.update)
    return Backtest(name, updates, examined.inner.split, validation, tested)


def examine(agent: Agent, env: Trading, params: Params, key: jax.Array) -> Outcome:
    """A policy through the period of `env` beside the baselines, at the same cash and cost."""
    book, terms = roll(agent, env, params, key), {"cash": env.cash, "cost": env.cost}
    curves = {
        POLICY: book.equity,
        "buy and hold": buy_and_hold(env.bars, **terms),
        "equal weight": equal_weight(env.bars, **terms),
        "minimum variance": minimum_variance(env.bars, env.split.train, **terms),
    }
    return Outcome(env.bars, book, curves)


def roll(agent: Agent, env: Trading, params: Params, key: jax.Array) -> Book:
    """Greedy actions through the whole period of `env`, which is one of `for_evaluation` or
    `for_backtest`. One compiled scan, however long."""
    key = purpose_key(key, Purpose.EVALUATE)

    def step(params: Params, actor: ActorState, t: jax.Array) -> tuple[ActorState, TradingState]:
        keys = jax.random.split(jax.random.fold_in(key, t), 2)
        actor, _ = interact(agent, env, params, actor, keys[:1], keys[1:], explore=False)
        return actor, actor.env_state

    @jax.jit
    def whole(params: Params) -> TradingState:
        start = init_actor(agent, env, key[None])
        advance = partial(step, params)
        _, after = jax.lax.scan(advance, start, jnp.arange(len(env.bars) - 1))
        return jax.tree.map(
            lambda x, rest: jnp.concatenate([x, rest[:, 0]]), start.env_state, after
        )

    states = jax.device_get(whole(params))
    shares, price = states.shares, env.table.price.astype(np.float64)
    traded = np.abs(np.diff(shares, axis=0, prepend=shares[:1]))
    costs = env.cost * (traded * price).sum(axis=1)
    return Book(states.cash.astype(np.float64), shares, price, costs)


def dates(period: Period) -> list[str]:
    """The first and the last bar of a period."""
    return [show(period.times[row]) for row in (0, -1)]


def _figures(outcome: Outcome) -> dict[str, Any]:
    rows = {
        name: {k: v if math.isfinite(v) else None for k, v in dataclasses.asdict(figures).items()}
        for name, figures in outcome.figures.items()
    }
    rows[POLICY]["costs"] = float(outcome.book.costs.sum())
    return rows
