"""What a first line of a user gets wrong is answered by one sentence that says what to write."""

import re
import subprocess
import sys
import traceback
from functools import partial

import gymnasium
import jax
import numpy as np
import pytest

import podracer
from podracer.agent import DEFAULT_CONTEXT
from podracer.envs.catch import Catch

SPEC = Catch().spec
WHOLE = "it must be a whole number."


class Tank(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, leak=0.3):
        self.leak = leak


def tank(**options):
    return podracer.Gymnasium(Tank, workers=0, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: podracer.train(podracer.PPO()), "object of class PPO: it must be the name of a"),
        (lambda: podracer.train(podracer.PPO, "catch"), "too many positional arguments; it takes "),
        (lambda: podracer.train("catch", frames=1000.0), "frames cannot be 1000.0: write 1000."),
        (lambda: podracer.train("catch", callbacks=[3]), "a callback is a function of the Boundar"),
        (lambda: podracer.train("catch", begin="runs/x"), "begin cannot be 'runs/x': it must be "),
        (lambda: podracer.PPO(lr=1e-3), "PPO has no field 'lr': did you mean learning_rate?"),
        (lambda: podracer.PPO("MlpPolicy", Tank()), "PPO takes its settings by their names, such"),
        (lambda: podracer.PPO(network=podracer.TorsoNetwork), "class TorsoNetwork: write TorsoN"),
        (
            lambda: podracer.PPO(network=podracer.MLP((64,))),
            "PPO.network cannot be an object of class MLP: write podracer.TorsoNetwork(podracer.",
        ),
        (lambda: podracer.PPO().build(Catch()), "class Catch: it must be the `spec` of an envir"),
        (lambda: podracer.MLP([64, 64]), "MLP.hidden cannot be [64, 64]: write (64, 64)."),
        (lambda: tank(leak=0.3), "no field 'leak': an option of a class goes into functools.part"),
        (lambda: tank(options={"leak": 0.3}), "options are pairs: write (('leak', 0.3),)."),
        (
            lambda: podracer.Gymnasium(partial(Tank, leek=0.3), workers=0),
            "unexpected keyword argument 'leek': did you mean leak?",
        ),
        (lambda: podracer.auto_reset(Catch), "cannot be the class Catch: write Catch(...)."),
        (lambda: podracer.Discrete(0), "Discrete.num_actions must be at least 1, but it is 0."),
        (lambda: podracer.Discrete(2.5), f"Discrete.num_actions cannot be 2.5: {WHOLE}"),
        (lambda: podracer.MultiDiscrete(()), "MultiDiscrete.num_actions needs at least one comp"),
        (lambda: podracer.Continuous(-np.inf, np.inf), "low cannot be -inf: it must be a tuple"),
        (lambda: podracer.Continuous((0.0,), (np.inf,)), "low < high, finite and as far apart"),
        (lambda: podracer.Continuous((0.0, 0.0), (1.0,)), "as many lower as upper bounds"),
        (lambda: podracer.ArraySpec((3,), "foo"), "ArraySpec.dtype cannot be 'foo'"),
        (lambda: podracer.EnvironmentSpec("x", SPEC), "missing a required argument: 'action'"),
        (lambda: podracer.make(Catch), "make: name cannot be the class Catch"),
        (lambda: podracer.check_agent(podracer.PPO()), "PPO: it must be the name of a recipe, or"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_to_write(call, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(podracer.ConfigError, match=re.escape(words)):
        call()
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_arguments():
    assert podracer.Discrete(np.int64(3)) == podracer.Discrete(3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TD3", "podracer.agents.ddpg.td3"),
        ("R2D2", "it is podracer.agents.R2D2."),
        ("trian", "did you mean train?"),
    ],
)
def test_a_name_that_is_elsewhere_is_said(name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(podracer, name)


def test_a_module_needs_no_import_of_its_own():
    script = "import podracer; print(podracer.agents.R2D2.__name__, podracer.types.Step.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["R2D2", "Step"]


def test_a_mistake_costs_a_few_lines_of_traceback():
    """As JAX does: `jax_traceback_filtering` brings the library's own frames back."""

    def lines():
        with pytest.raises(podracer.ConfigError, match="did you mean learning_rate") as caught:
            podracer.train("catch", agent={"learning_raet": 1e-3})
        return len(traceback.format_exception(caught.value))

    assert lines() <= 6
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert lines() > 6
    finally:
        jax.config.update("jax_traceback_filtering", "auto")


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
