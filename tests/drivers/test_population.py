"""Many learners in one program: each is what it would be alone, whatever becomes of the others."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from agents import AGENTS, blueprint, environment_for
from runs import resumed_and_whole
from variants import variants

import podracer
from podracer import recipes
from podracer.agents.a2c import A2C
from podracer.cli.main import main
from podracer.cli.pods import finish_sweep, read_spaces
from podracer.config.experiment import Experiment
from podracer.config.serialization import from_json, to_json
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.population import Hyperparameter, Pod, Population, population_mesh, run_keys
from podracer.drivers.progress import Orders
from podracer.envs import make
from podracer.errors import CheckpointError, ConfigError, NonFiniteError
from podracer.io.checkpoint import Restored, fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.policy import Policy
from podracer.reports.run import write_report
from podracer.run import sweep
from podracer.run.loading import load_run
from podracer.run.setup import build

CONFIG = AnakinConfig(16, 8, 5)
SMALL = TorsoNetwork(MLP((16,)))


def pod(seed, **values):
    return Pod(seed, tuple(Hyperparameter(name, value) for name, value in values.items()))


def train(agent, pods, environment="catch", devices=1, updates=10):
    """The pods' last states and all progress."""
    env = make(environment) if isinstance(environment, str) else environment
    agent = blueprint(agent, env.spec, CONFIG.rollout_length)
    driver = Population(agent, pods, env, CONFIG, jax.devices()[:devices])
    progress = list(driver.run(driver.init(run_keys(pods)), Orders(updates)))
    return progress[-1].state, progress


def alone(agent, seed, environment="catch", updates=10):
    """The same as a run of its own."""
    env = make(environment) if isinstance(environment, str) else environment
    agent = blueprint(agent, env.spec, CONFIG.rollout_length)
    driver = Anakin(agent, env, CONFIG, jax.devices()[:1])
    progress = list(driver.run(driver.init(jax.random.key(seed)), Orders(updates)))
    return progress[-1].state, progress


def close(one, other, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_a_pod_is_the_run_that_it_would_be_alone(name):
    """After two updates, before differences in the last bit have grown into other actions."""
    rate = AGENTS[name].learning_rate
    rate = getattr(rate, "start", rate)  # of a schedule
    agent = dataclasses.replace(AGENTS[name], learning_rate=rate)
    pods = [pod(3), pod(5, learning_rate=rate * 2)]
    states, progress = train(agent, pods, environment_for(name), updates=5)
    for index, (seed, scale) in enumerate(((3, 1), (5, 2))):
        single = dataclasses.replace(agent, learning_rate=rate * scale)
        state, reports = alone(single, seed, environment_for(name), updates=5)
        assert int(states.update[index]) == int(state.update) == 5
        frames = sum(int(p.pods["frames"][index]) for p in progress)
        assert frames == sum(p.frames for p in reports)
        close(jax.tree.map(lambda x, i=index: x[i], states.learner.shared), state.learner.shared)


def test_hyperparameters_reach_the_update():
    agent = A2C(network=SMALL)
    states, _ = train(agent, [pod(1, learning_rate=0.0), pod(1, learning_rate=1e-2), pod(1)])
    still, moved, plain = (jax.tree.map(lambda x, i=i: x[i], states) for i in range(3))
    start, _ = alone(dataclasses.replace(agent, learning_rate=0.0), 1)
    close(still.learner.shared.params, start.learner.shared.params, 0)
    leaves = [jax.tree.leaves(s.learner.shared.params)[0] for s in (still, moved, plain)]
    assert not np.allclose(leaves[0], leaves[1])
    assert not np.allclose(leaves[1], leaves[2])


@pytest.mark.slow
def test_devices_share_the_pods_and_change_nothing():
    pods = [pod(i) for i in range(4)]
    one, _ = train(A2C(network=SMALL), pods, devices=1, updates=5)
    four, progress = train(A2C(network=SMALL), pods, devices=4, updates=5)
    assert len(progress[-1].state.update.sharding.device_set) == 4
    close(one.learner.shared, four.learner.shared)
    assert population_mesh(jax.devices()[:8], 6).size == 6
    assert population_mesh(jax.devices()[:8], 7).size == 7
    assert population_mesh(jax.devices()[:2], 7).size == 1


@pytest.mark.figure(9)
@variants("recipe", ["catch_a2c"], ["cartpole_ppo"])
def test_a_pod_in_a_batch_of_its_own_is_the_run_alone_to_the_bit(recipe):
    experiment = recipes.find(recipe)
    agent, env = build(experiment)
    # On a CPU so many environments are a batch.
    config = dataclasses.replace(experiment.driver, num_envs=128, updates_per_chunk=3)
    pods = [Pod(3), Pod(4)]
    population = Population(agent, pods, env, config, jax.devices()[:1])
    [progress] = population.run(population.init(run_keys(pods)), Orders(3))
    anakin = Anakin(agent, env, config, jax.devices()[:1])
    for index, pod in enumerate(pods):
        [run] = anakin.run(anakin.init(jax.random.key(pod.seed)), Orders(3))
        close(jax.tree.map(lambda x, i=index: x[i], progress.state), run.state, tolerance=0)


def test_a_pod_that_diverges_harms_no_other():
    agent = A2C(network=SMALL, max_gradient_norm=1e30)
    pods = [pod(0), pod(1, learning_rate=1e38), pod(2)]
    states, progress = train(agent, pods, updates=20)
    healthy, _ = train(agent, [pod(0), pod(1), pod(2)], updates=20)
    last = progress[-1]
    assert last.metrics["pods_failed"] == 1
    np.testing.assert_array_equal(np.isnan(last.pods["loss"]), [False, True, False])
    assert np.isfinite(last.metrics["loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states.learner.shared))
    for i in (0, 2):
        take = lambda x, i=i: x[i]  # noqa: E731
        close(jax.tree.map(take, states.learner), jax.tree.map(take, healthy.learner), 0)
    with pytest.raises(NonFiniteError, match="update"):
        train(agent, [pod(0, learning_rate=1e38)], updates=20)


# --- as a run -------------------------------------------------------------------------------------

STEPS = 16 * 8
EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=A2C(network=SMALL),
    driver=CONFIG,
    frames=20 * STEPS,
    evaluations=2,
    evaluation_episodes=8,
    pods=(pod(0, learning_rate=1e-2), pod(1, learning_rate=1e-2), pod(0, learning_rate=0.0)),
    devices=1,
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_resumed_equals_uninterrupted(tmp_path):
    cut, whole = resumed_and_whole(EXPERIMENT, tmp_path, frames=10 * STEPS, evaluations=1)
    assert (cut / "pods.jsonl").read_text() == (whole / "pods.jsonl").read_text()


def test_a_pod_whose_evaluation_did_not_end_is_never_the_best(tmp_path, monkeypatch, capsys):
    record = {"updates": 5, "episodes": [3, 3, 3], "evaluation_return": [1.0, 2.0, 9.0]}
    monkeypatch.setattr(sweep, "read_pods", lambda _: [record])
    ranking = sweep.configurations(tmp_path, EXPERIMENT)  # by a record of an older version
    assert ranking[0].pods == (2,)
    record["evaluation_unfinished"] = [1, 0, 4]
    finish_sweep(tmp_path, EXPERIMENT)
    assert f"Not ranked: {tmp_path} has no best configuration" in capsys.readouterr().out
    assert not (tmp_path / "best.json").exists()
    monkeypatch.setattr(sweep, "readable_records", lambda _: [])
    monkeypatch.setattr(sweep, "read_sealed", lambda *_: b"")
    restored = Restored(5, None, {"records": {sweep.RECORDS: {}}})
    assert sweep.best_pod(tmp_path, restored) == 1
    later = {"updates": 8, "parent": [1, 1, 0]}  # of a selection after that evaluation
    monkeypatch.setattr(sweep, "read_pods", lambda _: [record, later])
    at_8 = dataclasses.replace(restored, step=8)
    assert [sweep.best_pod(tmp_path, r) for r in (restored, at_8)] == [1, 1]
    later["parent"] = [1, 2, 0]  # only pod 0 descends from the best
    assert sweep.best_pod(tmp_path, at_8) == 0
    monkeypatch.setattr(sweep, "read_pods", lambda _: [record])
    record["evaluation_unfinished"] = [1, 2, 4]
    with pytest.raises(ConfigError, match="has no best pod"):
        sweep.best_pod(tmp_path, restored)
    record["evaluation_unfinished"] = [0, 0, 4]
    best, failed = sweep.configurations(tmp_path, EXPERIMENT)
    assert (best.pods, best.score.mean, best.score.is_whole) == ((0, 1), 1.5, True)
    assert (failed.pods, failed.score.is_whole, failed.score.values.size) == ((2,), False, 0)
    finish_sweep(tmp_path, EXPERIMENT)
    assert (tmp_path / "best.json").exists()


def test_a_population_is_a_run_like_any_other(tmp_path, capsys):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run)
    assert from_json(to_json(EXPERIMENT)) == EXPERIMENT
    pods = lines(run / "pods.jsonl")
    assert [line["updates"] for line in pods] == [5, 10, 15, 20]
    assert all(len(line["frames"]) == 3 for line in pods)
    last = np.asarray(pods[-1]["evaluation_return"])
    assert lines(run / "metrics.jsonl")[-1]["evaluation_return"] == pytest.approx(last.mean())

    found = sweep.configurations(run, EXPERIMENT)
    assert {each.pods for each in found} == {(0, 1), (2,)}
    means = [configuration.score.mean for configuration in found]
    assert means == sorted(means, reverse=True)
    best, chosen = load_run(run), load_run(run, pod=int(np.argmax(last)))
    assert best.blueprint == chosen.blueprint
    assert fingerprint(best.state.learner) == fingerprint(chosen.state.learner)
    returns = {
        line["updates"]: max(line["evaluation_return"])
        for line in pods
        if "evaluation_return" in line
    }
    state = load_run(run, checkpoint="best").state
    assert int(state.update) == max(returns, key=lambda update: (returns[update], update))
    again, state = podracer.load(run, pod=1)
    assert load_run(run, pod=1).blueprint.settings.learning_rate == 1e-2
    assert state.shared.params is not None
    observations = np.eye(50, dtype=np.float32).reshape(50, 10, 5)
    acted = [podracer.load_policy(run, pod=number)(observations) for number in (0, 1)]
    assert np.array_equal(acted[1], Policy(again, state)(observations))
    assert not np.array_equal(*acted)
    with pytest.raises(ConfigError, match="pods 0 to 2, not 3"):
        podracer.load(run, pod=3)
    text = (run / "pods.jsonl").read_text()
    (run / "pods.jsonl").write_text(text.replace("5", "6"))
    with pytest.raises(CheckpointError, match="so the best pod is unknown"):
        podracer.load(run)
    (run / "pods.jsonl").write_text(text)

    for flags, pod in (((), int(np.argmax(last))), (("--pod", "1"), 1)):
        with pytest.raises(SystemExit, match="0"):
            main(["eval", str(run), "--episodes", "4", "--json", *flags])
        assert json.loads(capsys.readouterr().out)["pod"] == pod

    best = sweep.write_best(run, EXPERIMENT, found[0])
    winner = podracer.recipes.find(str(best))
    assert winner.pods == ()
    assert winner.agent.learning_rate == found[0].hyperparameters[0].value
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "run pod 2" in page
    assert "2 seeds" in page


# --- what to try ----------------------------------------------------------------------------------


def test_a_grid_has_every_combination_with_every_seed():
    pods = sweep.make_pods({"learning_rate": (1e-3, 1e-2), "discount": (0.9, 0.99, 1.0)}, [0, 1])
    assert len(pods) == len(set(pods)) == 12
    assert {p.seed for p in pods} == {0, 1}
    assert pods[0].hyperparameters == pods[1].hyperparameters
    assert sweep.make_pods({}, [4, 5]) == (Pod(4), Pod(5))


def test_ranges_are_drawn_evenly_on_their_scale():
    spaces = read_spaces(["learning_rate=1e-6:1e-2", "entropy_cost=0:1", "x=1,2"])
    pods = sweep.make_pods(spaces, [0], 2000, 3)
    values = {n: [p.hyperparameters[i].value for p in pods] for i, n in enumerate(("rate", "cost"))}
    rate, cost = np.log10(values["rate"]), np.asarray(values["cost"])
    assert -6 <= rate.min() < rate.max() <= -2
    assert abs(rate.mean() + 4) < 0.1  # 2.5 standard errors are 0.065
    assert abs(cost.mean() - 0.5) < 0.03
    assert {p.hyperparameters[2].value for p in pods} == {1.0, 2.0}
    assert pods == sweep.make_pods(spaces, [0], 2000, 3)
    assert spaces == read_spaces(["learning-rate=1e-6:1e-2", "entropy-cost=0:1", "x=1,2"])


@pytest.mark.parametrize(
    ("vary", "draws", "words"),
    [
        (["learning_rate"], 0, "name=1e-4,3e-4"),
        (["learning_rate=a,b"], 0, "cannot be read"),
        (["learning_rate=2:1"], 5, "must be finite and not empty"),
        (["learning_rate=1:2"], 0, "number of `draws`"),
        (["learning_rate=1:0:9,2:0:9"], 0, "of a schedule only the start varies"),
        (["a=1", "a=2"], 0, "twice"),
        (["learning_rate=1e-3,0.001"], 0, "'learning_rate=1e-3,0.001' names a value twice"),
    ],
)
def test_what_cannot_be_read_is_refused(vary, draws, words):
    with pytest.raises(ConfigError, match=words):
        sweep.make_pods(read_spaces(vary), [0], draws)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (Pod(1, Hyperparameter("learning_rate", 1e-3)), "Pod.hyperparameters cannot be an object"),
        (Pod(1, (Hyperparameter(3, 1e-3),)), "Hyperparameter.name cannot be 3"),
    ],
)
def test_a_pod_of_other_types_is_refused(pod, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        podracer.train("catch_a2c", pods=(pod,), run_dir=tmp_path / "run")
