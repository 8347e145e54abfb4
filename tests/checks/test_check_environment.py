"""`check_environment` refuses what drivers could not run, names what is wrong, compiles nothing."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.checks import check_environment
from podracer.environment import auto_reset, restart, transition
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.run.setup import build, make_driver
from podracer.types import ACTION_MASK, ArraySpec, Continuous, Discrete, EnvironmentSpec, TimeStep


@struct
class State:
    x: jax.Array  # f32 [3]
    time: jax.Array  # int32


SPEC = EnvironmentSpec("walk", {"x": ArraySpec((3,))}, Discrete(2))


def reset(key: jax.Array) -> tuple[State, TimeStep]:
    x = jax.random.normal(key, (3,))
    return State(x, jnp.int32(0)), restart({"x": x})


def step(key: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    x = state.x + action + jax.random.normal(key, (3,))
    state = State(x, state.time + 1)
    return state, transition({"x": x}, x.sum(), timeout=state.time >= 10)


def mutant(**parts: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"spec": SPEC, "reset": reset, "step": step} | parts))


def without(part: str) -> SimpleNamespace:
    environment = mutant()
    delattr(environment, part)
    return environment


def changed(thing: Any, **fields: Any) -> Any:
    """`dataclasses.replace` past the type checks that tests run under and users do not."""
    thing = copy.copy(thing)
    vars(thing).update(fields)
    return thing


def with_spec(**fields: Any) -> SimpleNamespace:
    return mutant(spec=changed(SPEC, **fields))


def stepping(change: Any) -> SimpleNamespace:
    """`change` gets the good state and timestep of `step` and returns what is given instead."""
    return mutant(step=lambda key, state, action: change(*step(key, state, action)))


def showing(**fields: Any) -> SimpleNamespace:
    """A timestep of `step` with other fields: functions of the timestep."""
    return stepping(
        lambda state, timestep: (
            state,
            changed(timestep, **{name: f(timestep) for name, f in fields.items()}),
        )
    )


def opening(**fields: Any) -> SimpleNamespace:
    def broken_reset(key: jax.Array) -> tuple[State, TimeStep]:
        state, timestep = reset(key)
        return state, changed(timestep, **fields)

    return mutant(reset=broken_reset)


def branching(key: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
    if state.time > 5:
        return reset(key)
    return step(key, state, action)


class Remembering:
    """Keeps its state on itself, where a trace leaves a tracer."""

    spec = SPEC

    def reset(self, key: jax.Array) -> tuple[State, TimeStep]:
        self.state, timestep = reset(key)
        return self.state, timestep

    def step(self, key: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        self.state, timestep = step(key, self.state, action)
        return self.state, timestep


class Counting:
    """Counts its calls outside of the state."""

    spec, calls = SPEC, 0
    reset = staticmethod(reset)

    def step(self, key: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        self.calls += 1
        return step(key, changed(state, time=state.time + self.calls), action)


class Drawing:
    """Draws from a generator of NumPy that is its attribute."""

    spec, step = SPEC, staticmethod(step)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def reset(self, key: jax.Array) -> tuple[State, TimeStep]:
        return reset(jax.random.fold_in(key, int(self.rng.random() < 0)))


@dataclass
class Plain:
    x: jax.Array
    time: jax.Array


def masked(shape: tuple[int, ...], dtype: Any, **fields: Any) -> SimpleNamespace:
    observation = {**SPEC.observation, ACTION_MASK: ArraySpec(shape, dtype)}
    return with_spec(observation=observation, **fields)


class NoSpec:
    reset = staticmethod(reset)
    step = staticmethod(step)


class Exiting:
    @property
    def spec(self):
        sys.exit(0)


class Unreadable:
    """Has a specification that raises while it is read."""

    reset = staticmethod(reset)
    step = staticmethod(step)

    @property
    def spec(self) -> EnvironmentSpec:
        return self.my_spec


def of_gymnasium(name: str, **members: Any) -> Any:
    return type(name, (), {"__module__": "gymnasium.core", **members})()


HOST = mutant(make=lambda num_envs, num_threads: None)


def looking_up_in_python(key: jax.Array) -> Any:
    return {}["seed"]


BROKEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    # What the environment is.
    "a class, not an instance": (Remembering, ("Remembering", "class")),
    "no spec": (NoSpec(), ("NoSpec is no environment", "no `spec`", "podracer.check_agent")),
    "an agent": (podracer.A2C(), ("A2C is no environment", "agents and experiments")),
    "a function": (reset, ("reset is no environment",)),
    "a spec that is a method": (
        SimpleNamespace(spec=Counting().step),
        ("SimpleNamespace.spec must be an EnvironmentSpec, but it is a method: put @property",),
    ),
    "a spec that exits": (Exiting(), ("Exiting.spec cannot be read: SystemExit: 0",)),
    "a spec that raises": (
        Unreadable(),
        (
            "Unreadable.spec cannot be read: AttributeError:",
            "my_spec",
            "(test_check_environment.py",
        ),
    ),
    "an environment of Gymnasium": (
        of_gymnasium("TimeLimit", spec=SimpleNamespace(id="CartPole-v1")),
        ("TimeLimit is one of Gymnasium", 'pass podracer.Gymnasium("CartPole-v1")'),
    ),
    "an environment of the host": (HOST, ("walk runs on the host", "not in JAX")),
    "no reset": (without("reset"), ("`reset`",)),
    "an empty observation": (
        with_spec(observation={"x": ArraySpec((0,)), "y": ArraySpec((3, 0))}),
        ("spec.observation has no numbers",),
    ),
    "observation a bare shape": (
        with_spec(observation=(3,)),
        ("spec.observation must be a tree of podracer.ArraySpec, not of int.",),
    ),
    # What its specification says.
    "actions of another type": (with_spec(action=2), ("spec.action", "Discrete", "int")),
    "actions of Gymnasium": (
        with_spec(action=of_gymnasium("Discrete", n=3)),
        ("spec.action must be podracer.Discrete,", "but it is a <class 'gymnasium.core.Discrete'>"),
    ),
    "a text for groups": (
        with_spec(groups={"actor": "ab"}),
        ("spec.groups['actor'] is a tuple: write ('ab',).",),
    ),
    # What reset and step take and return.
    "reset takes no key": (mutant(reset=lambda: reset(jax.random.key(0))), ("`reset`", "argument")),
    "three values": (stepping(lambda state, timestep: (state, timestep, {})), ("`step`", "pair")),
    "an observation for a timestep": (
        stepping(lambda state, timestep: (state, timestep.observation)),
        ("`step`", "the pair (state, TimeStep)"),
    ),
    # What the timesteps hold.
    "observation of another dtype": (
        with_spec(observation={"x": ArraySpec((3,), np.int32)}),
        ("reset().timestep.observation['x']", "int32[3]", "float32[3]"),
    ),
    "observation of double precision": (
        with_spec(observation={"x": ArraySpec((3,), np.float64)}),
        ("spec.observation['x'] is float64", "devices keep float32: declare and return"),
    ),
    "observation of text": (
        with_spec(observation={"x": ArraySpec((3,), "U3")}),
        ("spec.observation['x'] must be of real numbers or bool, and not of <U3",),
    ),
    "observation of complex numbers": (
        with_spec(observation={"x": ArraySpec((3,), np.complex64)}),
        ("spec.observation['x'] must be of real numbers or bool, and not of complex64",),
    ),
    "observation of another shape": (
        showing(observation=lambda t: {"x": t.observation["x"][:2]}),
        ("step().timestep.observation['x']", "float32[3]", "float32[2]"),
    ),
    "observation missing": (
        opening(observation={}),
        ("reset().timestep.observation['x']", "missing", "float32[3]"),
    ),
    "reward a Python number": (
        showing(reward=lambda t: 1.0),
        ("step().timestep.reward", "weakly typed", "jnp.float32"),
    ),
    # What the state does.
    "state grows": (
        stepping(lambda state, t: (changed(state, x=jnp.tile(state.x, 2)), t)),
        ("state.x", "float32[3]", "float32[6]"),
    ),
    "state in another container": (
        mutant(
            reset=lambda key: ((reset(key)[0].x,), reset(key)[1]),
            step=lambda key, state, action: ([state[0]], reset(key)[1]),
        ),
        ("state must keep its structure: state changed from tuple to list.",),
    ),
    "state with another container inside": (
        mutant(
            reset=lambda key: ({"a": (reset(key)[0].x, ())}, reset(key)[1]),
            step=lambda key, state, action: ({"a": (state["a"][0], None)}, reset(key)[1]),
        ),
        ("structure: state['a'][1] changed from tuple to NoneType.",),
    ),
    "state with a key": (
        mutant(
            reset=lambda key: ((reset(key)[0], key), reset(key)[1]),
            step=lambda key, state, action: ((state[0], key), reset(key)[1]),
        ),
        ("state[1]", "random key"),
    ),
    "state with a string": (
        mutant(reset=lambda key: ("start", reset(key)[1])),
        ("`reset` returns a str in [0], no array",),
    ),
    "state of a plain dataclass": (
        mutant(reset=lambda key: (Plain(**vars(reset(key)[0])), reset(key)[1])),
        ("`reset` returns a Plain in [0], no array: put @podracer.struct above it.",),
    ),
    # What only Python can run.
    "if on a traced value": (
        mutant(step=branching),
        (
            "`step`",
            "TracerBoolConversionError: a Python `if` or `while` depends on a traced value",
            f"(test_check_environment.py, line {branching.__code__.co_firstlineno + 1})",
        ),
    ),
    "float of a traced value": (
        mutant(step=lambda key, state, action: step(key, state, float(action))),
        ("`step`", "ConcretizationTypeError: Python needs a number and got a traced value: take "),
    ),
    "a range over a traced value": (
        mutant(step=lambda key, state, action: step(key, state, max(range(action)))),
        ("`step`", "Python needs a number and got a traced value: take jax.numpy or"),
    ),
    "state kept on the object": (Remembering(), ("`reset`", "as on `self`: keep it in the state")),
    "an attribute that counts": (Counting(), ("`step`", "changes from call to call")),
    "random numbers of numpy": (
        mutant(
            reset=lambda key: reset(
                jax.random.fold_in(key, np.random.default_rng().integers(99**9))
            )
        ),
        ("`reset`", "drawn with the key"),
    ),
    "two equal numbers of a global generator": (
        mutant(reset=lambda key: reset(jax.random.fold_in(key, int(np.random.rand())))),  # noqa: NPY002
        ("`reset` draws from NumPy's generators", "draw by jax.random, with the key"),
    ),
    "two equal numbers of a generator of its own": (
        Drawing(),
        ("`reset` draws from NumPy's generators",),
    ),
    "a mask of another length": (masked((3,), np.bool_), ("bool[2]", "bool[3]")),
    "actions from 1 on": (
        mutant(spec=EnvironmentSpec("one", ArraySpec((2,)), Discrete(3, start=1))),
        ("count from 0", "`start`"),
    ),
    "actions from 1 on in an environment that has a variant for evaluation": (
        mutant(
            spec=EnvironmentSpec("one", ArraySpec((2,)), Discrete(3, start=1)),
            for_evaluation=mutant,
        ),
        ("count from 0", "`start`"),
    ),
    "a mask of continuous actions": (
        masked((2,), np.bool_, action=Continuous((0.0,), (1.0,))),
        ("only discrete actions",),
    ),
    "an exception of its own": (
        mutant(reset=looking_up_in_python),
        ("`reset`", "KeyError: 'seed' (test_check_environment.py, line "),
    ),
}


@pytest.fixture
def compiled():
    """Names of what JAX compiles during the test."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.figure(20)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_environment_is_refused_without_a_compile(fault: str, compiled: list[str]) -> None:
    environment, words = BROKEN[fault]
    with pytest.raises(ConfigError) as refusal:
        check_environment(environment)
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not compiled


def test_the_good_environment_passes_without_a_compile(compiled: list[str]) -> None:
    assert check_environment(mutant()) is SPEC
    assert not compiled
    jax.jit(lambda x: x * 3)(jnp.ones(7))  # the listener does hear compiles
    assert compiled


def test_an_environment_may_seed_the_generators_that_it_draws_from() -> None:
    def seeded_reset(key: jax.Array) -> tuple[State, TimeStep]:
        np.random.seed(0)  # noqa: NPY002
        return reset(jax.random.fold_in(key, np.random.randint(9)))  # noqa: NPY002

    assert check_environment(mutant(reset=seeded_reset)) is SPEC


def test_who_trains_is_told_before_a_compile_that_no_episode_follows(compiled: list[str]) -> None:
    """An environment without ends needs no restarts."""
    for driver in (podracer.AnakinConfig(), podracer.SebulbaConfig()):
        settings = {"agent": podracer.A2C(), "driver": driver, "devices": 1, "frames": 9}
        with pytest.raises(ConfigError, match=r"walk: episodes end .*podracer.auto_reset"):
            make_driver(podracer.Experiment(environment=mutant(), **settings))
    check_environment(auto_reset(mutant()), restarts=True)
    endless = mutant(step=lambda key, state, action: (state, transition({"x": state.x}, 1.0)))
    check_environment(endless, restarts=True)
    assert not compiled


def test_what_jax_remembers_of_functions_is_no_change() -> None:
    """Loops and clips that share functions are printed otherwise where JAX has traced them."""

    def clip_in_a_loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.clip(jnp.abs(x) + i, 0.0, 9.0), x)

    def step_twice(key: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        x = jax.lax.cond(action > 0, clip_in_a_loop, lambda x: jnp.clip(x, 0.0, 9.0), state.x)
        counts = jnp.zeros(4, jnp.int32).at[action].add(jnp.clip(action, 0, 1))
        x = clip_in_a_loop(clip_in_a_loop(x)) + counts.at[1].add(1).sum()
        return step(key, State(x, state.time), action)

    environment = mutant(step=step_twice)
    state, _ = reset(jax.random.key(0))
    jax.eval_shape(step_twice, jax.random.key(0), state, jnp.int32(0))
    assert check_environment(environment) is SPEC


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (partial(jax.enable_x64, True), "jax_enable_x64 to be False, .* unset JAX_ENABLE_X64"),
        (partial(jax.numpy_dtype_promotion, "strict"), "promotion to be standard"),
        (jax.disable_jit, "jax_disable_jit"),
    ],
)
def test_settings_of_jax_that_exclude_the_programs_are_refused(setting, words, tmp_path):
    """Before anything is compiled or written; whatever loads a run builds it, too."""
    with setting(), pytest.raises(ConfigError, match=words):
        podracer.train("catch", frames=64, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with setting(), pytest.raises(ConfigError, match=words):
        build(recipes.find("catch"))


def test_a_vector_of_rewards_is_refused_with_the_remedy() -> None:
    class Vector:
        spec = EnvironmentSpec("vector", ArraySpec((3,)), Discrete(2))

        def reset(self, key):
            return jnp.int32(0), restart(jnp.zeros(3))

        def step(self, key, state, action):
            return state, replace(transition(jnp.zeros(3), 0.0), reward=jnp.zeros(2))

    with pytest.raises(ConfigError, match=r"dot\(weights, rewards\).*agents_as_rows\(env, 2\)"):
        check_environment(auto_reset(Vector()))
