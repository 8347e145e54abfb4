"""Population: many learners as one compiled program, each a *pod* with hyperparameters and a seed.

    jit(shard_map(map(vmap(chunk))))

The chunk is Anakin's. Pods share nothing, so the mesh axis `pod` needs no reduction; each device
has an equal share of them. The agent's float leaves are an argument of the program: other values
compile nothing anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from podracer.agent import Agent
from podracer.drivers import anakin
from podracer.drivers import common as driver
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.common import Progress, TrainState
from podracer.environment import Environment, evaluation_environment
from podracer.evaluate import MAX_STEPS, Evaluation, greedy_episodes
from podracer.io.names import nearest
from podracer.mesh import POD, Device, check_program_memory, make_mesh
from podracer.types import ConfigError, Metrics

PODS = PartitionSpec(POD)


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """The value of one of an agent's float leaves."""

    name: str
    value: float


@dataclasses.dataclass(frozen=True)
class Pod:
    """What tells a learner of a population from the others."""

    seed: int
    hyperparameters: tuple[Hyperparameter, ...] = ()


def with_hyperparameters(agent: Any, values: Mapping[str, float]) -> Any:
    """The agent with other float leaves. Raises `ConfigError` for a name that is none."""
    known = hyperparameters(agent)
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{type(agent).__name__} has no hyperparameter {name!r} that pods of one program "
                f"can differ in: {nearest(name, known)}"
            )
    leaves = [values.get(name, value) for name, value in known.items()]
    return jax.tree.unflatten(jax.tree.structure(agent), leaves)


def hyperparameters(agent: Any) -> dict[str, float]:
    """The float leaves of an agent by name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(agent)
    }


def stack(agent: Agent, pods: Sequence[Pod]) -> Any:
    """One agent whose leaves are f32 `[P]`."""
    agents = [
        with_hyperparameters(agent, {h.name: h.value for h in pod.hyperparameters}) for pod in pods
    ]
    return jax.tree.map(lambda *leaves: np.asarray(leaves, np.float32), *agents)


def keys(pods: Sequence[Pod]) -> jax.Array:
    """The run's key of each pod, `[P]`: that of a run with its seed."""
    return jnp.stack([jax.random.key(pod.seed) for pod in pods])


def population_mesh(devices: Sequence[Device], num_pods: int) -> Mesh:
    """As many of the devices as can share the pods evenly, on the axis `pod`."""
    if jax.process_count() > 1:
        raise ConfigError(
            "a population lives in one process: start one on each host, or a tournament."
        )
    count = max(n for n in range(1, len(devices) + 1) if num_pods % n == 0)
    return make_mesh(devices[:count], POD)


def abstract_states(
    agent: Agent, pods: Sequence[Pod], env: Any, mesh: Mesh, config: Any
) -> TrainState:
    """Shape, dtype and sharding of every leaf `[P, ...]` of the pods' states."""
    agents, every = stack(agent, pods), jax.eval_shape(lambda: keys(pods))
    states = jax.eval_shape(partial(_initial, env, config), agents, every)
    return driver.with_shardings(states, mesh, PODS)


def init_states(
    agent: Agent, pods: Sequence[Pod], env: Environment, mesh: Mesh, config: AnakinConfig
) -> TrainState:
    """The states `[P, ...]` before the first update, on the mesh."""
    like = abstract_states(agent, pods, env, mesh, config)
    where = jax.tree.map(lambda x: x.sharding, like)
    make = jax.jit(partial(_initial, env, config), out_shardings=where)
    return make(stack(agent, pods), keys(pods))


def _initial(env: Environment, config: AnakinConfig, agents: Any, keys: jax.Array) -> TrainState:
    # One after another: two batched QR decompositions (orthogonal weights) at once wait for each
    # other for ever on a CPU with few cores, as jaxlib 0.10.2 runs them.
    return jax.lax.map(
        lambda pod: driver.make_initial_state(pod[0], env, config, pod[1]), (agents, keys)
    )


def population(
    agent: Agent,
    pods: Sequence[Pod],
    env: Environment,
    mesh: Mesh,
    config: AnakinConfig,
    state: TrainState,
    *,
    num_updates: int,
    request: Callable[[], int] = lambda: 0,
    boundary: Callable[[int], bool] = lambda updates: False,
) -> Iterator[Progress]:
    """As `anakin`, for all pods at once: each trains until `num_updates` updates are done.

    `Progress.metrics` are means over the pods, `Progress.pods` has each one's. A pod that meets
    something that is not finite stays as it was before, and the others go on; raises
    `NonFiniteError` when none is left.
    """
    program = make_chunk(env, mesh, config)
    agents = jax.device_put(stack(agent, pods), jax.sharding.NamedSharding(mesh, PODS))

    def compile(*args: Any) -> Callable[..., tuple[TrainState, Metrics]]:
        return partial(check_program_memory(program.lower(agents, *args).compile(), mesh), agents)

    yield from anakin.run_chunks(
        compile,
        state,
        mesh,
        config,
        _report,
        num_updates=num_updates,
        request=request,
        boundary=boundary,
    )


def make_chunk(env: Environment, mesh: Mesh, config: AnakinConfig) -> Any:
    """The jitted program: `(agents, states, request) -> (states, metrics [P])`, states donated."""

    def pods(agents: Any, states: TrainState, request: jax.Array) -> tuple[TrainState, Metrics]:
        def one(pod: tuple[Agent, TrainState]) -> tuple[TrainState, Metrics]:
            return anakin.chunk(pod[0], env, config, None, pod[1], request)

        count = states.update.shape[0]
        return jax.lax.map(one, (agents, states), batch_size=_together(mesh, config, count))

    program = jax.shard_map(
        pods, mesh=mesh, in_specs=(PODS, PODS, PODS), out_specs=(PODS, PODS), check_vma=False
    )
    return jax.jit(program, donate_argnums=1)


def _together(mesh: Mesh, config: AnakinConfig, count: int) -> int:
    """How many of a device's pods go side by side; the rest follow, each its whole chunk.

    On a CPU as many as make a batch of 128 environments: more would not stay in its cache, and
    were up to twice as slow. On an accelerator all.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return count
    most = max(1, 128 // config.num_envs)
    return max(n for n in range(1, min(count, most) + 1) if count % n == 0)


def make_evaluator(
    agent: Agent, pods: Sequence[Pod], env: Environment, mesh: Mesh, episodes: int
) -> Callable[[TrainState], Evaluation]:
    """A function of the pods' states; returns and lengths are `[P, episodes]`."""
    agents = stack(agent, pods)
    evaluation_env: Environment = evaluation_environment(env)

    def one(agent: Agent, state: TrainState) -> Any:
        params = agent.actor_params(state.learner)
        return greedy_episodes(agent, evaluation_env, episodes, MAX_STEPS, params, state.key)

    program = jax.shard_map(
        jax.vmap(one), mesh=mesh, in_specs=(PODS, PODS), out_specs=PODS, check_vma=False
    )
    run = jax.jit(program)

    def evaluate(state: TrainState) -> Evaluation:
        returns, lengths, done = jax.device_get(run(agents, state))
        return Evaluation(returns, lengths, int((~done).sum()))

    return evaluate


def _report(updates: int, values: Any) -> Progress:
    """Each pod's metrics, NaN where it has none, and means over the healthy ones."""
    failed = values["fault"][:, 0] != 0
    if failed.all():
        driver.to_progress(updates, jax.tree.map(lambda x: x[0], values))  # raises what it met
    episodes = np.where(values["episodes"] > 0, values["episodes"], np.nan)
    shown = {
        "episodes": values["episodes"],
        "episode_return": values["episode_return"] / episodes,
        "episode_length": values["episode_length"] / episodes,
        **values["mean"],
    }
    pods = {name: np.where(failed, np.nan, value) for name, value in shown.items()}
    return Progress(
        updates,
        int(values["frames"].sum()),
        {"pods_failed": float(failed.sum()), **{name: _mean(x) for name, x in pods.items()}},
        request=int(values["request"].max()),
        pods={**pods, "frames": values["frames"]},
    )


def _mean(values: np.ndarray) -> float | None:
    """Over the pods `[P]` that have a value."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None
