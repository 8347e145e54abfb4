"""Runs from Python: what they leave, and that going on equals never having stopped."""

import dataclasses
import errno
import json
import math
import re
import shutil
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, environment_for
from child import records
from runs import resumed_and_whole

import podracer
from podracer import recipes
from podracer.agents.a2c import A2C
from podracer.agents.dqn import DQN
from podracer.config.experiment import Experiment, check_types
from podracer.config.serialization import from_json, to_json
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import auto_reset, restart, transition
from podracer.envs.catch import Catch
from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.evaluate import Evaluation
from podracer.io.checkpoint import Checkpointer, fingerprint, stored_fingerprint
from podracer.io.entry_points import installed
from podracer.io.seal import CONFIG, seal, seal_json
from podracer.networks import MLP, TorsoNetwork
from podracer.policy import Policy
from podracer.replay import Replay
from podracer.run import callbacks, resume
from podracer.run.errors import DeviceError
from podracer.run.loading import load_run, reopen
from podracer.run.resume import Totals, check_metadata
from podracer.run.setup import build
from podracer.run.warnings import run_warnings
from podracer.types import ArraySpec, Discrete, EnvironmentSpec

pytestmark = pytest.mark.usefixtures("shared")  # what is patched is not traced

SMALL = TorsoNetwork(MLP((16,)))
STEPS = 16 * 8
EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=A2C(network=SMALL),
    driver=AnakinConfig(16, 8, 5),
    frames=40 * STEPS,
    evaluations=4,
    evaluation_episodes=8,
    devices=1,
)


@pytest.mark.parametrize(
    ("short", "long", "pods"),
    [
        (3, 4, ()),
        pytest.param(3, 13, (), marks=pytest.mark.slow),
        pytest.param(3, 7, (Pod(0), Pod(1)), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_resumed_for_some_more_frames_makes_these(short, long, pods, tmp_path):
    """It ends with the updates of one that was begun with all of them, and with the same bytes."""
    experiment = dataclasses.replace(EXPERIMENT, evaluations=0, pods=pods)
    updates = []
    for name, lengths in {"whole": (long,), "longer": (short, long)}.items():
        for length in lengths:
            result = podracer.train(
                experiment,
                frames=length * STEPS,
                run_dir=tmp_path / name,
                resume=length > lengths[0],
            )
        updates.append(result.metrics["updates"])
    assert updates[1] == updates[0]
    assert stored_fingerprint(tmp_path / "longer") == stored_fingerprint(tmp_path / "whole")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "ppo" else pytest.mark.slow) for name in AGENTS],
)
def test_resumed_equals_uninterrupted(name, tmp_path):
    """State and records, to the byte, when the run is cut at its middle boundary."""
    experiment = dataclasses.replace(
        EXPERIMENT, agent=AGENTS[name], environment=environment_for(name)
    )
    resumed_and_whole(experiment, tmp_path, frames=20 * STEPS, evaluations=2)


@pytest.fixture
def cache_misses(monkeypatch):
    """Names of the programs that were compiled instead of read from the compile cache."""
    found = []

    def count(event, **_):
        if event == "/jax/compilation_cache/cache_misses":
            found.append(event)

    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.monitoring.register_event_listener(count)
    yield found
    jax.monitoring.unregister_event_listener(count)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.mark.parametrize("arch", ["anakin", pytest.param("sebulba", marks=pytest.mark.slow)])
def test_other_hyperparameters_compile_nothing(arch, tmp_path, cache_misses):
    experiment = dataclasses.replace(EXPERIMENT, frames=5 * STEPS, evaluations=1).with_arch(arch)
    first = podracer.train(experiment, run_dir=tmp_path / "first")
    cache_misses.clear()
    agent = {"learning_rate": 1e-2, "entropy_cost": 0.02, "discount": 0.9, "max_gradient_norm": 2.0}
    second = podracer.train(experiment, run_dir=tmp_path / "second", seed=3, agent=agent)
    assert cache_misses == []
    assert fingerprint(first.state) != fingerprint(second.state)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What `train` returned; its run directory is for reading only."""
    return podracer.train(EXPERIMENT, run_dir=tmp_path_factory.mktemp("runs") / "run")


def test_what_a_run_leaves(finished):
    run, result = finished.run_dir, finished
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["updates"] for line in lines] == list(range(5, 41, 5))
    assert [line["updates"] for line in lines if "evaluation_return" in line] == [10, 20, 30, 40]
    assert lines[-1]["frames"] == 40 * STEPS
    assert {"seconds", "frames_per_second", "episode_return", "loss", "time_step"} <= lines[
        0
    ].keys()
    assert 0 < lines[-1]["machine_cores"] < 64
    assert 50e6 < lines[-1]["machine_memory"] < 20e9
    config = json.loads((run / "config.json").read_text())
    assert from_json(config["experiment"]) == EXPERIMENT == reopen(run)
    assert config["versions"]["jax"] == jax.__version__
    assert result.exit_code == 0
    assert result.metrics["updates"] == 40
    agent, state = podracer.load(run)
    assert fingerprint(state) == fingerprint(result.state)
    assert (agent.name, agent.spec) == (result.agent.name, result.agent.spec)
    assert not (run / "crash.json").exists()


@pytest.mark.slow
def test_the_checkpoint_of_the_best_evaluation_is_kept(tmp_path, monkeypatch):
    returns = {10: 1.0, 20: 4.0, 30: 4.0, 40: 2.0, 60: 5.0, 80: math.nan, 85: 9.0}
    evaluated = {}

    def evaluate(state):
        update = int(state.update)
        evaluated[update] = fingerprint(state)
        return Evaluation(np.full(3, returns[update]), np.ones(3, int), np.array(0), np.array(3))

    def loaded(checkpoint):
        return stored_fingerprint(run, checkpoint)

    evaluate.lower = lambda state: lambda: None
    monkeypatch.setattr(callbacks, "make_evaluator", lambda *_: evaluate)
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, save_seconds=0)
    assert loaded("best") == loaded(30) == (30, evaluated[30])
    assert loaded("newest")[0] == 40
    podracer.train(EXPERIMENT, run_dir=run, resume=True, frames=80 * STEPS)  # other evaluations
    assert loaded("best") == (60, evaluated[60])
    podracer.load_policy(run, checkpoint=60)
    for choice in ("10", "latest", None, 1.0, True):
        with pytest.raises(ConfigError, match="load: checkpoint cannot be "):
            podracer.load(run, checkpoint=choice)
    with pytest.raises(ConfigError, match="has no pods, as it is no sweep: leave out pod 0"):
        podracer.load(run, pod=0)
    podracer.train(EXPERIMENT, run_dir=run, resume=True, frames=85 * STEPS, keep_best=False)
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        loaded("best")


def test_an_evaluation_that_equals_the_best_is_no_reason_to_save(tmp_path, monkeypatch):
    """On a solved task all do; of those that are saved anyway the newest is the best."""
    saves = []

    def save(self, updates, state, metadata):
        saves.append((updates, metadata["best"]["updates"]))

    def evaluate(state):
        return Evaluation(np.ones(3), np.ones(3, int), np.array(0), np.array(3))

    evaluate.lower = lambda state: lambda: None
    monkeypatch.setattr(callbacks, "make_evaluator", lambda *_: evaluate)
    monkeypatch.setattr(Checkpointer, "save", save)
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", save_seconds=1e6)
    assert saves == [(10, 10), (40, 40)]


@pytest.mark.slow
def test_a_run_that_lost_its_checkpoints_does_not_begin_again(tmp_path, caplog):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, save_seconds=0)
    metrics = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    for _ in ("saved.json", "metrics.jsonl"):  # each of them shows that a checkpoint was sealed
        with pytest.raises(CheckpointError, match=r"but one was saved|show that one was"):
            podracer.train(EXPERIMENT, run_dir=run, resume=True)
        assert (run / "metrics.jsonl").read_bytes() == metrics
        (run / "saved.json").unlink(missing_ok=True)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="seed"):
        podracer.train(EXPERIMENT, seed=7, run_dir=run, resume=True)
    podracer.train(EXPERIMENT, run_dir=run, resume=True)
    assert "ended before its first save, so it begins again" in caplog.text
    assert records(run)[0]["updates"] == 5


def test_tensorboard_reads_what_was_written(finished):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(finished.run_dir / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("evaluation/return")
    assert [event.step for event in scalars] == [10, 20, 30, 40]


@dataclasses.dataclass(frozen=True)
class CountingCatch(Catch):
    """Catch whose state also counts the steps."""

    def reset(self, key):
        state, timestep = super().reset(key)
        return (state, jnp.int32(0)), timestep

    def step(self, key, state, action):
        inner, timestep = super().step(key, state[0], action)
        return (inner, state[1] + 1), timestep


def test_policies_are_loaded_without_replay_and_environments(tmp_path):
    """So they may act in an environment whose state is another, and need no memory for a replay."""
    run, agent = tmp_path / "run", AGENTS["dqn"]
    recipe = dataclasses.replace(EXPERIMENT, agent=agent, frames=5 * STEPS)
    result = podracer.train(recipe, run_dir=run)
    whole, shared = podracer.load(run)[1], load_run(run).state.learner
    assert fingerprint(whole) == fingerprint(result.state)
    assert jax.tree.leaves(whole.local)
    assert shared.local == ()
    assert fingerprint(shared.shared) == fingerprint(whole.shared)
    policy = podracer.load_policy(run)
    elsewhere = podracer.load_policy(run, environment=CountingCatch())
    observations = np.eye(50, dtype=np.float32).reshape(50, 10, 5)
    assert np.array_equal(policy(observations), elsewhere(observations))
    _, again = podracer.load(run, environment=CountingCatch())
    assert fingerprint(again) == fingerprint(whole)


def test_a_policy_is_loaded_with_a_recipe_and_draws_with_a_seed(tmp_path):
    run = tmp_path / "run"
    recipe = dataclasses.replace(
        EXPERIMENT, environment=CountingCatch(), frames=5 * STEPS, evaluations=0
    )
    podracer.train(recipe, run_dir=run)
    with pytest.raises(ConfigError, match="name its recipe"):
        podracer.load_policy(run)
    loaded = podracer.load_policy(run, sampled=True, seed=3, recipe=recipe)
    expected = Policy(*podracer.load(run, recipe=recipe), sampled=True, seed=3)
    other = expected.copy(seed=0)
    observations = np.zeros((50, 10, 5), np.float32)
    draws, same, others = (
        np.stack([policy(observations) for _ in range(3)]) for policy in (loaded, expected, other)
    )
    assert np.array_equal(draws, same)
    assert not np.array_equal(draws, others)
    assert len(np.unique(draws)) > 1


def test_an_evaluation_can_be_repeated(finished):
    from podracer.evaluate import make_evaluator

    run = load_run(finished.run_dir)
    evaluate, state = make_evaluator(run.agent, run.env, 8), run.state
    again = evaluate(run.agent.actor_params(state.learner), state.key, state.update)
    assert np.array_equal(again.returns, finished.evaluation.returns)
    assert again.unfinished == 0
    assert set(again.lengths) == {9}


def test_a_target_ends_the_run(tmp_path, caplog, monkeypatch):
    run = tmp_path / "run"
    result = podracer.train(EXPERIMENT, run_dir=run, target_return=-1.0)
    assert result.metrics["updates"] == 10
    # A finished run stays finished.
    again = podracer.train(EXPERIMENT, run_dir=run, target_return=-1.0, resume=True)
    assert again.exit_code == 0
    assert again.reason == result.reason == "target_return"
    assert records(run)[-1]["updates"] == 10
    assert len(repr(result)) < 1000  # without the arrays
    config = (run / "config.json").read_text()
    with pytest.raises(
        ConfigError, match=rf"frames is {5 * STEPS}, but the run has made {10 * STEPS:,} al"
    ):
        podracer.train(EXPERIMENT, run_dir=run, resume=True, frames=5 * STEPS)
    limits = {"target_return": -1.0}, {"max_seconds": 0.001, "target_return": None}
    for limit in limits:  # without another one, more frames would change nothing
        with pytest.raises(ConfigError, match=f"ended by its `{next(iter(limit))}`, so `frames`"):
            podracer.train(EXPERIMENT, run_dir=run, resume=True, frames=90 * STEPS, **limit)
    assert (run / "config.json").read_text() == config
    assert "bit-exact" not in caplog.text
    versions = resume.installed_versions()
    monkeypatch.setattr(resume, "installed_versions", lambda: versions | {"jax": "0.0.1"})
    renamed = dataclasses.replace(EXPERIMENT, recipe="other")  # as a module may call its function
    assert podracer.train(renamed, run_dir=run, resume=True).reason == "frames"
    assert reopen(run).recipe == "test"
    words = f"computed with jax {versions['jax']}, then 0.0.1: correct, but perhaps not bit-exact"
    assert words in caplog.text


def test_records_of_lost_updates_are_cut_also_where_a_resumed_run_is_over(tmp_path):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, save_seconds=0)
    shutil.rmtree(run / "checkpoints" / f"{40:012d}")
    again = podracer.train(EXPERIMENT, run_dir=run, resume=True, max_seconds=1e-3)
    assert again.reason == "max_seconds"
    assert stored_fingerprint(run)[0] == again.metrics["updates"] == records(run)[-1]["updates"]


def test_a_run_says_at_every_resume_that_it_had_other_versions_or_devices(tmp_path, caplog):
    """Also where it goes on with those that it began with."""

    def resumed(metadata, *, jax="0.1", podracer="1", devices="1 x cpu", config=None):
        caplog.clear()
        seal_json(tmp_path / CONFIG, {"experiment": {}} | (config or {}))
        versions = {"podracer": podracer, "jax": jax}
        attempt = resume.History([devices], [versions])
        attempt.restore(metadata, tmp_path)
        attempt.warn()
        return dataclasses.asdict(attempt), caplog.text

    first = {"topologies": ["1 x cpu"], "versions": [{"podracer": "1", "jax": "0.1"}]}
    check_metadata(
        first | {"experiment": {}, "totals": dataclasses.asdict(Totals()), "records": {}}
    )
    assert resumed(first) == (first, "")
    second, text = resumed(first, jax="0.2", podracer="2")
    assert "with podracer 1, then 2; jax 0.1, then 0.2: correct, but perhaps" in text
    third, text = resumed(second, podracer="2")
    assert "with podracer 1, then 2; jax 0.1, then 0.2, then 0.1: correct" in text
    assert len(third["versions"]) == 3
    assert third["topologies"] == ["1 x cpu"]
    moved, text = resumed(first, devices="2 x cpu")
    said = "computed on 1 x cpu, then on 2 x cpu: correct, but not bit-exact. `devices` and"
    assert said in text
    assert said in resumed(moved, devices="2 x cpu")[1]
    assert "then on 2 x cpu, then on 1 x cpu: correct" in resumed(moved)[1]
    old = {"topologies": ["1 x cpu"]}  # of an older podracer
    assert resumed(old)[1] == ""
    for began in ("0.0", "0.0\x1b[2J"):
        text = resumed(old, config={"versions": {"jax": began, "python": "3"}})[1]
        assert ("jax 0.0, then 0.1" in text) == (began == "0.0")
        assert "\x1b" not in text


@pytest.mark.slow
def test_a_run_goes_on_with_the_devices_that_it_had(tmp_path, caplog):
    """Which is all that a run of so many devices needs to be exact, as a sweep is."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    podracer.train(EXPERIMENT, run_dir=whole, devices=2)
    podracer.train(EXPERIMENT, run_dir=cut, devices=2, frames=20 * STEPS, evaluations=2)
    result = podracer.train(EXPERIMENT, run_dir=cut, resume=True, devices=0)
    assert stored_fingerprint(cut) == stored_fingerprint(whole)
    assert len(jax.tree.leaves(result.state)[0].devices()) == 2
    assert "bit-exact" not in caplog.text
    for frames in (45 * STEPS, 50 * STEPS):  # on another number of devices, which every resume says
        caplog.clear()
        podracer.train(EXPERIMENT, run_dir=cut, resume=True, devices=1, frames=frames)
        assert re.search("on 2 x cpu .*, then on 1 x cpu .*: correct, but not", caplog.text)


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, frames=10 * STEPS)
    other = dataclasses.replace(EXPERIMENT, agent=A2C(network=SMALL, discount=0.5))
    with pytest.raises(ConfigError, match=r"agent.discount was 0.99 and is 0.5"):
        podracer.train(other, run_dir=run, resume=True)
    assert not (run / "crash.json").exists()  # the run itself is as it was


@pytest.mark.parametrize(("policy_lag", "said"), [(0, False), (1, True)])
def test_a_resume_says_whether_environments_begin_new_episodes(policy_lag, said, tmp_path, caplog):
    driver = SebulbaConfig(num_envs=4, rollout_length=4, policy_lag=policy_lag, updates_per_chunk=2)
    settings = {"driver": driver, "evaluations": 0, "run_dir": tmp_path / "run"}
    podracer.train(EXPERIMENT, frames=32, **settings)
    podracer.train(EXPERIMENT, frames=64, resume=True, **settings)
    assert ("begin new episodes" in caplog.text) == said


def test_a_directory_is_used_once(tmp_path):
    with pytest.raises(ConfigError, match=r"resumed in its directory, .*: give run_dir"):
        podracer.train(EXPERIMENT, resume=True)
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run", frames=5 * STEPS)
    with pytest.raises(ConfigError, match="already holds a run"):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "other", resume=True)
    (tmp_path / "run" / "config.json").unlink()
    for directory in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(ConfigError, match=r"holds checkpoints, but not the config\.json"):
            podracer.train(EXPERIMENT, run_dir=directory)
    (tmp_path / "cup").mkdir()
    (tmp_path / "cup" / "leaderboard.jsonl").touch()
    with pytest.raises(ConfigError, match="cup holds a tournament"):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "cup")


@pytest.mark.parametrize("name", ["metrics.jsonl", "pods.jsonl"])
def test_records_of_another_run_are_refused_and_left_as_they_are(name, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"run holds the {name} of another run: move it away"):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run", frames=STEPS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


@pytest.mark.parametrize(
    "text",
    ["RESOURCE_EXHAUSTED: Out of memory", pytest.param("DATA_LOSS: gone", marks=pytest.mark.slow)],
)
def test_a_failing_device_is_a_sentence_and_code_71(tmp_path, monkeypatch, text):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr("podracer.drivers.anakin.Anakin.run", broken)
    with pytest.raises(DeviceError) as raised:
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    assert raised.value.exit_code == 71
    crash = json.loads((tmp_path / "run" / "crash.json").read_text())
    assert crash["code"] == 71
    assert crash["last_update"] == 0


def test_an_error_is_shown_with_the_one_before_it(tmp_path, monkeypatch):
    def broken(*_, **__):
        try:
            raise KeyError("wheel")
        except KeyError:
            raise RuntimeError("no car")  # noqa: B904

    monkeypatch.setattr("podracer.drivers.anakin.Anakin.run", broken)
    with pytest.raises(RuntimeError, match="no car") as raised:
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    assert "KeyError: 'wheel'" in "".join(traceback.format_exception(raised.value))


def test_a_resumed_run_that_a_callback_ends_leaves_a_crash(tmp_path):
    run = tmp_path / "run"
    short = dataclasses.replace(EXPERIMENT, frames=10 * STEPS, evaluations=1)
    podracer.train(short, run_dir=run)
    longer = dataclasses.replace(short, frames=20 * STEPS)
    with pytest.raises(ConfigError, match="a callback returns True, a Wish or None, not 3"):
        podracer.train(longer, run_dir=run, resume=True, callbacks=[lambda boundary: 3])
    crash = json.loads((run / "crash.json").read_text())
    assert (crash["component"], crash["last_update"]) == ("callback", 20)


def test_a_crash_names_the_last_checkpoint_that_was_saved(tmp_path, monkeypatch):
    def seal_once(directory, name, digests):
        if int(name) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        seal(directory, name, digests)

    monkeypatch.setattr("podracer.io.checkpoint.seal", seal_once)
    with pytest.raises(StorageError, match="the checkpoint of step 20 could not be written"):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    crash = json.loads((tmp_path / "run" / "crash.json").read_text())
    assert crash["last_checkpoint"] == 10


BAD = [
    ({"frames": 0}, "frames must be at least 1"),
    ({"driver": AnakinConfig(1024, 1024, 4096), "frames": 2**40}, "a chunk has at most 2,147"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"devices": 9}, "`devices=9` was asked for, but this run sees 8"),
    ({"save_seconds": float("nan")}, "save_seconds must be finite"),
    ({"environment": "cathc"}, "did you mean catch"),
    ({"agent": A2C(learning_rate=float("nan"))}, "agent.learning_rate must be finite"),
    ({"agent": A2C(discount=1.5)}, "agent.discount must lie in"),
    ({"agent": A2C(network=TorsoNetwork(MLP((0,))))}, "hidden must be at least 1"),
    ({"driver": AnakinConfig(0, 8, 5)}, "driver.num_envs must be at least 1"),
]


@pytest.mark.figure(20)
@pytest.mark.parametrize(("change", "message"), BAD)
def test_impossible_values_are_refused_before_anything_is_made(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run", **change)
    assert list(tmp_path.iterdir()) == []


def test_one_setting_of_a_recipe_is_changed_by_name():
    experiment = recipes.find("cartpole_ppo")
    changed = experiment.with_fields(
        {"seed": 3, "agent": {"learning_rate": 0.5, "network": {"shared": True}}}
    )
    network = changed.agent.network
    assert (changed.seed, changed.agent.learning_rate, network.shared) == (3, 0.5, True)
    assert network.torso == experiment.agent.network.torso
    assert changed.driver == experiment.driver
    with pytest.raises(ConfigError, match=r"PPO has no field 'learning_rat'.*learning_rate"):
        podracer.train("cartpole_ppo", agent={"learning_rat": 0.5})
    with pytest.raises(ConfigError, match=r'one of its agent: agent=\{"learning_rate": ...\}'):
        podracer.train("cartpole_ppo", learning_rate=0.5)
    for change, words in (
        ({"total_timesteps": 1000}, "Experiment has no field 'total_timesteps': did you mean fra"),
        ({"lr": 0.5}, 'it is one of its agent: agent={"learning_rate": ...}.'),
        ({"n_envs": 2}, 'it is one of its driver: driver={"num_envs": ...}.'),
        ({"agent": {"batch_size": 2}}, "did you mean num_minibatches?"),
        (
            {"agent": {"hidden": (32, 32)}},
            'one of its network.torso: agent={"network": {"torso": {"hidden": ...}}}.',
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            podracer.train("cartpole_ppo", **change)


@pytest.mark.parametrize("name", [*recipes.RECIPES, *installed("recipes")])
def test_every_recipe_is_whole(name):
    experiment = recipes.find(name)
    experiment.check()
    check_types(experiment)
    assert experiment.recipe == name
    assert from_json(json.loads(json.dumps(to_json(experiment)))) == experiment
    chunk = experiment.run_driver
    assert experiment.num_updates * chunk.steps_per_update >= experiment.frames
    *marks, last = sorted(experiment.evaluation_updates) or [experiment.num_updates]
    assert last == experiment.num_updates
    assert all(updates % chunk.updates_per_chunk == 0 for updates in marks)


@pytest.mark.figure(16)
@pytest.mark.parametrize(
    "data",
    [
        {"kind": "os.system", "command": "true"},
        {"kind": "Experiment", "recipe": "x", "surprise": 1},
        {"kind": "AnakinConfig", "num_envs": "many"},
        {"kind": "MLP", "hidden": ["wide"]},
        {"kind": "MLP", "activation": "exec"},
        {"kind": "Experiment", "recipe": "x"},
        {"_target_": "os.system"},
    ],
)
def test_a_configuration_cannot_name_what_it_likes(data):
    with pytest.raises(ConfigError):
        from_json(data)


@dataclasses.dataclass(frozen=True)
class Faulty:
    """Episodes of 20 steps that show NaN in the 5th."""

    spec = EnvironmentSpec("faulty", ArraySpec((1,)), Discrete(2))

    def reset(self, key):
        return jnp.int32(0), restart(jnp.zeros(1))

    def step(self, key, time, action):
        time = time + 1
        observation = jnp.where(time == 5, jnp.nan, time / jnp.ones(1))
        return time, transition(observation, 1.0, timeout=time >= 20)


@pytest.mark.slow
def test_a_row_is_masked_until_its_next_episode_also_after_a_resume(tmp_path):
    driver = SebulbaConfig(4, 8, updates_per_chunk=1, policy_lag=0, threads_per_actor=1)
    env = auto_reset(Faulty())
    whole = Experiment(environment=env, agent=A2C(), driver=driver, frames=128, evaluations=0)
    podracer.train(whole, run_dir=tmp_path / "whole")
    cut = dataclasses.replace(whole, frames=32)  # the rows are masked when it ends
    podracer.train(cut, run_dir=tmp_path / "cut")
    podracer.train(whole, run_dir=tmp_path / "cut", resume=True)
    assert stored_fingerprint(tmp_path / "cut") == stored_fingerprint(tmp_path / "whole")


def sentences(experiment):
    return list(run_warnings(experiment, build(experiment)[0]))


def test_a_target_that_no_evaluation_can_reach_is_said():
    run = recipes.find("cartpole_sebulba")
    assert sentences(run) == []
    assert sentences(run.with_fields({"evaluations": 0})) == []  # nobody asked for the target
    (text,) = sentences(run.with_fields({"evaluations": 0, "target_return": 400.0}))
    assert text == "`target_return=400` ends no run without evaluations."


def test_a_replay_whose_warm_up_never_ends_is_said():
    long, last = (
        dataclasses.replace(EXPERIMENT, agent=DQN(replay=Replay(10_000, warmup=warmup)))
        for warmup in (40 * STEPS + 1, 40 * STEPS)
    )
    assert long.num_steps == 40 * STEPS
    (text,) = set(sentences(long)) - set(sentences(EXPERIMENT))
    assert text.startswith("Nothing will be learned: the replay's warm-up takes")
    assert sentences(last) == sentences(EXPERIMENT)


def test_a_finished_run_that_is_resumed_has_its_last_record(finished):
    again = podracer.train(EXPERIMENT, run_dir=finished.run_dir, resume=True)
    assert again.metrics.items() >= records(finished.run_dir)[-1].items()
    assert again.evaluation is None
