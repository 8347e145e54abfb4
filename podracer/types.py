"""Core types: timesteps, trajectories, states and specifications of environments.

Axis letters, used in every docstring:

    T  rollout length        B  environments (per shard inside a driver)     N  minibatch
    A  actions               K  unroll of a model or inner updates           S  simulations
    Z  atoms or quantiles    P  pods

Arrays are time-major, `[T, B, ...]`; `[*b, ...]` means any leading batch shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from podracer.arguments import named, to_python, typed
from podracer.errors import CheckpointError, ConfigError
from podracer.fields import bounded, check_ranges, struct

PyTree = Any
Params = PyTree
Carry = PyTree
EnvState = PyTree
Metrics = Mapping[str, Any]  # values are arrays [] or [n], or `reductions.MaskedMean`s


@struct
class TimeStep:
    """Output of an environment at time t. Leaves are `[*b, ...]`."""

    observation: PyTree
    """Tree of arrays `[*b, ...]`."""
    reward: Float32[Array, "*b"]
    """Reward for the action taken at t-1."""
    discount: Float32[Array, "*b"]
    """0 only at a true terminal, 1 elsewhere, also at a time-out; -1 where the turn passes to the
    other player of a zero-sum game, whose gain is this player's loss."""
    first: Bool[Array, "*b"]
    """Whether an episode begins here: recurrent state is reset."""
    last: Bool[Array, "*b"]
    """Whether the episode is cut here: the action chosen here is ignored."""

    def ends_episode(
        self, previous_last: Bool[Array | np.ndarray, "*b"]
    ) -> Bool[Array | np.ndarray, "*b"]:
        """Return whether an episode ends here; `previous_last` is `last` of the timestep before."""
        terminal = (self.discount == 0) & ~previous_last
        return (self.last & ~self.first) | terminal

    def begins_after_loss(
        self, previous_last: Bool[Array | np.ndarray, "*b"]
    ) -> Bool[Array | np.ndarray, "*b"]:
        """Return whether an episode begins here although the previous one has not ended.

        The previous episode was lost to a fault; the transition to this timestep must not train.
        """
        return self.first & ~previous_last & (self.discount > 0)


@struct
class Step:
    """A timestep and the action chosen on it."""

    timestep: TimeStep
    action: PyTree
    """Actions i32 `[*b]` or `[*b, size]`, or f32 `[*b, size]`."""
    extras: PyTree
    """What `Agent.act` keeps for `Agent.learn`, such as log-probabilities, `[*b, ...]`."""

    def with_timestep(self, **changes: Any) -> Step:
        """Return the step with other fields of its timestep."""
        return dataclasses.replace(self, timestep=dataclasses.replace(self.timestep, **changes))


@struct
class Trajectory:
    """T transitions between T+1 timesteps."""

    steps: Step
    """The T timesteps acted on, `[T, B, ...]`."""
    final: TimeStep
    """The timestep after the last action, `[B, ...]`."""
    carry: Carry
    """The agent's recurrent state at the first timestep, `[B, ...]`."""
    final_carry: Carry
    """The agent's recurrent state at `final`: a bootstrap value needs no second unroll."""

    def timesteps(self) -> TimeStep:
        """Return all timesteps `[T+1, B, ...]`: the T acted on, then the final one."""
        timestep = self.steps.timestep
        return jax.tree.map(lambda s, f: jnp.concatenate([s, f[None]]), timestep, self.final)

    def next_timesteps(self) -> TimeStep:
        """Return the timestep that each action led to, `[T, B, ...]`, without observations."""
        steps = dataclasses.replace(self.steps.timestep, observation=())
        final = dataclasses.replace(self.final, observation=())
        return jax.tree.map(lambda s, f: jnp.concatenate([s[1:], f[None]]), steps, final)

    def with_rewards(self, rewards: Float32[Array, "T+1 B"]) -> Trajectory:
        """Return the same trajectory with other rewards, in the order of `timesteps()`.

        Row t + 1 is the reward of transition t. Row 0 is that of the transition before this
        trajectory, from which agents with a replay learn now, and others did in the last rollout.
        """
        length, *rows = self.steps.timestep.reward.shape
        if rewards.shape != (length + 1, *rows):
            expected = f"{[length + 1, *rows]} as timesteps().reward is"
            raise ConfigError(f"with_rewards needs {expected}, not {list(rewards.shape)}.")
        rewards = rewards.astype(self.final.reward.dtype)
        steps = self.steps.with_timestep(reward=rewards[:-1])
        final = dataclasses.replace(self.final, reward=rewards[-1])
        return dataclasses.replace(self, steps=steps, final=final)

    def transitions(
        self, discount: float | Array = 1.0
    ) -> tuple[Float32[Array, "T B"], Float32[Array, "T B"], Bool[Array, "T B"]]:
        """Return the reward and the discount of each transition, and whether it is `valid`.

        `discount` gamma multiplies the environment's. The three are arguments of `ops.returns`, in
        their order there.
        """
        next_timesteps = self.next_timesteps()
        return next_timesteps.reward, discount * next_timesteps.discount, self.valid()

    def valid(self) -> Bool[Array, "T B"]:
        """Return which transitions may train: all but those that start at a time-out."""
        return ~self.steps.timestep.last


@struct
class LearnerState:
    """Everything an agent keeps between updates."""

    shared: PyTree
    """Replicated over devices: parameters, optimizer, targets, moments, counters."""
    local: PyTree = ()
    """Sharded over devices by the leading axis: replay, statistics of each environment."""


@named
@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one observation leaf, without any batch axis.

    With `frame_stack` the last axis holds the newest frames, oldest first, and each observation
    shifts the previous one by one new frame, or consists of copies of its newest frame, or of its
    newest frame after blank ones (all 0); the latter two only with `first`. A replay buffer then
    stores each frame once, and under Sebulba the newest one alone goes to the device.
    With `num_values` the observation is a number in 0 .. num_values - 1, such as a state's index.
    An environment of the host may convert from numbers that begin at `start`: so do those that a
    `Policy` takes.
    With `scaled` networks divide the bytes (uint8) by 255, as pixels from 0 to 255. None is True
    for bytes `[H, W, C]` and False for all else, whose numbers are taken as they are.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    frame_stack: bool = False
    num_values: int | None = None
    start: int = 0
    scaled: bool | None = None

    def __post_init__(self) -> None:
        shape = to_python(tuple(self.shape) if isinstance(self.shape, list) else self.shape)
        if not (isinstance(shape, tuple) and all(isinstance(x, int) and x >= 0 for x in shape)):
            advice = f": take ({shape},)" if isinstance(shape, int) else ""
            raise ConfigError(f"ArraySpec.shape must be a tuple of sizes, not {shape!r}{advice}.")
        object.__setattr__(self, "shape", shape)
        try:
            object.__setattr__(self, "dtype", np.dtype(self.dtype))
        except TypeError as error:
            raise ConfigError(f"ArraySpec.dtype cannot be {self.dtype!r}: {error}.") from None
        if self.scaled is None:
            object.__setattr__(self, "scaled", self.dtype == np.uint8 and len(shape) == 3)


ACTION_MASK = "action_mask"
NO_ACTION = (
    "an action mask was all False, so that no action was allowed: at least one must be True, "
    "except in a timestep with `last` set."
)


def action_mask(observation: PyTree) -> Any | None:
    """Return which actions an observation, or its spec, allows, None if all; see `Discrete`.

    Leaves are `[*b, num_actions]`. Some observations hold another one as `observation`.
    """
    while isinstance(observation, Mapping):
        if ACTION_MASK in observation:
            return observation[ACTION_MASK]
        observation = observation.get("observation")
    return None


@typed
@dataclasses.dataclass(frozen=True)
class Discrete:
    """Actions 0 .. num_actions - 1, int32.

    An environment of the host may convert to numbers that begin at `start`: so do the actions that
    a `Policy` returns.

    Where an observation is a dictionary with the key `action_mask`, bool `[num_actions]`, agents
    choose only actions that are True there. At least one must be, except where `last` is set.
    """

    num_actions: int = bounded(dataclasses.MISSING, low=1)
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_actions", to_python(self.num_actions))
        check_ranges(self, "Discrete")

    @property
    def components(self) -> tuple[int, ...]:
        """Number of actions of each component, as of `MultiDiscrete`; here it is one."""
        return (self.num_actions,)


@typed
@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """Several discrete actions at once, int32 `[n]`; component i is 0 .. num_actions[i] - 1.

    An environment of the host may convert each component to numbers that begin at `start`: so do
    the actions that a `Policy` returns; `()` means 0 for all.

    An `action_mask` (see `Discrete`) has the entries of all components, one component after
    another, bool `[sum(num_actions)]`; at least one of each component must be True. Binary actions
    are components with two values.
    """

    num_actions: tuple[int, ...] = bounded(dataclasses.MISSING, low=1)
    start: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_actions", to_python(self.num_actions))
        check_ranges(self, "MultiDiscrete")
        if not self.num_actions:
            raise ConfigError("MultiDiscrete.num_actions needs at least one component.")

    @property
    def components(self) -> tuple[int, ...]:
        """Number of actions of each component."""
        return self.num_actions

    @property
    def size(self) -> int:
        """Number of components."""
        return len(self.num_actions)


@typed
@dataclasses.dataclass(frozen=True)
class Continuous:
    """Actions in a box, f32 `[size]`, each coordinate within its bounds."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", to_python(self.low))
        object.__setattr__(self, "high", to_python(self.high))
        low, high = np.asarray(self.low, np.float64), np.asarray(self.high, np.float64)
        if low.shape != high.shape or not low.size:
            raise ConfigError("Continuous needs as many lower as upper bounds, at least one.")
        with np.errstate(over="ignore", invalid="ignore"):
            widths = high.astype(np.float32) - low.astype(np.float32)
        if not (np.isfinite(widths).all() and (low < high).all()):
            raise ConfigError(
                "Continuous needs bounds with low < high, finite and as far apart in float32, "
                f"but they are {self.low} and {self.high}."
            )

    @classmethod
    def within(cls, low: np.ndarray, high: np.ndarray) -> Continuous:
        """Return the box in float32 of bounds `[size]` with more digits: none is outside of it."""
        with np.errstate(over="ignore"):
            lowest, highest = low.astype(np.float32), high.astype(np.float32)
        lowest = np.where(lowest < low, np.nextafter(lowest, np.float32(np.inf)), lowest)
        highest = np.where(highest > high, np.nextafter(highest, np.float32(-np.inf)), highest)
        return cls(tuple(lowest.tolist()), tuple(highest.tolist()))

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return len(self.low)


ActionSpace = Discrete | MultiDiscrete | Continuous


@named
@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
    """Specification of an environment, from which an agent is built."""

    name: str
    observation: PyTree
    """`ArraySpec`, or a tree (such as a dictionary) of them."""
    action: ActionSpace
    extension: Any = None
    """For agents of environments of one kind: the environment itself where observations show its
    state (see packages/games), `TaskGroups` where tasks change."""
    agents: Mapping[str, EnvironmentSpec] = dataclasses.field(default_factory=dict)
    """What each of several agents observes, by its key in the observation, and its actions, which
    are this one's in turn (see packages/agents)."""
    takes_turns: bool = False
    """Whether the agent moves for two players: where the turn passes discounts are -1, see
    `TimeStep`."""
    turns_alternate: bool = True
    """Whether then the turn passes with every move, and nobody ever moves twice in a row."""
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Keys of an observation that is a dictionary, in groups: policies see the group `actor`, and
    critics the group `critic`, which may share keys. A key is a group of itself."""

    def keys(self, groups: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys of the observation in groups; raises `ConfigError` for unknown ones."""
        keys = tuple(key for group in groups for key in self.groups.get(group, (group,)))
        observed = self.observation if isinstance(self.observation, dict) else {}
        if unknown := [key for key in keys if key not in observed]:
            raise ConfigError(
                f"{self.name}: the observation has no group or key {unknown[0]!r}; its keys are "
                f"{', '.join(map(str, observed)) or 'none, as it is no dictionary'}."
            )
        return tuple(dict.fromkeys(keys))

    @property
    def spaces(self) -> str:
        """Observations and actions in words: `float32[4], Discrete(num_actions=2, start=0)`."""
        return f"{describe(self.observation)}, {self.action}"

    def __hash__(self) -> int:
        leaves, structure = jax.tree.flatten(self.observation)
        return hash((self.name, tuple(leaves), structure, self.action))


def describe(observation: PyTree) -> str:
    """Return the specification of an observation in words, such as `float32[4]`."""

    def text(leaf: ArraySpec) -> str:
        values = f" of {leaf.num_values} values" if leaf.num_values else ""
        return f"{leaf.dtype}{list(leaf.shape)}{values}"

    return str(jax.tree.map(text, observation)).replace("'", "")


def select(observation: PyTree, keys: tuple[str, ...]) -> PyTree:
    """Return the entries `keys` of an observation, or of its spec; all where there are none."""
    return {key: observation[key] for key in keys} if keys else observation


def blank_timestep(spec: EnvironmentSpec, num_envs: int) -> TimeStep:
    """Return the first timestep of episodes `[B, ...]` whose observations are zeros."""
    return TimeStep(
        observation=jax.tree.map(
            lambda leaf: jnp.zeros((num_envs, *leaf.shape), leaf.dtype), spec.observation
        ),
        reward=jnp.zeros(num_envs),
        discount=jnp.ones(num_envs),
        first=jnp.ones(num_envs, bool),
        last=jnp.zeros(num_envs, bool),
    )


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path. Raises `CheckpointError` if two have the same path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise CheckpointError("two leaves of the state have the same path")
    return leaves
