"""`check_agent` names the part of an agent that breaks the contract, and the user's line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import OrderedDict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.agent import DEFAULT_CONTEXT, Agent, Blueprint
from podracer.agents import AGENTS
from podracer.checks import check_agent
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.io.entry_points import installed
from podracer.ops.action_masks import mask_logits
from podracer.recipes import RECIPES
from podracer.run.setup import build
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, LearnerState

SPEC = EnvironmentSpec("walk", ArraySpec((3,)), Discrete(2))


@struct
class Good:
    """A linear policy with a memory that it does not use."""

    rate: float = 0.1

    def build(self, spec, context=DEFAULT_CONTEXT):
        def act(params, carry, timestep, keys, explore):
            logits = timestep.observation @ params["policy"]
            sample = jax.vmap(jax.random.categorical)
            action = sample(keys, logits) if explore else logits.argmax(-1)
            return action.astype(jnp.int32), {"logits": logits}, carry

        def learn(state, trajectory, key, axis):
            policy = state.shared["policy"] - self.rate * trajectory.steps.extras["logits"].mean()
            return LearnerState({"policy": policy}), {"loss": policy.mean()}

        return Agent(
            name=type(self).__name__,
            spec=spec,
            init=lambda key, num_envs: LearnerState({"policy": jnp.zeros((3, 2))}),
            carry=lambda num_envs: {"memory": jnp.zeros((num_envs, 4))},
            actor_params=lambda state: state.shared,
            act=act,
            learn=learn,
        )


@struct
class Mine:
    """A good agent with other functions, which get the settings first."""

    functions: Any = static(default=())  # pairs of name and function
    rate: float = 0.1

    def build(self, spec, context=DEFAULT_CONTEXT):
        functions = {name: partial(function, self) for name, function in self.functions}
        return dataclasses.replace(Good(self.rate).build(spec), name="Mine", **functions)


@struct
class Texted(Good):
    mode: str = "fast"


@struct
class Steered(Good):
    def build(self, spec, context=DEFAULT_CONTEXT):
        return super().build(spec, context) if self.rate > 0 else None


def agent(**functions: Any) -> Any:
    return Mine(tuple(functions.items()))


def check(settings: Any, **options: Any) -> None:
    check_agent(Blueprint(settings, SPEC), **options)


def acting(change: Any) -> Any:
    """`change` gets actions, extras, memory and `explore`."""
    return agent(act=lambda _, *args: change(*Good().build(SPEC).act(*args), args[-1]))


def learning(change: Any) -> Any:
    """`change` gets what the good agent's `learn` returns."""
    return agent(learn=lambda self, *args: change(*Good(self.rate).build(SPEC).learn(*args)))


def measuring(metrics: Any) -> Any:
    return learning(lambda state, _: (state, metrics))


def misspelled(self, state, trajectory, key, axis):
    return state.shared["polcy"]


def total(shared):
    return shared["policy"].sum()


BROKEN: dict[str, tuple[Any, str]] = {
    # What it raises.
    "KeyError": (
        agent(learn=misspelled),
        f"Mine.learn cannot be traced: KeyError: 'polcy' (test_check_agent.py, line "
        f"{misspelled.__code__.co_firstlineno + 1}).",
    ),
    "an exit, whose code 0 would count as success": (
        agent(learn=lambda *_: sys.exit(0)),
        "Mine.learn cannot be traced: SystemExit: 0 (test_check_agent.py, line ",
    ),
    "an actor that reads what each device has": (
        agent(actor_params=lambda self, state: state.local["replay"]),
        "Mine.actor_params (shared.params by default), local=(), cannot be traced: TypeError",
    ),
    "a setting that steers Python": (
        Steered(),
        "Steered.build cannot be traced: TracerBoolConversionError: a Python `if` or `while` "
        f"depends on a traced value: take jnp.where or podracer.static (test_check_agent.py, line "
        f"{Steered.build.__code__.co_firstlineno + 1}).",
    ),
    "a size that is not static": (
        agent(init=lambda self, *_: LearnerState({"policy": jnp.zeros(self.rate)})),
        "Python needs a number and got a traced value: take jax.numpy or podracer.static",
    ),
    "random numbers of NumPy": (
        agent(init=lambda *_: LearnerState({"policy": jnp.zeros(np.random.rand(2).shape)})),  # noqa: NPY002
        "Mine.init draws from NumPy's generators: draw by jax.random, with the key.",
    ),
    "a loss without aux": (
        agent(learn=lambda _, state, *args: podracer.global_grad(total, state.shared, axis=None)),
        "The loss of `global_grad` must return the pair (loss, aux).",
    ),
    "a distribution alone": (
        agent(distribution=lambda self, params, carry, timestep: timestep.observation),
        "Mine.distribution must return the pair (distribution, carry).",
    ),
    "NumPy": (
        agent(learn=lambda self, state, *_: np.sin(state.shared["policy"])),
        "TracerArrayConversionError: NumPy got a traced value: take jax.numpy (test_check_agent",
    ),
    # Metrics.
    "a Python number": (
        measuring({"rate": 0.1}),
        "metrics that are arrays, but 'rate' is of type float: write jnp.asarray(0.1).",
    ),
    "a matrix": (
        measuring({"x": jnp.zeros((3, 2))}),
        "scalars or of shape [n], n up to 1,024, but",
    ),
    "a metric without name": (measuring(jnp.zeros(())), "a dictionary of metrics, not array."),
    "a run's counter": (measuring({"frames": jnp.ones(())}), "'frames' would be one of the run's"),
    "an evaluation": (measuring({"evaluation_return": jnp.ones(())}), "group `evaluation`: take"),
    # What learn and act return.
    "a state alone": (
        learning(lambda state, metrics: state),
        "Mine.learn must return the pair (state, metrics).",
    ),
    "a key that is new": (
        learning(lambda s, m: (LearnerState(s.shared | {"steps": jnp.int32(1)}), m)),
        "must keep the structure of its state: state.shared['steps'] is new.",
    ),
    "another container": (
        learning(lambda s, m: (LearnerState(OrderedDict(s.shared), s.local), m)),
        "must keep the structure of its state: state.shared changed from dict to OrderedDict.",
    ),
    "text in the state": (
        agent(init=lambda *_: LearnerState({"phase": "warm-up"})),
        "Mine.init returns a str in .shared['phase'], no array.",
    ),
    "two parts of three": (
        acting(lambda action, extras, carry, explore: (action, extras)),
        "Mine.act must return the triple (actions, extras, carry).",
    ),
    "carry of another dtype": (
        acting(lambda a, x, carry, _: (a, x, jax.tree.map(jnp.float16, carry))),
        "Mine.act must keep carry['memory'] as float32[2, 4], but it became float16[2, 4].",
    ),
    "carry without rows": (
        agent(carry=lambda self, num_envs: jnp.zeros(4)),
        "Mine.carry: carry must lead with num_envs (2), but its shape is (4,).",
    ),
    "a tree of actions": (
        acting(lambda action, x, carry, _: ({"a": action}, x, carry)),
        "Mine.act must return actions int32[2], not dict.",
    ),
    "greedy actions of another dtype": (
        acting(lambda a, x, c, explore: (a if explore else a.astype(jnp.float32), x, c)),
        "Mine.act(explore=False) must return actions int32[2], not float32[2].",
    ),
    # What it is.
    "a class": (Good, "Good is a class: pass an instance, Good()."),
    "a text that is not static": (
        Texted(),
        "Texted.mode is a str: declare it with podracer.static.",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_agent_is_refused_in_one_line(fault):
    mine, text = BROKEN[fault]
    with pytest.raises(ConfigError) as refusal:
        check(mine, num_envs=2)
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


def obeying(mode):
    """The good agent, which obeys masks in a mode: `act` with `explore`, without, or both."""

    def act(self, params, carry, timestep, keys, explore):
        logits = timestep.observation["observation"] @ params["policy"]
        chosen = mask_logits(timestep.observation, logits) if explore in mode else logits
        return chosen.argmax(-1).astype(jnp.int32), {"logits": logits}, carry

    return agent(act=act)


@pytest.mark.parametrize(("mode", "method"), [((), "act"), ((True,), "act(explore=False)")])
def test_actions_that_a_mask_forbids_are_refused(mode, method):
    observation = {"observation": ArraySpec((3,)), "action_mask": ArraySpec((2,), bool)}
    spec = dataclasses.replace(SPEC, observation=observation)
    check_agent(Blueprint(obeying((True, False)), spec), num_envs=8, num_devices=1)
    text = f"Mine.{method} chose the action 0 where the action mask of walk allows 1 alone"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_agent(Blueprint(obeying(mode), spec), num_envs=8)


def test_the_good_agent_passes():
    check(Good(), num_devices=1)
    check(agent(learn=averaging))


# --- several devices ------------------------------------------------------------------------------


def averaging(self, state, trajectory, key, axis):
    logits = podracer.global_mean(trajectory.steps.extras["logits"].mean(), axis)
    return LearnerState({"policy": state.shared["policy"] - self.rate * logits}), {}


def in_a_loop(self, state, trajectory, key, axis):
    def body(state, _):
        return averaging(self, state, trajectory, key, axis)

    return jax.lax.scan(body, state, length=2)


def idle(self, state, trajectory, key, axis):
    return state, {"reward": trajectory.steps.timestep.reward.mean()}


def counting(self, state, trajectory, key, axis):
    reward = trajectory.steps.timestep.reward.mean()
    return LearnerState({"policy": state.shared["policy"] + 1}), {"reward": reward}


def counting_in_loops(self, state, trajectory, key, axis):
    logits = trajectory.steps.extras["logits"]

    def add(total_and_count):
        total, count = total_and_count
        return total + logits[count].mean(), count + 1

    def both(carry, x):
        (total, _), count = add(carry), carry[1] + 1
        return (total, count), x.mean()

    total, count = jax.lax.while_loop(lambda x: x[1] < 2, add, (jnp.zeros(()), 0))
    (_, count), _ = jax.lax.scan(both, (total, count), logits, length=len(logits))
    count = jax.lax.cond(count > 3, lambda x: x, lambda x: -x, count)
    policy = podracer.global_mean(total, axis) * self.rate + count
    return LearnerState({"policy": state.shared["policy"] + policy}), {}


def averaging_when_warm(self, state, trajectory, key, axis):
    is_warm = trajectory.steps.timestep.reward.sum() > 0
    new_state, _ = averaging(self, state, trajectory, key, axis)
    policy = jnp.where(is_warm, new_state.shared["policy"], state.shared["policy"])
    policy = jax.lax.cond(is_warm, lambda x: x, lambda x: x + 1, policy)
    return LearnerState({"policy": policy}), {}


def mixing_in_a_loop(self, state, trajectory, key, axis):
    def body(carry, x):
        return (carry[1], carry[1] + x.mean()), None

    zeros = (jnp.zeros(()), jnp.zeros(()))
    (total, _), _ = jax.lax.scan(body, zeros, trajectory.steps.extras["logits"])
    return LearnerState({"policy": state.shared["policy"] + total}), {}


def numbering(self, state, trajectory, key, axis):
    number = 0 if axis is None else jax.lax.axis_index(axis)
    return LearnerState({"policy": state.shared["policy"] + number}), {}


def naming_another_axis(self, state, trajectory, key, axis):
    return state, {} if axis is None else {"mean": jax.lax.pmean(self.rate, "batch")}


def averaging_a_metric_alone(self, state, trajectory, key, axis):
    logits = jax.jit(lambda x: x.mean())(trajectory.steps.extras["logits"])
    metrics = {"logits": podracer.global_mean(logits, axis)}
    return LearnerState({"policy": state.shared["policy"] - self.rate * logits}), metrics


@pytest.mark.parametrize("learn", [None, averaging_a_metric_alone, mixing_in_a_loop, numbering])
def test_learners_that_would_drift_apart_are_refused(learn):
    mine = agent(learn=learn) if learn else agent()
    check(mine, num_devices=1)
    with pytest.raises(
        ConfigError,
        match=r"Mine.learn puts into shared\['policy'\] what each of the 2 .*`devices=1`",
    ):
        check(mine, num_devices=2)


@pytest.mark.parametrize(
    "learn", [averaging, in_a_loop, averaging_when_warm, idle, counting, counting_in_loops]
)
def test_learners_that_stay_equal_are_not(learn):
    check(agent(learn=learn), num_devices=2)


def test_what_fails_on_several_devices_alone_is_named():
    with pytest.raises(
        ConfigError, match=r"Mine\.learn on several devices cannot be traced.*batch"
    ):
        check(agent(learn=naming_another_axis), num_devices=2)


def averaging_in_a_solver(self, state, trajectory, key, axis):
    def product(x):
        return podracer.global_mean(2.0 * x, axis)

    policy = state.shared["policy"]
    solution = jax.lax.custom_linear_solve(
        product, policy, lambda product, x: product(x) / 4, symmetric=True
    )
    return LearnerState({"policy": solution}), {}


def test_reductions_that_a_cpu_cannot_order_are_named():
    settings = agent(learn=averaging_in_a_solver)
    check(settings, num_devices=1)
    with pytest.raises(ConfigError, match="within `custom_linear_solve` cannot be ordered"):
        check(settings)


# --- the library's own agents --------------------------------------------------------------------

WORLDS = "lifetimes:worlds:small,envs=16,steps=4000"
ENVIRONMENTS = {
    **dict.fromkeys(("DDPG", "SAC"), "pendulum"),
    **dict.fromkeys(("LPG",), WORLDS),
}
WITH_FILE = {"Disco", "LPGStudent"}  # of a discovered rule


@pytest.mark.slow  # small ones of all pass in `test_contract.py`
@pytest.mark.parametrize("name", sorted({*AGENTS} - WITH_FILE))
def test_every_agent_passes_as_it_is(name):
    env = podracer.make(ENVIRONMENTS.get(name, "catch"))
    check_agent(Blueprint(AGENTS[name](), env.spec))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, *installed("recipes")])
def test_the_agent_of_every_recipe_passes_as_it_is(name):
    try:
        agent, _ = build(recipes.find(name))
    except ConfigError as error:
        pytest.skip(str(error))  # needs a package, or the file of a rule
    check_agent(agent)


@pytest.mark.parametrize("name", ["PPO", "DQN"])
def test_a_part_of_an_observation_may_have_no_numbers(name):
    observation = {"a": ArraySpec((3,)), "b": ArraySpec((0,))}
    check_agent(Blueprint(AGENTS[name](), EnvironmentSpec("walk", observation, Discrete(2))))
