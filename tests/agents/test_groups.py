"""Groups of an observation: critics learn from what policies do not see."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import (
    AGENTS,
    CONTINUOUS_PROBE_AGENTS,
    PROBE_AGENTS,
    RECURRENT_PROBE_AGENTS,
    RECURRENT_TANH,
    SMALL,
    blueprint,
)
from lucky import LUCKY, LUCKY_BOX, Lucky
from runs import anakin_setup, resumed_and_whole, train_anakin
from variants import variants
from walk import built, methods_of

import podracer
from podracer.agents.common import actor_critic
from podracer.checks import check_agent
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.policy import Policy
from podracer.types import ACTION_MASK, ArraySpec, TimeStep
from podracer_testing.parity import check_parity

CUE, LUCK = jnp.array([[1.0], [-1.0], [1.0], [-1.0]]), jnp.array([[1.0], [1.0], [-1.0], [-1.0]])
SMALL_AGENTS = {
    **{name: (AGENTS[name], LUCKY) for name in ("a2c", "impala", "stacx", "ppo", "ppo-gru")},
    **{name: (AGENTS[name], LUCKY_BOX) for name in ("sac", "sac-gru", "td3", "td3-lstm")},
}
LEARNERS = {
    **{name: (PROBE_AGENTS[name], LUCKY) for name in ("ppo", "impala")},
    "ppo-gru": (dataclasses.replace(PROBE_AGENTS["ppo"], network=RECURRENT_TANH), LUCKY),
    **{name: (CONTINUOUS_PROBE_AGENTS[name], LUCKY_BOX) for name in ("sac", "td3")},
    "sac-gru": (RECURRENT_PROBE_AGENTS["sac"], LUCKY_BOX),
}


def timestep_of(luck: jax.Array) -> TimeStep:
    ones = jnp.ones(len(CUE))
    return TimeStep({"cue": CUE, "luck": luck}, 0 * ones, ones, ones > 0, ones < 0)


def acted(agent: Any, params: Any, luck: jax.Array, steps: int = 1) -> jax.Array:
    """Actions `[4, ...]` in the last of a few equal timesteps."""
    keys, carry = jax.random.split(jax.random.key(0), len(CUE)), agent.carry(len(CUE))
    for _ in range(steps):
        action, _, carry = agent.act(params, carry, timestep_of(luck), keys, False)
    return action


@variants("name", ("ppo",), LEARNERS)
def test_critics_learn_values_of_what_the_policy_does_not_see(name):
    settings, env = LEARNERS[name]
    driver, state = anakin_setup(settings, env, num_envs=32, updates_per_chunk=50)
    state, progress = train_anakin(driver, state, 300)
    agent, learner = driver.agent, state.learner
    action = acted(agent, agent.actor_params(learner), LUCK)
    best = CUE / 2 if env is LUCKY_BOX else CUE[:, 0] > 0
    np.testing.assert_allclose(action, best, atol=0.15)
    if env is LUCKY:
        model = actor_critic.build(settings, env.spec)
        params, carry = learner.shared.params, agent.carry(len(CUE))
        values = model.outputs(params, carry, timestep_of(LUCK))[0]["value"][:, 0]
    elif not agent.carry(1):  # critics with a memory judge whole sequences
        networks, critics = methods_of(agent).networks, learner.shared.params.critics
        values = networks.q_values(critics, timestep_of(LUCK).observation, action).min(0)
    else:
        values = 1 + LUCK[:, 0]
        assert progress[-1].metrics["loss"] < 0.1  # of targets whose variance is 1
    np.testing.assert_allclose(values, 1 + LUCK[:, 0], atol=0.15)


@variants("name", ("ppo", "sac-gru"), SMALL_AGENTS)
def test_policies_neither_see_nor_learn_from_what_is_for_critics(name):
    settings, env = SMALL_AGENTS[name]
    agent = built(settings, env)
    state = agent.init(jax.random.key(0), len(CUE))
    params = agent.actor_params(state)
    actions = [acted(agent, params, luck, steps=3) for luck in (LUCK, 1e6 * LUCK + 5)]
    np.testing.assert_array_equal(*actions)

    def policy(params: Any, luck: jax.Array) -> jax.Array:
        if agent.distribution is None:
            return acted(agent, params, luck).sum()
        outputs = agent.distribution(params, agent.carry(len(CUE)), timestep_of(luck))[0]
        return sum(x.sum() for x in jax.tree.leaves(outputs))

    grads, of_luck = jax.grad(policy, argnums=(0, 1), allow_int=True)(params, LUCK)
    assert not of_luck.any()
    if env is LUCKY:  # one tree of parameters, and one loss
        actor, critic = (parts_of(grads)[part] for part in ("actor", "critic"))
        assert any(x.any() for x in jax.tree.leaves(actor))
        assert not any(x.any() for x in jax.tree.leaves(critic))


def parts_of(params: Any) -> Any:
    return getattr(params, "params", params)


def test_a_policy_takes_the_part_of_the_actor_alone_after_a_resumed_run(tmp_path):
    experiment = podracer.Experiment(
        environment=LUCKY,
        agent=AGENTS["ppo"],
        driver=podracer.AnakinConfig(16, 8, 5),
        frames=16 * 8 * 20,
        evaluations=2,
    )
    run, _ = resumed_and_whole(experiment, tmp_path, frames=16 * 8 * 10, evaluations=1)
    policy = podracer.load_policy(run, recipe=experiment)
    assert policy.spec.observation == {"cue": ArraySpec((1,))}
    actions = policy({"cue": np.asarray(CUE)})
    agent, state = podracer.load(run, recipe=experiment)
    np.testing.assert_array_equal(actions, acted(agent, agent.actor_params(state), LUCK))
    assert policy.distribution({"cue": np.asarray(CUE[0])}).logits.shape == (2,)
    with pytest.raises(ConfigError, match=r"must be \{cue: float32\[1\]\}"):
        policy({"cue": CUE, "luck": LUCK})


@pytest.mark.slow
def test_lock_step_sebulba_equals_anakin():
    check_parity(*SMALL_AGENTS["ppo-gru"])


# --- which part is whose -------------------------------------------------------------------------


def groups(settings: Any, env: Any = LUCKY) -> Any:
    return built(settings, env).groups


def test_settings_choose_groups_and_keys_other_than_the_declared_ones():
    ppo = AGENTS["ppo"]
    assert groups(ppo) == {"actor": ("cue",), "critic": ("cue", "luck")}
    declared = podracer.auto_reset(Lucky(groups=(("critic", ("luck",)), ("lucky", ("luck",)))))
    assert groups(ppo, declared) == {"actor": ("cue", "luck"), "critic": ("luck",)}
    chosen = dataclasses.replace(ppo, actor_groups=("lucky", "cue"), critic_groups=("cue",))
    assert groups(chosen, declared) == {"actor": ("luck", "cue"), "critic": ("cue",)}
    plain = podracer.auto_reset(Lucky(groups=()))
    assert groups(ppo, plain) == {}
    with pytest.raises(ConfigError, match=r"no group or key 'fate'; its keys are cue, luck\."):
        groups(dataclasses.replace(ppo, actor_groups=("fate",)))
    with pytest.raises(ConfigError, match="its keys are none, as it is no dictionary"):
        built(dataclasses.replace(ppo, actor_groups=("fate",)))


def test_a_mask_of_actions_is_always_for_the_policy():
    spec = LUCKY.spec
    observation = spec.observation | {ACTION_MASK: ArraySpec((2,), bool)}
    masked = dataclasses.replace(spec, observation=observation)
    assert AGENTS["ppo"].groups(masked)["actor"] == ("cue", ACTION_MASK)


def test_a_policy_takes_the_mask_of_actions_from_an_entry_that_its_network_does_not_see():
    inner = {"luck": ArraySpec((1,)), ACTION_MASK: ArraySpec((2,), bool)}
    observation = {"cue": ArraySpec((1,)), "observation": inner}
    spec = dataclasses.replace(LUCKY.spec, observation=observation, groups={"actor": ("cue",)})
    agent = AGENTS["ppo"].build(spec)
    policy = Policy(agent, agent.init(jax.random.key(0), 1))
    for action in (0, 1):
        mask = np.arange(2) == action
        shown = {"cue": np.ones(1), "observation": {"luck": np.ones(1), ACTION_MASK: mask}}
        assert policy(shown) == action


def test_critics_have_a_network_of_their_own_where_they_see_more_or_have_a_setting():
    def parts(**fields: Any) -> set[str]:
        agent = built(podracer.A2C(network=SMALL, **fields), LUCKY)
        return set(agent.init(jax.random.key(0), 1).shared.params)

    assert parts() == {"actor", "critic"}
    same = {"actor_groups": ("cue",), "critic_groups": ("cue",)}
    assert parts(**same) == {"shared"}
    assert parts(**same, critic_network=TorsoNetwork(MLP((4,)))) == {"actor", "critic"}


def test_an_agent_that_acts_on_everything_is_refused_where_the_actor_sees_a_part():
    with pytest.raises(ConfigError, match=r"DQN acts on the whole observation, but lucky has"):
        check_agent(blueprint(AGENTS["dqn"], LUCKY.spec))
    everything = Lucky(groups=(("actor", ("cue", "luck")),)).spec
    for settings in (AGENTS["dqn"], AGENTS["ppo"]):
        check_agent(blueprint(settings, everything), num_envs=16)


def test_keys_that_nobody_reads_are_named(caplog):
    check_agent(blueprint(AGENTS["ppo"], LUCKY.spec))
    assert "no network" not in caplog.text
    settings = dataclasses.replace(AGENTS["ppo"], critic_groups=("cue",))
    check_agent(blueprint(settings, LUCKY.spec))
    assert "PPO: no network sees luck of lucky." in caplog.text
    declared = podracer.auto_reset(Lucky(groups=(("actor", ("cue",)), ("critic", ("cue",)))))
    report = podracer.check_environment(declared)
    assert report.usable
    assert [x.text for x in report.findings] == ["no group has the key 'luck': no network sees it."]
    wrong = podracer.auto_reset(Lucky(groups=(("actor", ("fate",)),)))
    with pytest.raises(ConfigError, match="no group or key 'fate'"):
        podracer.check_environment(wrong)
