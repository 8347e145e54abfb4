"""What every agent must do, with or without a replay."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import pytest
from agents import blueprint as off_policy_blueprint
from off_policy import BOXED, DISCRETE, NEEDS_CONTINUOUS, OFF_POLICY, agent_and_env
from on_policy import ON_POLICY, blueprint, learner, small
from walk import ACTIONS, BOX, WALK, T, Walk, begin, built, close, network, slow

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.a2c import A2C
from podracer.agents.common import actor_critic
from podracer.checks import check_agent
from podracer.drivers.anakin import AnakinConfig, check
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.ops.distributions import policy
from podracer.types import EnvironmentSpec
from podracer_testing.contract import check_gradients, check_greedy, check_time_outs

SOME_ON_POLICY = [name if name in ("impala", "ppo") else slow(name) for name in ON_POLICY]
MEMORIES = ("none", "gru", "lstm", "gtrxl")
# An update that is differentiated takes four times as long to trace: once is enough.
ONE_OF_EACH = {name: [(ACTIONS, "gru"), (BOX, "lstm")] for name in ON_POLICY}
ONE_OF_EACH |= {"a2c": [(BOX, "gru")], "stacx": [(BOX, "none")]}


@pytest.mark.parametrize(
    ("name", "space", "memory"),
    [
        (name, *case) if case in ONE_OF_EACH[name] else slow(name, *case)
        for name in ON_POLICY
        for case in itertools.product((ACTIONS, BOX), MEMORIES)
    ],
)
def test_every_agent_keeps_the_contract(name, space, memory):
    agent = blueprint(small(name, memory), Walk(space))
    if name in ("pqn", "q_lambda") and space is BOX:
        with pytest.raises(ConfigError, match="needs discrete actions; walk has"):
            check_agent(agent)
    else:
        check_agent(agent, num_envs=4)


@struct
class Broken:
    """A good agent with other functions."""

    change: Any = static()  # from the settings and the good agent to the functions by name
    memory: str = static(default="none")
    discount: float = 0.9

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        good = A2C(network=network(self.memory), discount=self.discount).build(spec, context)
        return dataclasses.replace(good, name="Broken", **self.change(self, good))


def learning(change: Any) -> Any:
    """`change` gets what a good agent's `learn` returns."""
    return Broken(lambda _, good: {"learn": lambda *args: change(*good.learn(*args))})


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("impala", "lstm"),
        ("ppo", "gru"),
        slow("impala", "gtrxl"),
        slow("ppo", "gtrxl"),
        slow("a2c", "transformer"),
        slow("a2c", "gru"),
        slow("stacx", "gru"),
        slow("a2c", "lstm"),
        slow("impala", "none"),
        slow("impala", "gru"),
        slow("ppo", "lstm"),
    ],
)
def test_unrolling_gives_what_acting_gave(name, memory):
    """Across ends of episodes and from memory within one: policy and values at every step, hence
    importance ratios of exactly 1 where the parameters have not changed."""
    settings = learner(name, memory)
    state, trajectory = begin(built(settings))
    params = state.shared.params
    num_heads = getattr(settings, "num_heads", 1)
    net = actor_critic.build_network(settings.network, WALK.spec, num_heads=num_heads)
    timesteps, extras = trajectory.timesteps(), trajectory.steps.extras

    @jax.jit
    def unrolled(params: Any) -> Any:
        outputs, _ = net.apply(params, trajectory.carry, timesteps.observation, timesteps.first)
        last = actor_critic.ActorCritic(net, ACTIONS).final_value(params, trajectory)
        log_prob = policy(ACTIONS, outputs["policy"][:-1]).log_prob(extras["sample"])
        return outputs["policy"][:-1], outputs["value"][..., 0], log_prob, last

    logits, values, log_prob, last = unrolled(params)
    close(logits, extras.get("policy", logits), 1e-5)
    close(values[:-1], extras.get("value", values[:-1]), 1e-5)
    close(log_prob, extras.get("log_prob", log_prob), 1e-5)
    close(values[-1], last, 1e-5)


@pytest.mark.parametrize("name", [slow(name) if name == "stacx" else name for name in ON_POLICY])
def test_what_happens_at_a_time_out_teaches_nothing(name):
    check_time_outs(built(learner(name)))


@pytest.mark.parametrize("name", SOME_ON_POLICY)
def test_every_parameter_receives_a_gradient(name):
    check_gradients(built(learner(name)))


@pytest.mark.parametrize("name", SOME_ON_POLICY)
def test_without_exploring_the_keys_do_not_matter(name):
    check_greedy(built(learner(name)), explores=name != "q_lambda")


def test_an_agent_with_another_update_has_no_fused_form():
    """Else the driver would go on to learn by the old loss."""
    with pytest.raises(ConfigError, match="Broken has no fused form"):
        check(blueprint(learning(lambda *result: result)), WALK, AnakinConfig(16, T, fused=True), 1)


VARIANTS = ("td3-c51", "sac-c51", "sac-qr", "muzero-sampled")
SOME_OFF_POLICY = [
    pytest.param(name, marks=() if name in ("sac",) else pytest.mark.slow) for name in OFF_POLICY
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in VARIANTS else ()) for x in OFF_POLICY],
)
def test_every_agent_with_a_replay_keeps_the_contract(name):
    env, other = (BOXED, DISCRETE) if name in NEEDS_CONTINUOUS else (DISCRETE, BOXED)
    check_agent(off_policy_blueprint(OFF_POLICY[name], env.spec), num_envs=4)
    if name.startswith("muzero"):
        return  # takes both kinds of actions
    with pytest.raises(ConfigError, match=r"needs (discrete|continuous) actions; walk has"):
        OFF_POLICY[name].build(other.spec)


@pytest.mark.parametrize("name", SOME_OFF_POLICY)
def test_every_parameter_receives_a_gradient_from_a_replay(name):
    at_once = {"policy_delay": 1} if name in ("td3", "td3-c51") else {}
    check_gradients(*agent_and_env(name, **at_once))


@pytest.mark.parametrize("name", SOME_OFF_POLICY)
def test_what_happens_at_a_time_out_teaches_nothing_from_a_replay(name):
    check_time_outs(*agent_and_env(name))


@pytest.mark.parametrize("name", SOME_OFF_POLICY)
def test_without_exploring_the_keys_do_not_matter_off_policy(name):
    check_greedy(*agent_and_env(name))
