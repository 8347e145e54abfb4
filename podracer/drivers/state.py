"""State of a run: what drivers take and yield, checkpoints hold, and a resumed run goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import rollout
from podracer.agent import Blueprint
from podracer.devices.mesh import LEARNER_SPEC, REPLICATED, SHARDED, shardings
from podracer.environment import Environment
from podracer.errors import ConfigError
from podracer.fields import bounded, struct
from podracer.types import LearnerState, PyTree


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
class RolloutConfig:
    """Configuration of a driver: the shape of rollouts, on which a state depends, and of chunks."""

    num_envs: int = bounded(128, low=1)
    """Total number of environments; the devices, or the actor threads of all hosts, share them
    evenly."""
    rollout_length: int = bounded(16, low=1)
    """Environment steps T of each environment before each update."""
    updates_per_chunk: int = bounded(100, low=1)
    """Updates between two reports."""

    @property
    def steps_per_update(self) -> int:
        """Environment steps of all environments for one update."""
        return self.num_envs * self.rollout_length


def make_init(
    blueprint: Blueprint, env: Environment | None, mesh: Mesh, config: RolloutConfig
) -> tuple[TrainState, Callable[[jax.Array], TrainState]]:
    """Return the abstract state, and the function of a run's key that makes the first one.

    The state is sharded over the mesh. Without an environment its `actor` is (): acting then begins
    with a reset. The program is compiled by the first call.
    """

    def make(data: PyTree, key: jax.Array) -> TrainState:
        replaying = dataclasses.replace(blueprint, environment=data)
        return make_initial_state(replaying, env, config, key)

    shapes = abstract_state(blueprint, env, mesh, config)
    program = jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
    # Arrays of an environment are arguments, not to compile them into the program.
    data = None if env is None else blueprint.environment
    return shapes, lambda key: program(place_leaves(data, mesh), key)


def place_leaves(tree: Any, mesh: Mesh) -> Any:
    """Return a tree, such as a blueprint, with its numbers as arrays: arguments of a program.

    As constants of the program, other values would be compiled again (docs/decisions/0038).
    """
    sharding = NamedSharding(mesh, REPLICATED)

    def place(leaf: Any) -> jax.Array:
        value = np.asarray(leaf, jnp.result_type(leaf))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, tree)


def abstract_leaves(tree: Any, mesh: Mesh) -> Any:
    """Return shape, dtype and sharding of every leaf of `place_leaves`."""
    sharding = NamedSharding(mesh, REPLICATED)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=sharding), tree
    )


def with_blueprint(program: partial[Any], blueprint: Blueprint, mesh: Mesh) -> partial[Any]:
    """Return a driver's program with other numbers of its blueprint, which compiles nothing.

    Arrays of JAX, such as a data set's, have not changed: they stay on the devices.
    """

    def place(old: jax.Array, new: Any) -> jax.Array:
        return old if isinstance(new, jax.Array) else place_leaves(new, mesh)

    return partial(program.func, jax.tree.map(place, *program.args, blueprint))


def abstract_state(
    blueprint: Blueprint, env: Environment | None, mesh: Mesh, config: RolloutConfig
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
    blueprint: Blueprint, env: Environment | None, config: RolloutConfig, key: jax.Array
) -> TrainState:
    """Return the state before the first update, for tracing; `make_init` also shards it."""
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
    reset_key = rollout.purpose_key(key, rollout.Purpose.RESET)
    reset_keys = rollout.environment_keys(reset_key, indices, start)[0]
    return TrainState(
        learner=agent.init(rollout.purpose_key(key, rollout.Purpose.INIT), config.num_envs),
        actor=() if env is None else rollout.init_actor(agent, env, reset_keys),
        update=jnp.uint32(0),
        fault=jnp.zeros(2, jnp.uint32),
        key=key,
    )


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
