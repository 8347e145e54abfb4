"""What a driver asks of the loop around it, and what it reports to it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from podracer import rollout
from podracer.agent import Blueprint
from podracer.devices.mesh import shardings
from podracer.devices.reductions import MaskedMean, num_shards
from podracer.drivers.faults import check_no_fault
from podracer.drivers.state import TrainState
from podracer.ops.sums import sum_of_pairs
from podracer.types import EnvironmentSpec, Metrics, PyTree


class Request(enum.IntEnum):
    """Request of a host for a boundary, to save or to stop; the largest over all hosts counts.

    A chunk of Anakin is one program, so there both take effect at the end of the chunk.
    """

    NONE = 0
    CHUNK_END = 1
    UPDATE_END = 2


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a driver asks of the loop around it: how far to go, and where to stop or look."""

    num_updates: int | Callable[[int], int]
    """Number of updates of the run, or a function of the updates so far that returns the least it
    can be, called anew after each report."""
    is_boundary: Callable[[int], bool] = lambda updates: False
    """Whether the report after so many updates has the state. All hosts answer the same."""
    request: Callable[[], int] = lambda: Request.NONE
    """This host's `Request`; the hosts' largest one counts."""
    change: Callable[[], Blueprint | None] = lambda: None
    """A blueprint with other numbers to go on with, if any; nothing else may differ in it."""

    def last_update(self, updates: int) -> int:
        """Return the least number of updates of the run, `updates` of which were made."""
        return self.num_updates(updates) if callable(self.num_updates) else self.num_updates


@dataclasses.dataclass(frozen=True)
class Progress:
    """Report of a driver on one chunk of updates."""

    updates: int  # updates done since the run began, at the end of the chunk
    frames: int  # valid transitions within the chunk
    metrics: dict[str, Any]  # means over the chunk, f32 `[n]` or floats; None if no episode ended
    compile_seconds: float = 0.0  # spent before the first chunk, 0 in later reports
    request: int = Request.NONE  # the largest of all hosts
    state: TrainState | None = None  # at boundaries only, see `Driver.run`
    pods: dict[str, np.ndarray] | None = None  # in a population, metrics of each pod `[P]`
    collected: int | None = None  # steps in the actors' trajectories since the driver began
    time: float | None = None  # when the chunk had ended, by `time.perf_counter`; None: now
    not_finite: Sequence[str] = ()  # names of the agent's metrics with a number that is not finite


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

    Raises the `Fault` of an update as `check_no_fault` does; `shared` has the structure of the
    learner's shared state, by which what is not finite is named.
    """
    check_no_fault(values["fault"], spec.observation, values["mean"], shared)
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
    """Return the value of a metric, None for a `MaskedMean` in which nothing counts."""
    if not isinstance(mean, MaskedMean):
        return np.asarray(mean) if np.ndim(mean) else float(mean)
    if np.ndim(mean.total):
        share = np.asarray(mean.share)
        return mean.total / np.where(share > 0, share, np.nan) if share.any() else None
    return float(mean.total) / float(mean.share) if mean.share else None


def not_finite(means: Mapping[str, Any], rows: Any = ...) -> list[str]:
    """Return the names of metrics with a number in these rows that is not finite.

    A `MaskedMean` in which nothing counts has none.
    """

    def is_finite(mean: Any) -> bool:
        if isinstance(mean, MaskedMean):
            mean = np.where(np.asarray(mean.share) == 0, 0.0, mean.total)
        return bool(np.isfinite(np.asarray(mean)[rows]).all())

    return [name for name, mean in means.items() if not is_finite(mean)]
