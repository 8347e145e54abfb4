"""Runs that begin with what another run has learned."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from agents import AGENTS, blueprint, environment_for
from child import records

import podracer
from podracer.agents.dqn import DQN
from podracer.agents.ppo import PPO
from podracer.agents.rules.lpg import UpdateRule
from podracer.agents.rules.lpg.rule_file import encode_rule
from podracer.agents.rules.lpg.student import lpg_student
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import CheckpointError, ConfigError
from podracer.io.checkpoint import Checkpointer, stored_fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.run.records import Recorder
from podracer.run.resume import Totals
from podracer.run.setup import make_driver
from podracer.run.warm_start import Weights, begin_of, reset_paths
from podracer.schedules import Linear
from podracer.types import leaves_by_path

STEPS = 16 * 8
NETWORK = TorsoNetwork(MLP((16,)))
EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=PPO(network=NETWORK, learning_rate=Linear(1e-3, 0.0, 10 * STEPS), num_epochs=1),
    driver=AnakinConfig(16, 8, 5),
    frames=10 * STEPS,
    evaluations=1,
    evaluation_episodes=8,
    devices=1,
)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return podracer.train(EXPERIMENT, run_dir=tmp_path_factory.mktemp("runs") / "first")


def test_a_run_goes_on_from_what_another_has_learned(first, tmp_path):
    """Parameters, moments of the optimizer and statistics; schedules and counters begin anew."""
    begun = {}

    def callback(boundary):
        begun.setdefault(boundary.metrics["updates"], boundary.state)

    frozen = dataclasses.replace(EXPERIMENT.agent, learning_rate=0.0)
    result = podracer.train(
        EXPERIMENT, agent=frozen, seed=1, frames=5 * STEPS, begin=Weights(first.run_dir),
        run_dir=tmp_path / "frozen", callbacks=[callback],
    )  # fmt: skip
    before, after = first.state.shared, begun[5].shared
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    counts = [int(x) for x in jax.tree.leaves(after.optimizer_state) if x.dtype == np.int32]
    assert counts == [15 * EXPERIMENT.agent.num_minibatches]
    assert int(after.frames) == 5 * STEPS
    assert [record["frames"] for record in records(result.run_dir)] == [5 * STEPS]
    config = json.loads((result.run_dir / "config.json").read_text())
    origin = json.loads((first.run_dir / "config.json").read_text())
    expected = {"run": str(first.run_dir), "id": origin["run"]["id"], "updates": 10}
    assert config["weights"] == expected


def test_a_run_goes_on_from_the_best_checkpoint_or_a_numbered_one(tmp_path, monkeypatch):
    """The evaluation after five updates is better than the last one."""
    add_evaluation = Recorder.add_evaluation

    def add(recorder, evaluation, record, progress):
        returns = np.full_like(evaluation.returns, -progress.updates)
        add_evaluation(recorder, dataclasses.replace(evaluation, returns=returns), record, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "add_evaluation", add)
        run = podracer.train(EXPERIMENT, evaluations=2, run_dir=tmp_path / "other").run_dir
    for choice, updates in {"best": 5, 10: 10}.items():
        driver = make_driver(EXPERIMENT)
        begin = begin_of(Weights(run, choice), driver)
        assert begin.entries["weights"]["updates"] == updates
        params = begin.first_state(driver, EXPERIMENT.key)[0].learner.shared.params
        best = podracer.load(run, checkpoint=updates)[1].shared.params
        jax.tree.map(np.testing.assert_array_equal, params, best)
    with pytest.raises(CheckpointError, match="no checkpoint of update 7"):
        podracer.train(EXPERIMENT, begin=Weights(run, 7), run_dir=tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.slow
def test_such_a_run_is_resumed_as_any_other(first, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    podracer.train(EXPERIMENT, seed=1, begin=Weights(first.run_dir), run_dir=whole)
    podracer.train(EXPERIMENT, seed=1, begin=Weights(first.run_dir), run_dir=cut, frames=5 * STEPS)
    podracer.train(EXPERIMENT, seed=1, run_dir=cut, resume=True)
    assert stored_fingerprint(cut) == stored_fingerprint(whole)
    alone = podracer.train(EXPERIMENT, seed=1, run_dir=tmp_path / "alone")
    assert stored_fingerprint(alone.run_dir) != stored_fingerprint(whole)


def fail_before_the_first_save(**options):
    """A callback is too late for that: it is called after a save."""

    def fail(*_):
        raise RuntimeError("before the first save")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "save", fail)
        with pytest.raises(RuntimeError, match="before the first save"):
            podracer.train(EXPERIMENT, **options)


@pytest.mark.slow
def test_one_that_failed_before_its_first_save_begins_again_with_them(first, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    podracer.train(EXPERIMENT, seed=1, begin=Weights(first.run_dir), run_dir=whole)
    fail_before_the_first_save(seed=1, begin=Weights(first.run_dir), run_dir=cut)
    podracer.train(EXPERIMENT, seed=1, run_dir=cut, resume=True)
    assert stored_fingerprint(cut) == stored_fingerprint(whole)


@pytest.mark.slow
def test_how_it_began_is_known_or_it_is_not_resumed(tmp_path):
    """The other run is gone or is another, or a function of the user's returned the state.

    That it has learned since is no matter, while the checkpoint is there.
    """
    other, run, own = tmp_path / "other", tmp_path / "run", tmp_path / "own"
    podracer.train(EXPERIMENT, frames=5 * STEPS, run_dir=other)
    for directory in (run, tmp_path / "run2"):
        fail_before_the_first_save(begin=Weights(other), run_dir=directory)
    crash = (run / "crash.json").read_text()
    whole = podracer.train(EXPERIMENT, begin=Weights(other), run_dir=tmp_path / "whole")
    podracer.train(EXPERIMENT, run_dir=other, resume=True)
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run2", resume=True)
    assert stored_fingerprint(tmp_path / "run2") == stored_fingerprint(whole.run_dir)
    other.rename(tmp_path / "elsewhere")
    podracer.train(EXPERIMENT, frames=5 * STEPS, run_dir=other)
    with pytest.raises(ConfigError, match=f"began with {other}, where another run is now"):
        podracer.train(EXPERIMENT, run_dir=run, resume=True)
    other.rename(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=f"{run} ended before its first save, and .*: {other} hol"
    ):
        podracer.train(EXPERIMENT, run_dir=run, resume=True)
    assert (run / "crash.json").read_text() == crash

    def mine(driver, key):
        return driver.init(key), Totals()

    fail_before_the_first_save(begin=mine, run_dir=own)
    with pytest.raises(ConfigError, match=r"began with a state of .*mine.*: resume it"):
        podracer.train(EXPERIMENT, run_dir=own, resume=True)
    podracer.train(EXPERIMENT, begin=mine, run_dir=own, resume=True)
    assert begin_of(functools.partial(mine), None).entries == begin_of(mine, None).entries


def test_a_student_obeys_the_rule_of_its_own_run(tmp_path):
    rule, learned = UpdateRule(units=4, embedding=3, predictions=3), []
    own = [rule.init(jax.random.key(seed)) for seed in range(2)]
    for number, params in enumerate(own):
        path = tmp_path / f"rule{number}.npz"
        path.write_bytes(encode_rule(rule, params, {}))
        begin = Weights(tmp_path / "run0") if number else None
        learned.append(
            podracer.train(
                EXPERIMENT,
                agent=lpg_student(rule, NETWORK, learning_rate=0.0, rule_file=str(path)),
                frames=5 * STEPS,
                run_dir=tmp_path / f"run{number}",
                begin=begin,
            ).state.shared
        )
    jax.tree.map(np.testing.assert_array_equal, learned[1].params, learned[0].params)
    jax.tree.map(np.testing.assert_array_equal, learned[1].rule, own[1])


def test_agents_declare_their_frames():
    for name in ("ppo", "stacx", "dqn", "sac", "disco", "lpg_student"):
        agent = blueprint(AGENTS[name], environment_for(name).spec).build()
        state = jax.eval_shape(lambda agent=agent: agent.init(jax.random.key(0), 16).shared)
        frames = [path for path in leaves_by_path(state) if path.endswith("frames")]
        assert len(frames) == 1
        assert set(frames) <= set(reset_paths(state))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent": PPO(network=TorsoNetwork(MLP((8,))))}, r"float32\[50, 16\] at .*float32\[50, 8"),
        pytest.param(
            {"agent": DQN(network=NETWORK, replay=Replay(10_000))},
            "learned with another agent or",
            marks=pytest.mark.slow,
        ),
        ({"environment": "probe:action"}, r"in another environment: its learner has float32\[50"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(first, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        podracer.train(
            EXPERIMENT, begin=Weights(first.run_dir), run_dir=tmp_path / "run", **changes
        )
    assert list(tmp_path.iterdir()) == []
