"""Matches and ratings: who wins, what a rating says, and which players are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from podracer.agent import Blueprint
from podracer.agents.ppo import PPO
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer_games import match
from podracer_games.ratings import rate


def test_two_players_differ_by_the_logit_of_their_score():
    """With many games the prior says nothing: 3 points of 4 are 400 log10(3) = 190.8 points."""
    games = np.array([[0, 40_000], [40_000, 0]])
    scores = np.array([[0, 30_000], [10_000, 0]])
    elo, std = rate(scores, games)
    np.testing.assert_allclose(elo[0] - elo[1], 400 * np.log10(3), atol=0.1)
    # The variance of a logit of n games with share p is 1 / (n p (1 - p)).
    expected = 400 / np.log(10) / np.sqrt(40_000 * 0.75 * 0.25)
    np.testing.assert_allclose(2 * std[0], expected, rtol=1e-3)


def test_ratings_are_the_maximum_of_the_posterior():
    rng = np.random.default_rng(0)
    games = np.triu(rng.integers(1, 20, (4, 4)), 1)
    games = games + games.T
    scores = np.triu(np.round(2 * games * rng.uniform(size=(4, 4))) / 2, 1)
    scores = scores + np.tril(games - scores.T, -1)

    def log_posterior(elo: np.ndarray) -> float:
        share = 1 / (1 + 10 ** ((elo[None, :] - elo[:, None]) / 400))
        return float((scores * np.log(share)).sum() - (elo**2).sum() / (2 * 800.0**2))

    elo = rate(scores, games).elo
    best = log_posterior(elo)
    for _ in range(200):
        step = rng.normal(size=4)
        assert log_posterior(elo + step - step.mean()) < best
    np.testing.assert_allclose(elo.mean(), 0, atol=1e-9)


def test_a_player_is_a_run_at_a_path_or_an_address_or_a_pod_of_either(tmp_path, monkeypatch):
    places = {"a": tmp_path, "file://b": tmp_path / "copy"}
    monkeypatch.setattr(match, "local_run", lambda run, checkpoint: places.get(run, Path(run)))
    (tmp_path / "copy").mkdir()
    (tmp_path / "named:7").mkdir()
    assert match._find_run("a", "best") == (tmp_path, None)
    assert match._find_run("a:3", "best") == (tmp_path, 3)
    assert match._find_run("file://b", "best") == (tmp_path / "copy", None)
    assert match._find_run("file://b:12", "best") == (tmp_path / "copy", 12)
    assert match._find_run(f"{tmp_path}/named:7", "best") == (tmp_path / "named:7", None)
    assert match._find_run("minimax-2", "best") == match._find_run("nowhere:3", "best")


@pytest.mark.filterwarnings("ignore")  # of pgx, when it is imported
@pytest.mark.usefixtures("lenient_ranks")
class TestMatches:
    @pytest.fixture(autouse=True)
    def needs(self):
        pytest.importorskip("pgx")

    def test_minimax_beats_random_play_and_an_untrained_policy_makes_legal_moves(self):
        from podracer.envs import make
        from podracer_games import matches

        env = make("game:tic_tac_toe,opponent=self")
        agent = Blueprint(PPO(network=TorsoNetwork(MLP((4,)))), env.spec)
        state = agent.build().init(jax.random.key(0), 1)
        players = [
            matches.opponent_player("random"),
            matches.trained_player("untrained", agent, env, state, sampled=True),
            matches.opponent_player("minimax-2"),
        ]
        table = matches.play_matches(matches.common_game([env]), players, 64, seed=0)
        np.testing.assert_array_equal(table.wins + table.wins.T + table.draws, table.games)
        assert table.ratings.elo.argmax() == 2
        assert table.scores[2, 0] / 64 > 0.75
        # An illegal move would lose at once; random play against random play is even.
        assert 0.3 < table.scores[1, 0] / 64 < 0.7
        again = matches.play_matches(matches.common_game([env]), players, 64, seed=0)
        np.testing.assert_array_equal(again.wins, table.wins)

    def test_an_outcome_is_of_a_game_however_much_it_is_worth(self):
        """Kuhn poker pays one or two chips; everyone wins sometimes."""
        from podracer_games import matches

        players = [matches.opponent_player("random")] * 2
        play = matches.make_play_games("kuhn_poker", players, 64)
        assert set(np.unique(play(0, 1, jax.random.key(0)))) == {-1.0, 1.0}

    def test_players_who_remember_or_know_another_game_are_refused(self):
        from podracer.envs import make
        from podracer_games import matches

        env = make("game:tic_tac_toe,opponent=self")
        network = TorsoNetwork(MLP((4,)), memory="gru", memory_size=4)
        agent = Blueprint(PPO(network=network), env.spec)
        state = agent.build().init(jax.random.key(0), 1)
        player = matches.trained_player("mine", agent, env, state, sampled=True)
        with pytest.raises(ConfigError, match="mine remembers the game"):
            matches.play_matches("tic_tac_toe", [player, matches.opponent_player("random")], 1, 0)
        with pytest.raises(ConfigError, match=r"the same game, not connect_four, tic_tac_toe"):
            matches.common_game([env, make("game:connect_four")])
        for other in ("catch", "pgx:minatar-breakout"):
            with pytest.raises(ConfigError, match="need a board game"):
                matches.common_game([make(other)])

    @pytest.mark.slow
    def test_the_command_rates_runs(self, tmp_path):
        def call(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "podracer", *arguments]
            return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

        for frames in ("8192", "200000"):
            flags = ("--frames", frames, "--evaluations", "0", "--run-dir", frames)
            assert call("train", "tic_tac_toe_ppo", *flags).returncode == 0
        result = call("match", "8192", "200000", "random", "--games", "128", "--json")
        figures = json.loads(result.stdout)
        assert figures["players"] == ["8192", "200000", "random"]
        assert figures["elo"][1] == max(figures["elo"])
        assert "player" in call("match", "8192", "random", "--games", "8").stdout
        for players, sentence in (
            (["random", "minimax-2"], "needs at least one run"),
            (["8192"], "two players or more"),
            (["8192", "minmax"], "there is no opponent 'minmax'"),
        ):
            refused = call("match", *players)
            assert refused.returncode == 78
            assert sentence in refused.stderr
