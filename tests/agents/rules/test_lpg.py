"""LPG: the rule's gradient is the true one, lives end alone, and what was learned can be used."""

from __future__ import annotations

import dataclasses
import functools
import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, blueprint
from child import exit_code, records
from runs import anakin_setup, resumed_and_whole, train_anakin

import podracer
from podracer import recipes
from podracer.agents.common.optimizers import ParamsState
from podracer.agents.rules.lifetimes import Experience, group_by_lifetime, to_rollout, to_rollouts
from podracer.agents.rules.lpg import LPG, UpdateRule
from podracer.agents.rules.lpg import rule as update_rule
from podracer.agents.rules.lpg.rule_file import decode_rule, encode_rule
from podracer.agents.rules.lpg.student import lpg_student
from podracer.agents.rules.meta_training import CRITIC_OPTIMIZER, MetaBatch, MetaTraining
from podracer.config.experiment import Experiment
from podracer.config.serialization import from_json, to_json
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import TaskGroups
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.run.setup import build
from podracer.types import ArraySpec, Discrete, EnvironmentSpec

ENVS, T, K, LIVES, STATES = 2, 4, 2, 4, 6
SMALL = LPG(
    learning_rate=1e-2,
    student_learning_rate=10.0,
    critic_learning_rate=0.1,
    inner_updates=K,
    rule=UpdateRule(units=4, embedding=3, predictions=3),
)
COUNT = ArraySpec((), np.int32)
SPEC = EnvironmentSpec(
    "states",
    {"observation": ArraySpec((), np.int32, num_values=STATES), "task": COUNT, "task_count": COUNT},
    Discrete(3),
    extension=TaskGroups(ENVS, 100, ("one", "two")),
)
WORLDS = f"lifetimes:worlds:small+chain_short,envs={ENVS},steps=40"


def test_a_rule_does_not_learn_by_self_play():
    """It sees neither a discount of -1 nor whose turn it is."""
    spec = EnvironmentSpec("board", ArraySpec((4,)), Discrete(3), takes_turns=True)
    lifetimes = dataclasses.replace(SPEC, name="board", takes_turns=True)
    students = [blueprint(AGENTS[name], spec) for name in ("lpg_student", "disco")]
    for agent in (*students, blueprint(SMALL, lifetimes, T)):
        with pytest.raises(ConfigError, match="cannot learn by self-play, as in board"):
            agent.build()


FIELDS = dataclasses.fields(MetaTraining)


def training_of(settings):
    """The meta-training of an agent, whose methods the built agent holds."""
    return blueprint(settings, SPEC, T).build().init.__self__


@functools.cache
def judged():
    """Learners, and a window and a rollout of them with all that can happen in it."""
    agent, key = training_of(SMALL), jax.random.key(0)
    state = agent.init(key, LIVES * ENVS)

    def some(key, *lead):
        keys, B = jax.random.split(key, 6), LIVES * ENVS
        first = jax.random.bernoulli(keys[4], 0.2, (*lead, T + 1, B))
        return Experience(
            jax.random.randint(keys[0], (*lead, T + 1, B), 0, STATES),
            first,
            jax.random.randint(keys[1], (*lead, T, B), 0, 3),
            jax.random.normal(keys[2], (*lead, T, B)),
            jax.random.bernoulli(keys[3], 0.8, (*lead, T, B)).astype(jnp.float32),
            jax.random.bernoulli(keys[5], 0.9, (*lead, T, B)),
            (),
        )

    window = some(jax.random.fold_in(key, 1), K)
    kept = jax.tree.map(lambda *x: jnp.stack(x, 1), *[
        group_by_lifetime(jax.tree.map(lambda x, k=k: x[k], window), ENVS) for k in range(K)
    ])  # fmt: skip
    now = group_by_lifetime(some(jax.random.fold_in(key, 2)), ENVS)
    gains = jax.random.normal(jax.random.fold_in(key, 3), (LIVES, T, ENVS))
    # Learners that already prefer something: at the very beginning much of the gradient is 0.
    start = jax.tree.map(
        lambda x: x + jax.random.normal(jax.random.fold_in(key, 4), x.shape),
        state.local.students,
    )
    whole, world = jnp.asarray([True, True, False, True]), jnp.asarray([0, 1, 0, 0])
    batch = MetaBatch(start, kept, now, gains, whole, world)
    return agent, state.shared.rule, batch, window


def test_a_window_comes_back_in_order():
    _, _, batch, window = judged()
    for a, b in zip(
        jax.tree.leaves(to_rollouts(batch.window)), jax.tree.leaves(window), strict=True
    ):
        assert np.array_equal(a, b)


@functools.cache
def rule_grad():
    """Compiled once for all tests."""
    return jax.jit(judged()[0].meta_grad)


def objective(agent, batch, rule):
    """What the rule descends on, written out: K updates one after another, then the judgment."""
    learners = batch.students
    aux = []
    for k in range(K):
        learners, more = agent.update_students(
            rule, learners, jax.tree.map(lambda x, k=k: x[k], to_rollouts(batch.window))
        )
        aux.append(more)
    aux = jax.tree.map(lambda *x: jnp.stack(x), *aux)
    data, advantages = to_rollout((batch.rollout, batch.advantages))
    return agent.meta_loss(learners, aux, data, advantages, batch.is_whole.astype(jnp.float32))


@pytest.mark.slow
def test_the_gradient_is_that_of_two_updates_written_out():
    agent, rule, batch, _ = judged()
    grads, loss, *_ = rule_grad()(rule, batch)
    value, want = jax.jit(jax.value_and_grad(partial(objective, agent, batch)))(rule)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_the_gradient_equals_finite_differences(key):
    """In random directions, every leaf of the rule moved at once."""
    agent, rule, batch, _ = judged()
    grads = rule_grad()(rule, batch)[0]
    value = jax.jit(partial(objective, agent, batch))
    leaves, structure = jax.tree.flatten(rule)
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        step = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        ahead, behind = (
            value(
                jax.tree.unflatten(
                    structure, [x + h * d for x, d in zip(leaves, step, strict=True)]
                )
            )
            for h in (2e-3, -2e-3)
        )
        slope = sum(jnp.sum(g * d) for g, d in zip(jax.tree.leaves(grads), step, strict=True))
        assert float(slope) == pytest.approx(float(ahead - behind) / 4e-3, rel=0.02, abs=2e-4)


@functools.cache
def rollout_of():
    """A rollout `[T, B, ...]`, and what learners that prefer something say of it."""
    agent, rule, batch, window = judged()
    data = jax.tree.map(lambda x: x[0], window)
    outputs = agent.outputs(batch.students.params, data.observation, data.first)
    return agent, rule, batch, data, outputs


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_learners_descend_on_the_formula():
    agent, rule, _, data, outputs = rollout_of()
    targets = agent.settings.rule.apply(rule, data, outputs, 0.9)
    log_pi, log_y = log_softmax(outputs.policy[:-1]), log_softmax(outputs.prediction[:-1])
    chosen = np.take_along_axis(log_pi, np.asarray(data.action)[..., None], -1)[..., 0]
    divergence = (np.exp(log_y) * (log_y - np.log(targets.prediction))).sum(-1)
    want = data.valid * (0.5 * divergence - targets.policy * chosen)
    got = update_rule.student_loss(outputs, targets, data, 0.5)
    assert float(got) == pytest.approx(float(want.mean()), rel=1e-4)


def test_learners_do_as_they_are_told():
    """A positive target makes the action more likely, and predictions go towards theirs."""
    _, _, _, data, outputs = rollout_of()
    data = dataclasses.replace(data, valid=jnp.ones_like(data.valid))
    towards = jnp.zeros_like(outputs.prediction[:-1]).at[..., 0].set(1.0)
    targets = update_rule.Targets(jnp.ones_like(data.reward), towards)
    grads = jax.grad(update_rule.student_loss)(outputs, targets, data, 0.5)
    after = jax.tree.map(lambda x, g: x - g, outputs, grads)
    for told, one, two in (
        (np.asarray(data.action), outputs.policy, after.policy),
        (np.zeros_like(data.action), outputs.prediction, after.prediction),
    ):
        before, later = (
            np.take_along_axis(log_softmax(x[:-1]), told[..., None], -1) for x in (one, two)
        )
        assert (later > before).all()


def test_a_judgment_is_that_of_generalized_advantages(key):
    agent, _, _, data, _ = rollout_of()
    values = jax.random.normal(key, (LIVES, STATES, 1))
    params = {"value": values}
    critics = ParamsState(params, jax.vmap(CRITIC_OPTIMIZER.init)(params))
    after, got = agent.update_critics(critics, data)
    state, B = np.asarray(data.observation), LIVES * ENVS
    v = np.stack([values[b // ENVS, state[:, b], 0] for b in range(B)], 1)
    want, ahead = np.zeros((T, B)), np.zeros(B)
    for t in reversed(range(T)):
        discount = 0.99 * np.asarray(data.discount[t])
        delta = data.reward[t] + discount * v[t + 1] - v[t]
        ahead = np.where(data.valid[t], delta + discount * 0.95 * ahead, 0.0)
        want[t] = ahead
    lives, valid = (np.asarray(x).reshape(T, LIVES, ENVS) for x in (want, data.valid))
    assert not valid.all()
    over = {"axis": (0, 2), "keepdims": True, "where": valid > 0}  # ignored steps do not count
    scaled = ((lives - lives.mean(**over)) / (lives.std(**over) + 1e-3) * valid).reshape(T, B)
    np.testing.assert_allclose(got, scaled, rtol=1e-3, atol=1e-4)
    # Values that were seen move towards their targets, whose distance is the advantage.
    moved = np.asarray(after.params["value"] - values)[..., 0]
    total = np.zeros((LIVES, STATES))
    np.add.at(total, (np.arange(B) // ENVS, state[:-1]), want * np.asarray(data.valid))
    assert (np.sign(moved[np.abs(total) > 1e-4]) == np.sign(total[np.abs(total) > 1e-4])).all()


def test_the_rule_ascends_on_gains_and_entropies_and_spares_targets():
    """Each term of its objective with its sign and weight, of numbers made by hand."""

    class FixedStudents(type(training_of(SMALL))):
        def outputs(self, params, observation, first):
            return SimpleNamespace(policy=jnp.zeros((2, 2, 2)))

        def entropies(self, outputs, data, lifetimes):
            return {
                "policy_entropy": jnp.asarray([3.0, 9.0]),
                "prediction_entropy": jnp.asarray([4.0, 9.0]),
            }

    aux = {
        "policy_entropy": jnp.asarray([[7.0, 9.0], [1.0, 9.0]]),  # the first is not the rule's
        "prediction_entropy": jnp.asarray([[7.0, 9.0], [2.0, 9.0]]),
        "policy_target": jnp.asarray([[1.0, 9.0], [3.0, 9.0]]),
        "prediction_target": jnp.asarray([[4.0, 9.0], [6.0, 9.0]]),
    }
    agent = FixedStudents(*(getattr(training_of(SMALL), x.name) for x in FIELDS))
    data = SimpleNamespace(observation=(), first=(), action=jnp.zeros((1, 2), jnp.int32))
    advantages = jnp.asarray([[2.0, 5.0]]) / math.log(0.5)  # of actions as likely as not
    weights = jnp.asarray([1.0, 0.0])  # the second life ended
    got = agent.meta_loss(SimpleNamespace(params=()), aux, data, advantages, weights)
    want = -2.0 - 0.05 * 2.0 - 1e-3 * 3.0 + 5e-3 * 2.0 + 1e-3 * 5.0
    assert float(got) == pytest.approx(want / 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"lifetime_groups": 2}, {"recompute": True}])
def test_memory_is_traded_without_changing_the_gradient(key, how):
    agent, _, batch, _ = judged()
    batch = dataclasses.replace(batch, is_whole=jnp.ones(LIVES, bool))
    other = training_of(dataclasses.replace(SMALL, **how))
    shared = agent.init(key, LIVES * ENVS).shared
    want = jax.jit(partial(agent.update_rule, axis=None))(shared, batch)
    got = jax.jit(partial(other.update_rule, axis=None))(shared, batch)
    for a, b in zip(jax.tree.leaves(want.metrics), jax.tree.leaves(got.metrics), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(want.rule), jax.tree.leaves(got.rule), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)


def test_a_life_that_ended_within_the_window_teaches_nothing():
    _, rule, batch, _ = judged()
    none = dataclasses.replace(batch, is_whole=jnp.zeros(LIVES, bool))
    assert all(not np.any(g) for g in jax.tree.leaves(rule_grad()(rule, none)[0]))


def test_rewards_are_told_by_world():
    _, rule, batch, _ = judged()
    now, world = batch.rollout, batch.task
    *_, totals, steps = rule_grad()(rule, batch)
    counted, valid = np.asarray(batch.is_whole), np.asarray(now.valid, np.float32)
    for kind in (0, 1):
        lives = (np.asarray(world) == kind) & counted  # not those that ended on the way
        want = (valid * np.asarray(now.reward))[lives].sum() / valid[lives].sum()
        assert float(totals[kind] / steps[kind]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("end", ["terminal", "time-out"])
def test_nothing_behind_an_end_is_seen_from_before_it(end):
    """A rule's targets until the end of an episode do not depend on the next one, nor on the
    action that a time-out ignores."""
    agent, rule, batch, window = judged()
    data = jax.tree.map(lambda x: x[0], window)
    cut, discount = data.valid.at[:].set(True), data.discount.at[:].set(1.0)
    if end == "terminal":
        discount, after = discount.at[1].set(0.0), 2
    else:
        cut, after = cut.at[2].set(False), 2
    one = dataclasses.replace(data, valid=cut, discount=discount)
    two = dataclasses.replace(
        one, reward=one.reward.at[after:].add(5.0), action=(one.action.at[after:].add(1)) % 3
    )
    outputs = agent.outputs(batch.students.params, data.observation, data.first)
    later = outputs.prediction.at[after + (end == "time-out") :].add(1.0)
    other = dataclasses.replace(outputs, prediction=later)
    first = agent.settings.rule.apply(rule, one, outputs, 0.9)
    second = agent.settings.rule.apply(rule, two, other, 0.9)
    assert np.array_equal(first.policy[:2], second.policy[:2])
    assert np.array_equal(first.prediction[:2], second.prediction[:2])
    assert not np.allclose(first.policy[2:], second.policy[2:])


# --- under Anakin --------------------------------------------------------------------------------


DRIVER = AnakinConfig(LIVES * ENVS * 2, T, 1)


def lpg(devices=1):
    """The same program in all tests, which is dear to compile."""
    return anakin_setup(SMALL, WORLDS, devices=devices, **dataclasses.asdict(DRIVER))


@functools.cache
def learners(updates):
    """The learners' state at the beginning and after each of these updates, as plain arrays."""
    driver, state = lpg()
    begin = jax.tree.map(np.array, state.learner)
    progress = driver.run(state, Orders(updates, lambda _: True))
    return [begin, *(jax.device_get(p.state.learner) for p in progress)]


@pytest.mark.slow
def test_lives_end_alone_and_learners_begin_anew():
    """After every update a learner whose life has just begun is blank, and others are not."""
    begin, *updates = learners(25)
    lives, blank, moved = begin.local.lifetime, 0, np.zeros(0)
    for learner in updates:
        born = learner.local.lifetime != lives
        lives = learner.local.lifetime
        moved = learner.local.students.params["policy"].any(axis=(1, 2))
        assert not moved[born].any()
        assert not learner.local.is_whole[born].any()
        blank += born.sum()
    assert 0 < blank < 25 * len(lives)
    assert moved.any()
    assert len(set(lives.tolist())) > 1, "they do not all end together"


@pytest.mark.slow
def test_the_rule_moves_after_k_updates_and_every_k_from_then_on():
    begin, *updates = learners(6)
    moved, before = [], begin.shared.rule
    for learner in updates:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(learner.shared.rule), strict=True)
        moved.append(any(not np.array_equal(a, b) for a, b in pairs))
        before = learner.shared.rule
    assert moved == [False, False, True, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_the_number_of_devices_changes_nothing(devices):
    one, _ = train_anakin(*lpg(), 10)
    many, _ = train_anakin(*lpg(devices=devices), 10)
    shared = zip(jax.tree.leaves(one.learner), jax.tree.leaves(many.learner), strict=True)
    for a, b in shared:
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert np.array_equal(one.learner.local.lifetime, many.learner.local.lifetime)


EXPERIMENT = Experiment(
    recipe="test",
    environment=WORLDS,
    agent=SMALL,
    driver=DRIVER,
    frames=12 * DRIVER.steps_per_update,
    evaluations=0,
    devices=1,
)


@pytest.mark.slow
def test_resumed_equals_uninterrupted_and_the_rule_can_be_used(tmp_path, capsys):
    """In the middle of a window and of lives; then the rule, as a file, teaches others."""
    _, whole = resumed_and_whole(EXPERIMENT, tmp_path, frames=EXPERIMENT.frames // 4)

    assert exit_code("rule", whole) == 0
    assert "rule.npz" in capsys.readouterr().out
    assert exit_code("eval", whole) == 78
    assert "no policy that could act elsewhere" in capsys.readouterr().err
    params = decode_rule((whole / "rule.npz").read_bytes(), "rule.npz")[1]
    _, state = podracer.load(whole)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.shared.rule), strict=True):
        assert np.array_equal(a, b)

    shape = SMALL.rule
    agent = lpg_student(shape, TorsoNetwork(MLP((8,))), rule_file=str(whole / "rule.npz"))
    driver = SebulbaConfig(8, 4, 5, threads_per_actor=1)
    other = Experiment(
        environment="catch", agent=agent, driver=driver, frames=320, evaluations=1, devices=1
    )
    result = podracer.train(other, run_dir=tmp_path / "taught", evaluation_episodes=4)
    assert result.exit_code == 0
    assert result.metrics["gradient_norm"] > 0
    _, after = podracer.load(tmp_path / "taught")
    kept = jax.tree.leaves(after.shared.rule)
    assert all(map(np.array_equal, kept, jax.tree.leaves(params))), "the rule never changes"


@pytest.mark.slow
def test_a_rule_learns_to_teach(tmp_path):
    """In chains, where only the first action counts: learners under the rule come to earn what
    those under the one it began as do not."""
    experiment = dataclasses.replace(
        recipes.find("lpg"), environment="lifetimes:worlds:chain_short,envs=16,steps=1000"
    )
    podracer.train(experiment, run_dir=tmp_path / "run", frames=10_000_000)
    rewards = [r["reward_chain_short"] for r in records(tmp_path / "run")]
    assert abs(rewards[1]) < 0.05
    assert np.mean(rewards[-4:]) > 0.1, "0.2 is all that a step can earn"


# --- what cannot be ------------------------------------------------------------------------------


def test_a_run_under_a_rule_keeps_the_digest_of_its_file(tmp_path):
    path, rule = tmp_path / "rule.npz", UpdateRule(units=4, embedding=3, predictions=3)
    path.write_bytes(encode_rule(rule, rule.init(jax.random.key(0)), {}))
    kept = to_json(recipes.with_update_rule(recipes.find("catch_a2c"), str(path)))
    build(from_json(kept))
    path.write_bytes(encode_rule(rule, rule.init(jax.random.key(1)), {}))
    with pytest.raises(ConfigError, match="is not the file that the run began with"):
        build(from_json(kept))
