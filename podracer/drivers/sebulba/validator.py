"""What comes from a host environment is looked at before it may train."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podracer.types import EnvironmentFault, EnvironmentSpec, TimeStep


class Inspector:
    """Looks at every timestep of a batch before it may train.

    A row with a value that is not finite is counted, shown as a cut without content, and stays so
    until its environment begins a new episode.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int) -> None:
        self._name = spec.name
        leaves, self._structure = jax.tree.flatten(spec.observation)
        self._expected = [((num_envs, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._flags = {
            "reward": np.dtype(np.float32),
            "discount": np.dtype(np.float32),
            "first": np.dtype(bool),
            "last": np.dtype(bool),
        }
        self._num_envs = num_envs
        self._lost = np.zeros(num_envs, bool)
        self.faults: dict[str, int] = {}

    def inspect(self, timestep: TimeStep) -> TimeStep:
        """The timestep, bad rows emptied. Raises `EnvironmentFault` for wrong shapes or dtypes."""
        leaves, structure = jax.tree.flatten(timestep.observation)
        if structure != self._structure:
            self._refuse("observation", self._structure, structure)
        for leaf, (shape, dtype) in zip(leaves, self._expected, strict=True):
            self._check("observation", leaf, shape, dtype)
        for name, dtype in self._flags.items():
            self._check(name, getattr(timestep, name), (self._num_envs,), dtype)
        floats = [timestep.reward, timestep.discount]
        floats += [leaf for leaf in leaves if leaf.dtype.kind == "f"]
        if all(np.isfinite(x).all() for x in floats) and not self._lost.any():
            return timestep
        rows = [np.isfinite(x).reshape(self._num_envs, -1).all(axis=1) for x in floats]
        bad = ~np.logical_and.reduce(rows)
        if bad.any():
            self.faults["not_finite"] = self.faults.get("not_finite", 0) + int(bad.sum())
        self._lost = (self._lost & ~timestep.first) | bad
        return self._without(timestep, self._lost)

    def _without(self, timestep: TimeStep, lost: np.ndarray) -> TimeStep:
        def empty(leaf: np.ndarray) -> np.ndarray:
            mask = lost.reshape(-1, *[1] * (leaf.ndim - 1))
            return np.where(mask, np.zeros((), leaf.dtype), leaf)

        return TimeStep(
            observation=jax.tree.map(empty, timestep.observation),
            reward=empty(timestep.reward),  # pyright: ignore[reportArgumentType]
            discount=np.where(lost, np.float32(1), timestep.discount),  # pyright: ignore
            first=timestep.first | lost,
            last=timestep.last | lost,
        )

    def _check(self, what: str, leaf: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if getattr(leaf, "shape", None) != shape or leaf.dtype != dtype:
            got = f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"
            self._refuse(what, f"{dtype}{list(shape)}", got)

    def _refuse(self, what: str, expected: Any, got: Any) -> None:
        raise EnvironmentFault(f"{self._name}: {what} must be {expected}, but it became {got}.")
