"""Population: many learners as one compiled program, each a *pod* with hyperparameters and a seed.

    jit(shard_map(map(vmap(chunk))))

The chunk is Anakin's. Within it pods share nothing, so the mesh axis `pod` needs no reduction; an
`Exchange` selects or averages them between chunks. Each device has an equal share of the pods. The
agent's float leaves are an argument of the program, so other values need no recompilation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

from podracer import evaluate
from podracer.agent import Blueprint, Settings, check_policy
from podracer.arguments import typed
from podracer.devices.fused import platform_of
from podracer.devices.memory import check_program_memory
from podracer.devices.mesh import POD, REPLICATED, Device, find_devices, make_mesh, shardings
from podracer.devices.reductions import MaskedMean
from podracer.drivers import anakin, selection
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.driver import Driver, blueprint_for
from podracer.drivers.exchange import Averaging, is_due, with_averaging
from podracer.drivers.faults import check_no_fault
from podracer.drivers.progress import Progress, abstract_request, not_finite
from podracer.drivers.state import TrainState, make_initial_state, with_shardings
from podracer.environment import Environment, HostEnvironments, evaluation_environment
from podracer.errors import ConfigError
from podracer.evaluate import Episodes, PolicyKind, ProgramEvaluator
from podracer.names import nearest
from podracer.types import Metrics

PODS = PartitionSpec(POD)

Exchange = selection.Selection | Averaging  # between pods, before the chunks at which one is due


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """Value of one float leaf of an agent."""

    name: str
    value: float


@dataclasses.dataclass(frozen=True)
class Pod:
    """Seed and hyperparameters of one member of a population."""

    seed: int
    hyperparameters: tuple[Hyperparameter, ...] = ()


def with_hyperparameters(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return settings with other float leaves. Raises `ConfigError` for an unknown name."""
    defaults = hyperparameters(settings)
    for name in values:
        if name not in defaults:
            raise ConfigError(
                f"{type(settings).__name__} has no float hyperparameter {name!r} that "
                f"can differ between pods: {nearest(name, defaults)}"
            )
    leaves = [values.get(name, value) for name, value in defaults.items()]
    return jax.tree.unflatten(jax.tree.structure(settings), leaves)


def hyperparameters(settings: Any) -> dict[str, float]:
    """Return the float leaves of settings by name; a schedule's start has the schedule's name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".start"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(settings)
    }


def stack_agents(blueprint: Blueprint, pods: Sequence[Pod]) -> Blueprint:
    """Return one blueprint with the pods' hyperparameters as leaves f32 `[P]`.

    They share all else, such as a data set.
    """
    settings = [
        with_hyperparameters(blueprint.settings, {h.name: h.value for h in pod.hyperparameters})
        for pod in pods
    ]

    def stack(*leaves: Any) -> np.ndarray:
        return np.asarray(leaves, getattr(leaves[0], "dtype", np.float32))

    def as_array(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, jnp.result_type(leaf))

    context, environment = jax.tree.map(as_array, (blueprint.context, blueprint.environment))
    return Blueprint(jax.tree.map(stack, *settings), blueprint.spec, context, environment)


def agent_specs(agents: Blueprint) -> Any:
    """Return the partition specs of `stack_agents`, as the beginning of its tree."""
    return Blueprint(PODS, agents.spec, context=REPLICATED, environment=REPLICATED)  # type: ignore


def run_keys(pods: Sequence[Pod]) -> jax.Array:
    """Return the run key of each pod `[P]`, the same as of a run with its seed."""
    return jnp.stack([jax.random.key(pod.seed) for pod in pods])


def population_mesh(devices: Sequence[Device], num_pods: int) -> Mesh:
    """Return a mesh with the axis `pod`, of as many devices as can share the pods evenly.

    Raises `ConfigError` where several processes run.
    """
    if jax.process_count() > 1:
        raise ConfigError("a population has one process: start one on each host, or a tournament.")
    count = max(n for n in range(1, len(devices) + 1) if num_pods % n == 0)
    return make_mesh(devices[:count], POD)


def abstract_states(
    blueprint: Blueprint,
    pods: Sequence[Pod],
    env: Any,
    mesh: Mesh,
    config: Any,
    exchange: Exchange | None = None,
) -> TrainState:
    """Return shape, dtype and sharding of every leaf `[P, ...]` of the pods' states."""
    keys = jax.eval_shape(lambda: run_keys(pods))
    make_states = partial(make_initial_states, pods, env, mesh, config, exchange)
    states = jax.eval_shape(make_states, stack_agents(blueprint, pods), keys)
    return with_shardings(states, mesh, PODS)


def make_initial_states(
    pods: Sequence[Pod],
    env: Environment,
    mesh: Mesh,
    config: AnakinConfig,
    exchange: Exchange | None,
    agents: Any,
    keys: jax.Array,
) -> TrainState:
    """Return the initial states of all pods, stacked: settings and `keys` have a row for each."""
    # One after another on a CPU, where batched QR decompositions (orthogonal weights) of a network
    # that is not built in could deadlock, see `networks.layers.orthogonal`. An accelerator would
    # wait for thousands of small ones.
    at_once = keys.shape[0] if platform_of(mesh) != "cpu" else None

    def make(pod: tuple[Any, jax.Array]) -> TrainState:
        blueprint = dataclasses.replace(agents, settings=pod[0])
        return make_initial_state(blueprint, env, config, pod[1])

    states = jax.lax.map(make, (agents.settings, keys), batch_size=at_once)
    if not isinstance(exchange, selection.Selection):
        return states
    varying = [parameter.name for pod in pods for parameter in pod.hyperparameters]
    varying += [bound.name for bound in exchange.bounds]
    values: dict[str, Any] = hyperparameters(agents.settings)
    return selection.SelectionState(
        **vars(states),
        hyperparameters={name: values[name] for name in dict.fromkeys(varying)},
        score=jnp.full(states.update.shape, -jnp.inf, jnp.float32),
    )


def current_agents(agents: Blueprint, states: TrainState) -> Blueprint:
    """Return the agents with the hyperparameters in the states, where a selection changes them."""
    if isinstance(states, selection.SelectionState):
        settings = with_hyperparameters(agents.settings, states.hyperparameters)
        return dataclasses.replace(agents, settings=settings)
    return agents


class Population(Anakin):
    """Many learners as one program of Anakin, in which each pod is to the bit a run of its own."""

    @typed
    def __init__(
        self,
        agent: Blueprint | Settings,
        pods: Sequence[Pod],
        env: Environment,
        config: AnakinConfig,
        devices: Sequence[Device] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Check as `Anakin` does; the devices are as many as can share the pods evenly."""
        blueprint = blueprint_for(agent, env, config)
        anakin.check(blueprint, env, config, 1)
        check_policy(blueprint.build(), "train it alone, not in a population")
        if isinstance(exchange, selection.Selection) and env.spec.takes_turns:
            raise ConfigError(
                "selection ranks pods by their training returns, which in self-play say nothing of "
                "strength: train without one, and rank the pods with `podracer match RUN:0 RUN:1`."
            )
        self.pods, self.exchange, self.num_pods = tuple(pods), exchange, len(pods)
        mesh = population_mesh(find_devices() if devices is None else devices, len(pods))
        shapes = abstract_states(blueprint, pods, env, mesh, config, exchange)
        self._agents = stack_agents(blueprint, pods)
        make = partial(make_initial_states, pods, env, mesh, config, exchange)
        program = jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
        init = partial(program, self._agents)
        Driver.__init__(self, blueprint, env, config, mesh, shapes, init, mesh.size)

    def lower(self) -> Callable[[], anakin.Program]:
        agents = jax.device_put(self._agents, shardings(self.mesh, agent_specs(self._agents)))
        program = make_chunk(self.env, self.mesh, self.config, self.exchange)
        lowered = program.lower(agents, self.abstract_state, abstract_request(self.mesh))
        return lambda: partial(check_program_memory(lowered.compile(), self.mesh), agents)

    def report(self, updates: int, values: Any) -> Progress:
        """Return the report: `metrics` are means over the pods, `pods` has each one's.

        Metrics of a pod without a value are NaN. After a selection `pods` also has the parents and
        hyperparameters. A pod with a value that is not finite keeps the state before it. Raises
        `NonFiniteError` when all pods have failed.
        """
        failed = values["fault"][:, 0] != 0
        if failed.all():
            means = jax.tree.map(lambda x: x[0], values["mean"])
            observation = self.blueprint.spec.observation
            shared = self.abstract_state.learner.shared
            check_no_fault(values["fault"][0], observation, means, shared)
        num_episodes = np.where(values["episodes"] > 0, values["episodes"], np.nan)
        metrics = {
            "episodes": values["episodes"],
            "episode_return": values["episode_return"] / num_episodes,
            "episode_length": values["episode_length"] / num_episodes,
            **{name: _values(mean) for name, mean in values["mean"].items()},
        }
        pods = {
            name: np.where(failed.reshape(-1, *[1] * (np.ndim(value) - 1)), np.nan, value)
            for name, value in metrics.items()
        }
        means = {name: _finite_mean(value) for name, value in pods.items()}
        pods["frames"] = values["frames"]
        start = updates - int(values["updates"][0])
        if isinstance(self.exchange, selection.Selection) and is_due(self.exchange.every, start):
            pods |= values["selection"]
        return Progress(
            updates,
            int(values["frames"].sum()),
            {"pods_failed": float(failed.sum()), **means},
            request=int(values["request"].max()),
            pods=pods,
            not_finite=not_finite(values["mean"], ~failed),
        )

    def evaluator(
        self,
        episodes: int,
        *,
        policy: PolicyKind = "greedy",
        epsilon: float = 0.0,
        fixed: bool = False,
    ) -> ProgramEvaluator:
        """Return a function `(states) -> Evaluation`; returns and lengths are `[P, episodes]`.

        With `fixed` all evaluations of a pod play the same episodes, drawn with its seed: a
        selection changes the key in its state. Raises `ConfigError` as `make_evaluator` does.
        """
        env, rule = evaluation_environment(self.env), evaluate.ActingRule(policy, epsilon)
        if isinstance(env, HostEnvironments):
            raise ConfigError(
                f"pods are evaluated on the device, and {self.env.spec.name} runs on the host: "
                "take `evaluations=0`, or train once for each `seed`."
            )
        rule.check(env.spec)

        def play(agents: Blueprint, states: TrainState, keys: jax.Array) -> Episodes:
            def play_pod(settings: Any, state: TrainState, run_key: jax.Array) -> Episodes:
                blueprint = dataclasses.replace(agents, settings=settings)
                agent = current_agents(blueprint, state).build()
                params = agent.actor_params(state.learner)
                key, update = (run_key, jnp.uint32(0)) if fixed else (state.key, state.update)
                return evaluate.play_episodes(
                    agent, env, rule, episodes, evaluate.MAX_STEPS, params, key, update
                )

            return jax.vmap(play_pod)(agents.settings, states, keys)

        program = _over_pods(play, self.mesh, out_specs=PODS)
        agents, keys = self._agents, run_keys(self.pods)
        return ProgramEvaluator(jax.jit(program), lambda state: (agents, state, keys))


def make_chunk(
    env: Environment, mesh: Mesh, config: AnakinConfig, exchange: Exchange | None = None
) -> Any:
    """Return `(agents, states, request) -> (states, metrics [P])`, jitted; it donates states."""

    def pods(agents: Any, states: TrainState, request: jax.Array) -> tuple[TrainState, Metrics]:
        agents = current_agents(agents, states)

        def chunk(pod: tuple[Any, TrainState]) -> tuple[TrainState, Metrics]:
            blueprint = dataclasses.replace(agents, settings=pod[0])
            return anakin.chunk(blueprint, env, config, None, pod[1], request)

        batch_size = _pods_per_batch(mesh, config, states.update.shape[0])
        return _run_batches(chunk, agents.settings, states, batch_size)

    program = _over_pods(pods, mesh, out_specs=(PODS, PODS))
    if isinstance(exchange, selection.Selection):
        program = selection.with_selection(program, exchange, mesh)
    elif isinstance(exchange, Averaging):
        program = with_averaging(program, exchange, mesh)
    return jax.jit(program, donate_argnums=1, out_shardings=NamedSharding(mesh, PODS))


def _over_pods(function: Callable[..., Any], mesh: Mesh, out_specs: Any) -> Callable[..., Any]:
    """Return a function of stacked agents and of trees `[P, ...]`, on each device of its pods."""

    def program(agents: Blueprint, *trees: Any) -> Any:
        in_specs = (agent_specs(agents), *[PODS] * len(trees))
        sharded = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return sharded(agents, *trees)

    return program


def _run_batches(
    chunk: Callable[[tuple[Any, TrainState]], tuple[TrainState, Metrics]],
    settings: Any,
    states: TrainState,
    batch_size: int,
) -> tuple[TrainState, Metrics]:
    """Return the new states and the metrics of all pods; those of a batch run as one.

    The states are the loop's carry, which is updated in place: as its outputs they would be in
    memory three times, and replays are large. A pod that is its own batch has no axis of pods, and
    equals a single run bit for bit.
    """
    num_batches = states.update.shape[0] // batch_size
    axes = (num_batches,) if batch_size == 1 else (num_batches, batch_size)
    split = jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]), (settings, states))
    run = chunk if batch_size == 1 else jax.vmap(chunk)

    def body(states: TrainState, batch: jax.Array) -> tuple[TrainState, Metrics]:
        def read(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, batch, keepdims=False)

        def write(x: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(x, new, batch, 0)

        new, metrics = run(jax.tree.map(read, (split[0], states)))
        return jax.tree.map(write, states, new), metrics

    results = jax.lax.scan(body, split[1], jnp.arange(num_batches))
    return jax.tree.map(lambda x: x.reshape(math.prod(axes), *x.shape[len(axes) :]), results)


def _pods_per_batch(mesh: Mesh, config: AnakinConfig, num_pods: int) -> int:
    """Return how many of a device's pods run a chunk in one batch; the batches run in turn.

    On an accelerator all of them. On a CPU as many as make a batch of 128 environments: larger
    batches exceed its cache and were up to twice as slow.
    """
    if platform_of(mesh) != "cpu":
        return num_pods
    limit = max(1, 128 // config.num_envs)
    return max(n for n in range(1, min(num_pods, limit) + 1) if num_pods % n == 0)


def _values(mean: Any) -> Shaped[np.ndarray, " P *h"]:
    """Return the values of a metric, NaN for each `MaskedMean` in which nothing counts."""
    if not isinstance(mean, MaskedMean):
        return mean
    share = np.asarray(mean.share)
    return np.asarray(mean.total) / np.where(share > 0, share, np.nan)


def _finite_mean(values: Shaped[np.ndarray, " P *h"]) -> Any:
    if values.ndim > 1:
        return np.array([_finite_mean(column) for column in values.T], float)
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None
