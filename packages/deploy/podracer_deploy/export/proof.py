"""The proof of an export: the file decides as the agent does, on 1,000 observations."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent, policy_params
from podracer.environment import Environment, HostEnvironments, evaluation_environment
from podracer.errors import ConfigError
from podracer.policy import add_start
from podracer.rollout import init_actor, step_environments
from podracer.types import (
    ArraySpec,
    Carry,
    Continuous,
    EnvironmentSpec,
    LearnerState,
    PyTree,
    TimeStep,
    action_mask,
)
from podracer_deploy.export.decision import Arrays, Decision, named_leaves

STEPS, ROWS = 50, 20
CALLS = 1000  # calls that are timed
TOLERANCE = 1e-5
Runner = Callable[[Arrays], dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Proof:
    """Comparison of a file's decisions with the agent's."""

    observations: int
    """Number of observations."""
    source: str
    """Where they came from: `environment`, under the policy, or `specification`, drawn at random.
    """
    different_actions: int
    """Number of actions that differ: at all if they are discrete, else by more than 1e-5."""
    largest_difference: float
    """Largest difference of other outputs and continuous actions; relative where above 1."""
    microseconds: float
    """Median time of a decision for one observation; onnxruntime has one thread."""

    @property
    def holds(self) -> bool:
        """Whether the file decides as the agent does."""
        return self.different_actions == 0 and self.largest_difference <= TOLERANCE


def prove(
    decision: Decision,
    runner: Runner,
    agent: Agent,
    env: Environment | HostEnvironments,
    state: LearnerState,
) -> Proof:
    """Compare a file, run by `runner`, with the agent's own `act`.

    The file has its own memory from the first step on. In a device environment observations are
    what the agent meets there; for other environments they are drawn from the specification.
    """
    played = _playable(env)
    inputs, actions, memories = _reference(decision, agent, played, state)
    scores = _scores(decision, inputs, memories)
    memory: dict[str, np.ndarray] = {
        name: np.repeat(x[None], ROWS, axis=0) for name, x in decision.initial_memory.items()
    }
    different, largest = 0, 0.0
    arrays: dict[str, np.ndarray] = {}
    for t in range(STEPS):
        arrays = {n: memory[n] if n in memory else inputs[n][t] for n in decision.inputs}
        outputs = runner(arrays)
        memory = {name: outputs[f"next_{name}"] for name in memory}
        expected = {"action": actions[t], "scores": scores[t] if "scores" in outputs else None}
        expected |= {f"next_{name}": memories[name][t] for name in memory}
        differences = {name: _difference(x, expected[name]) for name, x in outputs.items()}
        in_action = differences["action"].reshape(ROWS, -1).max(axis=1)
        different += int((in_action > (TOLERANCE if actions.dtype == np.float32 else 0)).sum())
        if np.issubdtype(actions.dtype, np.integer):
            del differences["action"]
        largest = max([largest, *(float(x.max()) for x in differences.values())])
    return Proof(
        STEPS * ROWS,
        "specification" if played is None else "environment",
        different,
        largest,
        _microseconds(runner, {name: x[:1] for name, x in arrays.items()}),
    )


def _playable(env: Environment | HostEnvironments) -> Environment | None:
    """Return the device environment to play in; None where it is on the host, or unknown."""
    try:
        env = evaluation_environment(env)
    except ConfigError:  # a data set that names none
        return None
    return None if isinstance(env, HostEnvironments) else env


def _difference(x: np.ndarray, expected: Any) -> np.ndarray:
    x, y = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    assert x.shape == y.shape
    with np.errstate(invalid="ignore"):  # differences of infinities
        difference = np.where(x == y, 0.0, np.abs(x - y) / np.maximum(1.0, np.abs(y)))
    return np.where(np.isnan(difference), np.inf, difference)


def _microseconds(runner: Runner, arrays: Arrays) -> float:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        runner(arrays)
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


def _reference(
    decision: Decision, agent: Agent, env: Environment | None, state: LearnerState
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """Return inputs, actions and the memory after each step, all `[T, B, ...]`, of the agent."""
    params = policy_params(agent, state)
    carry = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), agent.carry(1))
    words = jax.random.bits(jax.random.key(1), (STEPS, ROWS, 2), jnp.uint32)

    def act(carry: Carry, timestep: TimeStep, words: jax.Array) -> tuple[jax.Array, Carry]:
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        action, _, carry = agent.act(params, carry, timestep, keys, decision.sampled)
        return action, carry

    if env is None:

        def step(carry: Carry, x: tuple[TimeStep, jax.Array]) -> tuple[Carry, Any]:
            action, carry = act(carry, *x)
            return carry, (x[0], action, carry)

        timesteps = draw_timesteps(agent.spec, np.random.default_rng(0))
        run = jax.jit(lambda: jax.lax.scan(step, carry, (timesteps, words))[1])
    else:

        def play(actor: Any, words: jax.Array) -> tuple[Any, Any]:
            action, carry = act(actor.carry, actor.timestep, words)
            keys = jax.random.wrap_key_data(words, impl="threefry2x32")
            record = actor.timestep, action, carry
            return step_environments(env, actor, action, carry, keys), record

        def run() -> Any:
            actor = init_actor(agent, env, jax.random.split(jax.random.key(0), ROWS))
            actor = dataclasses.replace(actor, carry=carry)
            return jax.lax.scan(play, actor, words)[1]

        run = jax.jit(run)
    timesteps, actions, carries = jax.device_get(run())
    spec = agent.spec
    observation = jax.tree.map(
        lambda leaf, x: x + x.dtype.type(leaf.start), spec.observation, timesteps.observation
    )
    actions = add_start(spec.action, actions)
    inputs = named_leaves("observation", observation)
    inputs |= {"reward": timesteps.reward, "first": timesteps.first, "key": np.asarray(words)}
    return inputs, actions, named_leaves("memory", carries)


def _scores(
    decision: Decision, inputs: dict[str, np.ndarray], memories: dict[str, np.ndarray]
) -> np.ndarray:
    """Return the decision's scores `[T, B, A]` where the agent's memory is its own."""
    if "scores" not in decision.outputs:
        return np.zeros(0)
    arrays = {}
    for name in decision.inputs:
        if name in decision.initial_memory:
            start = np.repeat(decision.initial_memory[name][None, None], ROWS, axis=1)
            arrays[name] = np.concatenate([start, memories[name][:-1]])
        else:
            arrays[name] = inputs[name]
    return np.asarray(jax.jit(jax.vmap(decision))(arrays)["scores"])


def draw_timesteps(spec: EnvironmentSpec, rng: np.random.Generator) -> TimeStep:
    """Draw timesteps `[T, B, ...]`: normal numbers, any integers, masks that allow something."""
    shape = (STEPS, ROWS)

    def draw(leaf: ArraySpec) -> np.ndarray:
        size = (*shape, *leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating):  # bfloat16, too
            return rng.normal(size=size).astype(leaf.dtype)
        if leaf.dtype == bool:
            return rng.random(size) < 0.5
        end = leaf.num_values or min(256, np.iinfo(leaf.dtype).max)
        return rng.integers(0, end, size).astype(leaf.dtype)

    observation: PyTree = jax.tree.map(draw, spec.observation)
    if (mask := action_mask(observation)) is not None:
        assert not isinstance(spec.action, Continuous)
        sizes = spec.action.components
        draws = [np.arange(n) == rng.integers(0, n, (*shape, 1)) for n in sizes]
        allowed = mask | np.concatenate(draws, axis=-1)
        observation = jax.tree.map(lambda x: allowed if x is mask else x, observation)
    ones = np.ones(shape, np.float32)
    first = rng.random(shape) < 0.1
    first[0] = True
    reward = rng.normal(size=shape).astype(np.float32)
    last = np.zeros(shape, bool)
    return TimeStep(observation, *map(jnp.asarray, (reward, ones, first, last)))
