"""Each reduction of a program waits for the one before on a CPU, whatever asks for it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from programs import request, unordered
from runs import anakin_setup, sebulba_setup, train_anakin

from podracer.agent import Agent
from podracer.devices import ordering
from podracer.devices.fused import traced_for
from podracer.devices.mesh import DATA, make_mesh
from podracer.devices.ordering import in_order
from podracer.devices.reductions import global_max, global_mean
from podracer.drivers import anakin
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.types import LearnerState

total = partial(jax.lax.psum, axis_name=DATA)
largest = partial(jax.lax.pmax, axis_name=DATA)


@jax.custom_vjp
def with_backward_pass(x):
    return total(x)


with_backward_pass.defvjp(lambda x: (total(x), x), lambda x, g: (total(g * x),))


@jax.custom_jvp
def with_tangents(x):
    return total(x)


with_tangents.defjvp(lambda x, dx: (total(x[0]), total(dx[0] * x[0])))


def in_a_scan(x):
    def step(carry, row):
        return carry + total(row).sum(), largest(row)

    return jax.lax.scan(step, 0.0, x, reverse=True, unroll=2)


def in_a_while_loop(x):
    """Also in its condition."""

    def step(loop):
        return loop[0] + largest(x[0, 0]), loop[1] + total(x)

    return jax.lax.while_loop(lambda loop: largest(loop[0]) < 5 * largest(1.0), step, (0.0, x))


def in_a_condition(x):
    def twice(x):
        return total(x), largest(2 * x)

    several = [jax.lax.switch(k, [twice, lambda x: (x, x), twice], x) for k in jnp.arange(3)]
    return several, jax.lax.cond(total(x[0, 0]) > -1e3, twice, lambda x: (x, x), x)


def recomputed(x):
    return jax.grad(jax.checkpoint(lambda x: (total(jnp.sin(x)) * total(x[:1])).sum()))(x)


def exchanging(x):
    gathered = jax.lax.all_gather(x, DATA), jax.lax.all_gather(2 * x, DATA, axis=1, tiled=True)
    passed_on = jax.lax.ppermute(x, DATA, [(0, 1), (1, 0)])
    return gathered, passed_on, jax.lax.psum_scatter(x[:2], DATA), jax.lax.all_to_all(x, DATA, 1, 1)


def of_types(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) // 2
    return total((x > 0, x.astype(jnp.bfloat16), x[:0])), largest(bits), total(1)


PROGRAMS = {
    "several at once": lambda x: (total({"a": x, "b": x[0]}), jax.vmap(total)(x + 1), largest(x)),
    "scan": in_a_scan,
    "while": in_a_while_loop,
    "cond": in_a_condition,
    "jit": lambda x: jax.jit(lambda x: (total(x), largest(x)))(x),
    "custom_vjp": lambda x: (jax.grad(lambda x: with_backward_pass(x).sum())(x), total(2 * x)),
    "custom_vjp, forward": lambda x: (with_backward_pass(x), total(2 * x)),
    "custom_jvp": lambda x: (jax.jvp(with_tangents, (x,), (x,)), total(2 * x)),
    "custom_jvp, value": lambda x: (with_tangents(x), total(2 * x)),
    "checkpoint": recomputed,
    "exchanges": exchanging,
    "types": of_types,
}


def compiled(function, devices=2, order=in_order):
    mesh = make_mesh(jax.devices()[:devices])
    program = jax.shard_map(
        order(lambda x: jax.tree.map(lambda x: jnp.asarray(x)[None], function(x)), mesh),
        mesh=mesh,
        in_specs=PartitionSpec(DATA),
        out_specs=PartitionSpec(DATA),
        check_vma=False,
    )
    x = jax.random.normal(jax.random.key(0), (4 * devices, devices))
    return jax.jit(program).lower(x).compile(), x


def as_written(function, mesh):
    return function


@pytest.mark.parametrize("name", PROGRAMS)
def test_reductions_wait_for_each_other_wherever_they_are(name):
    """And only then; the numbers are the same to the bit."""

    def with_more(x):
        return largest(-x), PROGRAMS[name](x), largest(3 * x)

    program, x = compiled(with_more)
    assert not unordered(program.as_text())
    plain, _ = compiled(with_more, order=as_written)
    assert unordered(plain.as_text())
    jax.tree.map(np.testing.assert_array_equal, program(x), plain(x))


def test_a_reduction_that_cannot_be_ordered_is_refused():
    def solve(x):
        identity = lambda v: total(v) / 2  # noqa: E731
        return jax.lax.custom_linear_solve(identity, x, lambda matvec, b: matvec(b), symmetric=True)

    with pytest.raises(ConfigError, match="within `custom_linear_solve` cannot be ordered"):
        compiled(solve)


# --- drivers --------------------------------------------------------------------------------------


@struct
class Logits:
    params: jax.Array


@struct
class Guesser:
    """Plays by the rewards of all actions, and reduces several numbers at once."""

    rate: float = 0.1

    def build(self, spec, context):
        def act(params, carry, timestep, keys, explore):
            logits = params[None] + timestep.observation.reshape(len(keys), -1)[:, :3]
            return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32), logits, carry

        def learn(state, trajectory, key, axis):
            rewards = trajectory.next_timesteps().reward[..., None]
            chosen = jax.nn.one_hot(trajectory.steps.action, 3)
            gain = global_mean((rewards * chosen).mean((0, 1)), axis)
            chance = global_mean(chosen.mean((0, 1)), axis)
            metrics = {"chance": chance.max(), "reward": global_max(rewards.max(), axis)}
            return LearnerState(Logits(state.shared.params + gain)), metrics

        return Agent(
            spec=spec,
            init=lambda key, num_envs: LearnerState(Logits(jnp.zeros(3))),
            act=act,
            learn=learn,
        )


@struct
class Watched:
    """Any agent, and statistics of its logits that do not depend on what it reduces itself."""

    inner: Guesser = Guesser()

    def build(self, spec, context):
        inner = self.inner.build(spec, context)

        def learn(state, trajectory, key, axis):
            logits = trajectory.steps.extras
            mean = global_mean(logits.mean(), axis)
            new_state, metrics = inner.learn(state, trajectory, key, axis)

            def add(sums, row):
                return sums + global_mean(row.mean(), axis) * global_max(row.max(), axis), None

            sums, _ = jax.lax.scan(add, 0.0, logits)
            size = jax.lax.cond(
                state.shared.params[0] > 0.01,
                lambda x: global_mean(jnp.abs(x).mean(), axis) + global_max(x.max(), axis),
                lambda x: global_max(-x.min(), axis),
                logits,
            )
            return new_state, {**metrics, "mean": mean, "sums": sums, "size": size}

        return dataclasses.replace(inner, learn=learn)


def lowered_chunk(agent, devices):
    driver, state = anakin_setup(agent, devices=devices)
    program = anakin.make_chunk(driver.env, driver.mesh, driver.config)
    return program.lower(driver.blueprint, state, request(devices))


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_users_agent_may_reduce_in_any_order(devices):
    several, one = (train_anakin(*anakin_setup(Watched(), devices=n), 10) for n in (devices, 1))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, several[0].learner, one[0].learner)
    assert len(several[1]) == 2
    for progress, expected in zip(several[1], one[1], strict=True):
        jax.tree.map(close, progress.metrics, expected.metrics)


def test_a_chunk_of_anakin_is_ordered_and_would_not_be_by_itself(monkeypatch):
    assert not unordered(lowered_chunk(Watched(), 2).compile().as_text())
    monkeypatch.setattr(ordering, "in_order", as_written)
    assert unordered(lowered_chunk(Watched(), 2).compile().as_text())


def test_an_update_of_sebulba_is_ordered_and_would_not_be_by_itself(monkeypatch):
    env = DeviceEnvironments(make("catch"))
    driver, _ = sebulba_setup(Watched(), env, devices=3, learners=2)
    compiled_text = lambda: driver.lower()().func.as_text()  # noqa: E731
    assert not unordered(compiled_text())
    monkeypatch.setattr(ordering, "in_order", as_written)
    assert unordered(compiled_text())


@pytest.mark.parametrize(("platform", "devices"), [("cpu", 1), ("gpu", 2)])
def test_one_device_and_accelerators_get_a_program_as_it_is(platform, devices, monkeypatch):
    with traced_for(platform):
        text = lowered_chunk(Watched(), devices).as_text()
        monkeypatch.setattr(ordering, "in_order", as_written)
        assert lowered_chunk(Watched(), devices).as_text() == text
