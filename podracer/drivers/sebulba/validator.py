"""Validation of the timesteps that host environments return."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from podracer.checks.errors import structure_change
from podracer.environment import expect_timestep
from podracer.errors import WEIGHTED_SUM, ConfigError, EnvironmentFault
from podracer.ops.action_masks import component_masks, lacks_action
from podracer.types import EnvironmentSpec, TimeStep

_FEW = 4_096  # numbers, for which BLAS starts no threads
KINDS = ("not_finite", "no_action")
NO_RESTART = "the timestep after an episode's end has no `first` set: no new episode begins."
_SCALAR_DTYPES = {
    "reward": np.dtype(np.float32),
    "discount": np.dtype(np.float32),
    "first": np.dtype(bool),
    "last": np.dtype(bool),
}


class TimestepValidator:
    """Validator of one batch of host environments.

    A row with a non-finite value, or whose action mask allows nothing, is counted in `faults`. It
    is zeroed and marked as cut (`first` and `last`), so that it does not train, until its
    environment starts a new episode.
    """

    def __init__(self, spec: EnvironmentSpec, masked: Bool[np.ndarray, " b"]) -> None:
        """Begin in a run in which these rows are masked until an episode begins."""
        self._name, self._spec = spec.name, spec
        leaves, self._structure = jax.tree.flatten(spec.observation)
        self._num_envs = len(masked)
        self._expected = [((len(masked), *leaf.shape), leaf.dtype) for leaf in leaves]
        self._masked_rows, self._any_masked = masked, bool(masked.any())
        self._ended_rows = np.zeros_like(masked)
        self.faults: Counter[str] = Counter()
        self.first_faults: dict[str, str] = {}  # a line on the first of each kind

    def validate(self, timestep: TimeStep) -> TimeStep:
        """Return the timestep, which is checked, with bad rows masked.

        Raises `ConfigError` if a row goes on after its episode's end.
        """
        leaves = self.check(timestep)
        if (self._ended_rows > timestep.first).any():
            raise ConfigError(f"{self._name}: {NO_RESTART}")
        self._ended_rows = timestep.last | ((timestep.discount == 0) & ~timestep.first)
        if not self._any_masked and self._is_good(timestep, leaves):
            return timestep
        bad_rows, finite = find_faults(np, self._spec, timestep, self._masked_rows)
        for kind, rows in zip(KINDS, bad_rows, strict=True):
            if rows.any():
                self.faults[kind] += int(rows.sum())
                row = int(rows.argmax())
                self.describe(kind, row, int(finite[:, row].argmin()))
        self._masked_rows = (self._masked_rows & ~timestep.first) | bad_rows.any(axis=0)
        self._any_masked = bool(self._masked_rows.any())
        return mask_rows(np, timestep, self._masked_rows)

    def _is_good(self, timestep: TimeStep, leaves: list[Any]) -> bool:
        """Return whether no row is bad, in as few calls as can be."""
        masks = component_masks(self._spec, timestep.observation)
        if not all(mask is None or (mask.any(axis=-1) | timestep.last).all() for mask in masks):
            return False
        floats = [leaf for leaf in leaves if leaf.dtype.kind in "fV"]  # V: bfloat16 and its like
        pairs = [(timestep.reward, timestep.discount), *zip(floats, floats, strict=True)]
        return all(_are_finite(*pair) for pair in pairs)

    def check(self, timestep: TimeStep) -> list[Any]:
        """Return the leaves of the observation.

        Raises `EnvironmentFault` for a structure, shape or dtype other than the spec's.
        """
        expect_timestep(self._name, timestep)
        leaves, structure = jax.tree.flatten(timestep.observation)
        if structure != self._structure:
            change = structure_change(self._spec.observation, timestep.observation, "observation")
            raise EnvironmentFault(f"{self._name}: observation must be as the spec's: {change}.")
        for leaf, (shape, dtype) in zip(leaves, self._expected, strict=True):
            self._check("observation", leaf, shape, dtype)
        for name, dtype in _SCALAR_DTYPES.items():
            self._check(name, getattr(timestep, name), (self._num_envs,), dtype)
        return leaves

    def describe(self, kind: str, row: int, part: int) -> None:
        """Keep a line on the first fault of a kind; `part` 0 is the reward, 1 the discount."""
        names = ("reward", "discount", "observation")
        fault = f"{names[min(part, 2)]} is not finite"
        text = fault if kind == "not_finite" else "its action mask was all False"
        self.first_faults.setdefault(kind, f"row {row} of the batch: {text}")

    def _check(self, name: str, leaf: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if getattr(leaf, "shape", None) != shape or leaf.dtype != dtype:
            actual = f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"
            if name == "reward" and len(np.shape(leaf)) > 1:
                actual += f": {WEIGHTED_SUM}"
            if hasattr(leaf, "__dlpack__") and not isinstance(leaf, np.ndarray | jax.Array):
                actual += ": a factory whose arrays are another library's has `on_device = True`"
            expected = f"{dtype}{list(shape)}"
            raise EnvironmentFault(
                f"{self._name}: {name} must be {expected}, but it became {actual}."
            )


def _are_finite(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether all numbers are finite, or False where a sum of their products overflows."""
    if x.size > _FEW:
        return bool(np.isfinite(x).all() and np.isfinite(y).all())
    return math.isfinite(np.vdot(x, y))


def find_faults(
    xp: Any, spec: EnvironmentSpec, timestep: TimeStep, masked: Bool[Array | np.ndarray, " b"]
) -> tuple[Bool[Array | np.ndarray, "2 b"], Bool[Array | np.ndarray, "n b"]]:
    """Return the bad rows by kind, and whether reward, discount and each float leaf are finite.

    A masked row without an action is counted once. `xp` is `numpy` or its like.
    """
    floats = [timestep.reward, timestep.discount]
    leaves = jax.tree.leaves(timestep.observation)
    floats += [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = xp.stack([xp.isfinite(x).reshape(len(x), -1).all(axis=1) for x in floats])
    no_action = lacks_action(spec, timestep) & (timestep.first | ~masked)
    return xp.stack([~finite.all(axis=0), no_action]), finite


def mask_rows(xp: Any, timestep: TimeStep, rows: Bool[Array | np.ndarray, " b"]) -> TimeStep:
    """Return the timestep with these rows zeroed and marked as cut; `xp` is `numpy` or its like."""

    def zero(leaf: Any) -> Any:
        mask = rows.reshape(-1, *[1] * (leaf.ndim - 1))
        return xp.where(mask, xp.zeros((), leaf.dtype), leaf)

    return TimeStep(
        observation=jax.tree.map(zero, timestep.observation),
        reward=zero(timestep.reward),
        discount=xp.where(rows, xp.float32(1), timestep.discount),
        first=timestep.first | rows,
        last=timestep.last | rows,
    )
