"""What a field of a configuration cannot be is refused, with what it must be."""

import dataclasses
import re

import optax
import pytest

import podracer
from podracer import recipes
from podracer.agents.common.optimizers import Optimizer
from podracer.config.experiment import check_types
from podracer.fields import check_ranges

CATCH = recipes.find("catch_a2c")
NUMBER_OR_SCHEDULE = "it must be a number or podracer.Linear(1e-3, 0.0)."


class Plain:
    """Builds an optimizer, but is no struct."""

    def build(self, max_gradient_norm=None, *, root_epsilon=0.0):
        return optax.scale_by_adam()


@podracer.struct
class Built:
    """Builds the optimizer of a name."""

    name: str = podracer.static(default="adam")

    def build(self, max_gradient_norm=None, *, root_epsilon=0.0):
        methods = {
            "adam": lambda: optax.adam(1e-3),
            "decayed": lambda: optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1)),
            "lion": optax.scale_by_lion,
            "muon": optax.contrib.scale_by_muon,
            "rising": lambda: optax.scale_by_schedule(lambda count: 0.1 * count),
        }
        return methods[self.name]()


def of_agent(**fields):
    return {"agent": dataclasses.replace(CATCH.agent, **fields)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (of_agent(optimizer=optax.adam(1e-3)), "whose `build` returns an optimizer of optax"),
        (of_agent(optimizer=Plain()), "put @podracer.struct above its class Plain."),
        (of_agent(optimizer=Built()), "Built point downhill already"),
        (of_agent(learning_rate="1e-3:0"), f"cannot be '1e-3:0': {NUMBER_OR_SCHEDULE}"),
        (of_agent(discount=podracer.Linear(0.9, 1.0)), "be a number, as it follows no schedule."),
        ({"recipe": podracer.Linear(0.9, 1.0)}, "it must be text without control characters."),
        ({"driver": "anakin"}, "cannot be 'anakin': it must be AnakinConfig(...) or SebulbaCon"),
        ({"agent": podracer.A2C}, "cannot be the class A2C: write A2C(...)."),
        ({"environment": Plain}, "Plain is a class: pass an instance, or podracer.Gymnasium(Plain"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_answered_with_what_to_write(changes, words, tmp_path):
    with pytest.raises(podracer.ConfigError, match=re.escape(words)):
        podracer.train("catch_a2c", run_dir=tmp_path / "run", **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["decayed", "lion", "muon", "rising"])
def test_an_unscaled_optimizer_of_ones_own_is_taken(name):
    check_types(dataclasses.replace(CATCH, **of_agent(optimizer=Built(name))))


def test_the_optimizers_of_the_library_are_not_tried(monkeypatch):
    built = []
    monkeypatch.setattr(Optimizer, "build", lambda *args, **__: built.append(args))
    check_types(CATCH)
    assert not built


@podracer.struct
class WarmingUp:
    """A mistake: the learning rate is in the optimizer, and the agent's comes on top."""

    def build(self, max_gradient_norm=None, *, root_epsilon=0.0):
        return optax.adam(optax.linear_schedule(0.0, 1e-3, 10))


@podracer.struct
class Nothing:
    def build(self, max_gradient_norm=None, *, root_epsilon=0.0):
        return optax.GradientTransformation(lambda _: None, lambda *_: (None, None))


def test_an_optimizer_that_warms_up_is_refused_by_its_next_updates():
    with pytest.raises(podracer.ConfigError, match="WarmingUp point downhill already"):
        check_types(dataclasses.replace(CATCH, **of_agent(optimizer=WarmingUp())))
    check_types(dataclasses.replace(CATCH, **of_agent(optimizer=Nothing())))  # refused later


def test_lists_in_dictionaries_are_tuples_and_others_are_refused():
    changed = CATCH.with_fields({"agent": {"network": {"torso": {"hidden": [32, 32]}}}})
    assert changed.agent.network.torso.hidden == (32, 32)
    listed = dataclasses.replace(CATCH.driver, num_envs=[8])
    with pytest.raises(podracer.ConfigError, match=r"net\.num_envs must be a tuple, \(8,\)"):
        check_ranges(listed, "net")


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(podracer.ConfigError, match=f"{tmp_path}/run already holds a run"):
        podracer.train("catch_a2c", run_dir="~/run")
    for command in (podracer.load, podracer.load_policy):
        with pytest.raises(podracer.ConfigError, match=f"^{tmp_path}/none holds no run"):
            command("~/none")
    with pytest.raises(podracer.ConfigError, match=f"^{tmp_path}/none holds no run"):
        podracer.train("catch_a2c", begin=podracer.Weights("~/none"))
