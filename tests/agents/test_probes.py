"""Every agent learns every probe: environments so small that what must be learned is known exactly.

Each probe adds one thing to the one before (see `podracer/envs/probes.py`), so the first that
fails says where to look.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import (
    ADAM,
    COMMON,
    CONTINUOUS_PROBE_AGENTS,
    PROBE_AGENTS,
    RECURRENT_PROBE_AGENTS,
    RECURRENT_TANH,
    blueprint,
)
from walk import methods_of

from podracer.agent import Agent
from podracer.agents.common import actor_critic, value_based
from podracer.agents.ddpg import DDPG
from podracer.agents.dqn import DQN
from podracer.agents.frodo import Frodo
from podracer.agents.muzero import MuZero
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.agents.qt_opt import QTOpt
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.devices.mesh import find_devices, make_mesh
from podracer.drivers.anakin import AnakinConfig, anakin
from podracer.drivers.common import init_state
from podracer.envs import make
from podracer.envs.probes import PROBES
from podracer.evaluate import make_evaluator
from podracer.types import LearnerState, TimeStep


def train(settings: Any, probe: str, updates: int = 200) -> tuple[Agent, LearnerState, float]:
    """The agent built for the probe, what it has learned, and its last episodes' mean return."""
    env, mesh = make(f"probe:{probe}"), make_mesh(find_devices(1))
    config = AnakinConfig(32, 8, updates_per_chunk=50, fused=isinstance(settings, QLambda))
    agent = blueprint(settings, env.spec, config.rollout_length)
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    *_, progress = anakin(agent, env, mesh, config, state, num_updates=updates)
    return agent.build(), progress.state.learner, progress.metrics["episode_return"]


def judge(
    settings: Any, agent: Agent, learner: LearnerState, probe: str
) -> tuple[np.ndarray, np.ndarray]:
    """The values of the probe's first observations, and the best actions there."""
    observation: Any = jnp.array([seen for seen, _ in PROBES[probe].values])
    count = len(observation)
    ones = jnp.ones(count)
    timestep = TimeStep(observation, 0 * ones, ones, ones > 0, ones < 0)
    keys, carry = jax.random.split(jax.random.key(0), count), agent.carry(count)
    action, extras, _ = agent.act(agent.actor_params(learner), carry, timestep, keys, False)
    values = _values(settings, agent, learner, timestep, carry, extras)
    return np.asarray(values), np.asarray(action)


def _values(
    settings: Any, agent: Agent, learner: LearnerState, timestep: TimeStep, carry: Any, extras: Any
) -> Any:
    """What the agent says of the value of its best action, `[n]`."""
    shared, observation = learner.shared, timestep.observation
    if isinstance(settings, QLambda):
        return extras["q"].max(-1)
    if isinstance(settings, DQN):
        keys = jax.random.split(jax.random.key(0), len(timestep.first))
        draws = value_based.draws_of_acting(settings.value, settings.noisy, keys, explore=False)
        outputs = methods_of(agent).outputs(shared.params, timestep, draws)
        return settings.value.mean(outputs).max(-1)
    if isinstance(settings, MuZero):
        return methods_of(agent).model.value(shared.params, observation)
    if isinstance(settings, R2D2):
        timesteps = jax.tree.map(lambda x: x[None], timestep)
        last_action = carry.last_action[None]
        q, _ = methods_of(agent).q_values(shared.params, carry.memory, timesteps, last_action)
        return q[0].max(-1)
    if isinstance(settings, DDPG | SAC):
        policy = methods_of(agent).policy(shared.params.actor, observation)
        action = policy.mode() if isinstance(settings, SAC) else policy
        networks = methods_of(agent).networks
        return networks.q_values(shared.params.critics, observation, action).min(0)
    if isinstance(settings, QTOpt):
        keys = jax.random.split(jax.random.key(0), len(timestep.first))
        action, _, _ = agent.act(agent.actor_params(learner), (), timestep, keys, False)
        networks = methods_of(agent).networks
        return networks.q_values(shared.params.critics, observation, action).min(0)
    if isinstance(settings, PQN):
        return extras["value"]
    params = shared["params"] if isinstance(shared, dict) else shared.params
    num_heads = getattr(settings, "num_heads", 1)
    network = actor_critic.build_network(settings.network, agent.spec, num_heads=num_heads)
    outputs, _ = network.apply(params, carry, observation[None], timestep.first[None])
    return outputs["value"][0, :, 0]


def check(settings: Any, probe: str, updates: int = 200) -> None:
    """It learns the known values and the known actions, and acts on them while training."""
    agent, learner, episode_return = train(settings, probe, updates)
    known = PROBES[probe]
    values, actions = judge(settings, agent, learner, probe)
    np.testing.assert_allclose(values, [value for _, value in known.values], atol=0.1)
    if known.best_actions:
        best = np.array(known.best_actions).reshape(actions.shape)
        np.testing.assert_allclose(actions, best, atol=0.1)
        assert episode_return > known.best_return - 0.1


FRODO = Frodo(**COMMON, **ADAM, entropy_cost=0.003, units=16)

# What always runs has one agent of each kind learn; the rest says where a bug is.
FAST = (
    ("q_lambda", "policy"),
    ("dqn", "timeout"),
    ("a2c", "continuous"),
)


def cases(probes: tuple[str, ...], names: Any = PROBE_AGENTS) -> list[Any]:
    """Agents and probes, those that are not in `FAST` marked as slow."""
    return [
        pytest.param(name, probe, marks=() if (name, probe) in FAST else pytest.mark.slow)
        for probe in probes
        for name in names
    ]


@pytest.mark.parametrize(
    ("name", "probe"),
    cases(("constant", "observation", "discount", "action", "policy", "timeout")),
)
def test_values_and_actions(name, probe):
    check(PROBE_AGENTS[name], probe, updates=400 if name.startswith("muzero") else 200)


@pytest.mark.parametrize(("name", "probe"), cases(("continuous",), CONTINUOUS_PROBE_AGENTS))
def test_continuous_actions(name, probe):
    check(CONTINUOUS_PROBE_AGENTS[name], probe, updates=300)


@pytest.mark.parametrize(
    ("name", "probe"), cases(("multidiscrete",), ("a2c", "impala", "stacx", "ppo"))
)
def test_several_actions_at_once(name, probe):
    check(PROBE_AGENTS[name], probe)


@pytest.mark.parametrize(
    ("name", "probe"),
    cases(("memory",), ("a2c", "impala", "stacx", "ppo", "q_lambda", "pqn", "r2d2")),
)
def test_memory_recalls_the_cue(name, probe):
    check(dataclasses.replace(PROBE_AGENTS[name], network=RECURRENT_TANH), probe, updates=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "pqn", "r2d2"])
def test_a_transformer_recalls_the_cue(name):
    layer = dataclasses.replace(RECURRENT_TANH, memory="gtrxl", memory_window=4)
    check(dataclasses.replace(PROBE_AGENTS[name], network=layer), "memory", updates=300)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["action", "policy", "multidiscrete", "memory"])
def test_actions_for_values_of_its_own(probe):
    """FRODO discovers what its values predict, so only its actions are known."""
    agent = FRODO if probe != "memory" else dataclasses.replace(FRODO, network=RECURRENT_TANH)
    _, _, episode_return = train(agent, probe, updates=300)
    assert episode_return > PROBES[probe].best_return - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_PROBE_AGENTS)
def test_memory_recalls_a_cue_for_real_actions(name):
    """Without memory the best action is 0, which costs 0.25 of the return."""
    agent, learner, _ = train(RECURRENT_PROBE_AGENTS[name], "continuous-memory", updates=300)
    evaluate = make_evaluator(agent, make("probe:continuous-memory"), 64)
    returns = evaluate(agent.actor_params(learner), jax.random.key(1)).returns
    assert returns.mean() > -0.02


@pytest.mark.slow
def test_without_memory_the_cue_is_lost():
    """The other side of the test above: nothing leaks the cue to a feed-forward agent."""
    _, _, episode_return = train(PROBE_AGENTS["ppo"], "memory", updates=300)
    assert abs(episode_return) < 0.15
