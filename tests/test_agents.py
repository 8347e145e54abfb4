"""What every agent must do, the two forms of the fused ones, and each agent's own arithmetic."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer.agent import check_agent
from podracer.agents import actor_critic
from podracer.agents.a2c import A2C
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.anakin import AnakinConfig, TrainState, abstract_state, init_state, make_chunk
from podracer.environment import auto_reset, restart, transition
from podracer.mesh import find_devices, make_mesh
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.distributions import policy
from podracer.ops.returns import generalised_advantages
from podracer.rollout import ActorState, init_actor, rollout
from podracer.types import (
    Array,
    ConfigError,
    Continuous,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    TimeStep,
    Trajectory,
    struct,
)

AGENTS = {"a2c": A2C, "impala": Impala, "ppo": PPO, "q_lambda": QLambda}
MEMORIES = ("none", "gru", "lstm")
ACTIONS = Discrete(3)
BOX = Continuous((-1.0, 0.0), (1.0, 2.0))
T, B = 8, 6


@struct
class WalkState:
    x: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """A drunkard's walk, terminal at the edges, cut by a time-out after four steps."""

    action: Discrete | Continuous = ACTIONS
    offset: float = 0.0  # of observations

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("walk", Array((2,)), self.action)

    def reset(self, key: jax.Array) -> tuple[WalkState, TimeStep]:
        x = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
        return WalkState(x, jnp.int32(0)), restart(self._observe(x))

    def step(self, key: jax.Array, state: WalkState, action: jax.Array) -> Any:
        x = state.x + 0.2 * jnp.sum(action) + 0.7 * jax.random.normal(key)
        state = WalkState(x, state.time + 1)
        reward = x + 0.5
        over = state.time >= 4
        return state, transition(self._observe(x), reward, terminal=jnp.abs(x) > 1.5, timeout=over)

    def _observe(self, x: jax.Array) -> jax.Array:
        return self.offset + jnp.stack([x, jnp.cos(3 * x)])


WALK = auto_reset(Walk())


def network(memory: str = "none", shared: bool = True) -> TorsoNetwork:
    return TorsoNetwork(MLP((8,), "tanh"), shared=shared, memory=memory, memory_size=5)


def build(name: str, env: Any = WALK, memory: str = "none", **fields: Any) -> Any:
    """A small agent; PPO's heads have a torso and a memory each, the others share one."""
    return AGENTS[name](network=network(memory, name != "ppo"), spec=env.spec, **fields)


def one_big_step(**fields: Any) -> Any:
    """PPO without minibatches: its first gradient is of the policy that acted."""
    return build("ppo", epochs=1, minibatches=1, max_gradient_norm=1e9, **fields)


def fresh(agent: Any) -> LearnerState:
    return agent.init(jax.random.key(0), B)


def enter(agent: Any, env: Any = WALK) -> ActorState:
    return init_actor(agent, env, jax.random.split(jax.random.key(1), B))


@partial(jax.jit, static_argnums=(0, 1))
def advance(agent: Any, env: Any, params: Any, actor: ActorState, seed: int) -> Any:
    return rollout(agent, env, params, actor, *jax.random.split(jax.random.key(seed), (2, T, B)))


@functools.cache
def begin(agent: Any, env: Any = WALK) -> tuple[LearnerState, Trajectory]:
    """A fresh state, and a rollout that begins within episodes and crosses ends of both kinds."""
    state = fresh(agent)
    params = agent.actor_params(state)
    actor, _ = advance(agent, env, params, enter(agent, env), 1)
    _, trajectory = advance(agent, env, params, actor, 2)
    assert not trajectory.valid().all()
    assert (trajectory.after().discount == 0).any()
    assert not trajectory.steps.timestep.first[0].all()
    return state, trajectory


@partial(jax.jit, static_argnums=0)
def learn(agent: Any, state: LearnerState, trajectory: Trajectory) -> Any:
    return agent.learn(state, trajectory, jax.random.key(2), None)


def with_rewards(trajectory: Trajectory, change: Any) -> Trajectory:
    """`change` gets the rewards of all timesteps `[T+1, B]`."""
    reward = change(trajectory.timesteps().reward)
    timestep = dataclasses.replace(trajectory.steps.timestep, reward=reward[:-1])
    steps = dataclasses.replace(trajectory.steps, timestep=timestep)
    final = dataclasses.replace(trajectory.final, reward=reward[-1])
    return dataclasses.replace(trajectory, steps=steps, final=final)


def gradient(state: LearnerState) -> Any:
    """The gradient of the first update: what Adam's mean holds of it."""
    return jax.tree.map(
        lambda x: 10 * x, optax.tree_utils.tree_get(state.shared["optimiser"], "mu")
    )


def close(got: Any, expected: Any, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), got, expected)


# --- every agent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("space", [ACTIONS, BOX], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_keeps_the_contract(name, space, memory):
    agent = build(name, Walk(space), memory)
    if name == "q_lambda" and space is BOX:
        with pytest.raises(ConfigError, match="QLambda needs discrete actions; walk has"):
            check_agent(agent)
    else:
        check_agent(agent, num_envs=4)


def broken(**methods: Any) -> Any:
    """A good agent with other methods."""
    agent = struct(type("Broken", (A2C,), methods))
    return agent(network=network(methods.pop("memory", "none")), spec=WALK.spec)


def acting(change: Any, memory: str = "none") -> Any:
    """`change` gets what a good agent's `act` returns."""
    return broken(act=lambda self, *args: change(*A2C.act(self, *args)), memory=memory)


def learning(change: Any) -> Any:
    """`change` gets what a good agent's `learn` returns."""
    return broken(learn=lambda self, *args: change(*A2C.learn(self, *args)))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (object(), "object is not an agent: it lacks init, carry"),
        (A2C(), "A2C has no `spec`"),
        (broken(init=lambda *args: {}), r"Broken\.init must return a LearnerState, not dict"),
        (
            broken(init=lambda self, key, n: LearnerState((), jnp.zeros(n + 1))),
            r"Broken\.init: local must lead with num_envs \(2\), but its shape is \(3,\)",
        ),
        (acting(lambda a, x, c: (1.0 * a, x, c)), r"Broken\.act must return actions int32\[2\]"),
        (acting(lambda a, x, c: (a[:1], x, c)), r"Broken\.act must return actions int32\[2\]"),
        (acting(lambda a, x, c: (a, x, (c,)), "gru"), r"Broken\.act must keep the structure of"),
        (acting(lambda a, x, c: 1 / 0), r"Broken\.act cannot be traced: division by zero"),
        (learning(lambda s, m: (s, {"loss": jnp.zeros(2)})), r"Broken\.learn must return scalar"),
        (learning(lambda s, m: ((), m)), r"Broken\.learn must keep the state's structure"),
        (
            learning(lambda s, m: (jax.tree.map(lambda x: x[..., None], s), m)),
            r"Broken\.learn must keep state\.shared\['optimiser'\].* but it became",
        ),
        (
            broken(learn=lambda self, *args: 1 if self.discount > 0.5 else 2),
            r"Broken\.learn cannot be traced: Attempted boolean conversion",
        ),
    ],
)  # fmt: skip
def test_a_broken_agent_is_refused_and_the_method_named(agent, message):
    with pytest.raises(ConfigError, match=message):
        check_agent(agent)


@pytest.mark.parametrize(
    "agent",
    [build("a2c", memory=memory) for memory in ("gru", "lstm")]
    + [build("impala", memory=memory) for memory in MEMORIES]
    + [one_big_step(memory="gru")],
    ids=["a2c-gru", "a2c-lstm", "impala-none", "impala-gru", "impala-lstm", "ppo-gru"],
)
def test_unrolling_gives_what_acting_gave(agent):
    """Across ends of episodes and from memory within one: policy and values at every step, hence
    importance ratios of exactly 1 where the parameters have not changed."""
    state, trajectory = begin(agent)
    net, params = actor_critic.build(agent.network, agent.spec), state.shared["params"]
    timesteps, extras = trajectory.timesteps(), trajectory.steps.extras

    @jax.jit
    def unrolled(params: Any) -> Any:
        made, _ = net.apply(params, trajectory.carry, timesteps.observation, timesteps.first)
        last = actor_critic.final_value(net, params, trajectory)
        log_prob = policy(ACTIONS, made["policy"][:-1]).log_prob(extras["sample"])
        return made["policy"][:-1], made["value"][..., 0], log_prob, last

    logits, values, log_prob, last = unrolled(params)
    close(logits, extras.get("policy", logits), 1e-5)
    close(values[:-1], extras.get("value", values[:-1]), 1e-5)
    close(log_prob, extras.get("log_prob", log_prob), 1e-5)
    close(values[-1], last, 1e-5)


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_importance_ratio_is_one_on_policy(memory):
    agent = build("impala", memory=memory)
    state, trajectory = begin(agent)
    close(learn(agent, state, trajectory)[1]["importance_ratio"], 1.0)


@pytest.mark.parametrize(
    "agent",
    [build("a2c"), build("impala"), one_big_step(), build("q_lambda")],
    ids=["a2c", "impala", "ppo", "q_lambda"],
)
def test_what_happens_at_a_time_out_teaches_nothing(agent):
    """The action there is ignored and what follows is a reset: neither may matter."""
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


@pytest.mark.parametrize("name", AGENTS)
def test_without_exploring_the_keys_do_not_matter(name):
    agent = build(name)
    state = agent.init(jax.random.key(0), 64)
    timestep = jax.vmap(WALK.reset)(jax.random.split(jax.random.key(1), 64))[1]

    def act(seed: int, explore: bool) -> np.ndarray:
        keys = jax.random.split(jax.random.key(seed), 64)
        return np.asarray(agent.act(agent.actor_params(state), (), timestep, keys, explore)[0])

    np.testing.assert_array_equal(act(0, False), act(1, False))
    assert (act(0, True) != act(1, True)).any() == (name != "q_lambda")


# --- on any number of devices --------------------------------------------------------------------


def case(name: str, env: Any = WALK, **fields: Any) -> tuple[Any, Any, AnakinConfig]:
    return build(name, env, **fields), env, AnakinConfig(16, T, 1)


CASES = {
    "a2c": case("a2c", memory="gru"),
    "impala": case("impala", auto_reset(Walk(BOX)), memory="lstm"),
    "q_lambda": case("q_lambda"),
    "ppo": case(
        "ppo",
        auto_reset(Walk(BOX)),
        epochs=1,
        minibatches=1,
        normalise_observations=True,
        normalise_rewards=True,
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
    placed = jax.tree.map(lambda x: x.sharding, abstract_state(agent, env, mesh, config))
    state = jax.device_put(jax.tree.map(jnp.copy, first_state(name)), placed)
    chunk = make_chunk(agent, env, mesh, config)
    state, metrics = chunk(state, jnp.zeros(devices, jnp.int32))
    return jax.device_get((state.learner, metrics["mean"]))


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("q_lambda", 2),
        ("q_lambda", 8),
        ("a2c", 8),
        ("impala", 4),
        ("ppo", 2),
        *(
            pytest.param(name, devices, marks=pytest.mark.slow)
            for name, devices in (
                ("q_lambda", 4), ("a2c", 2), ("a2c", 4), ("impala", 2), ("impala", 8), ("ppo", 4),
                ("ppo", 8),
            )
        ),
    ],
)  # fmt: skip
def test_shards_learn_what_one_device_learns(name, devices):
    """The same run key: D shards of B environments against one of D x B."""
    (many, many_metrics), (one, one_metrics) = one_update(name, devices), one_update(name, 1)
    close(gradient(many), gradient(one), atol=2e-6)
    close(many_metrics, one_metrics, atol=1e-5)
    rest = [{n: x for n, x in s.shared.items() if n != "optimiser"} for s in (many, one)]
    close(*rest, atol=1e-5)
    close(many.local, one.local)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_receives_a_gradient(name):
    learner, _ = one_update(name, 1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(learner)):
        assert np.abs(leaf).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


# --- the fused form ------------------------------------------------------------------------------


def gradients(agent: Any, reuse: bool, length: int, params: Any, actor: ActorState) -> Any:
    """Through the rollout and its forward pass, or by a second one over its trajectory."""

    def collect(params: Any) -> Trajectory:
        keys = jax.random.split(jax.random.key(2), (2, length, B))
        return rollout(agent, WALK, params, actor, *keys)[1]

    def fused(params: Any) -> Any:
        return agent.loss(params, collect(params), True)

    if reuse:
        return jax.grad(fused, has_aux=True)(params)
    return jax.grad(agent.loss, has_aux=True)(params, collect(params), False)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["a2c", "q_lambda"])
def test_the_gradient_through_the_rollout_is_that_of_a_second_pass(name, memory):
    """From within episodes and across their ends."""
    agent = build(name, memory=memory)
    params = agent.actor_params(fresh(agent))
    actor, _ = advance(agent, WALK, params, enter(agent), 1)
    both = jax.jit(lambda *args: [gradients(agent, reuse, T, *args) for reuse in (True, False)])
    fused, two_pass = both(params, actor)
    close(fused, two_pass, atol=2e-6)
    assert optax.tree.norm(fused[0]) > 0.01


def test_the_fused_program_learns_what_the_other_learns():
    agent, env, config = CASES["a2c"]
    fused = dataclasses.replace(config, fused=True)
    chunk = make_chunk(agent, env, make_mesh(find_devices(1)), fused)
    state, metrics = chunk(jax.tree.map(jnp.copy, first_state("a2c")), jnp.zeros(1, jnp.int32))
    learner, expected = one_update("a2c", 1)
    close(gradient(state.learner), gradient(learner), atol=2e-6)
    close(metrics["mean"], expected, atol=1e-5)


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("name", ["a2c", "q_lambda"])
def test_the_fused_update_computes_less(name, memory, monkeypatch):
    """Without loops, of which XLA counts one turn only."""
    monkeypatch.setattr(jax.lax, "scan", partial(jax.lax.scan, unroll=True))
    wide = TorsoNetwork(MLP((64,)), memory=memory, memory_size=32)
    agent = AGENTS[name](network=wide, spec=WALK.spec)
    params = jax.eval_shape(lambda: agent.actor_params(fresh(agent)))
    actor = jax.eval_shape(lambda: enter(agent))

    def flops(reuse: bool) -> float:
        lowered = jax.jit(partial(gradients, agent, reuse, 2)).lower(params, actor)
        return lowered.compile().cost_analysis()["flops"]

    print(flops(True), flops(False))
    assert flops(True) < 0.9 * flops(False)


# --- PPO -----------------------------------------------------------------------------------------


def ppo_gradient(agent: Any, state: LearnerState, trajectory: Trajectory, ratio_loss: Any) -> Any:
    """The gradient of PPO's loss with `ratio_loss(log_prob, old, advantage)` as the policy's."""
    net, extras, after = (
        actor_critic.build(agent.network, agent.spec),
        trajectory.steps.extras,
        trajectory.after(),
    )
    valid, timesteps = trajectory.valid(), trajectory.timesteps()

    def outputs(params: Any) -> Any:
        made, _ = net.apply(params, trajectory.carry, timesteps.observation, timesteps.first)
        return policy(ACTIONS, made["policy"][:-1]), made["value"][..., 0]

    values = outputs(state.shared["params"])[1]
    advantages = generalised_advantages(
        values[:-1], values[1:], after.reward, agent.discount * after.discount, valid,
        agent.lambda_,
    )  # fmt: skip
    standard = (advantages - jnp.mean(advantages)) / jnp.std(advantages)

    def loss(params: Any) -> jax.Array:
        distribution, value = outputs(params)
        policy_loss = ratio_loss(
            distribution.log_prob(extras["sample"]), extras["log_prob"], standard
        )
        value_loss = 0.5 * (value[:-1] - values[:-1] - advantages) ** 2
        terms = (
            policy_loss
            + agent.value_cost * value_loss
            - agent.entropy_cost * distribution.entropy()
        )
        return jnp.sum(jnp.where(valid, terms, 0.0)) / valid.size

    return jax.jit(jax.grad(loss))(state.shared["params"])


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_the_first_gradient_of_ppo_is_the_policy_gradient(memory):
    agent = one_big_step(memory=memory)
    state, trajectory = begin(agent)
    expected = ppo_gradient(
        agent, state, trajectory, lambda log_prob, old, advantage: -advantage * log_prob
    )
    after, metrics = learn(agent, state, trajectory)
    close(gradient(after), expected, atol=1e-5)
    close((metrics["approximate_kl"], metrics["clip_share"]), (0.0, 0.0))


@pytest.mark.parametrize(("shift", "kept"), [(-0.5, -1), (0.5, 1)])
def test_ppo_ignores_gains_beyond_its_clip(shift, kept):
    """Where the ratio has left the clip to the good side of its advantage, nothing is learnt."""
    agent = one_big_step()
    state, trajectory = begin(agent)
    extras = trajectory.steps.extras
    extras = {**extras, "log_prob": extras["log_prob"] + shift}
    trajectory = dataclasses.replace(
        trajectory, steps=dataclasses.replace(trajectory.steps, extras=extras)
    )

    def loss(log_prob: jax.Array, old: jax.Array, advantage: jax.Array) -> jax.Array:
        return -jnp.where(jnp.sign(advantage) == kept, advantage * jnp.exp(log_prob - old), 0.0)

    after, metrics = learn(agent, state, trajectory)
    close(gradient(after), ppo_gradient(agent, state, trajectory, loss), atol=1e-5)
    assert metrics["clip_share"] == 1


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_acting_and_learning_see_the_same_observations(memory):
    """With moments that change at every update, ratios stay 1 in the first epoch of each, and the
    moments are those of all that was seen."""
    agent = one_big_step(memory=memory, normalise_observations=True)
    env = auto_reset(Walk(offset=30.0))
    state, actor, seen = fresh(agent), enter(agent, env), []
    for i in range(3):
        actor, trajectory = advance(agent, env, agent.actor_params(state), actor, i)
        seen.append(np.asarray(trajectory.steps.timestep.observation).reshape(-1, 2))
        state, metrics = learn(agent, state, trajectory)
        close((metrics["approximate_kl"], metrics["clip_share"]), (0.0, 0.0))
        moments, items = state.shared["observations"], np.concatenate(seen).astype(float)
        assert moments.count == len(items)
        close((moments.mean, moments.variance), (items.mean(0), items.var(0)), rtol=1e-4)
    assert (moments.mean > 20).all()


def test_rewards_are_divided_by_the_deviation_of_the_returns():
    """By that of all discounted sums so far, which start again after every end of an episode."""
    plain = one_big_step(discount=0.9)
    agent = dataclasses.replace(plain, normalise_rewards=True)
    state, actor = fresh(agent), enter(plain)
    params, sums, total = plain.actor_params(fresh(plain)), [], np.zeros(B)
    for i in range(3):
        actor, trajectory = advance(plain, WALK, params, actor, i)
        before, (state, _) = state, learn(agent, state, trajectory)
        after = jax.device_get(trajectory.after())
        for t in range(T):
            total = after.reward[t] + 0.9 * total
            sums.append(total)
            total = np.where(after.last[t] | (after.discount[t] == 0), 0.0, total)
    close(state.shared["returns"].variance, np.var(sums), rtol=1e-4)
    close(state.local, total, atol=1e-5)

    # An agent that does not normalise learns the same from rewards divided by hand.
    divided = with_rewards(trajectory, lambda reward: reward / np.std(sums))
    expected, _ = learn(plain, LearnerState({**before.shared, "returns": ()}), divided)
    close(state.shared["params"], expected.shared["params"], atol=1e-5)


def test_ppo_decays_its_rate_to_zero():
    agent = build("ppo", epochs=2, minibatches=2, decay_updates=2)
    state, (_, trajectory) = fresh(agent), begin(one_big_step())
    change = []
    for _ in range(3):
        new, _ = learn(agent, state, trajectory)
        difference = jax.tree.map(
            lambda a, b: jnp.abs(a - b).max(), new.shared["params"], state.shared["params"]
        )
        change.append(max(jax.tree.leaves(jax.device_get(difference))))
        state = new
    assert change[0] > change[1] > 0 == change[2]


def test_ppo_refuses_minibatches_that_do_not_divide():
    agent = build("ppo", minibatches=5)
    with pytest.raises(ConfigError, match=r"split the 48 items .* into 5 equal minibatches"):
        check_agent(agent, num_envs=B, length=T)
    recurrent = build("ppo", memory="gru", minibatches=4)
    with pytest.raises(ConfigError, match="cannot split the 6 items"):
        check_agent(recurrent, num_envs=B, length=T)
    check_agent(recurrent, num_envs=8, length=T)
