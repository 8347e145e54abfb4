"""Selection: how a pod starts its next round, given the leaderboard and all pods.

Each rule is a frozen dataclass of settings, by which the pure function `choose` decides: the same
view and the same generator give the same start. No parent means a fresh start; one parent is
continued to the bit, with its experiment; several of one experiment are fused: the mean of their
weights and optimizer moments. None means to wait.

Some rules draw from the leaderboard, as ElegantRL-Podracer's generator does; the others select
within the population, which is the newest entry of every pod. These also select inside the program
of a sweep: their settings are in `podracer.drivers.selection`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from podracer.drivers.selection import (
    Generational,
    PopulationBased,
    Truncation,
    generation,
    num_replaced,
    truncation,
)
from podracer.fields import bounded
from podracer.tournament.events import Entry, TournamentState


@dataclasses.dataclass(frozen=True)
class Start:
    """Parents and hyperparameters of a round."""

    parents: tuple[str, ...] = ()  # ids of entries
    hyperparameters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Values that replace those of the parents' experiment, or of the pod's own without parents."""


@dataclasses.dataclass(frozen=True)
class SelectionView:
    """Input of a selection rule, determined by the log alone: a pod about to start a round."""

    state: TournamentState
    pod: int
    round: int


def generator(seed: int, pod: int, round: int) -> np.random.Generator:
    """Return the generator of one decision; a retry or a replay of the round draws the same."""
    return np.random.default_rng([seed, pod, round])


def perturb(
    hyperparameters: Mapping[str, float], rule: PopulationBased, rng: np.random.Generator
) -> dict[str, float]:
    """Perturb hyperparameters as in Jaderberg et al. (2017), section 4.

    Each one that has bounds is multiplied by one of the factors and clipped; or drawn from its
    bounds, with probability `resample` or if it has no value yet. The others are unchanged.
    """
    values = dict(hyperparameters)
    for bound in rule.bounds:
        factor = rule.factors[int(rng.integers(len(rule.factors)))]
        resampled = bound.name not in values or rng.random() < rule.resample
        sample = bound.draw(rng) if resampled else bound.low
        value = values.get(bound.name, sample)
        values[bound.name] = float(bound.perturb(value, factor, sample, resampled))
    return values


@dataclasses.dataclass(frozen=True)
class Independent:
    """Every pod continues its own newest entry: the control that a tournament must beat."""


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every pod starts from an entry drawn uniformly from the leaderboard."""


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Draw an entry by standardized score, and start from it if it is better than the pod's own.

    The rule of ElegantRL-Podracer (Liu et al. 2021, arXiv:2112.05923) as in its released code,
    without its defect that a full board could lose its best entry for a while.
    """

    temperature: float = bounded(1.0, exclusive=True)
    """Temperature of the softmax, in standard deviations of the scores; a lower one draws the
    best entry more often."""


@dataclasses.dataclass(frozen=True)
class KTournament:
    """Start from the best of k drawn entries, if it is better than the pod's own.

    Entries are drawn without replacement.

    Tournament selection: Goldberg and Deb 1991, "A comparative analysis of selection schemes".
    """

    k: int = bounded(3, low=1)
    """Number of entries k that are drawn; a larger k favors better entries."""


SelectionRule = (
    Independent | Uniform | Softmax | KTournament | Truncation | PopulationBased | Generational
)
SELECTION_RULES: dict[str, type] = {rule.__name__: rule for rule in get_args(SelectionRule)}


def choose(rule: SelectionRule, view: SelectionView, rng: np.random.Generator) -> Start | None:
    """Return the start of a pod's next round, None if it has to wait for others."""
    board, own_entry = view.state.board, view.state.pod(view.pod).newest
    match rule:
        case Generational():
            return _from_best_groups(rule, view)
        case Truncation():
            return _continue(_exploited(view, rule.fraction, rng) or own_entry)
        case PopulationBased():
            parent = _exploited(view, rule.fraction, rng)
            start = _continue(parent or own_entry)
            if parent is None and start.parents:
                return start
            # First rounds draw their hyperparameters from the bounds.
            return Start(start.parents, perturb(start.hyperparameters, rule, rng))
        case Uniform() if board:
            return _continue(board[rng.integers(len(board))])
        case Softmax() if board:
            candidate = board[rng.choice(len(board), p=softmax(board.scores, rule.temperature))]
        case KTournament() if board:
            count = min(rule.k, len(board))
            candidate = board[rng.choice(len(board), size=count, replace=False).min()]
        case _:
            return _continue(own_entry)
    is_better = own_entry is None or candidate.score > own_entry.score
    return _continue(candidate if is_better else own_entry)


def _continue(entry: Entry | None) -> Start:
    return Start() if entry is None else Start((entry.id,), entry.hyperparameters)


def softmax(scores: Sequence[float] | np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities, f64 `[n]`, of finite scores `[n]`; equal scores are equally likely."""
    values = np.asarray(scores, np.float64)
    values = values / (np.abs(values).max() or 1.0)  # so that no sum overflows
    values = values - values.max()
    deviation = values.std()
    weights = np.exp(values / deviation / temperature) if deviation > 0 else np.ones_like(values)
    return weights / weights.sum()


def _exploited(view: SelectionView, fraction: float, rng: np.random.Generator) -> Entry | None:
    """Return the entry that a pod at the bottom copies; None for any other pod."""
    population, own_entry = view.state.population, view.state.pod(view.pod).newest
    count = num_replaced(len(population), fraction)
    if own_entry is None or not count:
        return None
    place = population.place(own_entry)
    parent = int(truncation(place, len(population), fraction, rng.integers(count)))
    return None if parent == place else population[parent]


def _from_best_groups(rule: Generational, view: SelectionView) -> Start | None:
    """Return all pods of the parent group, to be fused. None until the generation has ended.

    A generation is a round. The rule uses only which pods are still in the previous round (it waits
    for these, unless they were marked absent, which is the time-out), and the newest entries. A
    group's score is the mean over its pods that ended the previous round; a group of which none did
    is no parent.
    """
    if view.round == 0:
        return Start()
    live = {number: pod for number, pod in view.state.pods.items() if pod.is_live}
    peers = (pod for number, pod in live.items() if number != view.pod and not pod.absent)
    if any(pod.round == view.round - 1 for pod in peers):
        return None
    groups: dict[int, list[Entry]] = {}
    for number, pod in sorted(live.items()):
        if pod.newest is not None and pod.newest.round >= view.round - 1:
            groups.setdefault(number // rule.group_size, []).append(pod.newest)
    if not groups:
        return Start()
    scores = {n: sum(x.score / len(entries) for x in entries) for n, entries in groups.items()}
    best = sorted(groups, key=lambda group: (-scores[group], group))[: rule.parents]
    pods = {number for number, pod in live.items() if pod.newest is not None or not pod.absent}
    numbers = sorted({number // rule.group_size for number in {view.pod, *pods}})
    ranks = [best.index(n) if n in best else len(best) for n in numbers]
    parents = generation(np.asarray(ranks), len(best))
    entries = groups[best[parents[numbers.index(view.pod // rule.group_size)]]]
    return Start(tuple(entry.id for entry in entries), entries[0].hyperparameters)
