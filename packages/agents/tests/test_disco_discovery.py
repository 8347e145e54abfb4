"""Discovery of a DiscoRL rule: students as `Disco` has them, meta-gradient, file and runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import blueprint
from jax.flatten_util import ravel_pytree
from walk import close, doubled

from podracer.agent import Context
from podracer.agents.rules.disco import Disco
from podracer.agents.rules.disco.rule_file import decode_rule, is_disco_rule
from podracer.agents.rules.disco.student import DiscoState, StudentState, build_optimizer
from podracer.agents.rules.lifetimes import Experience, group_by_lifetime, to_rollout, to_rollouts
from podracer.agents.rules.meta_training import MetaBatch
from podracer.environment import TaskGroups
from podracer.networks import Table
from podracer.replay import Sample
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep, Trajectory
from podracer_agents.disco_discovery import DiscoDiscovery
from podracer_agents.disco_rules import RuleSize, encode_rule

ENVS, T, K, LIFETIMES, STATES, ACTIONS = 2, 4, 2, 3, 6, 3
B = LIFETIMES * ENVS
SIZE = RuleSize(units=4, lifetime_units=3, predictions=3)
SMALL = DiscoDiscovery(
    learning_rate=1e-2,
    critic_learning_rate=0.1,
    inner_updates=K,
    rule=SIZE,
    support_max=2.0,
    support_size=5,
    model_size=4,
)
COUNT = ArraySpec((), np.int32)
STATE = ArraySpec((), np.int32, num_values=STATES)
SPEC = EnvironmentSpec(
    "states",
    {"observation": STATE, "task": COUNT, "task_count": COUNT},
    Discrete(ACTIONS),
    extension=TaskGroups(ENVS, 100, ("one", "two")),
)
AGENT: Any = blueprint(SMALL, SPEC, T).build().init.__self__  # type: ignore[attr-defined]


def random_experience(key: jax.Array, *lead: int) -> Experience:
    """Rollouts `[*lead, T, B, ...]` with terminals and time-outs."""
    keys = jax.random.split(key, 6)
    ends = jax.random.bernoulli(keys[3], 0.2, (*lead, T, B))
    return Experience(
        jax.random.randint(keys[0], (*lead, T + 1, B), 0, STATES),
        jnp.zeros((*lead, T + 1, B), bool),
        jax.random.randint(keys[1], (*lead, T, B), 0, ACTIONS),
        jax.random.normal(keys[2], (*lead, T, B)),
        1.0 - ends.astype(jnp.float32),
        jax.random.bernoulli(keys[5], 0.9, (*lead, T, B)),
        (),
    )


@functools.cache
def random_batch() -> tuple[Any, MetaBatch]:
    """A rule that has moved, and students that have learned something, with rollouts of theirs."""
    key = jax.random.key(0)
    state = AGENT.init(key, B)

    def moved(number: int, tree: Any, scale: float) -> Any:
        flat, unravel = ravel_pytree(tree)
        return unravel(
            flat + scale * jax.random.normal(jax.random.fold_in(key, number), flat.shape)
        )

    students: StudentState = state.local.students
    moments, _ = students.moments.update([jnp.float32(x) for x in (1.0, 0.1, 1.0)])
    adam = students.optimizer_state[0]  # after some updates its steps are more than a sign
    adam = adam._replace(
        count=adam.count + 5,
        mu=moved(8, adam.mu, 1e-2),
        nu=jax.tree.map(lambda x: x + 1e-3, adam.nu),
    )
    students = dataclasses.replace(
        students,
        params=moved(1, students.params, 0.5),
        target_params=moved(2, students.target_params, 0.5),
        moments=moments,
        memory=moved(3, students.memory, 0.3),
        optimizer_state=(adam, students.optimizer_state[1]),
    )
    window = random_experience(jax.random.fold_in(key, 4), K)
    grouped = [group_by_lifetime(jax.tree.map(lambda x, k=k: x[k], window), ENVS) for k in range(K)]
    rollout = group_by_lifetime(random_experience(jax.random.fold_in(key, 5)), ENVS)
    advantages = jax.random.normal(jax.random.fold_in(key, 6), (LIFETIMES, T, ENVS))
    batch = MetaBatch(
        students,
        jax.tree.map(lambda *x: jnp.stack(x, 1), *grouped),
        rollout,
        advantages,
        jnp.asarray([True, False, True]),
        jnp.asarray([0, 1, 0]),
    )
    return moved(7, state.shared.rule, 0.1), batch


# --- students ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_student_learns_as_one_of_disco_does():
    """Its update, with the state that the rule keeps, is that of `Disco` from the same rollout."""
    rule, batch = random_batch()
    disco = Disco(
        learning_rate=0.01,
        discount=SMALL.discount,
        support_max=SMALL.support_max,
        support_size=SMALL.support_size,
        model_size=SMALL.model_size,
        network=Table(),
    )
    spec = EnvironmentSpec("states", STATE, Discrete(ACTIONS))
    single: Any = disco.build(spec, Context(T + 1, rule)).init.__self__  # type: ignore[attr-defined]
    data = jax.tree.map(lambda x: x[0], to_rollouts(batch.window))
    settings = dataclasses.replace(SMALL, student_learning_rate=0.01)
    students = dataclasses.replace(AGENT, settings=settings, optimizer=build_optimizer())
    logits = students.policy(batch.students.params, data.observation, data.first)
    got, _ = jax.jit(students.update_students)(rule, batch.students, data)
    update = jax.jit(partial(single.update, axis=None))
    for lifetime in range(LIFETIMES):
        own = slice(lifetime * ENVS, (lifetime + 1) * ENVS)
        before = jax.tree.map(lambda x, i=lifetime: x[i], batch.students)
        state = DiscoState(
            frames=jnp.uint32(0),
            params=before.params,
            target_params=before.target_params,
            optimizer_state=before.optimizer_state,
            moments=before.moments,
            memory=before.memory,
            rule=rule,
        )
        want, _, _ = update(state, sample_of(data, logits, own), jax.random.key(0))
        for name in ("params", "target_params", "moments", "memory"):
            after = jax.tree.map(lambda x, i=lifetime: x[i], getattr(got, name))
            close(after, getattr(want, name), atol=1e-5)


def sample_of(data: Experience, logits: jax.Array, own: slice) -> Sample:
    """Some environments' rollout, acted by the policy with these logits, as a sample."""
    zeros = jnp.zeros((1, ENVS))
    no = jnp.zeros((1, ENVS), bool)
    timesteps = TimeStep(
        observation=data.observation[:, own],
        reward=jnp.concatenate([zeros, data.reward[:, own]]),
        discount=jnp.concatenate([zeros, data.discount[:, own]]),
        first=data.first[:, own],
        last=jnp.concatenate([~data.valid[:, own], no]),
    )
    action = jnp.concatenate([data.action[:, own], jnp.zeros((1, ENVS), jnp.int32)])
    steps = Step(timesteps, action, {"policy": logits[:, own]})
    final = jax.tree.map(lambda x: x[-1], timesteps)
    trajectory = Trajectory(jax.tree.map(lambda x: x[:-1], steps), final, (), ())
    index = jnp.zeros(ENVS, jnp.int32)
    return Sample(trajectory, jnp.ones(ENVS), index, index)


# --- the meta-gradient ---------------------------------------------------------------------------


def meta_loss(batch: MetaBatch, rule: Any) -> jax.Array:
    """What the rule descends on, written out: K updates one after another, then the objective."""
    students, aux = batch.students, []
    for k in range(K):
        data = jax.tree.map(lambda x, k=k: x[k], to_rollouts(batch.window))
        students, regularizers = AGENT.update_students(rule, students, data)
        aux.append(regularizers)
    data, advantages = to_rollout((batch.rollout, batch.advantages))
    return AGENT.meta_loss(
        students,
        jax.tree.map(lambda *x: jnp.stack(x), *aux),
        data,
        advantages,
        batch.is_whole.astype(jnp.float32),
    )


@pytest.mark.slow
def test_the_meta_gradient_equals_finite_differences():
    """In random directions, and for single parameters of each of the rule's layers."""
    with jax.enable_x64(True):  # finite differences lose half of all digits
        rule, batch = jax.tree.map(doubled, random_batch())
        grads, loss, *_ = jax.jit(AGENT.meta_grad)(rule, batch)
        value = jax.jit(partial(meta_loss, batch))
        np.testing.assert_allclose(loss, value(rule), rtol=1e-10)
        flat, unravel = ravel_pytree(rule)
        got = ravel_pytree(grads)[0]
        random = np.random.default_rng(0)
        starts = np.cumsum([0] + [x.size for x in jax.tree.leaves(rule)])
        single = [random.integers(a, b) for a, b in itertools.pairwise(starts)]
        places = np.arange(flat.size)
        directions = [(places == i).astype(float) for i in single]
        directions += [random.normal(size=flat.size) for _ in range(4)]
        for direction in directions:
            ahead, behind = (value(unravel(flat + h * direction)) for h in (1e-6, -1e-6))
            expected = float(ahead - behind) / 2e-6
            assert float(got @ direction) == pytest.approx(expected, rel=1e-4, abs=1e-8)
        paths = jax.tree_util.tree_leaves_with_path(grads)
        without = [jax.tree_util.keystr(path) for path, x in paths if np.abs(x).max() < 1e-12]
        assert without == [".policy[1].bias"], "which a softmax ignores"


@pytest.mark.parametrize("gradient", [0.0, 1e-9, 1e-6, 1e-3])
def test_small_gradients_of_students_do_not_decide_the_meta_gradient(gradient):
    """Adam's step is a function of its gradient whose slope grows as that becomes small."""
    optimizer = AGENT.optimizer

    def step(gradient):
        return optimizer.update(gradient, optimizer.init(jnp.float32(0)))[0]

    slope = jax.grad(step)(jnp.float32(gradient))
    assert 0.0 < slope <= 1.01e4


# --- the file ------------------------------------------------------------------------------------


def test_a_new_rule_comes_back_from_its_file():
    rule, _ = random_batch()
    content = encode_rule(rule)
    assert is_disco_rule(content)
    close(decode_rule(content, "a file"), rule, atol=1e-6)
    again = encode_rule(decode_rule(content, "a file"))
    close(decode_rule(again, "a file"), decode_rule(content, "a file"), atol=1e-6)


# --- runs ----------------------------------------------------------------------------------------
