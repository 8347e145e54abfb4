"""Selection within a population: pods start from better ones, between chunks, on the device.

    jit(cond(select), shard_map(map(vmap(chunk))))

A tournament has the same rules, and decides on the host, for one pod at a time: what both
share is written here once, on arrays of NumPy or of JAX (`xp`). A pod's score is the mean return of
the episodes that ended in the last chunk in which any did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.arguments import typed
from podracer.devices.mesh import POD, REPLICATED
from podracer.drivers.exchange import is_due
from podracer.drivers.state import TrainState
from podracer.errors import ConfigError
from podracer.fields import NO_FLAG, bounded, check_ranges, struct
from podracer.io.sinks import HYPERPARAMETER, PARENT
from podracer.rollout import Purpose, purpose_key
from podracer.types import PyTree


@typed
@dataclasses.dataclass(frozen=True)
class Range:
    """Interval of a hyperparameter's values. Raises `ConfigError` if it is empty."""

    name: str
    """Name of a float field of the agent, dotted if nested."""
    low: float
    """Smallest value. Draws are log-uniform if it is positive."""
    high: float
    """Largest value."""

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(
                f"the range of {self.name} must be finite and not empty, "
                f"but it is {self.low} to {self.high}."
            )

    def draw(self, rng: np.random.Generator) -> float:
        return self.clip(self.at(rng.random()))

    def at(self, quantile: Any, exp: Callable[[Any], Any] = math.exp) -> Any:
        """Return the value at a quantile in [0, 1); `exp` is one for its kind of numbers."""
        if self.low > 0:
            low, high = math.log(self.low), math.log(self.high)
            return exp(low + (high - low) * quantile)
        return self.low + (self.high - self.low) * quantile

    def clip(self, value: float) -> float:
        return float(min(max(value, self.low), self.high))

    def perturb(self, value: Any, factor: Any, sample: Any, resampled: Any, xp: Any = np) -> Any:
        """Return values times their factors, or the samples where resampled; clipped.

        Jaderberg et al. 2017, arXiv:1711.09846, section 4.
        """
        return xp.clip(xp.where(resampled, sample, value * factor), self.low, self.high)


def num_replaced(num_pods: int, fraction: float) -> int:
    """Return the number of pods at the bottom, of which there are as many at the top."""
    return min(max(1, round(fraction * num_pods)), num_pods // 2)


def truncation(ranks: Any, num_pods: int, fraction: float, rank: Any, xp: Any = np) -> Any:
    """Return the rank of the pod that each pod starts from, given their own; 0 is the best.

    A pod at the bottom starts from the pod of `rank`, which is one of the top; the others continue.
    """
    return xp.where(ranks >= num_pods - num_replaced(num_pods, fraction), rank, ranks)


def generation(ranks: Any, num_parents: int, xp: Any = np) -> Any:
    """Return the rank of the group that each group starts from, given those of all groups `[G]`.

    The best `num_parents` continue, the others are assigned to them in turn.
    """
    is_child = ranks >= num_parents
    return xp.where(is_child, (xp.cumsum(is_child) - 1) % num_parents, ranks)


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Pods at the bottom start from one at the top; the others continue.

    Truncation selection as in Jaderberg et al. 2017, arXiv:1711.09846, without exploration.
    """

    fraction: float = bounded(0.2, high=0.5, exclusive=True)
    """Fraction of the population that counts as the bottom, and as the top, in (0, 0.5]."""

    def __post_init__(self) -> None:
        check_ranges(self, "")

    def decide(self, scores: jax.Array, draws: jax.Array) -> jax.Array:
        """Return the numbers i32 `[P, 1]` of the pods that all pods start from.

        `scores` and `draws`, in [0, 1), are f32 `[P]`. Equal scores are ranked by number.
        """
        num_pods, (order, ranks) = scores.shape[0], _ranking(scores)
        rank = _one_of(num_replaced(num_pods, self.fraction), draws)
        return order[truncation(ranks, num_pods, self.fraction, rank, jnp)][:, None]


@dataclasses.dataclass(frozen=True)
class PopulationBased:
    """Truncation selection, and pods that start from another one perturb its hyperparameters.

    Population Based Training, Jaderberg et al. 2017, arXiv:1711.09846, with its fraction and
    factors.
    """

    bounds: Annotated[tuple[Range, ...], NO_FLAG] = (Range("learning_rate", 1e-5, 1e-2),)
    """Hyperparameters that vary, each with its bounds."""
    fraction: float = bounded(0.2, high=0.5, exclusive=True)
    """Fraction of the population that counts as the bottom, and as the top, in (0, 0.5]."""
    factors: tuple[float, ...] = bounded((0.8, 1.2), exclusive=True)
    """Factors of which one, drawn at random, multiplies each hyperparameter."""
    resample: float = bounded(0.25, high=1.0)
    """Probability that a hyperparameter is drawn from its bounds instead of being multiplied."""

    def __post_init__(self) -> None:
        check_ranges(self, "")
        if not self.factors:
            raise ConfigError("factors must be positive, at least one, but there are none.")

    decide = Truncation.decide

    def perturb(self, values: dict[str, Any], draws: jax.Array) -> dict[str, Any]:
        """Return hyperparameters f32 `[P]` by name after exploration.

        `draws`, f32 `[P, H, 3]` in [0, 1), choose for each of the H bounds the factor, whether to
        resample, and the quantile of the bounds.
        """
        values = dict(values)
        for index, bound in enumerate(self.bounds):
            choice, chance, quantile = jnp.moveaxis(draws[:, index], 1, 0)
            factor = jnp.asarray(self.factors, jnp.float32)[_one_of(len(self.factors), choice)]
            sample = bound.at(quantile, jnp.exp)
            resampled = chance < self.resample
            values[bound.name] = bound.perturb(values[bound.name], factor, sample, resampled, jnp)
        return values


@dataclasses.dataclass(frozen=True)
class Generational:
    """Groups of pods in generations: the best groups continue, and the others start from them.

    FinRL-Podracer (Li et al. 2021, arXiv:2111.05188): an agent is a group of pods with the same
    hyperparameters and different seeds, fused at the end of a generation. Pod p is of group
    p // `group_size`.

    A group's score is the mean over its pods. The `parents` best groups continue, each from its own
    fusion. The others are assigned to them in turn, so that the numbers of children differ by one
    at most.
    """

    group_size: int = bounded(1, low=1)
    """Number of pods in a group (K)."""
    parents: int = bounded(2, low=1)
    """Number of groups that the next generation descends from; two in the published runs."""

    def __post_init__(self) -> None:
        check_ranges(self, "")

    def decide(self, scores: jax.Array, draws: jax.Array) -> jax.Array:
        """Return the numbers i32 `[P, K]` of the pods whose fusion all pods start from.

        `scores` are f32 `[P]`. Equal ones are ranked by number; nothing is drawn.
        """
        order, ranks = _ranking(scores.reshape(-1, self.group_size).mean(axis=1))
        first = order[generation(ranks, self.parents, jnp)] * self.group_size
        members = jnp.arange(self.group_size)
        return jnp.repeat(first, self.group_size)[:, None] + members[None, :]


def _ranking(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the numbers by rank, and the ranks by number."""
    order = jnp.argsort(-scores, stable=True)
    return order, jnp.argsort(order)


def _one_of(count: int, draws: jax.Array) -> jax.Array:
    """Return whole numbers below `count` from numbers in [0, 1)."""
    return (draws * count).astype(jnp.int32)


Rule = Truncation | PopulationBased | Generational


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rule by which pods start from better ones, and how often."""

    rule: Rule
    """Rule that decides which pods start from which."""
    every: int
    """Number of updates between two selections: whole chunks."""

    @property
    def bounds(self) -> tuple[Range, ...]:
        """Ranges of the hyperparameters that the rule perturbs."""
        return self.rule.bounds if isinstance(self.rule, PopulationBased) else ()

    def check(self, pods: Sequence[Any]) -> None:
        """Raise `ConfigError` if the rule has nothing to perturb, or does not fit the `Pod`s."""
        if isinstance(self.rule, PopulationBased) and not self.bounds:
            raise ConfigError(
                "population-based selection perturbs hyperparameters within their ranges: give "
                "one or more by `exchange.rule.bounds`."
            )
        if isinstance(self.rule, Generational):
            size = self.rule.group_size
            num_groups, remainder = divmod(len(pods), size)
            if remainder or num_groups <= self.rule.parents:
                raise ConfigError(
                    f"generational selection with {self.rule.parents} parents needs more groups "
                    f"than these, all of group_size {size}, but there are {len(pods)} pods."
                )
            for i in range(0, len(pods), size):
                if len({pod.hyperparameters for pod in pods[i : i + size]}) > 1:
                    raise ConfigError(
                        f"the pods {i} to {i + size - 1} would be a group, of group_size {size}, "
                        "but have different hyperparameters: take as many as there are seeds."
                    )


@struct
class SelectionState(TrainState):
    """State of pods under selection, which changes their hyperparameters, too."""

    hyperparameters: dict[str, jax.Array]  # f32 [P], of those that pods differ in or that change
    score: jax.Array  # f32 [P]; -inf before any episode has ended


def with_selection(chunk: Callable[..., Any], selection: Selection, mesh: Mesh) -> Any:
    """Return a chunk `(agents, states, request) -> (states, metrics)` that begins with a selection.

    It selects where one is due. Metrics gain `selection`: the number of the `parent` of each pod,
    the first of a group, and the hyperparameters that the pod goes on with.
    """

    def program(
        agents: Any, states: SelectionState, request: jax.Array
    ) -> tuple[SelectionState, dict[str, Any]]:
        def keep(states: SelectionState) -> tuple[SelectionState, jax.Array]:
            return states, jnp.arange(states.score.shape[0])

        due = is_due(selection.every, states.update[0])
        states, parents = jax.lax.cond(due, partial(select_pods, selection, mesh), keep, states)
        states, metrics = chunk(agents, states, request)
        count = metrics["episodes"]
        mean_return = metrics["episode_return"] / jnp.maximum(count, 1)
        states = dataclasses.replace(states, score=jnp.where(count > 0, mean_return, states.score))
        values = {f"{HYPERPARAMETER}{name}": x for name, x in states.hyperparameters.items()}
        return states, {**metrics, "selection": {PARENT: parents, **values}}

    return program


def select_pods(
    selection: Selection, mesh: Mesh, states: SelectionState
) -> tuple[SelectionState, jax.Array]:
    """Return the states that pods begin the next chunk with, and the numbers of their parents.

    A pod that starts from another one takes its learner and its environments, with what it has
    learned from them, but uses its own random numbers. A pod without a finite score is no parent.
    """
    numbers = jnp.arange(states.score.shape[0])

    def fold(key: jax.Array, update: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.fold_in(purpose_key(key, Purpose.SELECT), update)
        return jax.random.split(jax.random.fold_in(key, number))  # pods may have the same seed

    new_keys, draw_keys = jax.vmap(fold, out_axes=1)(states.key, states.update, numbers)
    num_draws = 1 + 3 * len(selection.bounds)
    draws = jax.vmap(partial(jax.random.uniform, shape=(num_draws,)))(draw_keys)
    scores = jnp.where(states.fault[:, 0] == 0, states.score, -jnp.inf)
    parents = selection.rule.decide(scores, draws[:, 0])
    are_scored = jnp.isfinite(scores[parents]).all(axis=1, keepdims=True)
    parents = jnp.where(are_scored, parents, numbers[:, None])
    first = parents[:, 0]
    changed = (parents != numbers[:, None]).any(axis=1)

    parent_states = _rows(states, first, mesh)
    later = [_rows(states.learner.shared, column, mesh) for column in parents.T[1:]]
    shared = jax.tree.map(mean_of_floats, parent_states.learner.shared, *later)
    values = parent_states.hyperparameters
    if isinstance(selection.rule, PopulationBased):
        explored = selection.rule.perturb(values, draws[:, 1:].reshape(len(numbers), -1, 3))
        values = {name: jnp.where(changed, explored[name], x) for name, x in values.items()}
    new_states = dataclasses.replace(
        parent_states.with_shared(shared),
        hyperparameters=values,
        score=jnp.where(changed, scores[parents].mean(axis=1), states.score),
        key=jnp.where(changed, new_keys, states.key),
    )
    return new_states, first


def _rows(tree: PyTree, numbers: jax.Array, mesh: Mesh) -> PyTree:
    """Return the rows with these numbers of a tree of arrays `[P, ...]`, sharded like it.

    Shards gather whole leaves, bit by bit: the sum that XLA would take turns -0 into 0.
    """
    whole, sharded = (NamedSharding(mesh, spec) for spec in (REPLICATED, PartitionSpec(POD)))

    def take(x: jax.Array) -> jax.Array:
        rows = jax.lax.with_sharding_constraint(x, whole)[numbers]
        return jax.lax.with_sharding_constraint(rows, sharded)

    return jax.tree.map(take, tree)


def mean_of_floats(first: jax.Array, *later: jax.Array) -> jax.Array:
    """Return the mean of arrays of floats; of arrays of integers, the first one.

    FinRL-Podracer's fusion (Li et al. 2021, arXiv 2111.05188, section 3.2). What is equal in all
    arrays stays as it is to the bit, so that constants stay constant.
    """
    if not later or not jnp.issubdtype(first.dtype, jnp.floating):
        return first
    are_equal = jnp.stack([x == first for x in later]).all(axis=0)
    return jnp.where(are_equal, first, sum(later, first) / (1 + len(later)))
