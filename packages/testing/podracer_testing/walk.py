"""A random walk with ends of both kinds, and rollouts and updates of small agents in it."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import types
from podracer.agent import Agent, Blueprint, Context
from podracer.devices.reductions import as_mean
from podracer.environment import auto_reset, restart, transition
from podracer.fields import struct
from podracer.networks import MLP, TorsoNetwork
from podracer.rollout import ActorState, init_actor, rollout

ACTIONS = types.Discrete(3)
BOX = types.Continuous((-1.0, 0.0), (1.0, 2.0))

T, B = 8, 6


@struct
class WalkState:
    """State of one walk."""

    x: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """A drunkard's walk, terminal at the edges, cut by a time-out after four steps."""

    action: types.Discrete | types.Continuous = ACTIONS
    offset: float = 0.0  # added to observations

    @property
    def spec(self) -> types.EnvironmentSpec:
        return types.EnvironmentSpec("walk", types.ArraySpec((2,)), self.action)

    def reset(self, key: jax.Array) -> tuple[WalkState, types.TimeStep]:
        x = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
        return WalkState(x, jnp.int32(0)), restart(self.observe(x))

    def step(self, key: jax.Array, state: WalkState, action: jax.Array) -> Any:
        x = state.x + 0.2 * jnp.sum(action) + 0.7 * jax.random.normal(key)
        state = WalkState(x, state.time + 1)
        reward = x + 0.5
        timed_out = state.time >= 4
        return state, transition(
            self.observe(x), reward, terminal=jnp.abs(x) > 1.5, timeout=timed_out
        )

    def observe(self, x: jax.Array) -> jax.Array:
        return self.offset + jnp.stack([x, jnp.cos(3 * x)])


WALK = auto_reset(Walk())


def network(memory: Any = "none", shared: bool = True) -> TorsoNetwork:
    """Return a small network."""
    return TorsoNetwork(
        MLP((8,), "tanh"), shared, memory, 5, memory_layers=2, memory_heads=1, memory_window=2
    )


@functools.cache
def built(settings: Any, env: Any = WALK) -> Agent:
    """Return the agent of settings, the same one each time, so that tests share its programs."""
    return Blueprint(settings, env.spec, Context(T)).build()


def methods_of(agent: Agent) -> Any:
    """Return the methods of an agent, also those that are not part of its contract."""
    init: Any = agent.init
    return init.__self__


def fresh(agent: Any) -> types.LearnerState:
    """Return the first state of a learner."""
    return agent.init(jax.random.key(0), B)


def enter(agent: Any, env: Any = WALK) -> ActorState:
    """Return actors at the first timesteps of their episodes."""
    return init_actor(agent, env, jax.random.split(jax.random.key(1), B))


@partial(jax.jit, static_argnums=(0, 1))
def advance(agent: Any, env: Any, params: Any, actor: ActorState, seed: int) -> Any:
    """Return actors after a rollout, and the rollout."""
    return rollout(agent, env, params, actor, *jax.random.split(jax.random.key(seed), (2, T, B)))


@functools.cache
def begin(agent: Any, env: Any = WALK) -> tuple[types.LearnerState, types.Trajectory]:
    """Return a fresh state, and a rollout from within episodes across ends of both kinds."""
    state = fresh(agent)
    params = agent.actor_params(state)
    actor, _ = advance(agent, env, params, enter(agent, env), 1)
    _, trajectory = advance(agent, env, params, actor, 2)
    assert not trajectory.valid().all()
    assert (trajectory.next_timesteps().discount == 0).any()
    assert not trajectory.steps.timestep.first[0].all()
    return state, trajectory


@partial(jax.jit, static_argnums=0)
def learn(agent: Any, state: types.LearnerState, trajectory: types.Trajectory) -> Any:
    """Return the new state and the values of the metrics."""
    state, metrics = agent.learn(state, trajectory, jax.random.key(2), None)
    return state, values_of(metrics)


def values_of(metrics: Any) -> dict[str, jax.Array]:
    """Return the values of metrics."""
    return {name: as_mean(metric).value for name, metric in metrics.items()}


def with_rewards(trajectory: types.Trajectory, change: Any) -> types.Trajectory:
    """Return a trajectory with other rewards: `change` gets those of all timesteps `[T+1, B]`."""
    return trajectory.with_rewards(change(trajectory.timesteps().reward))


def first_moments(state: types.LearnerState) -> list[Any]:
    """Return Adam's means, which after one update are a tenth of the gradient."""
    shared = state.shared
    adam = getattr(shared, "optimizer_states", None) or shared.optimizer_state
    nodes = jax.tree.leaves(adam, is_leaf=lambda x: hasattr(x, "mu"))
    return [x.mu for x in nodes if hasattr(x, "mu")]


def close(got: Any, expected: Any, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    """Assert that the leaves of two trees are nearly equal."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), got, expected)
