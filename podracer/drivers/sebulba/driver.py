"""Driver: start the actors, learn from their trajectories, and report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Sequence

from podracer.agent import Blueprint, Settings, check_policy
from podracer.arguments import typed
from podracer.checks import check_agent, check_environment, check_spec
from podracer.devices.memory import format_bytes, free_bytes
from podracer.devices.mesh import DATA, Device, find_devices
from podracer.drivers.driver import Driver, blueprint_for
from podracer.drivers.progress import Orders, Progress, Request
from podracer.drivers.sebulba.actor_pool import make_actor_pool
from podracer.drivers.sebulba.config import DeviceSplit, SebulbaConfig, split_devices, with_threads
from podracer.drivers.sebulba.layout import TimestepLayout
from podracer.drivers.sebulba.learner import Learner
from podracer.drivers.sebulba.supervisor import Supervisor
from podracer.drivers.sebulba.trajectory import ActorFunctions, ActorPrograms
from podracer.drivers.sebulba.update import UpdateProgram, lower_update
from podracer.drivers.state import TrainState, make_init
from podracer.environment import Environment, HostEnvironments
from podracer.envs.host.device import DeviceEnvironments, to_host_environments
from podracer.errors import ConfigError
from podracer.fields import check_ranges


class Sebulba(Driver):
    """Actors that step environments of the host, and learners, on devices of their own.

    An environment in JAX is stepped on the host, too.
    """

    config: SebulbaConfig

    @typed
    def __init__(
        self,
        agent: Blueprint | Settings,
        env: Environment | HostEnvironments,
        config: SebulbaConfig,
        devices: Sequence[Device] | None = None,
    ) -> None:
        """Check that an agent can learn there: its settings, or a `Blueprint` of them.

        `devices` are all by default, see `split_devices`. Raises `ConfigError` before a start.
        """
        check_ranges(config, "driver")
        if isinstance(env, HostEnvironments):
            check_spec(env)
        else:
            check_environment(env, restarts=True)
        self.host = host = to_host_environments(env)
        """The environments as the actors step them."""
        blueprint, devices = blueprint_for(agent, env, config), devices or find_devices()
        config = with_threads(config, self.host)
        self.split = split_devices(devices, config)
        check(blueprint, self.host, config, self.split)
        # Lock-step training goes on exactly in environments that checkpoints can hold.
        in_lock_step, mesh = config.policy_lag == 0, self.split.mesh
        saved = host.environment if in_lock_step and isinstance(host, DeviceEnvironments) else None
        shapes, init = make_init(blueprint, saved, mesh, config)
        super().__init__(blueprint, env, config, mesh, shapes, init, len(devices))

    @functools.cached_property
    def actor_programs(self) -> ActorPrograms:
        """Programs of the actors, compiled by the first run."""
        rows, length = self.split.envs_per_thread, self.config.rollout_length
        functions = ActorFunctions(self.agent, rows, length, self.abstract_state.learner)
        return ActorPrograms(functions, len(self.split.learners), self.config.num_envs)

    def lower(self) -> Callable[[], UpdateProgram]:
        return lower_update(self.blueprint, self.split, self.config, self.abstract_state)

    @typed
    def run(self, state: TrainState, orders: Orders) -> Generator[Progress]:
        """Train from `state` (consumed) until the updates of `orders` are done, as Anakin does.

        The environments are reset with the seed in the state's key. From a state with `actor` set,
        lock-step training in environments in JAX continues exactly. Progress is reported every
        `updates_per_chunk` updates and may be a boundary, with `Progress.state` set, as under
        Anakin; a request for the end of the update makes it one there (with several hosts one
        update later). Changed numbers are taken before each update. Close the iterator to stop:
        when that returns, its threads and processes have ended.

        Raises the first fault of any component, with its name in the exception's `component`:
        `EnvironmentFault` for environments, and `NonFiniteError` as Anakin does.
        """
        start, config = time.perf_counter(), self.config
        with contextlib.ExitStack() as stack, Supervisor(config.env_timeout_seconds) as supervisor:
            parts = (self.actor_programs, self.host, self.split, config, state)
            actors = make_actor_pool(*parts, supervisor=supervisor, stack=stack)
            program = self.compile_in_thread().result()
            learner = Learner(self.split, actors, program, orders.request, self.report)
            compile_seconds = time.perf_counter() - start
            actors.start()
            stack.pop_all()  # from now on each thread closes its own environments
            state = dataclasses.replace(state, actor=())
            updates, request = actors.first_update, Request.NONE.value
            while updates < orders.last_update(updates):
                rollouts = actors.collect(learner.may_end)
                if (changed := orders.change()) is not None:
                    learner.change(changed)
                if rollouts is not None:
                    state = learner.update(state, rollouts)
                    updates += 1
                request = max(request, learner.request())
                is_last = updates >= orders.last_update(updates)
                is_within_chunk = not is_last and updates % config.updates_per_chunk
                if is_within_chunk and request < Request.UPDATE_END:
                    continue
                progress = learner.progress(updates)
                request = max(request, learner.request())  # hosts agree when all updates ended
                progress = dataclasses.replace(progress, compile_seconds=compile_seconds)
                if request or is_last or orders.is_boundary(updates):
                    whole = dataclasses.replace(state, actor=actors.actor_state())
                    progress = dataclasses.replace(progress, request=request, state=whole)
                compile_seconds, request = 0.0, Request.NONE.value
                yield progress
                learner.after_report()


def check(
    blueprint: Blueprint, env: HostEnvironments, config: SebulbaConfig, split: DeviceSplit
) -> None:
    """Raise `ConfigError` if the configuration cannot run, before anything is started."""
    rows_per_learner = split.envs_per_thread * split.threads // len(split.learners)
    if rows_per_learner % config.updates_per_batch:
        raise ConfigError(
            f"updates_per_batch is {config.updates_per_batch}, which does not divide the "
            f"{rows_per_learner} environments of each learner."
        )
    batch_size = rows_per_learner // config.updates_per_batch
    check_agent(blueprint, num_envs=batch_size, num_devices=split.mesh.shape[DATA])
    check_policy(blueprint.build(), "take `driver=podracer.AnakinConfig()`")
    _check_memory(env, config, split)


def _check_memory(env: HostEnvironments, config: SebulbaConfig, split: DeviceSplit) -> None:
    """Raise `ConfigError` where the observations of two rollouts do not fit into free memory.

    An actor fills one while the learner has the other.
    """
    large, columns = TimestepLayout(env.spec).zeros(1)
    one_step = sum(x.nbytes for x in (*large, columns))
    rows = split.envs_per_thread * split.threads // len(split.actors)
    needed, free = 2 * rows * config.rollout_length * one_step, free_bytes(split.mesh)
    if free is not None and needed > free:
        raise ConfigError(
            f"two rollouts of {rows} environments by {config.rollout_length} steps need "
            f"{format_bytes(needed)} on an actor's device, but {format_bytes(free)} are free: take "
            "fewer environments, a shorter rollout or more actors."
        )
