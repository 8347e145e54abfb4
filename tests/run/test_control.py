"""A run's `control`: other numbers of the agent and of the environment while it trains."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.devices.mesh import make_mesh
from podracer.drivers.state import place_leaves, with_blueprint
from podracer.errors import ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.run.changes import changed_blueprint, merged
from podracer.run.loop import Run
from podracer.run.setup import build, make_driver


@podracer.struct
class Bowl:
    """One step: the reward is less by the squared distance of the action from `center`."""

    center: float = 0.0
    slopes: Any = dataclasses.field(default_factory=lambda: np.zeros(2, np.float32))
    width: int = podracer.static(default=1)

    @property
    def spec(self):
        return podracer.EnvironmentSpec(
            "bowl", podracer.ArraySpec((self.width,), np.float32), podracer.Continuous((-1,), (1,))
        )

    def reset(self, key):
        return (), self._timestep(0.0, 1.0, True)

    def step(self, key, state, action):
        return (), self._timestep(-((action[0] - self.center) ** 2), 0.0, True)

    def _timestep(self, reward, discount, first):
        return podracer.TimeStep(
            jnp.zeros(self.width), jnp.float32(reward), jnp.float32(discount),
            jnp.bool_(first), jnp.bool_(False),
        )  # fmt: skip


EXPERIMENT = dataclasses.replace(
    recipes.find("catch_a2c").with_fields({
        "environment": Bowl(), "frames": 16 * 8 * 40, "evaluations": 4, "evaluation_episodes": 2,
        "devices": 1, "save_seconds": 0.0, "target_return": None,
        "driver": {"num_envs": 16, "rollout_length": 8, "updates_per_chunk": 5},
    })
)  # fmt: skip


def halve(boundary: podracer.Boundary) -> dict[str, Any]:
    return {"agent": {"learning_rate": 1e-3 * 0.5 ** (boundary.metrics["updates"] / 10)}}


def records(run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_number_of_the_agent_changes_and_nothing_is_compiled_again(tmp_path):
    compiles, counts = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
    )

    def control(boundary):
        counts.append(len(compiles))
        return halve(boundary)

    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", callbacks=[podracer.Control(control)])
    rates = [record.get("agent.learning_rate") for record in records(tmp_path / "run")]
    assert rates == [None, None, 5e-4, 5e-4, 2.5e-4, 2.5e-4, 1.25e-4, 1.25e-4]
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 3
    podracer.train(EXPERIMENT, run_dir=tmp_path / "alone")
    assert stored_fingerprint(tmp_path / "run") != stored_fingerprint(tmp_path / "alone")


def test_a_number_of_the_environment_changes_and_evaluations_keep_it(tmp_path):
    seen = []

    def control(boundary):
        seen.append(boundary.evaluation.returns.mean())
        return {"environment": {"center": 10.0}}

    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", callbacks=[podracer.Control(control)])
    returns = [record["episode_return"] for record in records(tmp_path / "run")]
    assert min(returns[:2]) > -10
    assert max(returns[2:]) < -50
    assert min(seen) > -10


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_as_it_would_have(devices, tmp_path):
    """What `control` changed before the last save is in the checkpoint; later it is asked again."""

    def control(boundary):
        change = {"center": boundary.metrics["updates"] / 100}
        return {"environment": change, **halve(boundary)}

    def lose(boundary):
        if boundary.metrics["updates"] == 30:
            raise RuntimeError("lost")

    experiment = dataclasses.replace(EXPERIMENT, devices=devices)
    podracer.train(experiment, run_dir=tmp_path / "alone", callbacks=[podracer.Control(control)])
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="lost"):
        podracer.train(experiment, run_dir=run, callbacks=[podracer.Control(control), lose])
    podracer.train(experiment, run_dir=run, resume=True, callbacks=[podracer.Control(control)])
    assert stored_fingerprint(run) == stored_fingerprint(tmp_path / "alone")
    names = ("updates", "agent.learning_rate", "environment.center", "episode_return")
    pairs = [
        [[record.get(name) for name in names] for record in records(path)]
        for path in (run, tmp_path / "alone")
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.slow
def test_a_run_that_is_resumed_without_its_control_keeps_what_changed(tmp_path, caplog):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, callbacks=[podracer.Control(halve)])
    longer = dataclasses.replace(EXPERIMENT, frames=EXPERIMENT.frames + 16 * 8 * 5)
    podracer.train(longer, run_dir=run, resume=True)
    assert records(run)[-1]["agent.learning_rate"] == 1e-3 / 16
    assert "goes on with the numbers that have changed: agent.learning_rate." in caplog.text


def test_learners_of_sebulba_change_and_what_actors_act_by_cannot(tmp_path):
    short = {"environment": "catch", "frames": 16 * 8 * 20, "evaluations": 2}
    sebulba = EXPERIMENT.with_fields(short).with_arch("sebulba")
    podracer.train(sebulba, run_dir=tmp_path / "run", callbacks=[podracer.Control(halve)])
    assert records(tmp_path / "run")[-1]["agent.learning_rate"] == 5e-4
    sebulba = recipes.find("cartpole_dqn").with_arch("sebulba")
    parts = (sebulba, *build(sebulba))
    changed_blueprint(*parts, {"agent": {"discount": 0.98}})
    with pytest.raises(ConfigError, match="but actors act by it"):
        changed_blueprint(*parts, {"agent": {"apex_alpha": 0.5}})
    with pytest.raises(ConfigError, match="under Anakin alone"):
        changed_blueprint(*parts, {"environment": {"length": 0.5}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"driver": {"num_envs": 8}}, "a change must be fields"),
        ({"agent": {"learning_rat": 0.1}}, "has no field 'learning_rat'"),
        ({"agent": {"learning_rate": -1.0}}, "learning_rate"),
        ({"agent": {"network": {"torso": {"hidden": (8,)}}}}, "hidden, but that is compiled"),
        ({"environment": {"center": "left"}}, "must change to a number"),
        ({"environment": {"slopes": [1.0]}}, "of the same shape"),
    ],
)
def test_what_cannot_change_is_refused_in_a_sentence(change, message):
    blueprint, env = build(EXPERIMENT)
    with pytest.raises(ConfigError, match=message):
        changed_blueprint(EXPERIMENT, blueprint, env, merged({}, change))


def test_a_part_in_the_place_of_a_number_that_changed_is_refused():
    parts = (EXPERIMENT, *build(EXPERIMENT))
    earlier = {"agent": {"learning_rate": 1e-4}}
    changes = merged(earlier, {"agent": {"learning_rate": {"start": 1e-4}}})
    with pytest.raises(ConfigError, match="learning_rate"):
        changed_blueprint(*parts, changes)


def test_numbers_of_a_wrapped_environment_can_change():
    experiment = dataclasses.replace(EXPERIMENT, environment=podracer.auto_reset(Bowl()))
    changes = {"environment": {"inner": {"center": 2, "slopes": jnp.asarray([1.0, 2.0])}}}
    changes = json.loads(json.dumps(merged({}, changes)))  # as from a checkpoint
    blueprint = changed_blueprint(experiment, *build(experiment), changes)
    assert blueprint.environment.inner.center == 2.0
    np.testing.assert_array_equal(blueprint.environment.inner.slopes, [1.0, 2.0])


def test_a_schedule_that_control_returns_is_kept_as_its_numbers():
    linear = EXPERIMENT.with_fields({"agent": {"learning_rate": podracer.Linear(1e-3, 0.0)}})
    rate = podracer.Linear(5e-4, 1e-4, frames=64.0)

    def changed(fields):
        run = Run(linear, make_driver(linear), Path("nowhere"), ())
        run.change(fields)
        return run

    first = changed({"agent": {"learning_rate": rate}})
    assert first.changes["agent"]["learning_rate"]["start"] == 5e-4
    again = changed(json.loads(json.dumps(first.changes)))
    leaves = [jax.tree.leaves(run.blueprint.settings) for run in (first, again)]
    assert leaves[0] == leaves[1]


def test_numbers_of_a_tuple_change_and_are_restored():
    @podracer.struct
    class Bowls(Bowl):
        depths: tuple[float, ...] = (1.0, 2.0)

    experiment = dataclasses.replace(EXPERIMENT, environment=Bowls())
    run = Run(experiment, make_driver(experiment), Path("nowhere"), ())
    run.change({"environment": {"depths": (np.float32(3.0), 4.0)}})
    changes = json.loads(json.dumps(run.changes))  # as from a checkpoint
    blueprint = changed_blueprint(experiment, *build(experiment), changes)
    assert blueprint.environment.depths == (3.0, 4.0)


def test_arrays_of_an_environment_are_arguments_and_are_not_copied(tmp_path):
    """Those without a fraction cannot change."""

    @podracer.struct
    class Table(Bowl):
        rows: Any = dataclasses.field(default_factory=lambda: jnp.arange(4))

    experiment = dataclasses.replace(EXPERIMENT, environment=Table())
    blueprint, env = build(experiment)
    assert blueprint.environment.rows is env.rows
    new = changed_blueprint(experiment, blueprint, env, {"agent": {"learning_rate": 1e-4}})
    assert new.environment is blueprint.environment
    mesh = make_mesh(jax.devices()[:1])
    (placed,) = (program := partial(abs, place_leaves(blueprint, mesh))).args
    (again,) = with_blueprint(program, new, mesh).args
    assert again.environment.rows is placed.environment.rows
    assert float(again.settings.learning_rate) == pytest.approx(1e-4)
    moved = changed_blueprint(experiment, blueprint, env, {"environment": {"center": 1.0}})
    assert moved.environment.rows is env.rows
    with pytest.raises(
        ConfigError, match=r"a change names environment\.rows, but that is compiled"
    ):
        changed_blueprint(experiment, blueprint, env, {"environment": {"rows": [1, 2, 3, 4]}})
