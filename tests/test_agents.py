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
from podracer.anakin import AnakinConfig, init_state, make_chunk
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
    Step,
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
    reward_scale: float = 1.0

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("walk", Array((2,)), self.action)

    def reset(self, key: jax.Array) -> tuple[WalkState, TimeStep]:
        x = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
        return WalkState(x, jnp.int32(0)), restart(self._observe(x))

    def step(self, key: jax.Array, state: WalkState, action: jax.Array) -> Any:
        x = state.x + 0.2 * jnp.sum(action) + 0.7 * jax.random.normal(key)
        state = WalkState(x, state.time + 1)
        reward = self.reward_scale * (x + 0.5)
        over = state.time >= 4
        return state, transition(
            self._observe(x), reward, terminal=jnp.abs(x) > 1.5, timeout=over
        )

    def _observe(self, x: jax.Array) -> jax.Array:
        return 30.0 + 5.0 * jnp.stack([x, jnp.cos(3 * x)])


WALK = auto_reset(Walk())


def network(memory: str = "none", shared: bool = True) -> TorsoNetwork:
    return TorsoNetwork(MLP((8,), "tanh"), shared=shared, memory=memory, memory_size=5)


def build(name: str, env: Any = WALK, memory: str = "none", shared: bool = True, **fields) -> Any:
    return AGENTS[name](network=network(memory, shared), spec=env.spec, **fields)


@partial(jax.jit, static_argnums=0)
def fresh(agent: Any) -> LearnerState:
    return agent.init(jax.random.key(0), B)


@partial(jax.jit, static_argnums=(0, 1))
def start(agent: Any, env: Any, key: jax.Array) -> ActorState:
    return init_actor(agent, env, jax.random.split(key, B))


@partial(jax.jit, static_argnums=(0, 1))
def advance(agent: Any, env: Any, params: Any, actor: ActorState, key: jax.Array) -> Any:
    return rollout(agent, env, params, actor, *jax.random.split(key, (2, T, B)))


def play(agent: Any, env: Any, count: int, params: Any, key: jax.Array) -> list[Trajectory]:
    """Rollouts after each other; all but the first begin within episodes, with full memory."""
    actor, trajectories = start(agent, env, key), []
    for i in range(count):
        actor, trajectory = advance(agent, env, params, actor, jax.random.fold_in(key, i))
        trajectories.append(trajectory)
    return trajectories


@functools.cache
def begin(agent: Any, env: Any = WALK) -> tuple[LearnerState, Trajectory]:
    """A fresh state, and a rollout that begins within episodes and crosses ends of both kinds."""
    state = fresh(agent)
    trajectory = play(agent, env, 2, agent.actor_params(state), jax.random.key(1))[-1]
    assert not trajectory.valid().all()
    assert (trajectory.after().discount == 0).any()
    assert not trajectory.steps.timestep.first[0].all()
    return state, trajectory


@partial(jax.jit, static_argnums=0)
def learn(agent: Any, state: LearnerState, trajectory: Trajectory) -> Any:
    return agent.learn(state, trajectory, jax.random.key(2), None)


def gradient(state: LearnerState) -> Any:
    """The gradient of the first update: what Adam's mean holds of it."""
    return jax.tree.map(lambda x: 10 * x, optax.tree_utils.tree_get(state.shared["optimiser"], "mu"))


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
        (broken(init=lambda self, key, n: {}), r"Broken\.init must return a LearnerState, not dict"),
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


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["a2c", "impala", "ppo"])
def test_unrolling_gives_what_acting_gave(name, memory):
    """Across ends of episodes and from memory within one: policy and values at every step, hence
    importance ratios of exactly 1 where the parameters have not changed."""
    agent = build(name, memory=memory, shared=name != "ppo")
    state, trajectory = begin(agent)
    net, params = actor_critic.build(agent.network, agent.spec), state.shared["params"]
    timesteps, extras = trajectory.timesteps(), trajectory.steps.extras
    outputs, _ = jax.jit(net.apply)(
        params, trajectory.carry, timesteps.observation, timesteps.first
    )
    distribution = policy(ACTIONS, outputs["policy"][:-1])
    if "log_prob" in extras:
        close(distribution.log_prob(extras["sample"]), extras["log_prob"], 1e-5)
    if "policy" in extras:
        close(outputs["policy"][:-1], extras["policy"], 1e-5)
    if "value" in extras:
        close(outputs["value"][:-1, :, 0], extras["value"], 1e-5)
    close(
        outputs["value"][-1, :, 0], actor_critic.final_value(net, params, trajectory), 1e-5
    )
    _, metrics = learn(agent, state, trajectory)
    close(metrics.get("importance_ratio", 1.0), 1.0)


@pytest.mark.parametrize("name", AGENTS)
def test_what_happens_at_a_time_out_teaches_nothing(name):
    """The action there is ignored and what follows is a reset: neither may matter."""
    options = {"epochs": 1, "minibatches": 1} if name == "ppo" else {}
    agent = build(name, **options)
    state, trajectory = begin(agent)
    steps, cut = trajectory.steps, ~trajectory.valid()
    before = jnp.concatenate([jnp.zeros((1, B), bool), cut[:-1]])
    timestep = dataclasses.replace(
        steps.timestep, reward=jnp.where(before, 1e3, steps.timestep.reward)
    )
    extras = dict(steps.extras)
    if name != "q_lambda":
        extras["sample"] = jnp.where(cut, 2 - extras["sample"], extras["sample"])
    steps = Step(timestep, jnp.where(cut, 2 - steps.action, steps.action), extras)
    final = dataclasses.replace(
        trajectory.final, reward=jnp.where(cut[-1], 1e3, trajectory.final.reward)
    )
    other = dataclasses.replace(trajectory, steps=steps, final=final)
    got, expected = (learn(agent, state, x)[0].shared["params"] for x in (other, trajectory))
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

CASES = {
    "a2c": build("a2c", memory="gru"),
    "impala": build("impala", auto_reset(Walk(BOX)), memory="lstm"),
    "q_lambda": build("q_lambda"),
    "ppo": build(
        "ppo",
        auto_reset(Walk(BOX)),
        shared=False,
        epochs=1,
        minibatches=1,
        normalise_observations=True,
        normalise_rewards=True,
    ),
}


@functools.cache
def one_update(name: str, devices: int) -> Any:
    """The learner's state and the metrics after one update on the same 16 environments."""
    agent, mesh = CASES[name], make_mesh(find_devices(devices))
    env, config = auto_reset(Walk(agent.spec.action)), AnakinConfig(16, T, 1)
    state = init_state(agent, env, mesh, config, jax.random.key(0))
    chunk = make_chunk(agent, env, mesh, config)
    state, metrics = chunk(state, jnp.zeros(devices, jnp.int32))
    return jax.device_get((state.learner, metrics["mean"]))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
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


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["a2c", "q_lambda"])
def test_the_gradient_through_the_rollout_is_that_of_a_second_pass(name, memory):
    """From within episodes and across their ends; the rollouts are the same to the bit."""
    agent, mesh = build(name, memory=memory), make_mesh(find_devices(1))
    config, request = AnakinConfig(B, T, 1), jnp.zeros(1, jnp.int32)
    fused, two_pass = (
        make_chunk(agent, WALK, mesh, dataclasses.replace(config, fused=x)) for x in (True, False)
    )
    state = init_state(agent, WALK, mesh, config, jax.random.key(0))
    state, _ = two_pass(state, request)
    (a, metrics), (b, expected) = fused(copied(state), request), two_pass(copied(state), request)
    close(metrics, expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, a.actor.timestep, b.actor.timestep)
    close(a.actor, b.actor)
    close(gradient(a.learner), gradient(b.learner))


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("name", ["a2c", "q_lambda"])
def test_the_fused_update_computes_less(name, memory, monkeypatch):
    """Without loops, of which XLA counts one turn only."""
    monkeypatch.setattr(jax.lax, "scan", partial(jax.lax.scan, unroll=True))
    agent, mesh = build(name, memory=memory), make_mesh(find_devices(1))

    def flops(fused: bool) -> float:
        config = AnakinConfig(32, 4, 1, fused)
        state = jax.eval_shape(lambda k: init_state(agent, WALK, mesh, config, k), jax.random.key(0))
        chunk = make_chunk(agent, WALK, mesh, config)
        compiled = chunk.lower(state, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
        return compiled.cost_analysis()["flops"]

    print(flops(True), flops(False))
    assert flops(True) < 0.9 * flops(False)


# --- PPO -----------------------------------------------------------------------------------------


def one_big_step(**fields: Any) -> Any:
    """PPO without minibatches: its first gradient is of the policy that acted."""
    return build("ppo", epochs=1, minibatches=1, max_gradient_norm=1e9, **fields)


def ppo_gradient(agent: Any, state: LearnerState, trajectory: Trajectory, ratio_loss: Any) -> Any:
    """The gradient of PPO's loss with `ratio_loss(log_prob, old, advantage)` as the policy's."""
    net, extras, after = actor_critic.build(agent.network, agent.spec), trajectory.steps.extras, trajectory.after()
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


@pytest.mark.parametrize("memory", MEMORIES)
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
    state, seen = fresh(agent), []
    for i in range(3):
        trajectory = play(agent, WALK, 2, agent.actor_params(state), jax.random.key(i))[-1]
        seen.append(np.asarray(trajectory.steps.timestep.observation).reshape(-1, 2))
        state, metrics = learn(agent, state, trajectory)
        close((metrics["approximate_kl"], metrics["clip_share"]), (0.0, 0.0))
        moments, items = state.shared["observations"], np.concatenate(seen).astype(float)
        assert moments.count == len(items)
        close((moments.mean, moments.variance), (items.mean(0), items.var(0)), rtol=1e-4)
    moved = agent.actor_params(state)["observations"].mean
    assert (moved > 20).all()


def test_rewards_are_divided_by_the_deviation_of_the_returns():
    """By what has been seen so far of discounted sums, which start again after every end."""
    agent = one_big_step(normalise_rewards=True, discount=0.9)
    state = fresh(agent)
    sums, total = [], np.zeros(B)
    for trajectory in play(agent, WALK, 3, agent.actor_params(state), jax.random.key(1)):
        state, _ = learn(agent, state, trajectory)
        after = jax.device_get(trajectory.after())
        for t in range(T):
            total = after.reward[t] + 0.9 * total
            sums.append(total)
            total = np.where(after.last[t] | (after.discount[t] == 0), 0.0, total)
    close(state.shared["returns"].variance, np.var(sums), rtol=1e-4)
    close(state.local, total, atol=1e-5)


def test_the_unit_of_rewards_does_not_matter():
    def first_gradient(scale: float) -> Any:
        env = auto_reset(Walk(reward_scale=scale))
        agent = one_big_step(normalise_rewards=True)
        state, trajectory = begin(agent, env)
        return gradient(learn(agent, state, trajectory)[0])

    close(first_gradient(1000.0), first_gradient(1.0), atol=1e-4, rtol=1e-3)


def test_ppo_decays_its_rate_to_zero():
    agent = build("ppo", epochs=2, minibatches=2, decay_updates=2)
    state, trajectory = begin(agent)
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
    with pytest.raises(ConfigError, match="cannot split the 48 items .* into 5 equal minibatches"):
        check_agent(agent, num_envs=B, length=T)
    recurrent = build("ppo", memory="gru", minibatches=4)
    with pytest.raises(ConfigError, match="cannot split the 6 items"):
        check_agent(recurrent, num_envs=B, length=T)
    check_agent(recurrent, num_envs=8, length=T)
