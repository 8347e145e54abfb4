"""Anakin: environment, agent and update as one compiled program on every device.

    jit(shard_map(fori_loop(rollout, learn)))

One dispatch runs a *chunk* of many updates. The state is donated from chunk to chunk. Metrics are
reduced on the device and fetched one chunk late, so the device never waits for Python.
Source: Hessel et al. 2021, section 3 (arXiv 2104.06272).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from podracer.agent import Agent, Blueprint, Fused, Settings
from podracer.arguments import named, typed
from podracer.checks import check_agent, check_environment
from podracer.devices import fused
from podracer.devices.memory import check_program_memory
from podracer.devices.mesh import (
    DATA,
    REPLICATED,
    SHARDED,
    Arrival,
    Device,
    check_divisible,
    make_mesh,
)
from podracer.devices.ordering import shard_in_order
from podracer.drivers.driver import Driver, blueprint_for
from podracer.drivers.faults import apply_unless_fault
from podracer.drivers.progress import (
    Orders,
    Progress,
    Request,
    abstract_request,
    reduce_metrics,
    request_array,
)
from podracer.drivers.state import (
    TRAIN_SPEC,
    RolloutConfig,
    TrainState,
    learn_key,
    make_init,
    place_leaves,
    reset_episode_totals,
    with_blueprint,
)
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.fields import bounded, check_ranges
from podracer.rollout import ActorState, Purpose, environment_keys, purpose_key, rollout
from podracer.types import Metrics, Params, Trajectory

Program = partial[tuple[TrainState, Metrics]]
"""Compiled chunk `(state, request) -> (state, metrics)`, with its agent."""


@named
@dataclasses.dataclass(frozen=True)
class AnakinConfig(RolloutConfig):
    """Configuration of the Anakin driver."""

    updates_per_chunk: int = bounded(100, low=1)
    """Updates in a chunk, which is one call of the compiled program: longer chunks cost less
    overhead, shorter chunks report and stop sooner."""
    fused: bool = False
    """Differentiate through the rollout and reuse its forward pass (the paper's minimal unit), for
    agents that support it. A GPU makes a second forward pass all the same, which takes fewer
    kernels. Sebulba has no such form, so its runs then differ by rounding."""


def check(blueprint: Blueprint, env: Environment, config: AnakinConfig, num_devices: int) -> None:
    """Raise `ConfigError` if the configuration cannot run, before anything is compiled."""
    check_ranges(config, "driver")
    check_divisible("num_envs", config.num_envs, num_devices)
    check_environment(env, restarts=True)
    share = config.num_envs // num_devices
    check_agent(blueprint, num_envs=share, num_devices=num_devices)
    built = blueprint.build()
    if config.fused and not isinstance(built.learn, Fused):
        raise ConfigError(
            f"{built.name} has no fused form: its loss needs more than `act` computes. Run it with "
            "`driver.fused=False`."
        )


class Anakin(Driver):
    """Environment, agent and update as one compiled program on every device."""

    env: Environment
    config: AnakinConfig

    @typed
    def __init__(
        self,
        agent: Blueprint | Settings,
        env: Environment,
        config: AnakinConfig,
        devices: Sequence[Device] | None = None,
    ) -> None:
        """Check that an agent can learn there: its settings, or a `Blueprint` of them.

        `devices` are all by default. Raises `ConfigError`, before anything is compiled.
        """
        if isinstance(env, HostEnvironments):
            raise ConfigError(
                f"{env.spec.name} runs on the host, and Anakin needs an environment on the "
                "device: take `driver=podracer.SebulbaConfig()`."
            )
        mesh = make_mesh(devices)
        blueprint = blueprint_for(agent, env, config)
        check(blueprint, env, config, mesh.size)
        shapes, init = make_init(blueprint, env, mesh, config)
        super().__init__(blueprint, env, config, mesh, shapes, init, mesh.size)

    def lower(self) -> Callable[[], Program]:
        blueprint = place_leaves(self.blueprint, self.mesh)
        # JAX by itself returns empty arrays replicated, and then refuses them as arguments.
        placed = jax.tree.map(lambda x: x.sharding if x.size == 0 else None, self.abstract_state)
        program = make_chunk(self.env, self.mesh, self.config, out_shardings=(placed, None))
        lowered = program.lower(blueprint, self.abstract_state, abstract_request(self.mesh))
        return lambda: partial(check_program_memory(lowered.compile(), self.mesh), blueprint)

    @typed
    def run(self, state: TrainState, orders: Orders) -> Generator[Progress]:
        """Train from `state` (consumed) until the updates of `orders` are done.

        A chunk is a boundary if `orders` say so, if a host made a request (with several hosts it
        takes effect one chunk later, at the same chunk on all), or if it is the last, which may be
        shorter. At a boundary metrics are fetched at once and `Progress.state` is set; that state
        is donated to the next chunk when the iterator is advanced. At every other chunk metrics
        come one chunk late. Changed numbers are taken before each chunk. Raises `NonFiniteError`
        with the number of the update; neither it nor a later one was applied.
        """
        multi_host, updates_per_chunk = jax.process_count() > 1, self.config.updates_per_chunk
        updates = int(np.max(jax.device_get(state.update)))  # `[P]` of a population, all equal
        start = time.perf_counter()
        program = self.compile_in_thread().result()
        compile_seconds = time.perf_counter() - start

        def report(updates: int, arrival: Arrival) -> Progress:
            nonlocal compile_seconds
            progress = self.report(updates, arrival.values())
            waited, compile_seconds = compile_seconds, 0.0
            return dataclasses.replace(progress, compile_seconds=waited, time=arrival.time)

        pending: tuple[int, Arrival] | None = None  # the chunk that may still run
        agreed_request = Request.NONE.value
        while updates < (target := orders.last_update(updates)):
            chunk_end = updates + updates_per_chunk - updates % updates_per_chunk
            length = min(chunk_end, target) - updates
            requests = request_array(self.mesh, orders.request(), length)
            if (blueprint := orders.change()) is not None:
                program = with_blueprint(program, blueprint, self.mesh)
            with jax.transfer_guard("disallow"):
                state, metrics = program(state, requests)
                _handle_signals()
            # Waited for from here on: on a GPU the call may take as long as the chunk, and the
            # report on it comes one chunk later.
            arrival = Arrival(metrics)
            updates += length
            if pending is not None:
                progress = report(*pending)
                agreed_request = progress.request
                yield progress
            pending = (updates, arrival)
            current_request = agreed_request if multi_host else orders.request()
            is_last = updates >= orders.last_update(updates)
            if current_request or is_last or orders.is_boundary(updates):
                progress = report(updates, arrival)
                if multi_host:  # where every chunk is a boundary, only here
                    current_request = max(current_request, progress.request)
                yield dataclasses.replace(progress, request=current_request, state=state)
                # Answered; a host that still has one repeats it.
                agreed_request = Request.NONE.value
                pending = None


def _handle_signals() -> None:
    """Let Python run the handlers of signals that came during a call of JAX, which may raise.

    It does so where a function begins. The next one would be the exit of the context around the
    call, and its setting would stay.
    """


def make_chunk(
    env: Environment, mesh: Mesh, config: AnakinConfig, out_shardings: Any = None
) -> jax.stages.Wrapped:
    """Return the jitted program `(blueprint, state, request) -> (state, metrics)`.

    It donates the state. `request`, i32 `[devices, 2]`, holds the `Request` of each device's host
    and the number of updates, see `request_array`. The metrics hold the largest request, so that
    all hosts save or stop at the same update.
    """
    axis = DATA if mesh.size > 1 else None
    program = shard_in_order(
        lambda blueprint, *args: chunk(blueprint, env, config, axis, *args),
        mesh,
        in_specs=(REPLICATED, TRAIN_SPEC, SHARDED),
        out_specs=(TRAIN_SPEC, REPLICATED),
    )
    return jax.jit(program, donate_argnums=1, out_shardings=out_shardings)


def chunk(
    blueprint: Blueprint,
    env: Environment,
    config: AnakinConfig,
    axis: str | None,
    state: TrainState,
    request: jax.Array,
) -> tuple[TrainState, Metrics]:
    """Run one shard's chunk: many updates, then one reduction of their metrics."""
    request, num_updates = request[0]
    agent, env = blueprint.build(), eqx.combine(blueprint.environment, env)
    update = jax.jit(partial(update_once, agent, env=env, config=config, axis=axis))  # traced once

    shapes = state.learner.shared
    metrics = jax.eval_shape(update, state)[1]
    zeros, unravel = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape), metrics))

    def body(_: jax.Array, loop: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, (frames, sums) = loop
        state, metrics = update(state.with_shared(fused.unpack(state.learner.shared, shapes)))
        state = state.with_shared(fused.pack(state.learner.shared))
        return state, (frames + metrics["frames"], sums + ravel_pytree(metrics)[0])

    loop = state.with_shared(fused.pack(state.learner.shared)), (jnp.int32(0), zeros)
    state, (frames, sums) = jax.lax.fori_loop(0, num_updates, body, loop)
    state = state.with_shared(fused.unpack(state.learner.shared, shapes))
    metrics = {**unravel(sums), "frames": frames}
    episodes = state.actor.episodes
    metrics = reduce_metrics(episodes, state.fault, metrics, num_updates, request, axis)
    actor = dataclasses.replace(state.actor, episodes=reset_episode_totals(episodes))
    return dataclasses.replace(state, actor=actor), metrics


def update_once(
    agent: Agent,
    state: TrainState,
    *,
    env: Environment,
    config: AnakinConfig,
    axis: str | None = None,
) -> tuple[TrainState, Metrics]:
    """Roll out, learn, and apply the update: one shard.

    Under `jax.disable_jit()` it is ordinary Python, which a debugger can step through.
    """
    length, num_envs = config.rollout_length, len(state.actor.timestep.reward)
    shard = jax.lax.axis_index(axis) if axis else jnp.uint32(0)
    indices = shard.astype(jnp.uint32) * num_envs + jnp.arange(num_envs, dtype=jnp.uint32)
    steps = state.update * jnp.uint32(length) + jnp.arange(length, dtype=jnp.uint32)
    # Keys `[T, B]`, by global environment and global step.
    act_keys = environment_keys(purpose_key(state.key, Purpose.ACT), indices, steps)
    step_keys = environment_keys(purpose_key(state.key, Purpose.STEP), indices, steps)

    def play(params: Params) -> tuple[Trajectory, ActorState]:
        actor, trajectory = rollout(agent, env, params, state.actor, act_keys, step_keys)
        return trajectory, actor

    if config.fused and not fused.is_for("gpu"):
        step = cast(Fused, agent.learn).step(state.learner, play, axis, reuse=True)
        learner, metrics, (trajectory, actor) = step
    else:
        trajectory, actor = play(agent.actor_params(state.learner))
        learner, metrics = agent.learn(state.learner, trajectory, learn_key(state, axis), axis)
    state, metrics = apply_unless_fault(agent, state, learner, trajectory, metrics, axis)
    return dataclasses.replace(state, actor=actor), metrics
