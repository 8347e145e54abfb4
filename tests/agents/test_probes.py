"""Every agent learns every probe: environments so small that what must be learned is known exactly.

Each probe adds one thing to the one before (see `podracer/envs/probes.py`), so the first that
fails says where to look.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import pytest
from agents import CONTINUOUS_PROBE_AGENTS, PROBE_AGENTS, RECURRENT_PROBE_AGENTS, RECURRENT_TANH
from walk import methods_of

from podracer.agent import Agent
from podracer.agents.common import actor_critic
from podracer.agents.ddpg import DDPG
from podracer.agents.dqn import DQN
from podracer.agents.muzero import MuZero
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.envs import make
from podracer.evaluate import make_evaluator
from podracer.types import LearnerState, TimeStep
from podracer_testing.probes import check_probe, train


def values_of(
    settings: Any, agent: Agent, learner: LearnerState, timestep: TimeStep, carry: Any, extras: Any
) -> Any:
    """What the agent says of the value of its best action, `[n]`."""
    shared, observation = learner.shared, timestep.observation
    if isinstance(settings, QLambda):
        return extras["q"].max(-1)
    if isinstance(settings, DQN):
        outputs = methods_of(agent).outputs(shared.params, timestep, None)
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
    if isinstance(settings, PQN):
        return extras["value"]
    params = shared["params"] if isinstance(shared, dict) else shared.params
    num_heads = getattr(settings, "num_heads", 1)
    network = actor_critic.build_network(settings.network, agent.spec, num_heads=num_heads)
    outputs, _ = network.apply(params, carry, observation[None], timestep.first[None])
    return outputs["value"][0, :, 0]


def check(settings: Any, probe: str, updates: int = 200) -> None:
    """It learns the known values and the known actions, and acts on them while training."""
    check_probe(
        settings,
        probe,
        updates,
        values=partial(values_of, settings),
        fused=isinstance(settings, QLambda),
    )


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
@pytest.mark.parametrize("name", RECURRENT_PROBE_AGENTS)
def test_memory_recalls_a_cue_for_real_actions(name):
    """Without memory the best action is 0, which costs 0.25 of the return."""
    agent, learner, _ = train(RECURRENT_PROBE_AGENTS[name], "probe:continuous-memory", updates=300)
    evaluate = make_evaluator(agent, make("probe:continuous-memory"), 64)
    returns = evaluate(agent.actor_params(learner), jax.random.key(1)).returns
    assert returns.mean() > -0.02


@pytest.mark.slow
def test_without_memory_the_cue_is_lost():
    """The other side of the test above: nothing leaks the cue to a feed-forward agent."""
    _, _, episode_return = train(PROBE_AGENTS["ppo"], "probe:memory", updates=300)
    assert abs(episode_return) < 0.15
