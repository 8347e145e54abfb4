"""Every agent learns every probe: environments so small that what must be learnt is known exactly.

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

from podracer.agents import actor_critic
from podracer.agents.a2c import A2C
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.anakin import AnakinConfig, anakin
from podracer.driver import init_state
from podracer.envs import make
from podracer.envs.probes import GAMMA, PROBES
from podracer.mesh import find_devices, make_mesh
from podracer.networks import MLP, TorsoNetwork
from podracer.types import LearnerState, TimeStep

SMALL = TorsoNetwork(MLP((16,), "tanh"))
RECURRENT = TorsoNetwork(MLP((16,), "tanh"), memory="gru", memory_size=16)
COMMON = {"network": SMALL, "learning_rate": 0.01, "discount": GAMMA}
AGENTS = {
    "a2c": A2C(**COMMON, entropy_cost=0.003),
    "impala": Impala(**COMMON, entropy_cost=0.003),
    "ppo": PPO(**COMMON, entropy_cost=0.003, epochs=2, minibatches=2),
    "q_lambda": QLambda(**COMMON, lambda_=0.9),
}


def train(agent: Any, probe: str, updates: int = 200) -> tuple[Any, LearnerState, float]:
    """The agent made for the probe, what it has learnt, and its last episodes' mean return."""
    env, mesh = make(f"probe:{probe}"), make_mesh(find_devices(1))
    agent = dataclasses.replace(agent, spec=env.spec)
    config = AnakinConfig(32, 8, updates_per_chunk=50, fused=isinstance(agent, QLambda))
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    *_, progress = anakin(agent, env, mesh, config, state, num_updates=updates)
    return agent, progress.state.learner, progress.metrics["episode_return"]


def judge(agent: Any, learner: LearnerState, probe: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of the probe's first observations, and the best actions there."""
    observation = jnp.array([seen for seen, _ in PROBES[probe].values])
    count = len(observation)
    ones = jnp.ones(count)
    timestep = TimeStep(observation, 0 * ones, ones, ones > 0, ones < 0)
    keys, carry = jax.random.split(jax.random.key(0), count), agent.carry(count)
    action, extras, _ = agent.act(agent.actor_params(learner), carry, timestep, keys, False)
    if isinstance(agent, QLambda):
        return np.asarray(extras["q"].max(-1)), np.asarray(action)
    network = actor_critic.build(agent.network, agent.spec)
    params = learner.shared["params"]
    outputs, _ = network.apply(params, carry, observation[None], timestep.first[None])
    return np.asarray(outputs["value"][0, :, 0]), np.asarray(action)


def check(agent: Any, probe: str, updates: int = 200) -> None:
    """It learns the known values and the known actions, and acts on them while training."""
    agent, learner, episode_return = train(agent, probe, updates)
    known = PROBES[probe]
    values, actions = judge(agent, learner, probe)
    np.testing.assert_allclose(values, [value for _, value in known.values], atol=0.1)
    if known.best:
        best = np.array(known.best).reshape(actions.shape)
        np.testing.assert_allclose(actions, best, atol=0.1)
        assert episode_return > known.best_return - 0.1


# What always runs has every agent learn a value and a policy; the rest says where a bug is.
FAST = (
    ("a2c", "timeout"),
    ("impala", "timeout"),
    ("ppo", "timeout"),
    ("q_lambda", "timeout"),
    ("impala", "policy"),
    ("q_lambda", "policy"),
    ("a2c", "continuous"),
    ("ppo", "memory"),
)


def cases(probes: tuple[str, ...], names: Any = AGENTS) -> list[Any]:
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
    check(AGENTS[name], probe)


@pytest.mark.parametrize(("name", "probe"), cases(("continuous",), ("a2c", "impala", "ppo")))
def test_continuous_actions(name, probe):
    agent = AGENTS[name]
    if isinstance(agent, PPO):
        # Its advantages never shrink, so its steps must.
        agent = dataclasses.replace(agent, decay_updates=300)
    check(agent, probe, updates=300)


@pytest.mark.parametrize(("name", "probe"), cases(("memory",)))
def test_memory_recalls_the_cue(name, probe):
    check(dataclasses.replace(AGENTS[name], network=RECURRENT), probe, updates=300)


@pytest.mark.slow
def test_without_memory_the_cue_is_lost():
    """The other side of the test above: nothing leaks the cue to a feed-forward agent."""
    _, _, episode_return = train(AGENTS["ppo"], "memory", updates=300)
    assert abs(episode_return) < 0.15
