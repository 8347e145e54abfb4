"""Training against frozen policies: whose moves they are, exact resumption, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import podracer
from podracer.agents.alphazero import AlphaZero
from podracer.agents.ppo import PPO
from podracer.cli.main import main
from podracer.cli.run_options import CheckpointOptions
from podracer.config.experiment import Experiment
from podracer.config.serialization import read_config
from podracer.drivers.anakin import AnakinConfig
from podracer.envs import make
from podracer.envs.opponents import random_move
from podracer.errors import CheckpointError, ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.io.seal import CONFIG, seal_json
from podracer.networks import MLP, TorsoNetwork
from podracer.run import loading, restore
from podracer.run.loading import load_run
from podracer.run.opponents import (
    TrainedOpponent,
    make_environment,
    with_opponents,
    without_runs,
)

pytest.importorskip("pgx")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of pgx, when it is imported
    pytest.mark.usefixtures("lenient_ranks"),
]

TINY = Experiment(
    environment="pgx:tic_tac_toe,opponent=self",
    agent=PPO(network=TorsoNetwork(MLP((8,)))),
    driver=AnakinConfig(num_envs=8, rollout_length=8, updates_per_chunk=1),
    frames=64,
    devices=1,
    evaluations=0,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("opponents") / "first"
    with jax.numpy_rank_promotion("allow"):  # `lenient_ranks` comes after this
        podracer.train(TINY, run_dir=directory)
    return directory


def first_free(key, game, state):
    """The opponent that takes the first free place."""
    return state.legal_action_mask.argmax().astype("int32")


def last_free(key, game, state):
    return (8 - state.legal_action_mask[::-1].argmax()).astype("int32")


@pytest.mark.slow
def test_each_game_draws_one_opponent_and_keeps_it():
    """Against one that takes the first free place and one that takes the last."""
    env = make("pgx:tic_tac_toe", opponent=(first_free, last_free))
    step = jax.jit(jax.vmap(env.step))
    keys = jax.random.split(jax.random.key(0), 64)
    state, timestep = jax.jit(jax.vmap(env.reset))(keys)
    numbers, games = np.asarray(state.inner.opponent), 0
    assert 0.25 < numbers.mean() < 0.75
    for t in range(12):
        board = np.asarray(timestep.observation["board"]).reshape(64, 9, 2)
        free = ~board.any(-1)
        action = np.argmax(free * np.random.default_rng(t).uniform(0.1, 1, (64, 9)), -1)
        keys = jax.random.split(jax.random.key(t + 1), 64)
        state, timestep = step(keys, state, action.astype(np.int32))
        after = np.asarray(timestep.observation["board"]).reshape(64, 9, 2)
        begins = np.asarray(timestep.first)
        games += begins.sum()
        for b in np.flatnonzero(~begins):
            free[b, action[b]] = False
            (move,) = np.flatnonzero(after[b, :, 1] & ~board[b, :, 1])
            places = np.flatnonzero(free[b])
            assert move == (places[-1] if numbers[b] else places[0])
        drawn = np.asarray(state.inner.opponent)
        np.testing.assert_array_equal(drawn[~begins], numbers[~begins])
        numbers = drawn
    assert games > 64


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "+minimax-1,evaluate_against=random"])
def test_training_against_a_run_resumes_to_the_bit(run, tmp_path, options):
    """One opponent, and several with an evaluation against another."""
    experiment = dataclasses.replace(
        TINY, environment=f"pgx:tic_tac_toe,opponent={run}{options}", frames=256
    )
    podracer.train(experiment, run_dir=tmp_path / "whole")
    podracer.train(experiment, run_dir=tmp_path / "parts", frames=128)
    podracer.train(experiment, run_dir=tmp_path / "parts", resume=True)
    whole, parts = (stored_fingerprint(tmp_path / name) for name in ("whole", "parts"))
    assert whole == parts
    assert whole[0] == 4


@pytest.mark.slow
def test_a_run_is_loaded_without_its_opponents(run, tmp_path):
    opponent = shutil.copytree(run, tmp_path / "opponent")
    environment = f"pgx:tic_tac_toe,opponent={opponent},evaluate_against=minimax-1"
    experiment = dataclasses.replace(TINY, environment=environment)
    podracer.train(experiment, run_dir=tmp_path / "run")
    shutil.rmtree(opponent)
    agent, _ = podracer.load(tmp_path / "run")
    assert agent.spec.name == "pgx:tic_tac_toe"
    with pytest.raises(ConfigError, match="there is no opponent"):
        load_run(tmp_path / "run")


def test_commands_make_an_environment_without_opponents_of_training(tmp_path, monkeypatch):
    name = "pgx:tic_tac_toe,opponent=runs/gone,evaluate_against=runs/there"
    experiment = dataclasses.replace(TINY, environment=name)
    environments = []

    def build(make, experiment):
        environments.append(experiment.environment)
        raise ConfigError("enough")

    monkeypatch.setattr(loading, "reopen", lambda *_: experiment)
    monkeypatch.setattr(restore, "build_with", build)
    with pytest.raises(ConfigError, match="enough"):
        CheckpointOptions(tmp_path).load(experiment)
    assert environments == [name.replace("runs/gone", "random")]


@pytest.mark.slow
def test_a_run_is_evaluated_without_opponents_that_it_only_trained_against(run, tmp_path, capsys):
    """A league deletes them, and its last line names this command."""
    directory = shutil.copytree(run, tmp_path / "run")
    config = read_config(directory / CONFIG)
    environment = f"pgx:tic_tac_toe,opponent={tmp_path / 'gone'}+random,evaluate_against=random"
    experiment = config["experiment"] | {"environment": environment}
    seal_json(directory / CONFIG, config | {"experiment": experiment})
    with pytest.raises(SystemExit) as leaving:
        main(["eval", str(directory), "--episodes", "2", "--json"])
    assert leaving.value.code == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 1


@pytest.mark.slow
def test_an_agent_that_plans_is_loaded_with_its_opponents(run, tmp_path):
    """It searches in the game that it plays, and no other is put in its place without a word."""
    opponent = shutil.copytree(run, tmp_path / "opponent")
    environment = f"model:pgx:tic_tac_toe,opponent={opponent},evaluate_against={run}"
    planner = AlphaZero(network=TorsoNetwork(MLP((8,))), num_simulations=2)
    experiment = dataclasses.replace(TINY, environment=environment, agent=planner)
    podracer.train(experiment, run_dir=tmp_path / "run")
    agent, _ = podracer.load(tmp_path / "run")
    model = agent.spec.extension.inner
    assert model.opponents == load_run(tmp_path / "run").env.environment.inner.opponents
    assert [type(x) for x in model.opponents] == [TrainedOpponent]
    assert model.evaluation_opponents == (random_move,)
    shutil.rmtree(opponent)
    with pytest.raises(ConfigError, match="there is no opponent"):
        podracer.load(tmp_path / "run")


def test_the_names_of_environments_with_opponents():
    name = "model:pgx:go_9x9,opponent=self,evaluate_against=minimax-1"
    against = with_opponents(name, ["runs/a", "random"], "random")
    assert against == "model:pgx:go_9x9,opponent=runs/a+random,evaluate_against=random"
    assert without_runs(against) == against.replace("runs/a", "random")
    assert without_runs(against, keep_planned=True) == against
    evaluated = with_opponents(name, ["runs/a"], "runs/b")
    assert without_runs(evaluated, keep_planned=True) == evaluated.replace("runs/b", "random")
    assert without_runs(evaluated, keep_evaluation=True) == evaluated.replace("runs/a", "random")
    assert without_runs(evaluated, keep_planned=True, keep_evaluation=True) == evaluated
    only = "pgx:go_9x9,opponent=runs/a"  # which are those of evaluation, too
    assert without_runs(only, keep_planned=True, keep_evaluation=True) == only
    assert without_runs(only) == only.replace("runs/a", "random")
    assert without_runs(name) == name
    assert without_runs("catch") == "catch"
    opened = "pgx:tic_tac_toe,opponent=self,opening_moves=4"  # which are those of self-play
    assert make(with_opponents(opened, ["random"], "random")).spec.name == "pgx:tic_tac_toe"


def refused(directory: Path, opponents: str, game: str = "tic_tac_toe") -> str:
    experiment = dataclasses.replace(TINY, environment=f"pgx:{game},opponent={opponents}")
    with pytest.raises((ConfigError, CheckpointError)) as error:
        podracer.train(experiment, run_dir=directory)
    assert not directory.exists()
    return str(error.value)


def test_what_is_no_run_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "empty").mkdir()
    for game, opponents, words in (
        ("tic_tac_toe", f"{tmp_path / 'empty'}", "it holds no run"),
        ("tic_tac_toe", f"{tmp_path / 'nothing'}+random", "there is no opponent"),
        ("tic_tac_toe", "minimax-1+self", "without others"),
        ("minatar-breakout", "minimax-1", "needs no opponent"),
    ):
        assert words in refused(tmp_path / "run", opponents, game)


@pytest.mark.slow
def test_runs_of_other_games_are_refused_before_anything_is_compiled(run, tmp_path):
    for game, opponents, words in (
        ("connect_four", f"{run}", "learned tic_tac_toe, so it is no opponent in connect_four"),
        ("tic_tac_toe", f"{run}/checkpoints/000000000099", "there is no opponent"),
        ("tic_tac_toe", f"{run}+self", "without others"),
        ("minatar-breakout", f"{run}", "so it is no opponent in minatar-breakout"),
    ):
        assert words in refused(tmp_path / "run", opponents, game)


@pytest.mark.slow
def test_runs_that_cannot_play_are_refused_before_anything_is_compiled(tmp_path):
    memory = TorsoNetwork(MLP((4,)), memory="gru", memory_size=4)
    recurrent = dataclasses.replace(TINY, agent=PPO(network=memory))
    podracer.train(recurrent, run_dir=tmp_path / "recurrent")
    assert "remembers the game" in refused(tmp_path / "run", f"{tmp_path / 'recurrent'}")
    podracer.train("catch_a2c", run_dir=tmp_path / "catch", frames=1, evaluations=0)
    assert "need a game of two players" in refused(tmp_path / "run", f"{tmp_path / 'catch'}")


@pytest.mark.slow
def test_an_opponent_whose_checkpoint_has_changed_is_another_environment(run, tmp_path):
    """A run goes on only against the opponent that it began with."""
    opponent = shutil.copytree(run, tmp_path / "opponent")
    experiment = dataclasses.replace(TINY, environment=f"pgx:tic_tac_toe,opponent={opponent}")
    podracer.train(experiment, run_dir=tmp_path / "run")
    podracer.train(TINY, run_dir=opponent, frames=128, resume=True)
    with pytest.raises(ConfigError, match=r"began in another environment.*opponent"):
        podracer.train(experiment, run_dir=tmp_path / "run", frames=128, resume=True)


@pytest.mark.slow
def test_a_run_is_an_opponent_of_evaluation(run):
    env = make_environment(f"pgx:tic_tac_toe,opponent=self,evaluate_against={run}")
    assert env.for_evaluation().inner.opponent.directory == str(run)
