"""Shared by the drivers: the state of a run, progress reports, and the check of each update."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import rollout
from podracer.agent import Agent, Blueprint
from podracer.devices.kernels import all_finite, select
from podracer.devices.mesh import LEARNER_SPEC, REPLICATED, SHARDED, shardings
from podracer.devices.reductions import num_shards
from podracer.environment import Environment
from podracer.errors import ConfigError, EnvironmentFault, NonFiniteError
from podracer.fields import struct
from podracer.means import Mean
from podracer.ops.action_masks import action_mask, allows_action
from podracer.ops.sums import sum_of_pairs
from podracer.types import NO_ACTION, EnvironmentSpec, LearnerState, Metrics, PyTree, Trajectory


class Request(enum.IntEnum):
    """Request of a host for a boundary, to save or to stop; the largest over all hosts counts.

    A chunk of Anakin is one program, so there an update ends for a host when its chunk does.
    """

    NONE = 0
    CHUNK_END = 1
    UPDATE_END = 2


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a driver asks of the loop around it: how far to go, and where to stop or look."""

    num_updates: int | Callable[[int], int]
    """How many updates the run has; where that is not known before, a function of the updates so
    far: how many there are at least. It is called anew after each report."""
    is_boundary: Callable[[int], bool] = lambda updates: False
    """Whether the report after so many updates has the state. All hosts answer the same."""
    request: Callable[[], int] = lambda: Request.NONE
    """This host's `Request`; the hosts' largest one counts."""
    change: Callable[[], Blueprint | None] = lambda: None
    """A blueprint with other numbers to go on with, if any; nothing else may differ in it."""

    def last_update(self, updates: int) -> int:
        """Return how many updates the run has at least, `updates` of which were made."""
        return self.num_updates(updates) if callable(self.num_updates) else self.num_updates


class Fault(enum.IntFlag):
    """Reasons not to apply an update: values that are not finite, or a broken environment."""

    OBSERVATION = 1
    REWARD = 2
    LOSS = 4
    GRADIENT = 8
    RESTART = 16
    ACTION_MASK = 32


_LEAF_SHIFT = 8  # the bits below are for `Fault`


@struct
class TrainState:
    """Complete state of a run: what a checkpoint holds and a resumed run continues from."""

    learner: LearnerState
    actor: PyTree  # `rollout.ActorState`, or () where environments cannot be saved
    update: jax.Array  # u32 scalar, number of updates done
    fault: jax.Array  # u32 [2]: of the first fault, see `fault_bits`, and the number of the update
    key: jax.Array  # the run's key, from which all other keys are folded

    def with_shared(self, shared: PyTree) -> Self:
        learner = dataclasses.replace(self.learner, shared=shared)
        return dataclasses.replace(self, learner=learner)


TRAIN_SPEC = TrainState(LEARNER_SPEC, SHARDED, REPLICATED, REPLICATED, REPLICATED)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Progress:
    """Report of a driver on one chunk of updates."""

    updates: int  # updates done since the run began, at the end of the chunk
    frames: int  # valid transitions within the chunk
    metrics: dict[str, Any]  # means over the chunk, f32 `[n]` or floats; None if no episode ended
    compile_seconds: float = 0.0  # spent before the first chunk, 0 in later reports
    request: int = Request.NONE  # the largest of all hosts
    state: TrainState | None = None  # at boundaries only, see `anakin`
    pods: dict[str, np.ndarray] | None = None  # in a population, metrics of each pod `[P]`
    collected: int | None = None  # steps in the actors' trajectories since the driver began
    time: float | None = None  # when the chunk had ended, by `time.perf_counter`; None: now
    not_finite: Sequence[str] = ()  # names of the agent's metrics with a number that is not finite


class HasNumEnvs(Protocol):
    """Driver configuration with a number of environments, on which a state depends."""

    @property
    def num_envs(self) -> int: ...

    @property
    def rollout_length(self) -> int: ...


def init_state(
    blueprint: Blueprint, env: Environment | None, mesh: Mesh, config: HasNumEnvs, key: jax.Array
) -> TrainState:
    """Return the state before the first update, sharded over the mesh.

    Without an environment its `actor` is (): acting then begins with a reset.
    """
    shapes = abstract_state(blueprint, env, mesh, config)

    def make(data: PyTree, key: jax.Array) -> TrainState:
        replaying = dataclasses.replace(blueprint, environment=data)
        return make_initial_state(replaying, env, config, key)

    program = jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
    # Arrays of an environment are arguments, not to compile them into the program.
    data = None if env is None else place_agent(blueprint.environment, mesh)
    return program(data, key)


def place_agent(agent: Any, mesh: Mesh) -> Any:
    """Return the agent with its leaves, the hyperparameters, as arrays: arguments of a program.

    As constants of the program, other values would be compiled again (docs/decisions/0038).
    """

    def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
        value = np.asarray(leaf, jnp.result_type(leaf))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, agent, _agent_shardings(agent, mesh))


def _agent_shardings(agent: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda _: NamedSharding(mesh, REPLICATED), agent)


def with_agent(program: partial[Any], agent: Any, mesh: Mesh) -> partial[Any]:
    """Return a driver's program with other leaves of its agent, which compiles nothing.

    Arrays of JAX, such as a data set's, have not changed: they stay on the devices.
    """

    def place(old: jax.Array, new: Any) -> jax.Array:
        return old if isinstance(new, jax.Array) else place_agent(new, mesh)

    return partial(program.func, jax.tree.map(place, *program.args, agent))


def abstract_agent(agent: Any, mesh: Mesh) -> Any:
    """Return shape, dtype and sharding of every leaf of `place_agent`."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(
            np.shape(x), jnp.result_type(x), sharding=sharding
        ),
        agent,
        _agent_shardings(agent, mesh),
    )


def abstract_state(
    blueprint: Blueprint, env: Environment | None, mesh: Mesh, config: HasNumEnvs
) -> TrainState:
    """Return shape, dtype and sharding of every leaf of a state, to restore one."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return with_shardings(
        jax.eval_shape(partial(make_initial_state, blueprint, env, config), key), mesh, TRAIN_SPEC
    )


def with_shardings(state: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Return shapes with shardings on this mesh; `specs` is a prefix tree of partition specs."""
    specs = jax.tree.broadcast(specs, state, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings(mesh, specs),
    )


def make_initial_state(
    blueprint: Blueprint, env: Environment | None, config: HasNumEnvs, key: jax.Array
) -> TrainState:
    """Return the state before the first update, for tracing; `init_state` also shards it."""
    length = blueprint.context.rollout_length
    if length != config.rollout_length:
        raise ConfigError(
            f"the blueprint's context has rollouts of {length} steps and the driver of "
            f"{config.rollout_length}: take Blueprint(settings, spec, "
            f"Context(rollout_length={config.rollout_length}))."
        )
    agent = blueprint.build()
    if env is not None:
        env = eqx.combine(blueprint.environment, env)
    indices = jnp.arange(config.num_envs, dtype=jnp.uint32)
    start = jnp.zeros(1, jnp.uint32)
    reset_keys = rollout.environment_keys(
        rollout.purpose_key(key, rollout.Purpose.RESET), indices, start
    )[0]
    return TrainState(
        learner=agent.init(rollout.purpose_key(key, rollout.Purpose.INIT), config.num_envs),
        actor=() if env is None else rollout.init_actor(agent, env, reset_keys),
        update=jnp.uint32(0),
        fault=jnp.zeros(2, jnp.uint32),
        key=key,
    )


def abstract_request(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of `request_array`."""
    sharding = shardings(mesh, PartitionSpec(mesh.axis_names))
    return jax.ShapeDtypeStruct((mesh.size, 2), jnp.int32, sharding=sharding)


def request_array(mesh: Mesh, request: int, num_updates: int = 1) -> jax.Array:
    """Return for each device its host's request and the number of updates, i32 `[devices, 2]`.

    This host's is `request`; the number of updates to make is the same on all.
    """
    local = np.tile(np.asarray([request, num_updates], np.int32), (len(mesh.local_devices), 1))
    return jax.make_array_from_process_local_data(abstract_request(mesh).sharding, local)


def reset_episode_totals(episodes: rollout.EpisodeStats) -> rollout.EpisodeStats:
    """Return the statistics with the sums of running episodes kept and the totals set to zero."""
    return dataclasses.replace(
        rollout.zero_episode_stats(episodes.count.shape[0]),
        running_return=episodes.running_return,
        running_error=episodes.running_error,
        running_length=episodes.running_length,
    )


def learn_key(state: TrainState, axis: str | None, part: jax.Array | None = None) -> jax.Array:
    """Return the key of this shard's next update.

    `part` numbers the consecutive updates from one batch of trajectories.
    """
    shard = jax.lax.axis_index(axis) if axis else jnp.uint32(0)
    key = jax.random.fold_in(rollout.purpose_key(state.key, rollout.Purpose.LEARN), state.update)
    key = jax.random.fold_in(key, shard)
    return key if part is None else jax.random.fold_in(key, part)


def apply_unless_fault(
    agent: Agent,
    state: TrainState,
    learner: LearnerState,
    trajectory: Trajectory,
    metrics: Metrics,
    axis: str | None,
) -> tuple[TrainState, Metrics]:
    """Apply one shard's update, unless this or an earlier one had a `Fault` on any shard.

    After a fault `learner.shared` stays as it was before that update. Metrics gain `frames`, the
    number of valid transitions.
    """
    bits = fault_bits(agent, trajectory, learner, metrics, axis)
    no_earlier_fault = state.fault[0] == 0
    is_applied = (bits == 0) & no_earlier_fault
    shared = select(is_applied, learner.shared, state.learner.shared)
    is_first_fault = (bits != 0) & no_earlier_fault
    new_state = dataclasses.replace(
        state,
        learner=LearnerState(shared, learner.local),
        update=state.update + 1,
        fault=jnp.where(is_first_fault, jnp.stack([bits, state.update]), state.fault),
    )
    return new_state, {**metrics, "frames": jnp.sum(trajectory.valid(), dtype=jnp.int32)}


def fault_bits(
    agent: Agent, trajectory: Trajectory, learner: LearnerState, metrics: Metrics, axis: str | None
) -> jax.Array:
    """Return the bits of `Fault` of this update on any shard.

    From `_LEAF_SHIFT` on they are one more than the place of the first leaf of `_checked_leaves`
    that is not finite.
    """
    final, steps = trajectory.final, trajectory.steps.timestep
    observations, rewards = (steps.observation, final.observation), (steps.reward, final.reward)
    leaves = _checked_leaves(observations, rewards, metrics, learner.shared)
    restarts = jnp.all(trajectory.next_timesteps().first | trajectory.valid())
    passed = [
        (flag, is_finite)
        for flag, group in itertools.groupby(leaves, lambda leaf: leaf[0])
        for is_finite in all_finite([leaf for _, _, leaf in group])
    ]
    passed.append((Fault.RESTART, restarts))
    if (mask := action_mask(steps.observation)) is not None:
        allowed = allows_action(agent.spec.action, mask)
        passed.append((Fault.ACTION_MASK, jnp.all(allowed | steps.last)))
    failures = 1.0 - jnp.stack([x for _, x in passed]).astype(jnp.float32)
    has_failed = (jax.lax.psum(failures, axis) if axis else failures) > 0
    flags = np.asarray([flag.value for flag, _ in passed], np.uint32)
    bits = jnp.bitwise_or.reduce(jnp.where(has_failed, flags, np.uint32(0)))
    place = jnp.where(jnp.any(has_failed[: len(leaves)]), jnp.argmax(has_failed) + 1, 0)
    return bits | place.astype(jnp.uint32) << _LEAF_SHIFT


def _checked_leaves(
    observations: Sequence[PyTree], reward: PyTree, metrics: Mapping[str, Any], shared: PyTree
) -> list[tuple[Fault, str, Any]]:
    """Return the `Fault`, the name and the value of each part of an update that must be finite.

    Metrics that are neither losses nor norms of gradients are diagnostics and may be anything.
    """

    def leaves(flag: Fault, name: str, tree: PyTree) -> list[tuple[Fault, str, Any]]:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return [(flag, name + jax.tree_util.keystr(path), leaf) for path, leaf in paths]

    names = sorted(metrics)
    losses = [name for name in names if name == "loss" or name.endswith("_loss")]
    norms = [name for name in names if name.endswith("gradient_norm")]
    return [
        *(x for tree in observations for x in leaves(Fault.OBSERVATION, "observation", tree)),
        (Fault.REWARD, "reward", reward),
        *((Fault.LOSS, name, metrics[name]) for name in losses),
        *((Fault.GRADIENT, name, metrics[name]) for name in norms),
        *leaves(Fault.GRADIENT, "shared", shared),
    ]


def reduce_metrics(
    episodes: rollout.EpisodeStats,
    fault: jax.Array,
    sums: Metrics,
    num_updates: jax.Array | int,
    request: jax.Array,
    axis: str | None,
) -> Metrics:
    """Reduce metrics over shards; `sums` are those over a number of updates.

    Two all-reduces: one of integers, one of floats.
    """
    integers = jnp.stack(
        [
            sums["frames"],
            jnp.sum(episodes.count),
            jnp.int32(request == Request.CHUNK_END.value),
            jnp.int32(request == Request.UPDATE_END.value),
        ]
    )
    integers = jax.lax.psum(integers, axis) if axis else integers
    frames, count, chunk_ends, update_ends = integers
    sums = {name: metric for name, metric in sums.items() if name != "frames"}
    means = jax.tree.map(lambda x: x / num_updates / num_shards(axis), sums)
    # Lengths as floats: episodes that began long before may add up to more than an int32 holds.
    lengths = episodes.total_length.astype(jnp.float32)
    rounded_off = (episodes.total_length - lengths.astype(jnp.int32)).astype(jnp.float32)
    returns = sum_of_pairs(episodes.total_return, -episodes.total_error)
    totals = returns, sum_of_pairs(lengths, rounded_off)
    floats, unravel = ravel_pytree((means, totals))
    means, (total_return, length) = unravel(jax.lax.psum(floats, axis) if axis else floats)
    request = jnp.where(chunk_ends > 0, Request.CHUNK_END.value, Request.NONE.value)
    return {
        "mean": means,
        "frames": frames,
        "episodes": count,
        "episode_return": total_return,
        "episode_length": length,
        "request": jnp.where(update_ends > 0, Request.UPDATE_END.value, request),
        "fault": fault,
        "updates": jnp.int32(num_updates),
    }


def to_progress(updates: int, values: Any, spec: EnvironmentSpec, shared: PyTree) -> Progress:
    """Return the report on a chunk from the output of `reduce_metrics`, on the host.

    If an update had a `Fault`, raises `NonFiniteError`, `ConfigError` for an environment that does
    not restart, or `EnvironmentFault` for one that allows no action. `shared` has the structure of
    the learner's shared state, by which what is not finite is named.
    """
    bits, failed_update = (int(x) for x in values["fault"])
    if bits:
        observation = spec.observation
        names = [
            name for _, name, _ in _checked_leaves([observation] * 2, (), values["mean"], shared)
        ]
        _raise_fault(bits, failed_update + 1, names)
    episodes = int(values["episodes"])
    metrics: dict[str, Any] = {
        "episodes": episodes,
        "episode_return": float(values["episode_return"]) / episodes if episodes else None,
        "episode_length": float(values["episode_length"]) / episodes if episodes else None,
        **{name: _value(mean) for name, mean in values["mean"].items()},
    }
    return Progress(
        updates,
        int(values["frames"]),
        metrics,
        request=int(values["request"]),
        not_finite=not_finite(values["mean"]),
    )


def _value(mean: Any) -> Any:
    """Return the value of a metric, None for a `Mean` in which nothing counts."""
    if not isinstance(mean, Mean):
        return np.asarray(mean) if np.ndim(mean) else float(mean)
    if np.ndim(mean.total):
        share = np.asarray(mean.share)
        return mean.total / np.where(share > 0, share, np.nan) if share.any() else None
    return float(mean.total) / float(mean.share) if mean.share else None


def not_finite(means: Mapping[str, Any], rows: Any = ...) -> list[str]:
    """Return the names of metrics with a number in these rows that is not finite.

    A `Mean` in which nothing counts has none.
    """

    def is_finite(mean: Any) -> bool:
        if isinstance(mean, Mean):
            mean = np.where(np.asarray(mean.share) == 0, 0.0, mean.total)
        return bool(np.isfinite(np.asarray(mean)[rows]).all())

    return [name for name, mean in means.items() if not is_finite(mean)]


def _raise_fault(bits: int, update: int, leaves: Sequence[str]) -> NoReturn:
    faults, place = Fault(bits % (1 << _LEAF_SHIFT)), bits >> _LEAF_SHIFT
    if Fault.RESTART in faults:
        raise ConfigError(
            f"update {update}: an episode ended and the environment did not restart: wrap it in "
            "podracer.auto_reset if it is in JAX; on the host its `step` restarts it."
        )
    if Fault.ACTION_MASK in faults:
        raise EnvironmentFault(f"update {update}: {NO_ACTION}")
    names, first = ", ".join(str(fault.name).lower() for fault in faults), leaves[place - 1]
    names += "" if first == names else f" (first {first})"
    raise NonFiniteError(f"update {update}: not finite: {names}. The update was not applied.")
