"""The vocabulary of the library: what environments say, what agents learn from, what is kept.

Axis letters, used in every docstring:

    T  rollout length        B  environments (per shard inside a driver)     N  minibatch
    A  actions               K  unroll of a model or inner updates           S  simulations
    Z  atoms or quantiles    P  pods

Arrays are time-major, `[T, B, ...]`; `[*b, ...]` means any leading batch shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
import tyro

PyTree = Any
Params = PyTree
Carry = PyTree
EnvState = PyTree
Metrics = Mapping[str, jax.Array]
T = TypeVar("T")
Derived = Annotated[T | None, tyro.conf.Suppress]  # type of a `derived` field: no flag


def static(*, default: Any = dataclasses.MISSING, low: float | None = None) -> Any:
    """A field of a `struct` that is part of its structure, not a leaf; at least `low` if given."""
    metadata = {"static": True} | ({} if low is None else {"range": (low, math.inf)})
    return dataclasses.field(default=default, metadata=metadata)


def bounded(default: Any, low: float = 0.0, high: float = math.inf) -> Any:
    """A field of a dataclass whose value must be finite and lie in `[low, high]`; a tuple's items,
    likewise. `check_ranges` checks it."""
    return dataclasses.field(default=default, metadata={"range": (low, high)})


def derived(*, leaf: bool = False) -> Any:
    """Declare a field that, like `spec`, setting up an experiment fills in: None until then.

    Configuration files leave it out. With `leaf` it holds arrays, else it is static.
    """
    return dataclasses.field(default=None, metadata={"static": not leaf, "derived": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def struct(cls: type[T]) -> type[T]:
    """A frozen dataclass that is a pytree; fields declared with `static()` are structure."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if f.name not in meta]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


def check_ranges(config: Any, path: str) -> None:
    """Raise `ConfigError` if a field of a dataclass, or of one within it, leaves the range that it
    was declared with by `bounded` or `static`. `path` is the name of `config` in the message."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{path}.{field.name}"
        if dataclasses.is_dataclass(value):
            check_ranges(value, name)
            continue
        if "range" in field.metadata and value is not None:
            low, high = field.metadata["range"]
            values: tuple[float, ...] = value if isinstance(value, tuple) else (value,)
            if not all(math.isfinite(v) and low <= v <= high for v in values):
                limits = f"lie in [{low:g}, {high:g}]"
                if high == math.inf:
                    limits = "be finite" if low == -math.inf else f"be at least {low:g}"
                raise ConfigError(f"{name} must {limits}, but it is {value}.")


@struct
class TimeStep:
    """What the world says at time t. Leaves are `[*b, ...]`."""

    observation: PyTree  # [*b, ...]
    reward: jax.Array  # f32 [*b], for the action taken at t-1
    discount: jax.Array  # f32 [*b], 0 only at a true terminal; 1 at a time-out
    first: jax.Array  # bool [*b], just reset: clear recurrent memory here
    last: jax.Array  # bool [*b], the episode is cut here: the action chosen here is ignored


@struct
class Step:
    """A timestep, the action chosen on it, and what the agent wants to remember of the choice."""

    timestep: TimeStep
    action: PyTree
    extras: PyTree


@struct
class Trajectory:
    """T transitions between T+1 timesteps."""

    steps: Step  # [T, B, ...]
    final: TimeStep  # [B, ...]
    carry: Carry  # the agent's memory at steps[0], [B, ...]
    final_carry: Carry  # and at `final`, so that a bootstrap value needs no second unroll

    def timesteps(self) -> TimeStep:
        """All timesteps `[T+1, B, ...]`: the T acted on, then the final one."""
        return jax.tree.map(
            lambda steps, final: jnp.concatenate([steps, final[None]]),
            self.steps.timestep,
            self.final,
        )

    def next_timesteps(self) -> TimeStep:
        """What each action led to, `[T, B, ...]`, observations left out."""
        steps = dataclasses.replace(self.steps.timestep, observation=())
        final = dataclasses.replace(self.final, observation=())
        return jax.tree.map(lambda s, f: jnp.concatenate([s[1:], f[None]]), steps, final)

    def valid(self) -> jax.Array:
        """Bool `[T, B]`: transitions that may train. A time-out's own action leads nowhere."""
        return ~self.steps.timestep.last


@struct
class LearnerState:
    """Everything an agent keeps between updates."""

    shared: PyTree  # replicated over `data`: parameters, optimizer, targets, moments, counters
    local: PyTree = ()  # leading axis sharded over `data`: replay, per-environment sums


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one observation leaf, without any batch axis.

    With `frame_stack` the last axis holds the newest frames, oldest first, and each observation
    either moves on by one frame from the one before it, or begins as copies of its newest frame, or
    as its newest frame after blank ones (all 0). A replay buffer then stores each frame once.
    With `num_values` the observation is a number in 0 .. num_values - 1, such as a state's index.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    frame_stack: bool = False
    num_values: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


ACTION_MASK = "action_mask"


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Actions 0 .. num_actions - 1, int32.

    Where an observation is a dictionary with the key `action_mask`, bool `[num_actions]`, agents
    choose only actions that are True there.
    """

    num_actions: int


@dataclasses.dataclass(frozen=True)
class Continuous:
    """Actions in a box, f32 `[size]`, each coordinate within its bounds."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.low)


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
    """What an agent must know of an environment before it is built.

    `extension` is for agents that are made for environments of one kind: the environment itself
    where observations show its state (`envs/model.py`), `TaskGroups` where tasks change.
    """

    name: str
    observation: Any  # pytree of `ArraySpec`; dictionaries of them are allowed
    action: Discrete | Continuous
    extension: Any = None

    def __hash__(self) -> int:
        leaves, structure = jax.tree.flatten(self.observation)
        return hash((self.name, tuple(leaves), structure, self.action))


class PodracerError(Exception):
    """A failure with a stable exit code; the message is one clear sentence."""

    exit_code = 70


class ConfigError(PodracerError):
    """What the user asked for cannot be: caught before any compile."""

    exit_code = 78


class EnvironmentFault(PodracerError):
    """An environment failed for good: it raised, hung, or died more often than it may."""

    exit_code = 72


class CheckpointError(PodracerError):
    """No checkpoint that can be trusted."""

    exit_code = 65


class NonFiniteError(PodracerError):
    """An update met a value that is not finite; it was not applied."""
