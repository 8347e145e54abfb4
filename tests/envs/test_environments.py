"""Device environments: the algebra of episodes, the rules of each, and names."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pickle
import re
from functools import partial
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from episodes import play, random_actions
from walk import Walk

from podracer.checks import check_environment
from podracer.environment import (
    Features,
    action_struct,
    auto_reset,
    evaluation_environment,
    features,
    restart,
    transition,
)
from podracer.envs import ENVIRONMENTS, cartpole, catalog, catch, make, names, pendulum
from podracer.envs.cartpole import CartPole, CartPoleState
from podracer.envs.catch import Catch
from podracer.envs.pendulum import Pendulum, PendulumState
from podracer.envs.probes import GAMMA, PROBES
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.io import entry_points
from podracer.types import ArraySpec, Discrete, EnvironmentSpec


@functools.cache
def random_play(name: str) -> Any:
    """1000 random steps of four environments, `[1001, 4]`, and their actions `[1000, 4]`."""
    return play(make(name), 1000, 4)


def check_episodes(timesteps: Any) -> None:
    """What holds of any environment that restarts by itself. Leaves `[T, B, ...]`."""
    first, last = timesteps.first, timesteps.last
    terminal = timesteps.discount == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(timesteps))
    assert np.isin(timesteps.discount, (0, 1)).all()
    assert first[0].all()
    assert not (first & last).any()
    assert first[terminal].all()  # a terminal restarts in the same step
    assert not terminal[last].any()  # what is cut by the clock goes on
    after = first[1:][last[:-1]], timesteps.reward[1:][last[:-1]], terminal[1:][last[:-1]]
    assert after[0].all()
    assert not after[1].any()
    assert not after[2].any()
    began = first[1:]  # and nothing else restarts
    assert (began == (terminal[1:] | last[:-1])).all()


# --- the algebra of episodes ---------------------------------------------------------------------


@struct
class ScriptState:
    episode: jax.Array  # uint32, drawn at the reset
    time: jax.Array  # int32


class Script:
    """Ends as its actions say: 4 is a terminal without `last`, 5 with, 6 a time-out, 7 both."""

    spec = EnvironmentSpec(
        "script",
        {"episode": ArraySpec((), np.uint32), "time": ArraySpec((), np.int32)},
        Discrete(8),
    )

    def reset(self, key: jax.Array) -> Any:
        state = ScriptState(jax.random.bits(key), jnp.int32(0))
        return state, restart(vars(state))

    def step(self, key: jax.Array, state: ScriptState, action: jax.Array) -> Any:
        state = ScriptState(state.episode, state.time + 1)
        reward = 10 * state.time + action
        terminal, timeout = (action >= 4) & (action != 6), action >= 6
        timestep = transition(vars(state), reward, terminal=terminal, timeout=timeout)
        return state, dataclasses.replace(timestep, last=timestep.last & (action != 4))


@pytest.mark.parametrize("env", [Script(), auto_reset(Script())], ids=["once", "twice"])
def test_auto_reset_against_a_python_loop(env: Any) -> None:
    """Around an environment that restarts by itself, too."""
    shown, actions = play(auto_reset(env), 200, 8)
    check_episodes(shown)
    for lane in range(8):
        lane_shown = jax.tree.map(lambda x, lane=lane: x[:, lane], shown)
        time, cut, episode = 0, False, lane_shown.observation["episode"][0]
        for t, action in enumerate(actions[:, lane].tolist(), start=1):
            reward, discount, first, last = 0.0, 1.0, False, False
            if cut:
                time, cut, first = 0, False, True
            else:
                time += 1
                reward = 10.0 * time + action
                if action in (4, 5, 7):
                    time, discount, first = 0, 0.0, True
                elif action == 6:
                    cut = last = True
            now = jax.tree.map(lambda x, t=t: x[t].item(), lane_shown)
            assert (now.reward, now.discount) == (reward, discount)
            assert (now.first, now.last) == (first, last)
            assert now.observation["time"] == time
            assert (now.observation["episode"] != episode) == first  # a fresh start, or the same
            episode = now.observation["episode"]


def test_auto_reset_draws_starts_apart_from_steps() -> None:
    """The key of a restart is not the key of the step it falls in."""

    class Noisy(Script):
        def step(self, key: jax.Array, state: ScriptState, action: jax.Array) -> Any:
            return super().step(key, ScriptState(jax.random.bits(key), state.time), action)

    env, key = auto_reset(Noisy()), jax.random.key(0)
    state, _ = env.reset(key)
    _, going = env.step(key, state, jnp.int32(0))
    _, ending = env.step(key, state, jnp.int32(5))
    assert going.observation["episode"] != ending.observation["episode"]


def test_auto_reset_shows_its_environment() -> None:
    env = auto_reset(CartPole())
    state, _ = env.reset(jax.random.key(0))
    assert (env.render(state) == CartPole().render(state.inner)).all()
    assert not hasattr(auto_reset(Script()), "render")
    assert hash(env) == hash(auto_reset(CartPole()))


def test_a_wrapper_has_the_abilities_of_its_environment_and_no_others() -> None:
    shown = Script()

    class Evaluated(Script):
        def for_evaluation(self) -> Script:
            return shown

    drawn, evaluated = auto_reset(CartPole()), auto_reset(Evaluated(), resets_per_step=2)
    assert features(drawn).render is not None
    assert features(drawn).for_evaluation is None
    assert features(evaluated).for_evaluation is not None
    assert features(evaluated).render is None
    assert evaluation_environment(drawn) is drawn
    assert evaluation_environment(evaluated) == auto_reset(shown, resets_per_step=2)
    copy = pickle.loads(pickle.dumps(drawn))
    assert copy == drawn
    assert features(copy).render is not None


def test_a_terminal_is_shown_before_the_restart() -> None:
    """With `show_terminals`, as environments of the host show it; time-outs are as without it."""

    hidden, shown = (auto_reset(Walk(), show_terminals=x) for x in (False, True))
    state, timestep = shown.reset(jax.random.key(0))
    last, kinds, steps = False, set(), [jax.jit(x.step) for x in (hidden, shown)]
    for key in jax.random.split(jax.random.key(1), 60):
        (_, expected), (state, timestep) = (step(key, state, jnp.int32(1)) for step in steps)
        if not last and timestep.discount == 0:
            assert timestep.last
            assert not timestep.first
            assert abs(timestep.observation[0]) > 1.5
            assert expected.first
            np.testing.assert_allclose(timestep.reward, expected.reward, rtol=1e-5)
        else:
            jax.tree.map(
                partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), timestep, expected
            )
        kinds.add((bool(timestep.last), int(timestep.discount)))
        last = timestep.last
    assert kinds == {(False, 1), (True, 1), (True, 0)}


def test_a_feature_that_is_none_is_absent() -> None:
    none = dict.fromkeys((field.name for field in dataclasses.fields(Features)), None)
    assert features(SimpleNamespace(**none)) == features(object()) == Features()


# --- every environment of the library ------------------------------------------------------------


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_own_environment(name: str) -> None:
    env = make(name)
    spec = check_environment(env)
    assert spec.name == name
    assert hash(env) == hash(make(name))

    timesteps, _ = random_play(name)
    check_episodes(timesteps)
    assert timesteps.first[1:].any()
    observation = timesteps.observation
    assert observation.shape == (1001, 4, *spec.observation.shape)
    assert observation.dtype == spec.observation.dtype


@pytest.mark.parametrize("name", ["catch", "cartpole", "pendulum"])
def test_render(name: str) -> None:
    env, key = make(name), jax.random.key(0)
    step, action = jax.jit(env.step), random_actions(env.spec, key, 1)[0]
    state, _ = env.reset(key)
    before = env.render(jax.device_get(state))
    for _ in range(6):
        state, _ = step(key, state, action)
    after = env.render(jax.device_get(state))
    assert before.dtype == np.uint8
    assert before.ndim == 3
    assert before.shape[2] == 3
    assert before.shape == after.shape
    assert (before != after).any()


def test_different_keys_start_differently() -> None:
    for env, least in ((Catch(), 5), (CartPole(), 60), (Pendulum(), 60)):
        _, opening = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))
        assert len(np.unique(opening.observation.reshape(64, -1), axis=0)) >= least


def follow(timestep: Any) -> jax.Array:
    """Moves the paddle under the ball."""
    board = timestep.observation
    ball = jnp.argmax(board[:-1].sum(axis=0))
    return jnp.sign(ball - jnp.argmax(board[-1])).astype(jnp.int32) + 1


# --- Catch ---------------------------------------------------------------------------------------


def test_catch_rules() -> None:
    timesteps, _ = random_play("catch")
    board, ends = timesteps.observation, np.arange(0, 1001, 9)  # 9 steps an episode
    assert (np.flatnonzero((timesteps.discount == 0).all(axis=1)) == ends[1:]).all()
    assert not np.delete(timesteps.discount == 0, ends, axis=0).any()
    assert np.isin(timesteps.reward[ends[1:]], (-1, 1)).all()
    assert not np.delete(timesteps.reward, ends, axis=0).any()
    assert not timesteps.last.any()
    for t in range(18):  # the ball falls a row a step, from the top
        assert (board[t][:, t % 9].sum(axis=-1) == 1).all()
    assert (board[:, :, -1].sum(axis=-1) == 1).all()
    assert (board[ends][:, :, -1] == np.eye(catch.COLUMNS)[2]).all()  # starts in the middle


def test_catch_returns() -> None:
    perfect, _ = play(Catch(), 90, 16, follow)
    random, _ = random_play("catch")
    assert (perfect.reward[perfect.discount == 0] == 1).all()
    assert -0.8 < random.reward[random.discount == 0].mean() < -0.3


# --- against Gymnasium ---------------------------------------------------------------------------


def test_cartpole_steps_as_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    reference = gymnasium.make("CartPole-v1").unwrapped
    reference.reset(seed=0)
    rng = np.random.default_rng(0)
    motion = rng.uniform(-1, 1, (400, 4)) * (2.6, 2, 0.25, 2)
    actions = rng.integers(0, 2, 400)
    state = CartPoleState(jnp.asarray(motion, jnp.float32), jnp.zeros(400, jnp.int32))
    keys = jax.random.split(jax.random.key(0), 400)
    _, got = jax.jit(jax.vmap(CartPole().step))(keys, state, jnp.asarray(actions, jnp.int32))
    ends = 0
    for i in range(400):
        reference.state, reference.steps_beyond_terminated = tuple(motion[i]), None
        observation, reward, terminated, truncated, _ = reference.step(int(actions[i]))
        np.testing.assert_allclose(got.observation[i], observation, rtol=1e-5, atol=1e-5)
        assert got.reward[i] == reward
        assert (got.discount[i] == 0) == terminated == got.last[i]
        assert not truncated
        ends += terminated
    assert 50 < ends < 350


def test_cartpole_time_out_and_fall() -> None:
    def balance(timestep: Any) -> jax.Array:
        position, speed, angle, spin = timestep.observation
        return (angle + 0.5 * spin + 0.05 * position + 0.1 * speed > 0).astype(jnp.int32)

    shown, _ = play(make("cartpole"), 510, 8, balance)
    assert (np.flatnonzero(shown.last.all(axis=1)) == [cartpole.MAX_STEPS]).all()
    assert (shown.discount[: cartpole.MAX_STEPS + 1] == 1).all()
    assert (shown.reward[1 : cartpole.MAX_STEPS + 1].sum(axis=0) == 500).all()

    falling = CartPoleState(jnp.array([0.0, 0.0, 0.2, 3.0]), jnp.int32(cartpole.MAX_STEPS - 1))
    _, both = CartPole().step(jax.random.key(0), falling, jnp.int32(1))
    assert both.discount == 0  # a fall at the last step is a fall


def test_pendulum_steps_as_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    reference = gymnasium.make("Pendulum-v1").unwrapped
    reference.reset(seed=0)
    rng = np.random.default_rng(0)
    angle, speed = rng.uniform(-10, 10, 300), rng.uniform(-8, 8, 300)
    torque = rng.uniform(-3, 3, (300, 1)).astype(np.float32)  # some out of bounds
    state = PendulumState(
        jnp.asarray(angle, jnp.float32), jnp.asarray(speed, jnp.float32), jnp.zeros(300, jnp.int32)
    )
    keys = jax.random.split(jax.random.key(0), 300)
    _, got = jax.jit(jax.vmap(Pendulum().step))(keys, state, jnp.asarray(torque))
    for i in range(300):
        reference.state = np.array([angle[i], speed[i]])
        observation, reward, terminated, _, _ = reference.step(torque[i])
        np.testing.assert_allclose(got.observation[i], observation, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.reward[i], reward, rtol=1e-4, atol=1e-5)
        assert not terminated
    assert not got.last.any()


def test_pendulum_times_out() -> None:
    shown, _ = random_play("pendulum")
    cuts = np.arange(pendulum.MAX_STEPS, 1001, pendulum.MAX_STEPS + 1)
    assert (np.flatnonzero(shown.last.any(axis=1)) == cuts).all()
    assert (shown.discount == 1).all()


# --- probes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(PROBES) - {"memory", "continuous-memory"}))
def test_probe_values(name: str) -> None:
    """`values` solve the Bellman equation of the best policy, through time-outs and all."""
    probe = PROBES[name]
    observations = np.array([observation for observation, _ in probe.values], np.float32)
    values = np.array([value for _, value in probe.values])

    def policy(timestep: Any) -> jax.Array:
        which = jnp.argmax((jnp.array(observations) == timestep.observation[None]).all(axis=-1))
        shape = (len(values), *action_struct(probe.spec).shape)
        return jnp.array(probe.best_actions or np.zeros(shape, int)).reshape(shape)[which]

    shown, _ = play(auto_reset(probe), 36, 8, policy)  # whole episodes of 1, 2 or 5 + 1 steps
    known = (shown.observation[..., None, :] == observations).all(axis=-1)
    assert known.any(axis=-1).all()
    v = values[known.argmax(axis=-1)]
    target = shown.reward[1:] + GAMMA * shown.discount[1:] * v[1:]
    valid = ~shown.last[:-1]
    np.testing.assert_allclose(v[:-1][valid], target[valid], rtol=1e-6)
    episodes = (shown.first[1:]).sum()
    if name != "observation":  # whose mean return is chance
        assert shown.reward.sum() / episodes == pytest.approx(probe.best_return, abs=1e-6)


def test_actions_matter_to_probes_that_know_the_best() -> None:
    for name in ("action", "policy", "continuous", "multidiscrete", "memory", "continuous-memory"):
        shown, _ = random_play(f"probe:{name}")
        assert shown.reward[shown.discount == 0].mean() < PROBES[name].best_return - 0.2


def test_the_memory_probe_needs_memory() -> None:
    shown, actions = random_play("probe:memory")
    cue = np.where(shown.first, shown.observation[..., 0], 0.0)
    for t in range(1, len(cue)):  # recall: the cue of the running episode
        cue[t] = np.where(shown.first[t], cue[t], cue[t - 1])
    asked = shown.observation[:-1, :, 1] == 1
    assert (asked == (shown.discount[1:] == 0)).all()
    assert (shown.reward[1:][asked] == np.where(actions == (cue[:-1] > 0), 1, -1)[asked]).all()
    assert not shown.reward[1:][~asked].any()
    assert len(np.unique(shown.observation[:-1][asked], axis=0)) == 1  # nothing to tell them apart


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("catsch", ("catsch", "did you mean catch?")),
        ("CartPole", ("did you mean cartpole?",)),
        ("probe:memroy", ("probe:memory",)),
        ("atari:", ("atari:NAME",)),
        ("gymnax:Catch-bsuite", ("gymnax:Catch-bsuite is in podracer-environments: `pip install",)),
        ("zzz", ("`podracer list environments` shows the names",)),
        ("ALE/Pong-v5", ("write atari:pong instead",)),
        ("SpaceInvadersNoFrameskip-v4", ("write atari:space_invaders instead",)),
        ("CartPole-v1", ("of Gymnasium it is gymnasium:CartPole-v1",)),
        ("gym:CartPole-v1", ("of Gymnasium it is gymnasium:CartPole-v1",)),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    name: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "installed", lambda kind: {})  # as without our packages
    with pytest.raises(ConfigError) as refusal:
        make(name)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "cartpole,winds=1",
            "cartpole: there is no option 'winds': choose one of resets_per_step,",
        ),
        ("probe:memory,reset=1", "probe:memory: there is no option 'reset': did you mean"),
        ("lifetimes:catch,wind=1", "catch: there is no option 'wind'. lifetimes itself takes"),
        ("cart:", "cart: add :NAME."),
    ],
)
def test_wrong_options_of_a_name_are_refused_with_what_to_write(name, words, monkeypatch) -> None:
    class Entry(EntryPoint):
        def load(self) -> Any:
            return lambda track: make("cartpole")

    monkeypatch.setattr(entry_points, "entry_points", lambda group: [Entry("cart", "", group)])
    with pytest.raises(ConfigError, match=re.escape(words)):
        make(name)


@pytest.mark.parametrize(("needed", "status"), [("jax", "installed"), ("a-suite", "needs a-suite")])
def test_names_tells_which_suite_an_installed_package_lacks(needed, status, monkeypatch) -> None:
    class Package:
        requires = ("jax>=0.1", "other>=1; extra == 'dev'", f"{needed}>=0.1; extra == 'suite'")

    entry = EntryPoint("suite", "adapters:suite", "podracer.environments")._for(Package())
    monkeypatch.setattr(entry_points, "entry_points", lambda group: [entry])
    assert ("suite", status) in {(name, how) for name, _, how in names()}


def test_names_lists_what_can_be_made() -> None:
    listed = {name: (about, how) for name, about, how in names()}
    assert {"catch", "cartpole", "pendulum", "probe:memory", "atari:NAME"} <= set(listed)
    assert all(about and "\n" not in about for about, _ in listed.values())
    assert listed["catch"][1] == "installed"
    found = importlib.util.find_spec("ale_py") and importlib.util.find_spec("gymnasium")
    assert listed["atari:NAME"][1] == (
        "installed" if found else 'pip install -e ".[atari]" in the clone of podracer'
    )
