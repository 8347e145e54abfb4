"""Adapters of suites: the contract, known rules, and ends; without their suite they are skipped."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import SMALL, blueprint
from episodes import check_contract, check_episodes, play

import podracer
from podracer.checks import check_agent, check_environment
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.types import ArraySpec

# An environment of each suite, and how many steps are enough to see an end.
CASES = {
    "jumanji:Snake-v1": 80,
    "jumanji:Game2048-v1": 4,
    "jumanji:Maze-v0": 120,
    "brax:inverted_pendulum": 60,
    "playground:CartpoleBalance": 4,
    "craftax:Craftax-Classic-Symbolic-v1": 4,
    "xminigrid:MiniGrid-Empty-5x5": 120,
    "octax:brix": 60,
}
HEAVY = ("craftax", "playground", "brax")
PACKAGES = {"playground": ("mujoco_playground",), "octax": ("octax", "cv2")}  # others: the prefix


def installed(prefix: str) -> bool:
    return all(map(importlib.util.find_spec, PACKAGES.get(prefix, (prefix,))))


def suite(name: str, *values: Any) -> Any:
    prefix = name.split(":")[0]
    marks = [pytest.mark.skipif(not installed(prefix), reason=f"{prefix} is not installed")]
    if prefix in HEAVY:
        marks.append(pytest.mark.slow)
    return pytest.param(name, *values, marks=marks)


pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the suites, when they are imported or used
    pytest.mark.usefixtures("lenient_ranks"),
]


@pytest.mark.parametrize("name", [suite(name) for name in CASES])
def test_keeps_the_contract(name):
    check_contract(name)


@pytest.mark.parametrize(("name", "steps"), [suite(name, CASES[name]) for name in CASES])
def test_episodes_begin_and_end_as_they_should(name, steps):
    check_episodes(name, steps)


@pytest.mark.parametrize("name", [suite("octax:brix")])
def test_chip8_games_show_the_frames_of_a_step(name):
    env = make(f"{name},frame_skip=3,max_num_steps_per_episodes=5")
    assert env.spec.observation == ArraySpec((32, 64, 3), np.bool_)
    no_key = env.spec.action.num_actions - 1
    timesteps, _ = play(env, 12, 4, lambda _: no_key)
    assert np.flatnonzero(timesteps.last[:, 0]).tolist() == [5, 11]
    assert (timesteps.discount == 1).all()
    frames = timesteps.observation[:, 0]
    assert frames[-1, :, :, -1].sum(axis=0).max() >= 4  # rows of bricks
    assert (frames[5, ..., -1] != frames[5, ..., 0]).any()  # the ball moves within a step
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    picture = env.render(jax.device_get(state))
    assert (picture.dtype, picture.shape) == (np.uint8, (256, 512, 3))


# --- stand-ins for suites that are seldom installed -----------------------------------------------


@struct
class SimulatorState:
    """What brax and Playground call a state."""

    obs: Any
    reward: jax.Array
    done: jax.Array
    info: dict[str, jax.Array]

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class Simulator:
    """Observations count the steps, one of which earns 2."""

    action_size = 1
    _config = types.SimpleNamespace(episode_length=3)
    _mjx_model = ({"gain": np.float32(2), "mass": np.ones(2, np.float32)}, None)
    mjx_model = property(lambda self: self._mjx_model)

    def __init__(self, observe=lambda x: x):
        self.observe = observe

    def reset(self, key):
        zero = jnp.zeros(())
        return SimulatorState(self.observe(zero[None]), zero, zero, {"rng": key, "time": zero})

    def step(self, state, action):
        time = state.info["time"] + 1
        info = {**state.info, "time": time}
        return SimulatorState(
            self.observe(time[None]), jnp.float32(self.mjx_model[0]["gain"]), state.done, info
        )


@pytest.fixture
def simulators(monkeypatch):
    """Stand-ins for brax and for Playground, one task of which shows critics more."""
    tasks = {
        "Plain": lambda x: x,
        "Two": lambda x: {"state": x, "privileged_state": jnp.concatenate([x, -x])},
    }
    brax = types.ModuleType("brax.envs")
    brax.__dict__.update(_envs={"ant": None}, get_environment=lambda name, backend: Simulator())

    def randomizer(model, keys):
        gain = jax.vmap(lambda key: jax.random.uniform(key, minval=1.0, maxval=3.0))(keys)
        return ({**model[0], "gain": gain}, None), ({"gain": 0, "mass": None}, None)

    registry = types.SimpleNamespace(
        ALL_ENVS=tuple(tasks),
        load=lambda name, config_overrides: Simulator(tasks[name]),
        get_domain_randomizer={"Two": randomizer}.get,
    )
    playground = types.ModuleType("mujoco_playground")
    playground.__dict__.update(registry=registry)
    monkeypatch.setitem(sys.modules, "brax", types.ModuleType("brax"))
    monkeypatch.setitem(sys.modules, "brax.envs", brax)
    monkeypatch.setitem(sys.modules, "mujoco_playground", playground)
    caches = [importlib.import_module(f"podracer_environments.{n}").load_simulator
              for n in ("brax", "playground")]  # fmt: skip
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_step_of_brax_is_one_of_its_steps(simulators):
    timesteps, _ = play(make("brax:ant,episode_length=3"), 7, 2, lambda _: jnp.zeros(1))
    assert timesteps.observation[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert timesteps.reward[1:, 0].tolist() == [2, 2, 2, 0, 2, 2, 2]
    assert np.flatnonzero(timesteps.last[:, 0]).tolist() == [3, 7]
    with pytest.raises(ConfigError, match="action_repeat"):
        make("brax:ant,action_repeat=4")
    with pytest.raises(ConfigError, match="brax:ant: episode_length must be 1, 2, 3"):
        make("brax:ant,episode_length=0")


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("", {"state": 1, "privileged_state": 2}),
        (",observe=state", 1),
        (",observe=privileged_state", 2),
        (",observe=state+privileged_state", {"state": 1, "privileged_state": 2}),
    ],
)
def test_an_observation_of_playground_has_the_chosen_entries(simulators, options, sizes):
    env = make(f"playground:Two{options}")
    check_environment(env)
    assert jax.tree.map(lambda spec: spec.shape[0], env.spec.observation) == sizes
    groups = {"actor": ("state",), "critic": ("privileged_state",)}
    assert env.spec.groups == ({} if options else groups)
    assert make("playground:Plain").spec.observation.shape == (1,)
    assert make("playground:Plain").spec.groups == {}


def test_each_episode_of_playground_draws_a_model(simulators):
    env = make("playground:Two,randomize=true")
    timesteps, _ = play(env, 7, 3, lambda _: jnp.zeros(1))
    gains = timesteps.reward[1:]
    assert (gains[3] == 0).all()  # the step that restarts
    for episode in (gains[:3], gains[4:]):
        assert (episode == episode[0]).all()
        assert ((episode > 1) & (episode < 3)).all()
    assert len({*gains[0].tolist(), *gains[4].tolist()}) == 6
    with pytest.raises(ConfigError, match="no randomizer for 'Plain'"):
        make("playground:Plain,randomize=true")


def test_a_policy_of_playground_sees_the_state_and_its_critic_more(simulators):
    env = make("playground:Two")
    settings = podracer.PPO(network=SMALL)
    check_agent(blueprint(settings, env.spec))
    agent = settings.build(env.spec)
    assert agent.groups == env.spec.groups
    assert agent.policy_spec.observation == {"state": ArraySpec((1,))}
