"""Check of one Gymnasium environment in random play, in this process."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from podracer.checks.errors import describe_error
from podracer.checks.random_play import random_actions, wrong_scales
from podracer.checks.report import EnvironmentReport, Finding
from podracer.envs.host import gymnasium_spec
from podracer.envs.host.gymnasium import Gymnasium, timestep_of
from podracer.envs.host.gymnasium_worker import Fault, Leaf, Worker, local_worker
from podracer.ops.action_masks import action_mask
from podracer.types import ACTION_MASK, EnvironmentSpec

if TYPE_CHECKING:
    from gymnasium import Env

STEPS, SECONDS = 1_000, 5.0  # random play ends by whichever comes first
COMPARED_STEPS = 200  # steps for which two episodes with one seed are compared
MASK_NAMES = {ACTION_MASK, "action_masks"}  # keys of `info`
LOST_SHARE = 0.1  # share of the changes of a number that float32 may lose


def examine(environment: Gymnasium) -> EnvironmentReport:
    """Play with random actions and report what an agent would meet, and what it would not see."""
    fields = (environment.environment, environment.options, environment.observe)
    spec, setup = gymnasium_spec.inspect_environment(*fields, in_process=True)
    setup = dataclasses.replace(setup, row_ranges=((0, 1),))
    worker = local_worker(setup, gymnasium_spec.factory(spec.name, *fields))
    play = Play(worker, spec, STEPS)
    with np.errstate(over="ignore"):  # a fault, as infinity is, and no warning
        earlier_generators = _global_generators()
        play.run(seed=1)
        play.draws_globally = _global_generators() != earlier_generators
        repeats = [Play(worker, spec, min(COMPARED_STEPS, play.num_steps)) for _ in range(2)]
        if not play.errors:
            for repeat, seed in zip(repeats, (1, 2), strict=True):
                repeat.run(seed)
    findings = [Finding("error", text) for text in play.errors]
    if not play.errors:
        warnings = [*play.warnings(), *_on_seeds(play, *repeats)]
        findings = [Finding("error", text) for repeat in repeats for text in repeat.errors[:1]]
        findings += [Finding("warning", text) for text in warnings]
    return EnvironmentReport(spec.name, spec, tuple(findings), play.figures())


def _global_generators() -> tuple[Any, ...]:
    """Return the states of the generators that all code of a process shares."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


def _on_seeds(play: Play, same: Play, different_seed: Play) -> Iterator[str]:
    """Yield what is wrong with the effect of seeds."""
    pairs = zip(play.history, same.history, strict=False)
    different = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
    if different == 0:
        yield (
            "two environments that are reset with one seed begin differently: `reset(seed=seed)` "
            "must call super().reset(seed=seed) and draw from self.np_random."
        )
    elif different is not None:
        yield (
            f"two episodes with one seed and the same actions differ from step {different} on: "
            "random numbers must be those of self.np_random."
        )
    elif len(different_seed.history) > 1 and same.history == different_seed.history:
        yield "two seeds give the same episodes: there is nothing random, or no seed is used."


class Play:
    """Random play in one environment, its history and what is wrong with it."""

    def __init__(self, worker: Worker, spec: EnvironmentSpec, most_steps: int) -> None:
        self.worker, self.spec, self.most_steps = worker, spec, most_steps
        self.timestep = timestep_of(worker.setup, worker.shared)
        self.errors: list[str] = []
        self.history: list[bytes] = []  # all numbers of each timestep
        self.num_steps = self.num_terminals = self.num_timeouts = self.num_resets = 0
        self.step_seconds = self.reset_seconds = self.total = 0.0
        self.returns: list[float] = []
        self.leaves: dict[str, _Numbers] = {}
        self.reward_kinds: set[str] = set()
        self.masks: set[str] = set()  # where the environment offers what agents do not see
        self.statistics: list[str] = []
        self.draws_globally = False

    def run(self, seed: int) -> None:
        """Play with the random actions of a seed; end at the first error."""
        generator, end = np.random.default_rng(0), time.monotonic() + SECONDS
        self.call = "__init__"
        try:
            env = self.worker.envs[0] = self.worker.make()
            self.statistics = list(gymnasium_spec.running_statistics(env))
            if any(hasattr(layer, "action_masks") for layer in gymnasium_spec.layers(env)):
                self.masks.add("action_masks()")
            self._reset(env, seed)
            while self.num_steps < self.most_steps and time.monotonic() < end:
                self._step(env, generator)
                if self.worker.episode_ended[0]:
                    self._reset(env, None)
        except Fault as fault:
            self.errors.append(f"`{self.call}` returned bad data ({fault.kind}): {fault}.")
        except Exception as error:
            self.errors.append(f"`{self.call}` raised {describe_error(error)}")
        finally:
            self.worker.close_env(0)

    def _step(self, env: Env, generator: np.random.Generator) -> None:
        shared = self.worker.shared
        shared.action[:] = random_actions(generator, self.spec, self.timestep.observation, 1)
        (action,) = self.worker.read_actions()
        self.call, start = "step", time.perf_counter()
        result = env.step(action)
        self.step_seconds += time.perf_counter() - start
        self.num_steps += 1
        self.worker.write_step(0, result)
        self._look(env, result)
        self.reward_kinds.add(type(result[1]).__name__)
        self.total += float(shared.reward[0])
        if self.worker.episode_ended[0]:
            terminal = shared.discount[0] == 0
            self.num_terminals += int(terminal)
            self.num_timeouts += int(not terminal)
            self.returns.append(self.total)
            self.total = 0.0

    def _reset(self, env: Env, seed: int | None) -> None:
        self.call = "reset" if seed is None else "reset(seed=seed)"
        start = time.perf_counter()
        result = env.reset() if seed is None else env.reset(seed=seed)
        self.reset_seconds += time.perf_counter() - start
        self.num_resets += 1
        self.worker.write_reset(0, result)
        self._look(env, result)

    def _look(self, env: Env, result: tuple[Any, ...]) -> None:
        """Take a timestep that was written into the worker's memory. Raises `Fault`."""
        observation, info = result[0], result[-1]
        if isinstance(info, Mapping):
            self.masks |= {f'info["{key}"]' for key in MASK_NAMES & info.keys()}
        for fault in self.worker.find_faults(0, 1):
            raise fault
        shared = self.worker.shared
        arrays = [array[0] for _, array in self.worker.leaves]
        scalars = (shared.reward[0], shared.discount[0], shared.first[0], shared.last[0])
        self.history.append(b"".join(x.tobytes() for x in (*arrays, *scalars)))
        for leaf, low, high, value in _leaves(
            self.worker.setup.observation, env.observation_space, observation
        ):
            numbers = self.leaves.setdefault(leaf.name, _Numbers(leaf, low, high))
            numbers.add(np.asarray(value))

    def warnings(self) -> Iterator[str]:
        """Yield what an agent would bear, but should know."""
        for numbers in self.leaves.values():
            yield from numbers.warnings()
        yield from self.statistics
        if self.masks and action_mask(self.spec.observation) is None:
            yield (
                f"{', '.join(sorted(self.masks))} says which actions are possible, and agents do "
                f"not see it: a wrapper can put it into the observation, as {ACTION_MASK!r} of a "
                "dictionary."
            )
        if self.draws_globally:
            yield (
                "random numbers are drawn from the generators of `random` or NumPy that the whole "
                "process shares: they follow the run's seed only in processes of their own, not "
                "with workers=0. Draw from self.np_random."
            )
        if strange := self.reward_kinds - {"float", "float32", "float64", "int"}:
            yield f"rewards are of type {', '.join(sorted(strange))}: return a float."
        if not self.returns:
            yield (
                f"no episode ended within {self.num_steps:,} steps: where episodes have no limit, "
                "wrap the environment in gymnasium.wrappers.TimeLimit."
            )

    def figures(self) -> dict[str, Any]:
        """Return what was measured."""
        figures: dict[str, Any] = {
            "steps of random play": self.num_steps,
            "terminals": self.num_terminals,
            "time-outs": self.num_timeouts,
        }
        if self.returns:
            figures["mean return"] = float(np.mean(self.returns))
        if self.num_steps and not self.errors:
            figures["steps a second of one environment"] = self.num_steps / self.step_seconds
            figures["milliseconds of a reset"] = 1e3 * self.reset_seconds / self.num_resets
        return figures


class _Numbers:
    """Extremes and changes of one array of the observations, as the environment returns it."""

    def __init__(self, leaf: Leaf, low: Any, high: Any) -> None:
        self.leaf, self.low, self.high = leaf, low, high
        self.least, self.most, self.dtypes = np.inf, -np.inf, set[str]()
        self.below = self.above = False
        self.previous: np.ndarray | None = None
        self.changes = self.lost = np.zeros(leaf.shape, np.int64)

    def add(self, value: np.ndarray) -> None:
        self.dtypes.add(str(value.dtype))
        if value.size and value.dtype.kind in "fiu":
            self.least, self.most = min(self.least, value.min()), max(self.most, value.max())
        if self.low is not None and value.dtype.kind in "fiu":
            self.below |= bool((value < self.low).any())
            self.above |= bool((value > self.high).any())
        if self.previous is not None and value.dtype.itemsize == 8:
            changed = value != self.previous
            narrow = value.astype(self.leaf.dtype) == self.previous.astype(self.leaf.dtype)
            self.changes, self.lost = self.changes + changed, self.lost + (changed & narrow)
        self.previous = value.copy()

    def warnings(self) -> Iterator[str]:
        leaf = self.leaf
        yield from wrong_scales(leaf.name, leaf, self.most)
        if self.below or self.above:
            yield (
                f"{leaf.name} reaches from {self.least:g} to {self.most:g}, outside of the bounds "
                f"that its space declares, {np.min(self.low):g} to {np.max(self.high):g}."
            )
        if undeclared := self.dtypes - {str(leaf.source)}:
            dtypes = ", ".join(sorted(undeclared))
            yield f"{leaf.name} is {dtypes}, but its space says {leaf.source}."
        if (self.lost > LOST_SHARE * self.changes).any():
            yield (
                f"{leaf.name} is {leaf.source} and arrives as {leaf.dtype}, which loses "
                f"{self.lost.sum():,} of {self.changes.sum():,} changes from step to step: "
                "subtract an offset or scale it."
            )


def _leaves(tree: Any, space: Any, value: Any) -> Iterator[tuple[Leaf, Any, Any, Any]]:
    """Yield each array of an observation with its `Leaf` and the bounds of floats in its space."""
    if isinstance(tree, Leaf):
        is_float = tree.source.kind == "f"  # the worker checks the bounds of other arrays
        yield tree, space.low if is_float else None, space.high if is_float else None, value
    else:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        for key in keys:
            yield from _leaves(tree[key], space[key], value[key])
