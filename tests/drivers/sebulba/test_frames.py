"""Stacks of frames under Sebulba: the newest frame goes up, and agents see whole stacks."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, SMALL, blueprint
from runs import anakin_setup, sebulba_setup, train_anakin, train_sebulba
from variants import variants

from podracer.agents.impala import Impala
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.drivers.sebulba.actor_pool import make_actor_pool
from podracer.drivers.sebulba.supervisor import Supervisor
from podracer.drivers.sebulba.trajectory import complete
from podracer.environment import auto_reset
from podracer.envs.host.atari import Atari
from podracer.fields import struct
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep
from podracer_testing.parity import check_equal, optimized

STACK = ArraySpec((2, 3, 4), np.uint8, frame_stack=True)
SPEC = EnvironmentSpec("frames", {"picture": STACK, "speed": ArraySpec((2,))}, Discrete(3))


@dataclasses.dataclass(frozen=True)
class Films:
    """Random films whose stacks begin by copies or black frames; lives, time-outs and faults."""

    initial: str = "black"
    faulty: bool = False
    on_device: bool = False
    spec: EnvironmentSpec = SPEC

    def make(self, num_envs, num_threads):
        return FilmBatch(self, num_envs)


class FilmBatch:
    """A row's game lasts 9 steps or is cut at random; a life may be lost, and frames go on."""

    def __init__(self, films, num_envs):
        self.films, self.num_envs = films, num_envs

    def reset(self, seed, indices, start):
        self.random = np.random.default_rng([seed, *map(int, indices), start])
        self.stack = np.zeros((self.num_envs, *STACK.shape), np.uint8)
        self.ended = np.ones(self.num_envs, bool)
        self.shown = []
        return self.step(None)

    def step(self, action):
        n, random = self.num_envs, self.random
        frame = random.integers(0, 255, (n, *STACK.shape[:-1]), np.uint8)
        first, lost = self.ended, ~self.ended & (random.random(n) < 0.2)
        blank = np.zeros((n, *STACK.shape[:-1], 3), np.uint8)
        initial = blank if self.films.initial == "black" else np.repeat(frame[..., None], 3, -1)
        older = np.where(first[:, None, None, None], initial, self.stack[..., 1:])
        self.stack = np.concatenate([older, frame[..., None]], axis=-1)
        self.ended = ~first & ~lost & (random.random(n) < 0.15)
        reward = np.ones(n, np.float32)
        if self.films.faulty:
            reward = np.where(random.random(n) < 0.1, np.float32("nan"), reward)
        discount = 1 - (lost | (self.ended & (random.random(n) < 0.5))).astype(np.float32)
        speed = random.normal(size=(n, 2)).astype(np.float32)
        observation = {"picture": self.stack, "speed": speed}
        timestep = TimeStep(observation, reward, discount, first | lost, self.ended.copy())
        self.shown.append(timestep)
        return jax.device_put(timestep) if self.films.on_device else timestep

    def close(self):
        pass


class Recorded:
    """A factory whose one batch stays to be looked at."""

    def __init__(self, factory):
        self.factory, self.spec, self.batches = factory, factory.spec, []
        self.on_device = getattr(factory, "on_device", False)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def make(self, num_envs, num_threads):
        self.batches.append(self.factory.make(num_envs, num_threads))
        return self.batches[-1]


def rollouts_of(env, length, number, updates=0):
    """Complete trajectories of one actor thread, and what its agent saw of each timestep."""
    config = SebulbaConfig(num_envs=4, rollout_length=length, threads_per_actor=1, policy_lag=None)
    settings = blueprint(Impala(network=SMALL), env.spec, length)
    driver = Sebulba(settings, env, config, jax.devices()[:1])
    agent = settings.build()

    def act(params, carry, timestep, keys, explore):
        action, extras, carry = agent.act(params, carry, timestep, keys, explore)
        return action, (extras, timestep.observation), carry

    object.__setattr__(driver, "agent", dataclasses.replace(agent, act=act))
    vars(driver).pop("actor_programs", None)  # of the agent as it was, if they are shared
    state = dataclasses.replace(
        driver.init(jax.random.key(3)), actor=(), update=jnp.uint32(updates)
    )
    trajectories = []
    with contextlib.ExitStack() as stack, Supervisor(60) as supervisor:
        parts = (driver.actor_programs, env, driver.split, config, state)
        actors = make_actor_pool(*parts, supervisor=supervisor, stack=stack)
        actors.start()
        for _ in range(number):
            (rollout,) = actors.collect(lambda: False)
            trajectories.append(complete(env.spec, rollout.shards[0]))
    return trajectories


def masked(shown):
    """Observations `[N, b, ...]` as they were shown, zeros where a fault masks the row."""
    rows, series = np.zeros(4, bool), []
    for timestep in shown:
        rows = (rows & ~timestep.first) | ~np.isfinite(timestep.reward)
        series.append(
            jax.tree.map(
                lambda x: np.where(rows.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype),  # noqa: B023
                timestep.observation,
            )
        )
    return jax.tree.map(lambda *x: np.stack(x), *series)


def check_seen(trajectories, expected, length):
    """Assert that learners and agents saw the observations `[N, b, ...]`."""
    for i, trajectory in enumerate(trajectories):
        steps = jax.tree.map(lambda x: x[i * length : (i + 1) * length], expected)  # noqa: B023
        check_equal(trajectory.steps.timestep.observation, steps)
        check_equal(trajectory.steps.extras[1], steps)
        final = jax.tree.map(lambda x: x[(i + 1) * length], expected)  # noqa: B023
        check_equal(trajectory.final.observation, final)


FILMS = {
    "black": Films(),
    "copies": Films("copies"),
    "faults": Films(faulty=True),
    "device": Films("copies", faulty=True, on_device=True),
}


ALL = itertools.product(FILMS, (1, 7))


@variants(("name", "length"), [("faults", 1), ("black", 7), ("device", 7)], ALL)
def test_agents_and_learners_see_the_stacks_that_environments_show(name, length):
    """Over lost lives, ends of games, time-outs and faults, and between rollouts."""
    env, number = Recorded(FILMS[name]), 42 // length
    trajectories = rollouts_of(env, length, number)
    expected = masked(env.batches[0].shown[: number * length + 1])
    check_seen(trajectories, expected, length)


@variants("name", ["black"], ["device"])
def test_a_long_run_goes_on_beyond_the_steps_of_a_signed_number(name):
    env, length = Recorded(FILMS[name]), 7
    trajectories = rollouts_of(env, length, 3, updates=2**31 // length + 1)
    check_seen(trajectories, masked(env.batches[0].shown[: 3 * length + 1]), length)


GAMES = {
    "lives": {"game": "breakout"},
    "fire": {"game": "breakout", "use_fire_reset": True},
    "time-outs": {"game": "pong", "max_frames": 100},
    "several": {"game": "breakout+pong", "full_action_set": True, "max_frames": 100},
}


class Filmed:
    """An Atari batch that keeps what it showed."""

    def __init__(self, batch):
        self.batch, self.shown, self.close = batch, [], batch.close

    def reset(self, *args):
        return self.show(self.batch.reset(*args))

    def step(self, action):
        return self.show(self.batch.step(action))

    def show(self, timestep):
        self.shown.append(jax.tree.map(np.copy, timestep))
        return timestep


@variants("name", ["lives"], GAMES)
def test_atari_shows_the_same_stacks(name):
    pytest.importorskip("ale_py")
    env = Recorded(Atari(size=(21, 21), **GAMES[name]))
    make = env.make
    env.make = lambda *args: env.batches.append(Filmed(make(*args))) or env.batches[-1]
    trajectories = rollouts_of(env, 50, 6)
    shown = env.batches[-1].shown
    assert sum(timestep.first.sum() for timestep in shown[1:301]) > 8
    if name == "lives":
        assert any(((x.discount == 0) & ~x.last & x.first).any() for x in shown)
    expected = jax.tree.map(lambda *x: np.stack(x), *(x.observation for x in shown[:301]))
    check_seen(trajectories, expected, 50)


@struct
class Walk:
    frames: jax.Array
    time: jax.Array


class Walks:
    """Stacked random frames in JAX, cut after 7 steps."""

    spec = EnvironmentSpec("walks", STACK, Discrete(3))

    def _show(self, frames, time):
        state, zero = Walk(frames, time), jnp.float32(0)
        last = time == 7
        timestep = TimeStep(frames, zero + frames[0, 0, -1] % 3, zero + 1, time == 0, last)
        return state, timestep

    def _frame(self, key):
        return jax.random.randint(key, (*STACK.shape[:-1], 1), 0, 255).astype(jnp.uint8)

    def reset(self, key):
        blank = jnp.zeros((*STACK.shape[:-1], 3), jnp.uint8)
        frames = jnp.concatenate([blank, self._frame(key)], axis=-1)
        return self._show(frames, jnp.int32(0))

    def step(self, key, state, action):
        frames = jnp.concatenate([state.frames[..., 1:], self._frame(key)], axis=-1)
        return self._show(frames, state.time + 1)


@variants("name", ["impala"], ["dqn"])
def test_lock_step_with_stacks_equals_anakin_and_goes_on(name):
    agent = AGENTS[name]
    env = auto_reset(Walks())
    anakin = anakin_setup(agent, env)
    sebulba = sebulba_setup(agent, env, policy_lag=0, threads_per_actor=1)
    with optimized():
        expected, _ = train_anakin(*anakin, 10)
        state, _ = train_sebulba(*sebulba, 5)
        state, _ = train_sebulba(sebulba[0], state, 10)
    check_equal(state, expected)


class FaultyWalks(Walks):
    """Lives are lost and rewards are no numbers, as the newest frame says."""

    def _show(self, frames, time):
        state, timestep = super()._show(frames, time)
        chance = frames[0, 0, -1] % 4
        lost = (chance == 0) & ~timestep.first & ~timestep.last
        reward = jnp.where((chance == 1) & (time > 0), jnp.nan, timestep.reward)
        discount = jnp.where(lost, jnp.float32(0), timestep.discount)
        first = timestep.first | lost
        return state, dataclasses.replace(timestep, reward=reward, discount=discount, first=first)


def test_a_resumed_run_goes_on_behind_masked_rows():
    env = auto_reset(FaultyWalks())
    settings = {"rollout_length": 5, "policy_lag": 0, "threads_per_actor": 1}
    driver, _ = sebulba_setup(AGENTS["impala"], env, **settings)
    expected, _ = train_sebulba(driver, driver.init(jax.random.key(0)), 10)
    state, _ = train_sebulba(driver, driver.init(jax.random.key(0)), 5)
    assert (state.actor.timestep.first & state.actor.timestep.last).any()
    state, _ = train_sebulba(driver, state, 10)
    check_equal(state, expected)
