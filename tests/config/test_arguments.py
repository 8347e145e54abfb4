"""What a first line of a user gets wrong is answered by one sentence that says what to write."""

import dataclasses
import itertools
import re
from functools import partial

import gymnasium
import jax
import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.agent import DEFAULT_CONTEXT
from podracer.arguments import refusal
from podracer.config.serialization import to_json
from podracer.drivers.anakin import Anakin
from podracer.drivers.population import Pod, Population
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba.driver import Sebulba
from podracer.envs.catch import Catch
from podracer.envs.lifetimes import Lifetimes
from podracer.run.resume import check_same_experiment
from podracer.tournament.config import Tournament

SPEC = Catch().spec
CONFIG = podracer.AnakinConfig()
AGENT = podracer.PPO().build(SPEC)
STATE = podracer.LearnerState(())
EVALUATE = podracer.make_evaluator(AGENT, Catch(), 2)
DRIVER = Anakin(podracer.PPO(), Catch(), CONFIG)


class Tank(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, leak=0.3):
        self.leak = leak


class Notes:
    """Sink, which is no function of a `Boundary` although its class can be called."""

    def __init__(self, name="notes"):
        self.name = name

    def write(self, record):
        pass


def tank(**options):
    return podracer.Gymnasium(Tank, workers=0, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: podracer.train(podracer.PPO()), "object of class PPO: it must be the name of a"),
        (lambda: podracer.train(environment="catch"), "missing a required argument: 'experiment'"),
        (lambda: podracer.train("catch", frames=1000.0), "frames cannot be 1000.0: write 1000."),
        (lambda: podracer.train("catch", callbacks=[3]), "a callback is a function of the Boundar"),
        (lambda: podracer.train("catch", callbacks=[Notes]), "the name of a package's, not <class"),
        (lambda: podracer.PPO(lr=1e-3), "PPO has no field 'lr': did you mean learning_rate?"),
        (
            lambda: podracer.PPO(network=podracer.MLP((64,))),
            "PPO.network cannot be an object of class MLP: write podracer.TorsoNetwork(podracer.",
        ),
        (lambda: podracer.MLP([64, 64]), "MLP.hidden cannot be [64, 64]: write (64, 64)."),
        (lambda: podracer.PPO(actor_groups="seen"), "groups cannot be 'seen': write ('seen',)."),
        (lambda: tank(observe="seen"), "observe must be a tuple, ('seen',), but it is 'seen'."),
        (lambda: tank(options={"leak": 0.3}), "options are pairs: write (('leak', 0.3),)."),
        (lambda: Anakin(podracer.PPO(), "catch", CONFIG), "env cannot be 'catch'"),
        (
            lambda: Sebulba(podracer.PPO(), Catch(), podracer.AnakinConfig()),
            "Sebulba: config cannot be an object of class AnakinConfig",
        ),
        (
            lambda: podracer.make_evaluator(podracer.PPO().build(SPEC), Tank(), 1),
            "Tank is one of Gymnasium: pass podracer.Gymnasium(Tank).",
        ),
        (
            lambda: Population(podracer.PPO(), [Pod(0)], Catch(), podracer.SebulbaConfig()),
            "Population: config cannot be an object of class SebulbaConfig",
        ),
        (lambda: EVALUATE(STATE, jax.random.key(0)), "takes (agent.actor_params(state), jax.ran"),
        (lambda: EVALUATE(jax.random.key(0), {}), "an evaluator takes (agent.actor_params(st"),
        (lambda: DRIVER.run(DRIVER.abstract_state, 10), "orders cannot be 10: it must be podra"),
        (lambda: DRIVER.run(STATE, Orders(1)), "state cannot be an object of class LearnerState:"),
        (
            lambda: Anakin(podracer.Blueprint(podracer.PPO(), SPEC, 16), Catch(), CONFIG),
            "Blueprint.context cannot be 16: it must be podracer.Context(rollout_length=16).",
        ),
        (lambda: podracer.Gymnasium([Tank]), "is neither a registered id nor something to call"),
        (lambda: Population(podracer.PPO(), [Pod(0)], tank(), CONFIG), "Tank runs on the host, an"),
        (lambda: Anakin(podracer.PPO(), SPEC, CONFIG), "EnvironmentSpec is no environment, as it"),
        (lambda: Lifetimes(Tank()), "Tank is not a device environment, so it cannot have lifetim"),
        (lambda: Lifetimes(Catch), "Catch is not a device environment, so it cannot have lifetim"),
        (
            lambda: podracer.TorsoNetwork().build(Tank.observation_space, {}),
            "a network takes podracer.ArraySpec, or a tree of them, not Box.",
        ),
        (lambda: tank(step_seconds=0), "step_seconds must be at least 0.001, but it is 0."),
        (lambda: tank(options=("leak", 0.3)), "options are pairs: write (('leak', 0.3),)."),
        (lambda: podracer.check_agent("catch", num_devices=0), "num_devices must be at least 1"),
        (
            lambda: podracer.check_agent(podracer.Blueprint(podracer.PPO(discount="x"), SPEC)),
            "PPO.discount cannot be 'x': it must be a number.",
        ),
        (lambda: Tournament((), round=3), "Tournament has no field 'round': did you mean rounds"),
        (lambda: podracer.train("catch", recipe="../x"), "run name '../x-s0-"),
        (lambda: podracer.train("catch", pods=(Pod(0), Pod(0))), "two pods are equal, and would"),
        (lambda: recipes.find("catch").with_arch("Anakin"), "must be one of 'anakin', 'sebulba'."),
        (
            lambda: podracer.Gymnasium(partial(Tank, leek=0.3), workers=0),
            "unexpected keyword argument 'leek': did you mean leak?",
        ),
        (lambda: podracer.auto_reset(Catch), "cannot be the class Catch: write Catch(...)."),
        (lambda: podracer.Discrete(0), "Discrete.num_actions must be at least 1, but it is 0."),
        (lambda: podracer.Continuous((0.0,), (np.inf,)), "low < high, finite and as far apart"),
        (lambda: podracer.EnvironmentSpec("x", SPEC), "missing a required argument: 'action'"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_to_write(call, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(podracer.ConfigError, match=re.escape(words)):
        call()
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_arguments():
    assert podracer.Discrete(np.int64(3)) == podracer.Discrete(3)


def test_an_experiment_brings_its_agents_environment_and_rollouts():
    @podracer.struct
    class Long(podracer.A2C):
        def build(self, spec, context=DEFAULT_CONTEXT):
            if context.rollout_length != 7 or spec.name != "catch":
                raise podracer.ConfigError(f"built for {context.rollout_length} in {spec.name}.")
            return podracer.A2C.build(self, spec, context)

    driver = podracer.AnakinConfig(num_envs=4, rollout_length=7)
    experiment = podracer.Experiment(environment="catch", agent=Long(), driver=driver, frames=64)
    podracer.check_agent(experiment)
    with pytest.raises(podracer.ConfigError, match="built for 16 in catch"):
        podracer.check_agent(podracer.Blueprint(Long(), SPEC))


def test_what_is_no_finite_number_is_not_proposed_in_a_tuple():
    assert refusal("hidden", 2.5, tuple[float, ...]).endswith("write (2.5,).")
    assert "write" not in refusal("hidden", float("nan"), tuple[float, ...])


def test_a_run_is_not_resumed_in_another_class_of_gymnasium():
    class Pool(Tank):
        pass

    run = recipes.find("cartpole_sebulba")
    kinds = (Tank, Pool, partial(Tank, leak=0.1), partial(Pool, leak=0.1))
    runs = [
        dataclasses.replace(run, environment=podracer.Gymnasium(kind, workers=0)) for kind in kinds
    ]
    for old, new in itertools.permutations(runs, 2):
        with pytest.raises(podracer.ConfigError, match=r"environment\.environment"):
            check_same_experiment(to_json(old), new)
