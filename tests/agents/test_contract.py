"""What every agent must do, the two forms of the fused ones, and each agent's own arithmetic."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import request
from walk import (
    ACTIONS,
    BOX,
    WALK,
    B,
    T,
    Walk,
    advance,
    begin,
    built,
    close,
    enter,
    fresh,
    gradient,
    learn,
    network,
    slow,
    values_of,
    with_rewards,
)

from podracer.agent import DEFAULT_CONTEXT, Agent, Blueprint, Context
from podracer.agents.a2c import A2C
from podracer.agents.common import actor_critic, epochs
from podracer.agents.common.normalization import normalized_by_actor, scale_rewards
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.agents.stacx import Stacx
from podracer.checks import check_agent
from podracer.devices.mesh import find_devices, make_mesh
from podracer.devices.reductions import global_grad
from podracer.drivers.anakin import AnakinConfig, check, make_chunk
from podracer.drivers.common import TrainState, abstract_state, init_state
from podracer.environment import auto_reset
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.distributions import policy
from podracer.ops.moments import init_moments
from podracer.ops.returns import generalized_advantages
from podracer.rollout import ActorState, rollout
from podracer.schedules import Linear
from podracer.types import EnvironmentSpec, LearnerState, Trajectory

AGENTS = {"a2c": A2C, "impala": Impala, "ppo": PPO, "pqn": PQN, "q_lambda": QLambda, "stacx": Stacx}
SOME = [name if name in ("impala", "ppo") else slow(name) for name in AGENTS]
MEMORIES = ("none", "gru", "lstm")
CONTINUOUS = auto_reset(Walk(BOX))


def small(name: str, memory: str = "none", **fields: Any) -> Any:
    """Settings of a small agent; PPO's heads have a torso and a memory each, others share one."""
    return AGENTS[name](network=network(memory, name != "ppo"), **fields)


# Without clipped gradients, and with an entropy bonus that shows. PPO without minibatches, so that
# its first gradient is of the policy that acted. Tests share these: each costs a compile.
LEARNERS = {
    "a2c": {"max_gradient_norm": 1e9, "entropy_cost": 0.5},
    "impala": {"max_gradient_norm": 1e9, "entropy_cost": 0.5, "optimizer": Optimizer()},
    "ppo": {"max_gradient_norm": 1e9, "entropy_cost": 0.5, "num_epochs": 1, "num_minibatches": 1},
    "pqn": {"max_gradient_norm": 1e9, "num_epochs": 1, "num_minibatches": 1},
    "q_lambda": {},
    "stacx": {"max_gradient_norm": 1e9, "entropy_cost": 0.5, "optimizer": Optimizer()},
}


def learner(name: str, memory: str = "none", **fields: Any) -> Any:
    return small(name, memory, **LEARNERS[name] | fields)


def blueprint(settings: Any, env: Any = WALK) -> Blueprint:
    return Blueprint(settings, env.spec, Context(T))


# --- every agent ---------------------------------------------------------------------------------


# An update that is differentiated takes four times as long to trace: once is enough.
ONE_OF_EACH = {name: [(ACTIONS, "gru"), (BOX, "lstm")] for name in AGENTS}
ONE_OF_EACH |= {"a2c": [(ACTIONS, "none"), (BOX, "gru")], "stacx": [(BOX, "none")]}


@pytest.mark.parametrize(
    ("name", "space", "memory"),
    [
        (name, *case) if case in ONE_OF_EACH[name] else slow(name, *case)
        for name in AGENTS
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


def acting(change: Any, memory: str = "none") -> Any:
    """`change` gets what a good agent's `act` returns."""
    return Broken(lambda _, good: {"act": lambda *args: change(*good.act(*args))}, memory)


def learning(change: Any) -> Any:
    """`change` gets what a good agent's `learn` returns."""
    return Broken(lambda _, good: {"learn": lambda *args: change(*good.learn(*args))})


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (object(), "object builds no agent: it lacks"),
        (type("Plain", (A2C,), {})(), "Plain is not a tree of arrays: put @podracer.struct"),
        (
            Broken(lambda *_: {"init": lambda *args: {}}),
            r"Broken\.init must return a LearnerState, not dict",
        ),
        (
            Broken(lambda *_: {"init": lambda key, n: LearnerState((), jnp.zeros(n + 1))}),
            r"Broken\.init: local must lead with num_envs \(2\) or a number that divides it, "
            r"but its shape is \(3,\)",
        ),
        (acting(lambda a, x, c: (1.0 * a, x, c)), r"Broken\.act must return actions int32\[2\]"),
        (acting(lambda a, x, c: (a[:1], x, c)), r"Broken\.act must return actions int32\[2\]"),
        (acting(lambda a, x, c: (a, x, (c,)), "gru"), r"Broken\.act must keep the structure of"),
        (
            acting(lambda a, x, c: 1 / 0),
            r"Broken\.act cannot be traced: ZeroDivisionError: division by zero "
            r"\(test_contract\.py,",
        ),
        (learning(lambda s, m: (s, {"loss": jnp.zeros(2)})), r"Broken\.learn must return scalar"),
        (
            learning(lambda s, m: ((), m)),
            r"Broken\.learn must return a LearnerState first, not tuple",
        ),
        (
            learning(lambda s, m: (jax.tree.map(lambda x: x[..., None], s), m)),
            r"Broken\.learn must keep state\.shared\.params.* but it became",
        ),
        (
            Broken(lambda self, _: {"learn": lambda *args: 1 if self.discount > 0.5 else 2}),
            r"Broken\.learn cannot be traced: TracerBoolConversionError: a Python `if` or `while` "
            r"depends on a traced value: take jnp\.where or jax\.lax\.cond "
            r"\(test_contract\.py, line",
        ),
    ],
)  # fmt: skip
def test_a_broken_agent_is_refused_and_the_method_named(agent, message):
    with pytest.raises(ConfigError, match=message):
        check_agent(blueprint(agent), num_envs=2)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("impala", "lstm"),
        ("ppo", "gru"),
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


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_the_importance_ratio_is_one_on_policy(memory):
    agent = built(learner("impala", memory))
    state, trajectory = begin(agent)
    close(learn(agent, state, trajectory)[1]["importance_ratio"], 1.0)


@pytest.mark.parametrize("name", [slow(name) if name == "stacx" else name for name in AGENTS])
def test_what_happens_at_a_time_out_teaches_nothing(name):
    """The action there is ignored and what follows is a reset: neither may matter."""
    agent = built(learner(name))
    state, trajectory = begin(agent)
    cut = ~trajectory.valid()
    after_cut = jnp.concatenate([jnp.zeros((1, B), bool), cut])
    other = with_rewards(trajectory, lambda reward: jnp.where(after_cut, 1e3, reward))
    extras = dict(trajectory.steps.extras)
    if "sample" in extras:
        extras["sample"] = jnp.where(cut, 2 - extras["sample"], extras["sample"])
    action = jnp.where(cut, 2 - trajectory.steps.action, trajectory.steps.action)
    steps = dataclasses.replace(other.steps, action=action, extras=extras)
    other = dataclasses.replace(other, steps=steps)
    got, expected = (gradient(learn(agent, state, x)[0]) for x in (other, trajectory))
    close(got, expected, atol=1e-7)


@pytest.mark.parametrize("name", SOME)
def test_every_parameter_receives_a_gradient(name):
    agent = built(learner(name))
    state, _ = learn(agent, *begin(agent))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(state)):
        assert np.abs(leaf).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


@pytest.mark.parametrize("name", SOME)
def test_without_exploring_the_keys_do_not_matter(name):
    agent = built(learner(name))
    params, timestep = agent.actor_params(fresh(agent)), enter(agent).timestep

    def act(seed: int, explore: bool) -> np.ndarray:
        keys = jax.random.split(jax.random.key(seed), B)
        return np.asarray(agent.act(params, (), timestep, keys, explore)[0])

    np.testing.assert_array_equal(act(0, False), act(1, False))
    assert (act(0, True) != act(1, True)).any() == (name != "q_lambda")


# --- on any number of devices --------------------------------------------------------------------


def case(name: str, env: Any = WALK, **fields: Any) -> tuple[Any, Any, AnakinConfig]:
    return blueprint(small(name, **fields), env), env, AnakinConfig(16, T, 1)


CASES = {
    "a2c": case("a2c"),
    "impala": case("impala", auto_reset(Walk(BOX))),
    "pqn": case("pqn", num_epochs=1, num_minibatches=1),
    "q_lambda": case("q_lambda"),
    "stacx": case("stacx", auto_reset(Walk(BOX))),
    "ppo": case(
        "ppo",
        auto_reset(Walk(BOX)),
        num_epochs=1,
        num_minibatches=1,
        normalize_observations=True,
        normalize_rewards=True,
    ),
}


@functools.cache
def first_state(name: str) -> TrainState:
    agent, env, config = CASES[name]
    return init_state(agent, env, make_mesh(find_devices(1)), config, jax.random.key(0))


@functools.cache
def one_update(name: str, devices: int) -> Any:
    """The learner's state and the metrics after one update on the same 16 environments."""
    agent, env, config = CASES[name]
    mesh = make_mesh(find_devices(devices))
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(agent, env, mesh, config))
    state = jax.device_put(jax.tree.map(jnp.copy, first_state(name)), shardings)
    chunk = make_chunk(env, mesh, config)
    state, metrics = chunk(agent, state, request(devices))
    return jax.device_get((state.learner, metrics["mean"]))


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        slow(name, devices)
        for name in ("a2c", "impala", "stacx", "q_lambda", "ppo", "pqn")
        for devices in (2, 4, 8)
    ],
)
def test_shards_learn_what_one_device_learns(name, devices):
    """The same run key: D shards of B environments against one of D x B."""
    (many, many_metrics), (one, one_metrics) = one_update(name, devices), one_update(name, 1)
    close(gradient(many), gradient(one), atol=2e-6)
    close(many_metrics, one_metrics, atol=1e-5)
    learners = [dataclasses.replace(s.shared, optimizer_state=()) for s in (many, one)]
    close(*learners, atol=1e-5)
    close(many.local, one.local)


# --- the fused form ------------------------------------------------------------------------------


def gradients(agent: Any, reuse: bool, length: int, params: Any, actor: ActorState) -> Any:
    """Through the rollout and its forward pass, or by a second one over its trajectory."""

    def collect(params: Any) -> Trajectory:
        keys = jax.random.split(jax.random.key(2), (2, length, B))
        return rollout(agent, WALK, params, actor, *keys)[1]

    def fused(params: Any) -> Any:
        return agent.learn.loss(params, state, collect(params), True)

    state = fresh(agent)
    if reuse:
        grads, metrics = global_grad(fused, params, axis=None)
    else:
        inputs = (params, state, collect(params), False)
        grads, metrics = global_grad(agent.learn.loss, *inputs, axis=None)
    return grads, values_of(metrics)


FUSED = pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("a2c", "none"),
        ("q_lambda", "none"),
        slow("a2c", "gru"),
        slow("a2c", "lstm"),
        slow("q_lambda", "gru"),
        slow("q_lambda", "lstm"),
    ],
)


@FUSED
def test_the_gradient_through_the_rollout_is_that_of_a_second_pass(name, memory):
    """From within episodes and across their ends."""
    agent = built(learner(name, memory))
    params = agent.actor_params(fresh(agent))
    actor, _ = advance(agent, WALK, params, enter(agent), 1)
    both_forms = jax.jit(
        lambda *args: [gradients(agent, reuse, T, *args) for reuse in (True, False)]
    )
    fused, two_pass = both_forms(params, actor)
    close(fused, two_pass, atol=2e-6)
    assert optax.tree.norm(fused[0]) > 0.01


def test_the_fused_program_learns_what_the_other_learns():
    agent, env, config = CASES["q_lambda"]
    fused = dataclasses.replace(config, fused=True)
    chunk = make_chunk(env, make_mesh(find_devices(1)), fused)
    state = jax.tree.map(jnp.copy, first_state("q_lambda"))
    state, metrics = chunk(agent, state, request(1))
    two_pass, expected = one_update("q_lambda", 1)
    close(gradient(state.learner), gradient(two_pass), atol=2e-6)
    close(metrics["mean"], expected, atol=1e-5)


def test_a_schedule_in_the_fused_program():
    most = 2 * 16 * T
    agent, env, config = case("a2c", entropy_cost=Linear(0.5, 0.0, frames=most))
    mesh = make_mesh(find_devices(1))
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    chunk = make_chunk(env, mesh, dataclasses.replace(config, fused=True))
    for _ in range(4):
        cost = 0.5 * (1 - min(1.0, int(state.learner.shared.frames) / most))
        state, metrics = chunk(agent, state, request(1))
        mean = values_of(metrics["mean"])
        parts = mean["policy_loss"] + agent.settings.value_cost * mean["value_loss"]
        close(mean["loss"], parts - cost * mean["entropy"])
    assert cost == 0


def test_an_agent_with_another_update_has_no_fused_form():
    """Else the driver would go on to learn by the old loss."""
    with pytest.raises(ConfigError, match="Broken has no fused form"):
        check(blueprint(learning(lambda *result: result)), WALK, AnakinConfig(16, T, fused=True), 1)


@FUSED
def test_the_fused_update_computes_less(name, memory, monkeypatch):
    """Without loops, of which XLA counts one turn only."""
    monkeypatch.setattr(jax.lax, "scan", partial(jax.lax.scan, unroll=True))
    wide = TorsoNetwork(MLP((64,)), memory=memory, memory_size=32)
    agent = built(AGENTS[name](network=wide))
    params = jax.eval_shape(lambda: agent.actor_params(fresh(agent)))
    actor = jax.eval_shape(lambda: enter(agent))

    def flops(reuse: bool) -> float:
        lowered = jax.jit(partial(gradients, agent, reuse, 1)).lower(params, actor)
        return lowered.compile().cost_analysis()["flops"]

    assert flops(True) < 0.9 * flops(False)


# --- losses --------------------------------------------------------------------------------------


def textbook_gradient(
    settings: Any, state: LearnerState, trajectory: Trajectory, policy_loss: Any
) -> Any:
    """Of a policy loss, a squared error to λ-returns and an entropy bonus, over what is valid.

    `policy_loss` gets log-probabilities now and when acting, and generalized advantages.
    """
    net = actor_critic.build_network(settings.network, WALK.spec)
    timesteps, next_timesteps, valid = (
        trajectory.timesteps(),
        trajectory.next_timesteps(),
        trajectory.valid(),
    )
    extras = trajectory.steps.extras

    def forward(params: Any) -> Any:
        outputs, _ = net.apply(params, trajectory.carry, timesteps.observation, timesteps.first)
        return policy(ACTIONS, outputs["policy"][:-1]), outputs["value"][..., 0]

    values = forward(state.shared.params)[1]
    discounts = settings.discount * next_timesteps.discount
    lambda_ = settings.trace_lambda if isinstance(settings, Impala) else settings.gae_lambda
    advantages = generalized_advantages(
        values[:-1], values[1:], next_timesteps.reward, discounts, valid, lambda_
    )

    def loss(params: Any) -> jax.Array:
        distribution, value = forward(params)
        log_prob = distribution.log_prob(extras["sample"])
        terms = policy_loss(log_prob, extras.get("log_prob"), advantages)
        terms += settings.value_cost * 0.5 * (value[:-1] - values[:-1] - advantages) ** 2
        terms -= settings.entropy_cost * distribution.entropy()
        return jnp.mean(terms, where=valid)

    return jax.jit(jax.grad(loss))(state.shared.params)


def standardized(x: jax.Array, valid: jax.Array) -> jax.Array:
    return (x - jnp.mean(x, where=valid)) / jnp.std(x, where=valid)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("a2c", "none"),
        ("impala", "none"),
        ("ppo", "none"),
        slow("ppo", "gru"),
        slow("a2c", "gru"),
        slow("impala", "lstm"),
    ],
)
def test_the_first_gradient_is_the_policy_gradient(name, memory):
    """Where the policy that learns is the one that acted, all three do the same. (V-trace with a
    λ of 1, its default, then has the targets and the advantages of GAE.)"""
    settings = learner(name, memory)
    agent = built(settings)
    state, trajectory = begin(agent)
    valid = trajectory.valid()
    assert not valid.all()
    scale = partial(standardized, valid=valid) if name == "ppo" else lambda x: x
    expected = textbook_gradient(
        settings, state, trajectory, lambda log_prob, _, advantages: -scale(advantages) * log_prob
    )
    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), expected, atol=1e-5)
    assert optax.tree.norm(expected) > 0.1
    close((metrics.get("approx_kl", 0.0), metrics.get("clip_fraction", 0.0)), (0.0, 0.0))


@pytest.mark.parametrize("name", ["a2c", "impala", "ppo", "stacx"])
def test_the_deviation_of_actions_is_a_parameter(name):
    """It is the same in every state; STACX has one for each of its heads."""
    settings, env = small(name), Walk(BOX)
    params = fresh(built(settings, env)).shared.params
    params["log_std"]["policy"] = jnp.full(BOX.size, 0.7)
    observation = jax.random.normal(jax.random.key(0), (T, B, 2))
    num_heads = getattr(settings, "num_heads", 1)
    net = actor_critic.build_network(settings.network, env.spec, num_heads=num_heads)
    outputs, _ = net.apply(params, (), observation, jnp.zeros((T, B), bool))
    distribution = policy(BOX, outputs["policy"])
    assert distribution.mean.shape == (T, B, BOX.size)
    assert jnp.std(distribution.mean) > 0
    close(distribution.log_scale, jnp.full((T, B, BOX.size), 0.7))


def test_the_deviation_of_actions_depends_on_the_state_by_choice():
    agent, env = built(small("a2c", state_dependent_std=True), CONTINUOUS), CONTINUOUS
    _, trajectory = begin(agent, env)
    log_scale = policy(BOX, trajectory.steps.extras["policy"]).log_scale
    assert (jnp.std(log_scale, axis=(0, 1)) > 0).all()


# --- PPO -----------------------------------------------------------------------------------------


def advantages(settings: Any, agent: Agent, state: LearnerState, trajectory: Trajectory) -> Any:
    """The generalized advantages, by the values that acting computed, and which of them count."""
    keys, final = jax.random.split(jax.random.key(0), B), trajectory.final
    params = agent.actor_params(state)
    _, extras, _ = agent.act(params, trajectory.final_carry, final, keys, False)
    values = jnp.concatenate([trajectory.steps.extras["value"], extras["value"][None]])
    next_timesteps, valid = trajectory.next_timesteps(), trajectory.valid()
    discounts = settings.discount * next_timesteps.discount
    rewards = next_timesteps.reward
    return (
        generalized_advantages(
            values[:-1], values[1:], rewards, discounts, valid, settings.gae_lambda
        ),
        valid,
    )


@pytest.mark.parametrize(("shift", "kept"), [(-0.5, -1), (0.5, 1)])
def test_ppo_ignores_gains_beyond_its_clip(shift, kept):
    """Where the ratio has left the clip to the good side of its advantage, nothing is learned."""
    settings = learner("ppo")
    agent = built(settings)
    state, trajectory = begin(agent)
    extras = trajectory.steps.extras
    extras = {**extras, "log_prob": extras["log_prob"] + shift}
    trajectory = dataclasses.replace(
        trajectory, steps=dataclasses.replace(trajectory.steps, extras=extras)
    )

    def loss(log_prob: jax.Array, old: jax.Array, advantages: jax.Array) -> jax.Array:
        gain = standardized(advantages, trajectory.valid()) * jnp.exp(log_prob - old)
        return -jnp.where(jnp.sign(gain) == kept, gain, 0.0)

    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), textbook_gradient(settings, state, trajectory, loss), atol=1e-5)
    close(metrics["clip_fraction"], 1.0)


@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_acting_and_learning_see_the_same_observations(memory):
    """With moments that change at every update, ratios stay 1 in the first epoch of each, and the
    moments are those of all that was acted on."""
    agent = built(learner("ppo", memory, normalize_observations=True))
    env = auto_reset(Walk(offset=30.0))
    state, actor, observations = fresh(agent), enter(agent, env), []
    for i in range(3):
        actor, trajectory = advance(agent, env, agent.actor_params(state), actor, i)
        valid = np.asarray(trajectory.valid())
        observations.append(np.asarray(trajectory.steps.timestep.observation)[valid])
        state, metrics = learn(agent, state, trajectory)
        close((metrics["approx_kl"], metrics["clip_fraction"]), (0.0, 0.0))
        moments, items = (
            state.shared.observation_moments,
            np.concatenate(observations).astype(float),
        )
        assert moments.count == len(items)
        close((moments.mean, moments.variance), (items.mean(0), items.var(0)), rtol=1e-4)
    assert (moments.mean > 20).all()


def test_under_a_lag_learning_sees_what_acting_saw():
    """An actor's moments may be older than the learner's: ratios and values are still the same."""
    settings = learner("ppo", normalize_observations=True)
    agent = built(settings)
    env = auto_reset(Walk(offset=30.0))
    old_state = fresh(agent)
    params = agent.actor_params(old_state)
    actor, first = advance(agent, env, params, enter(agent, env), 0)
    _, trajectory = advance(agent, env, params, actor, 1)
    updated, _ = learn(agent, old_state, first)
    moments = updated.shared.observation_moments
    state = LearnerState(dataclasses.replace(old_state.shared, observation_moments=moments))
    _, metrics = learn(agent, state, trajectory)
    close((metrics["approx_kl"], metrics["clip_fraction"]), (0.0, 0.0))

    errors, valid = advantages(settings, agent, state, trajectory)
    close(metrics["value_loss"], 0.5 * jnp.mean(errors**2, where=valid), rtol=1e-5)
    # The final timestep, which no actor has normalized, has the newest moments.
    mean, deviation = np.asarray(moments.mean), np.sqrt(moments.variance)
    final = (np.asarray(trajectory.final.observation) - mean) / deviation
    close(normalized_by_actor(moments, trajectory).final.observation, final, atol=1e-4)


@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_the_variance_that_values_explain(memory):
    """It is 1 - Var[G - v] / Var[G] over the steps that count, as in Stable-Baselines3."""
    settings = learner("ppo", memory)
    agent = built(settings)
    state, trajectory = begin(agent)
    values = trajectory.steps.extras["value"]
    error, valid = (np.asarray(x) for x in advantages(settings, agent, state, trajectory))
    error, value = (np.asarray(x, float)[valid] for x in (error, values))
    _, metrics = learn(agent, state, trajectory)
    close(metrics["explained_variance"], 1 - np.var(error) / np.var(value + error), rtol=1e-4)
    assert not valid.all()


@pytest.mark.parametrize("grouping", ["minibatch", "batch", "none"])
@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_advantages_are_standardized_together(grouping, memory):
    """By a reference that loops over the minibatches; what is not valid does not count."""
    items = np.asarray([[1, 4, 0], [5, 3, 2]])
    advantage = jax.random.normal(jax.random.key(0), (1 if memory == "none" else T, B))
    valid = np.ones(advantage.shape, np.float32)
    valid[0, 4] = 0
    means, variances = epochs.advantage_moments(
        advantage, jnp.asarray(valid), jnp.asarray(items), grouping, None
    )
    for k in range(2):
        counted = np.where(valid, advantage, np.nan)
        group = {"minibatch": counted[:, items[k]], "batch": counted}.get(grouping)
        group = None if group is None else group[~np.isnan(group)]
        expected = (0.0, 1.0) if group is None else (group.mean(), group.var())
        close((means[k], variances[k]), expected)


def test_the_value_is_clipped_by_choice():
    """Without the clip the value's loss is that of A2C: half of the squared error."""
    settings = learner("ppo", clip_value=False, clip_epsilon=0.01)
    agent = built(settings)
    state, trajectory = begin(agent)
    extras = trajectory.steps.extras
    extras = {**extras, "value": extras["value"] + 1.0}  # so that the clip would matter
    steps = dataclasses.replace(trajectory.steps, extras=extras)
    trajectory = dataclasses.replace(trajectory, steps=steps)
    change, valid = advantages(settings, agent, state, trajectory)  # of the value, to its target
    error = (1.0 + change) ** 2
    _, metrics = learn(agent, state, trajectory)
    close(metrics["value_loss"], 0.5 * jnp.mean(error, where=valid), rtol=1e-5)
    clipping = built(dataclasses.replace(settings, clip_value=True))
    _, metrics = learn(clipping, state, trajectory)
    larger = jnp.maximum(error, (0.01 + change) ** 2)
    close(metrics["value_loss"], 0.5 * jnp.mean(larger, where=valid), rtol=1e-5)


def test_a_target_kl_ends_an_update():
    """No step is taken on the first minibatch that exceeds it, nor on any after it."""
    settings = small("ppo", learning_rate=0.05, num_epochs=3, num_minibatches=2)
    agent = built(settings)
    state, trajectory = begin(agent)
    unlimited, all_metrics = learn(agent, state, trajectory)
    far = built(dataclasses.replace(settings, target_kl=1e9))
    same, metrics = learn(far, state, trajectory)
    close(same.shared.params, unlimited.shared.params, atol=1e-6)
    close({name: metrics[name] for name in all_metrics}, all_metrics, atol=1e-5)
    assert metrics["minibatch_fraction"] == 1

    near = built(dataclasses.replace(settings, target_kl=1e-6))
    stopped, metrics = learn(near, state, trajectory)
    taken = int(stopped.shared.optimizer_state[1].count)
    assert 0 < taken < 6
    close(metrics["minibatch_fraction"], taken / 6)
    assert metrics["approx_kl"] * (taken + 1) > 1.5e-6  # the last one is among them
    assert int(stopped.shared.frames) == trajectory.valid().sum()


def test_normalized_rewards_are_clipped():
    _, trajectory = begin(built(learner("ppo")))
    timesteps = with_rewards(trajectory, lambda reward: reward.at[3, 0].set(1e6))
    scaled, *_ = scale_rewards(
        init_moments(jnp.zeros(())), jnp.zeros(B), timesteps, discount=0.0, axis=None
    )
    assert scaled.steps.timestep.reward.max() < 10 + 1e-6


def test_rewards_are_divided_by_the_deviation_of_the_returns():
    """By that of all discounted sums so far, which start again after every end of an episode."""
    settings = learner("ppo")
    unscaled, agent = built(settings), built(learner("ppo", normalize_rewards=True))
    state, actor = fresh(agent), enter(unscaled)
    params, sums, total = unscaled.actor_params(fresh(unscaled)), [], np.zeros(B)
    for i in range(3):
        actor, trajectory = advance(unscaled, WALK, params, actor, i)
        old_state, (state, _) = state, learn(agent, state, trajectory)
        following = jax.device_get(trajectory.next_timesteps())
        for t in range(T):
            total = following.reward[t] + settings.discount * total
            sums += list(total[np.asarray(trajectory.valid()[t])])
            total = np.where(following.last[t] | (following.discount[t] == 0), 0.0, total)
    close(state.shared.return_moments.variance, np.var(sums), rtol=1e-4)
    close(state.local, total, atol=1e-5)

    # An agent that does not normalize learns the same from rewards divided by hand.
    divided = with_rewards(trajectory, lambda reward: reward / np.std(sums))
    old_learner = dataclasses.replace(old_state.shared, return_moments=None)
    expected, _ = learn(unscaled, LearnerState(old_learner), divided)
    close(state.shared.params, expected.shared.params, atol=1e-5)


def test_a_learning_rate_falls_to_zero():
    _, trajectory = begin(built(learner("ppo")))
    num_frames = int(trajectory.valid().sum())
    decay = Linear(1e-3, 0.0, frames=2 * num_frames)
    agent = built(small("ppo", num_epochs=2, num_minibatches=2, learning_rate=decay))
    state = fresh(agent)
    change = []
    for _ in range(3):
        new, _ = learn(agent, state, trajectory)
        difference = jax.tree.map(
            lambda a, b: jnp.abs(a - b).max(), new.shared.params, state.shared.params
        )
        change.append(max(jax.tree.leaves(jax.device_get(difference))))
        state = new
        assert int(state.shared.frames) == len(change) * num_frames
    assert change[0] > change[1] > 0 == change[2]


@pytest.mark.parametrize("name", ["a2c", slow("impala"), "ppo"])
def test_an_entropy_cost_falls_to_zero(name):
    settings = learner(name, entropy_cost=Linear(0.5, 0.0, frames=B * T))
    agent = built(settings)
    state, trajectory = begin(agent)
    for frames, cost in ((0, 0.5), (B * T // 2, 0.25), (B * T, 0.0)):
        shared = dataclasses.replace(state.shared, frames=jnp.uint32(frames))
        _, metrics = learn(agent, LearnerState(shared), trajectory)
        parts = metrics["policy_loss"] + settings.value_cost * metrics["value_loss"]
        close(metrics["loss"], parts - cost * metrics["entropy"])


def test_ppo_refuses_minibatches_that_do_not_divide():
    agent = blueprint(small("ppo", num_minibatches=5))
    with pytest.raises(ConfigError, match=r"split the 48 items .* into 5 equal minibatches"):
        check_agent(agent, num_envs=B)
    recurrent = blueprint(small("ppo", "gru", num_minibatches=4))
    with pytest.raises(ConfigError, match="cannot split the 6 items"):
        check_agent(recurrent, num_envs=B)
    check_agent(recurrent, num_envs=8)
