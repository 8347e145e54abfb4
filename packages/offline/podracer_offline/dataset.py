"""Data sets: transitions of whole episodes as arrays, checked, and their files."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from podracer.arguments import typed
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.io.npz import DAMAGE, read_header, unpack
from podracer.io.text import redact
from podracer.types import (
    ACTION_MASK,
    ActionSpace,
    ArraySpec,
    Continuous,
    Discrete,
    EnvironmentSpec,
    MultiDiscrete,
    PyTree,
    action_mask,
    leaves_by_path,
)

LOG = "data"  # name of an environment that nobody knows
_COLUMNS = ("action", "reward", "terminal", "timeout")
# Names in files of D4RL, and in common files of Minari's arrays.
_ALIASES = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminal": "terminals",
    "timeout": "timeouts",
}
_MOST_NAME_BYTES = 2**16


@struct
class Rows:
    """Timesteps of episodes, one after another, with the final observations after time-outs."""

    observation: PyTree
    action: jax.Array
    reward: jax.Array  # f32, for the action
    terminal: jax.Array  # bool, the action ends the episode
    last: jax.Array  # bool, the episode is cut here, and there is no action
    starts: jax.Array  # i32 [E], the first timesteps of the episodes
    # f32 [N, n], of the actions; not in `config.json`, where runs of older versions lack it
    distribution: jax.Array | None = dataclasses.field(default=None, metadata={"derived": True})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """N transitions of whole episodes, one after another; NumPy arrays `[N, ...]`.

    `terminal` and `timeout` mark the last transition of each episode, and where both are set it is
    a terminal. Raises `ConfigError` where arrays do not fit together, or have no finite numbers.
    """

    observation: PyTree
    """Observations on which actions were chosen: an array, or a dictionary of arrays."""
    action: np.ndarray
    """Actions: integers from 0 on, `[N]` or `[N, n]`, or f32 `[N, n]` in the environment's
    units, whose extremes are rounded inward from more digits."""
    reward: np.ndarray
    """Rewards for the actions, f32."""
    terminal: np.ndarray
    """Whether the action ended the episode, bool."""
    timeout: np.ndarray
    """Whether the episode was cut after the action, bool."""
    final_observation: PyTree = None
    """Observations `[K, ...]` after the K time-outs in their order; without them a time-out's
    transition, whose value is unknown, is not learned from."""
    environment: str = ""
    """Name of the environment that they come from, if it has one."""
    distribution: np.ndarray | None = None
    """Distributions that the actions come from, f32 `[N, n]`, if recorded: logits, those of several
    actions one after another, or means and then logarithms of scales of continuous actions, in
    units where their bounds are -1 and 1."""

    def __post_init__(self) -> None:
        for name in ("terminal", "timeout"):
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
                raise ConfigError(f"{name} of the data set must be true and false, or 1 and 0.")
            object.__setattr__(self, name, array.astype(bool))
        size = self.terminal.shape
        if len(size) != 1 or not size[0] or self.timeout.shape != size:
            raise ConfigError(
                "terminal and timeout of the data set must be bool[N] with N of at least 1."
            )
        object.__setattr__(self, "timeout", self.timeout & ~self.terminal)
        for name in ("observation", "action", "reward", "final_observation", "distribution"):
            value = getattr(self, name)
            is_missing = value is None and name not in ("final_observation", "distribution")
            if is_missing or any(isinstance(x, dict | tuple | list) for x in _leaves(value)):
                raise ConfigError(
                    f"{name} of the data set must be an array, or a dictionary of arrays."
                )
            object.__setattr__(self, name, jax.tree.map(partial(_in_32_bits, name), value))
        if self.action.dtype.kind in "biu":
            object.__setattr__(self, "action", self.action.astype(np.int32))
        _check_sizes(self)
        for name, array in _arrays(self).items():
            if not np.isfinite(array).all():
                raise ConfigError(f"{name} of the data set has numbers that are not finite.")
        if not (self.terminal[-1] or self.timeout[-1]):
            raise ConfigError(
                "the last transition of the data set ends no episode: set terminal or timeout "
                "there, or leave the part of an episode out."
            )

    @property
    def ends(self) -> np.ndarray:
        """Indices of the last transition of each episode, i64 `[E]`."""
        return np.flatnonzero(self.terminal | self.timeout)

    @property
    def returns(self) -> np.ndarray:
        """Undiscounted returns of the episodes, f64 `[E]`."""
        starts = np.concatenate([[0], self.ends[:-1] + 1])
        return np.add.reduceat(self.reward.astype(np.float64), starts)

    @property
    def digest(self) -> str:
        """SHA-256 of all arrays, in hexadecimal."""
        sha = hashlib.sha256(self.environment.encode())
        for name, array in _arrays(self).items():
            sha.update(f"{name} {array.dtype} {array.shape}".encode())
            sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()

    @typed
    def split(self, fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Return two data sets, with a share of the episodes, drawn with `seed`, and the others."""
        count = len(self.ends)
        if not 0 < fraction < 1 or not 0 < (size := round(fraction * count)) < count:
            raise ConfigError(
                f"a share of {fraction} of {count} episodes leaves one part without any: take a "
                "share in (0, 1), or more episodes."
            )
        selection = np.zeros(count, bool)
        selection[np.random.default_rng(seed).permutation(count)[:size]] = True
        return self._episodes(selection), self._episodes(~selection)

    def _episodes(self, selection: np.ndarray) -> Dataset:
        ends = self.ends
        rows = np.repeat(selection, np.diff(ends, prepend=-1))
        finals = selection[self.timeout[ends]]
        columns = {name: getattr(self, name) for name in (*_COLUMNS, "distribution")}
        parts = {name: x[rows] for name, x in columns.items() if x is not None}
        return dataclasses.replace(
            self,
            observation=jax.tree.map(lambda x: x[rows], self.observation),
            final_observation=jax.tree.map(lambda x: x[finals], self.final_observation),
            **parts,
        )

    def rows(self) -> Rows:
        """Return all timesteps as NumPy's arrays. Raises `ConfigError` if none is usable."""
        timeout, final = self.timeout, self.final_observation
        last, places = timeout, np.flatnonzero(timeout) + 1
        if final is not None:  # it follows the transition
            last = np.insert(np.zeros_like(timeout), places, True)

        def with_final(array: np.ndarray, values: Any = 0) -> np.ndarray:
            return array if final is None else np.insert(array, places, values, axis=0)

        observation = self.observation
        if final is not None:
            observation = jax.tree.map(with_final, observation, final)
        terminal = with_final(self.terminal, False)
        ends = terminal | last
        starts = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
        starts = starts[~last[starts]]  # an episode without a transition that can be learned from
        if not len(starts):
            raise ConfigError(
                "each episode of the data set is one transition up to a time-out whose next "
                "observation is unknown: give final_observation."
            )
        reward = np.where(last, np.float32(0), with_final(self.reward))
        distribution = self.distribution
        if distribution is not None:
            distribution = with_final(distribution)
        columns: Any = (observation, with_final(self.action), reward, terminal, last)
        columns = (*columns, starts.astype(np.int32), distribution)
        return Rows(*columns)

    # --- files ------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the content of an `.npz` file, as `load` reads it, without secrets of the name."""
        file, name = io.BytesIO(), redact(self.environment, stable=True)
        arrays: dict[str, Any] = {"environment": np.asarray(name), **_arrays(self)}
        np.savez(file, **arrays)
        return file.getvalue()

    @staticmethod
    def load(path: str | Path | BinaryIO, name: str = "") -> Dataset:
        """Return the data set in an `.npz` file, whose arrays have the names of the fields.

        The arrays of a dictionary of observations are `observation.NAME`. D4RL's names are
        understood, too: `observations`, `next_observations` and so on. `name` is what messages call
        an open file. Raises `ConfigError`.
        """
        name = name or str(path)
        try:
            with zipfile.ZipFile(path) as archive:
                members = _members(archive.namelist(), name)
                _check_headers({x: read_header(archive, y) for x, y in members.items()}, name)
                arrays = {field: unpack(archive, member) for field, member in members.items()}
        except DAMAGE as error:
            reason = getattr(error, "strerror", None) or "numpy.savez writes such files"
            raise ConfigError(f"{name} is no data set in an .npz file: {reason}.") from error
        dataset = Dataset(
            observation=_tree(arrays, "observation"),
            final_observation=_tree(arrays, "final_observation"),
            environment=str(arrays.get("environment", "")),
            distribution=arrays.get("distribution"),
            **{column: arrays[column] for column in _COLUMNS},
        )
        following = arrays.get("next_observations")
        if dataset.final_observation is not None or following is None:
            return dataset
        return dataclasses.replace(dataset, final_observation=following[dataset.timeout])

    @staticmethod
    def from_minari(dataset: Any, environment: str | None = None) -> Dataset:
        """Return the transitions of a `minari.MinariDataset`.

        `environment` is by default Gymnasium's, by the id that the data set has, if any. Raises
        `ConfigError` where observations are not an array or a dictionary of arrays.
        """
        episodes = list(dataset.iterate_episodes())
        if not episodes:
            raise ConfigError("the Minari data set has no episodes.")
        for number, episode in enumerate(episodes):
            _check_episode(number, episode, episodes[0])
        terminal = np.concatenate([x.terminations for x in episodes]).astype(bool)
        ends = np.cumsum([len(x.rewards) for x in episodes]) - 1
        timeout = np.zeros_like(terminal)
        timeout[ends] = ~terminal[ends]  # by truncation, or where the collection ended
        finals = [x.observations for x in episodes if not x.terminations[-1]]
        if environment is None:
            id = getattr(dataset.env_spec, "id", "")
            environment = f"gymnasium:{id}" if id else ""

        def join(trees: list[PyTree], part: Any) -> PyTree:
            return jax.tree.map(lambda *x: np.concatenate([leaf[part] for leaf in x]), *trees)

        space = getattr(dataset, "observation_space", None)
        return Dataset(
            observation=_from_zero(space, join([x.observations for x in episodes], slice(-1))),
            action=join([x.actions for x in episodes], slice(None))
            - getattr(dataset.action_space, "start", 0),
            reward=np.concatenate([x.rewards for x in episodes]),
            terminal=terminal,
            timeout=timeout,
            final_observation=_from_zero(space, join(finals, slice(-1, None))) if finals else None,
            environment=environment,
        )

    # --- environments -----------------------------------------------------------------------------

    @property
    def spec(self) -> EnvironmentSpec:
        """Specification of an environment that the data set may come from, by its numbers alone."""
        observation, action = _row_specs(self.observation), self.action
        if action.dtype.kind != "f":
            sizes = np.max(action, axis=0).astype(np.int64) + 1
            widths = self.distribution, action_mask(self.observation)
            choices = [x.shape[-1] for x in widths if x is not None]
            if action.ndim == 1 and choices:  # also those that never occur
                sizes = choices[0]
            space = Discrete(int(sizes)) if action.ndim == 1 else MultiDiscrete(tuple(sizes))
        else:
            low, high = action.min(axis=0), action.max(axis=0)
            for place in np.flatnonzero(low == high)[:1]:
                raise ConfigError(
                    f"coordinate {place} of the data set's actions is always {low[place]:g}, so "
                    "its bounds are unknown: leave it out, or name the environment."
                )
            space = Continuous(tuple(low), tuple(high))
        return EnvironmentSpec(LOG, observation, space)

    def check(self, spec: EnvironmentSpec, *, bounds: bool = True) -> Dataset:
        """Return the transitions as an environment can have them, or raise `ConfigError`.

        Actions that are one rounding away from a bound, on either side, are at it. Without `bounds`
        they may lie beyond them, or be forbidden.
        """
        parts = {"observation": self.observation}
        if self.final_observation is not None:
            parts["final_observation"] = self.final_observation
        for name, arrays in parts.items():
            _check_like(name, arrays, spec.observation, f"{spec.name}'s")
            leaves = leaves_by_path(arrays)
            for path, leaf in leaves_by_path(spec.observation).items():
                high = leaf.num_values
                if high is not None and not ((leaves[path] >= 0) & (leaves[path] < high)).all():
                    raise ConfigError(
                        f"{name}{path} of the data set must lie in 0 to {high - 1}, as in "
                        f"{spec.name}."
                    )
        space = spec.action
        if self.distribution is not None:
            size = 2 * space.size if isinstance(space, Continuous) else sum(space.components)
            _check_like("distribution", self.distribution, ArraySpec((size,)), f"{spec.name}'s")
        action = _checked_actions(self.action, spec, bounds)
        if bounds:
            _check_allowed(action, self.observation, space)
        same = action is self.action or np.array_equal(action, self.action)
        return self if same else dataclasses.replace(self, action=action)


def _in_32_bits(name: str, array: Any) -> np.ndarray:
    """Return an array as JAX keeps it: no float or integer has 64 bits.

    Raises `ConfigError` for integers that would change, and where there are no numbers.
    """
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{name} of the data set has no numbers, its dtype is {array.dtype}.")
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            rounded = array.astype(np.float32, copy=False)
        if name != "action" or rounded is array or not array.size:
            return rounded
        # The extremes may be an environment's bounds, and are rounded as those are.
        with np.errstate(over="ignore"):
            low, high = (x.astype(np.float32) for x in (np.min(array, 0), np.max(array, 0)))
        low = np.where(low < np.min(array, 0), np.nextafter(low, np.float32(np.inf)), low)
        high = np.where(high > np.max(array, 0), np.nextafter(high, np.float32(-np.inf)), high)
        return np.where(np.isfinite(rounded), np.clip(rounded, low, high), rounded)
    if array.dtype not in (np.int64, np.uint32, np.uint64):
        return array
    converted = array.astype(np.int32)
    if not np.array_equal(converted, array):
        raise ConfigError(f"{name} of the data set has integers that do not fit in 32 bits.")
    return converted


def _from_zero(space: Any, observation: PyTree) -> PyTree:
    """Return observations of a space of Gymnasium with numbers that begin at 0."""
    if isinstance(observation, dict):
        spaces = getattr(space, "spaces", {})
        return {name: _from_zero(spaces.get(name), x) for name, x in observation.items()}
    start = getattr(space, "start", 0)
    return observation - start if np.any(start) else observation


def _arrays(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return all arrays by their names in a file."""
    arrays = {name: getattr(dataset, name) for name in _COLUMNS}
    for field in ("observation", "final_observation", "distribution"):
        tree = getattr(dataset, field)
        leaves = {f".{k}": x for k, x in tree.items()} if isinstance(tree, dict) else {"": tree}
        arrays |= {field + name: x for name, x in leaves.items() if x is not None}
    return arrays


def _leaves(observation: PyTree) -> list[Any]:
    """Return the parts of a dictionary, or the observation alone."""
    return list(observation.values()) if isinstance(observation, dict) else [observation]


def _tree(arrays: dict[str, np.ndarray], field: str) -> PyTree:
    """Return an array or a dictionary of arrays, None if there is neither."""
    parts = {
        name.partition(".")[2]: x for name, x in arrays.items() if name.startswith(f"{field}.")
    }
    return parts or arrays.get(field)


def _row_specs(arrays: PyTree) -> PyTree:
    """Return the specifications of one row of arrays `[N, ...]`."""
    return jax.tree.map(lambda x: ArraySpec(x.shape[1:], x.dtype), arrays)


def _members(files: list[str], name: str) -> dict[str, str]:
    """Return the arrays of a data set in an archive by field: its others are not unpacked.

    Raises `ConfigError` where one is missing.
    """
    members = {x: x for x in (file.removesuffix(".npy") for file in files)}
    for column, alias in _ALIASES.items():
        if alias in members:
            members.setdefault(column, members.pop(alias))
    trees = ("observation", "final_observation")
    fields = (*_COLUMNS, "environment", "distribution", "next_observations")
    wanted = {x: y for x, y in members.items() if x in fields or x.partition(".")[0] in trees}
    for column in (*_COLUMNS, "observation"):
        if not any(field.partition(".")[0] == column for field in wanted):
            raise ConfigError(f"{name} is no data set: it has no array {column!r}.")
    return wanted


def _check_headers(headers: dict[str, tuple[tuple[int, ...], np.dtype]], name: str) -> None:
    """Raise `ConfigError` where arrays that are not read yet do not fit each other."""
    count = next(iter(headers["terminal"][0]), 0)
    for field, (shape, dtype) in headers.items():
        if field == "environment":
            if shape or dtype.kind != "U" or dtype.itemsize > _MOST_NAME_BYTES:
                raise ConfigError(f"environment of {name} must be a name.")
        elif dtype.kind not in "biuf":
            raise ConfigError(f"{field} of the data set has no numbers, its dtype is {dtype}.")
        elif not field.startswith("final_observation"):
            _check_size(field, shape, count)
        elif next(iter(shape), 0) > count:
            raise ConfigError(f"{field} of the data set has more rows than {count} transitions.")


def _check_episode(number: int, episode: Any, first: Any) -> None:
    """Raise `ConfigError` unless an episode of Minari has steps, and rows as the first one's."""
    if not (length := np.size(episode.rewards)):
        raise ConfigError(f"episode {number} of the Minari data set has no steps.")
    for name in ("rewards", "terminations", "actions", "observations"):
        tree, is_observation = getattr(episode, name), name == "observations"
        for leaf in _leaves(tree) if is_observation else [tree]:
            if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biuf":
                kinds = "arrays or a dictionary of arrays" if is_observation else "arrays"
                raise ConfigError(
                    f"{name} of a Minari data set must be {kinds}, but they have a "
                    f"{getattr(leaf, 'dtype', type(leaf).__name__)}."
                )
            unit = "timesteps" if is_observation else "transitions"
            _check_size(f"{name} of episode {number}", leaf.shape, length + is_observation, unit)
        rows, expected = (
            {path: x.shape[1:] for path, x in leaves_by_path(part).items()}
            for part in (tree, getattr(first, name))
        )
        if rows != expected:
            has, needs = ({path.strip("[]'"): x for path, x in y.items()} for y in (rows, expected))
            raise ConfigError(
                f"{name} of episode {number} of the Minari data set have rows of shape {has}, not "
                f"{needs} as those of episode 0."
            )


def _check_sizes(dataset: Dataset) -> None:
    for name, array in _arrays(dataset).items():
        is_final = name.startswith("final_observation")
        expected = int(dataset.timeout.sum()) if is_final else len(dataset.terminal)
        _check_size(name, array.shape, expected, "time-outs" if is_final else "transitions")
    action = dataset.action
    if dataset.reward.ndim != 1 or action.ndim > 2 or not action.size:
        raise ConfigError("of a data set, reward is [N], and action is [N] or [N, n].")
    if action.dtype.kind == "f" and action.ndim == 1:
        raise ConfigError(
            f"action of the data set is float32{list(action.shape)}, but continuous actions are "
            "[N, n]: give action[:, None]."
        )
    if dataset.final_observation is not None:
        expected = _row_specs(dataset.observation)
        _check_like("final_observation", dataset.final_observation, expected, "its observation's")


def _check_size(
    name: str, shape: tuple[int, ...], expected: int, unit: str = "transitions"
) -> None:
    if shape[:1] != (expected,):
        raise ConfigError(
            f"{name} of the data set must lead with its {expected} {unit}, but its shape is "
            f"{shape}."
        )


def _check_like(name: str, arrays: PyTree, expected: PyTree, owner: str) -> None:
    """Raise `ConfigError` unless rows of arrays `[N, ...]` have the expected specifications."""
    leaves, specs = leaves_by_path(_row_specs(arrays)), leaves_by_path(expected)
    if leaves.keys() != specs.keys():
        has, needs = ("/".join(x) or "an array" for x in (leaves, specs))
        raise ConfigError(f"{name} of the data set is {has}, not {needs} as {owner}.")
    for path, spec in specs.items():
        leaf = leaves[path]
        if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
            has, needs = (f"{x.dtype}{list(x.shape)}" for x in (leaf, spec))
            raise ConfigError(f"{name}{path} of the data set is {has}, not {needs} as {owner}.")


def _checked_actions(action: np.ndarray, spec: EnvironmentSpec, bounds: bool) -> np.ndarray:
    """Return actions of an environment, those next to a bound at it. Raises `ConfigError`."""
    space = spec.action
    if isinstance(space, Continuous):
        _check_like("action", action, ArraySpec((space.size,)), f"{spec.name}'s")
        low, high = (np.asarray(x, np.float32) for x in (space.low, space.high))
        rounding = np.spacing(np.maximum(np.abs(low), np.abs(high)))
        for bound in (low, high):
            action = np.where(np.abs(action - bound) <= rounding, bound, action)
        is_invalid = (action < low) | (action > high)
    else:
        shape = (len(space.components),) if isinstance(space, MultiDiscrete) else ()
        _check_like("action", action, ArraySpec(shape, np.int32), f"{spec.name}'s")
        is_invalid = (action < 0) | (action >= np.asarray(space.components).reshape(shape))
    if bounds and is_invalid.any():
        row = int(np.argwhere(is_invalid)[0][0])
        # The digits that a number in 32 bits has, as its source may have written it.
        numbers = np.array2string(action[row], 10**6, separator=", ", floatmode="unique")
        raise ConfigError(
            f"action {row} of the data set, {numbers}, is none of {spec.name}: "
            f"actions lie in {_range_text(space)}."
        )
    return action


def _check_allowed(action: np.ndarray, observation: PyTree, space: ActionSpace) -> None:
    """Raise `ConfigError` for an action that the mask in its observation forbids."""
    mask = action_mask(observation)
    if mask is None or isinstance(space, Continuous):
        return
    columns = np.cumsum((0, *space.components[:-1])) + action.reshape(len(action), -1)
    is_forbidden = ~np.take_along_axis(mask, columns, axis=1).all(axis=1)
    if is_forbidden.any():
        row = int(np.argmax(is_forbidden))
        raise ConfigError(
            f"action {row} of the data set, {action[row].tolist()}, is not allowed by its mask "
            f"{ACTION_MASK!r}: leave the episode out."
        )


def _range_text(space: Any) -> str:
    if isinstance(space, Continuous):
        low, high = ([float(f"{x:.6g}") for x in bounds] for bounds in (space.low, space.high))
        return f"{low} to {high}"
    if isinstance(space, Discrete):
        return f"0 to {space.num_actions - 1}"
    return f"{[0] * space.size} to {[n - 1 for n in space.components]}"
