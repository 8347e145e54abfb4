"""Leagues: who plays whom, ratings that follow from the log, faults that stay in their match."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import Killed, killed

from podracer import recipes
from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.io.run_directory import write_json
from podracer.io.signals import StopSignals
from podracer.networks import MLP, TorsoNetwork
from podracer.reports.standings import LiveStandings, entry_as_json
from podracer.reports.tournament import write_tournament_report
from podracer.tournament import orchestrator, selection
from podracer.tournament import pod as pods
from podracer.tournament.config import Tournament
from podracer.tournament.engine import InlineEngine
from podracer.tournament.events import (
    Board,
    Entry,
    PodState,
    Started,
    Submitted,
    TournamentState,
    accepted_entries,
    state_after,
)
from podracer.tournament.index import INDEX
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer.tournament.league import draw_opponents, draw_training, even, prioritized, win_rates
from podracer.tournament.orchestrator import Orchestrator
from podracer.tournament.ratings import Match, Rating, points, rate, rate_players

LEAGUE = Tournament(
    (recipes.find("tic_tac_toe_ppo"),),
    selection.Independent(),
    pods=3,
    rounds=4,
    size=3,
    episodes=10,
    opponents="past",
    matches=2,
)
DIGEST = hashlib.sha256(b"").hexdigest()


# --- ratings --------------------------------------------------------------------------------------


def test_an_anchor_has_0_and_the_differences_stay():
    games = np.array([[0, 30, 20], [30, 0, 40], [20, 40, 0]])
    scores = np.array([[0, 9, 4], [21, 0, 15], [16, 25, 0]])
    free, pinned = rate(scores, games), rate(scores, games, anchor=0)
    np.testing.assert_allclose(pinned.elo, free.elo - free.elo[0], atol=1e-9)
    assert pinned.elo[0] == pinned.std[0] == 0.0
    # The variance of a difference of two ratings, by the games of these two alone.
    elo, std = rate(np.array([[0, 10_000], [30_000, 0]]), 40_000 * (1 - np.eye(2)), anchor=0)
    np.testing.assert_allclose(elo[1], 400 * np.log10(3), atol=0.1)
    expected = 400 / np.log(10) / np.sqrt(40_000 * 0.75 * 0.25)
    np.testing.assert_allclose(std[1], expected, rtol=1e-3)


def test_ratings_do_not_depend_on_the_order_of_matches():
    rng = np.random.default_rng(0)
    players = [f"p{pod}r{round}" for pod in range(4) for round in range(5)]
    matches = [Match(player, "random", *rng.integers(1, 9, 3)) for player in players]
    for i, player in enumerate(players[1:]):
        matches.append(Match(player, players[rng.integers(i + 1)], *rng.integers(0, 9, 3)))
    ratings = rate_players(matches)
    first, *others = matches
    assert rate_players([first, *reversed(others)]) == ratings
    assert ratings["random"] == (0.0, 0.0)
    fault = Match("p0r0", "p3r4", 0, 0, 0, "it broke")
    assert rate_players([*matches, fault]) == ratings


def test_ratings_do_not_depend_on_the_ratings_before():
    """Each entry of a log is rated from the last ratings, which find the same as none do."""
    rng = np.random.default_rng(1)
    matches: list[Match] = []
    ratings: dict[str, Rating] = {}
    for number in range(40):
        names = [f"p0r{earlier}" for earlier in rng.permutation(number)[:3]]
        for name in ("random", *names):
            matches.append(Match(f"p0r{number}", name, *rng.integers(0, 9, 3)))
        ratings = rate_players(matches, ratings)
    players = list(ratings)
    anew = rate(*points(matches, players), anchor=0)
    start = rng.normal(0.0, 500.0, len(players))
    warm = rate(*points(matches, players), anchor=0, start=start)
    np.testing.assert_allclose(warm.elo, anew.elo, rtol=0, atol=1e-9)
    np.testing.assert_allclose(warm.std, anew.std, rtol=0, atol=1e-9)
    assert ratings == rate_players(matches)


# --- the draw of opponents ------------------------------------------------------------------------


def entry(pod: int, round: int) -> Entry:
    return Entry(
        pod, round, 0, 0.0, 1.0, 10, "e", 100, 1.0, f"pods/p{pod}r{round}", DIGEST, (), {}, {}, 0.0
    )


def state_with_ratings() -> TournamentState:
    """Three pods with two rounds each, of which the leaderboard holds one of pod 0 and one of 1."""
    matches = [
        Match("p0r0", "random", 6, 0, 4), Match("p1r0", "random", 9, 0, 1),
        Match("p2r0", "random", 2, 0, 8), Match("p0r1", "random", 7, 1, 2),
        Match("p0r1", "p1r0", 1, 0, 9), Match("p1r1", "random", 8, 1, 1),
        Match("p2r1", "random", 4, 0, 6), Match("p2r1", "p0r1", 2, 2, 6),
    ]  # fmt: skip
    pods = {pod: PodState(2, newest=entry(pod, 1)) for pod in range(3)}
    board = Board((entry(1, 0), entry(0, 1)))
    ratings = rate_players(matches)
    return TournamentState(LEAGUE.header(), board, pods, matches=tuple(matches), ratings=ratings)


def shares(rule: str, num: int = 1000) -> dict[str, float]:
    """How often pod 0, which starts from p0r1, draws whom as its one opponent."""
    league = dataclasses.replace(LEAGUE, opponents=rule, matches=1)
    state, counts = state_with_ratings(), dict[str, int]()
    for round in range(num):
        anchor, drawn = draw_opponents(league, state, 0, round, ("p0r1",))
        assert anchor == "random"
        counts[drawn] = counts.get(drawn, 0) + 1
    return {name: count / num for name, count in sorted(counts.items())}


def test_opponents_are_drawn_by_the_rule():
    """1,000 draws: a standard deviation of a share is at most 0.016."""
    uniform = shares("latest")
    assert list(uniform) == ["p0r1", "p1r1", "p2r1"]
    np.testing.assert_allclose(list(uniform.values()), 1 / 3, atol=0.05)
    uniform = shares("past")
    assert list(uniform) == ["p0r1", "p1r0", "p1r1", "p2r1"]
    np.testing.assert_allclose(list(uniform.values()), 1 / 4, atol=0.05)
    elo = {name: rating.elo for name, rating in state_with_ratings().ratings.items()}

    def expected(name: str) -> float:
        return 1 / (1 + 10 ** ((elo[name] - elo["p0r1"]) / 400))

    rates = {  # of p0r1: the games of each pair, with one more that goes as expected
        "p0r1": 0.5,
        "p1r0": (1 + expected("p1r0")) / (10 + 1),
        "p1r1": expected("p1r1"),
        "p2r1": (6 + 2 / 2 + expected("p2r1")) / (10 + 1),
    }
    weights = np.array([(1 - rate) ** 2 for rate in rates.values()])
    hard = shares("prioritized")
    assert list(hard) == list(rates)
    np.testing.assert_allclose(list(hard.values()), weights / weights.sum(), atol=0.05)
    assert max(hard, key=lambda name: hard[name]) == "p1r0"


def test_a_draw_is_decided_by_the_seed_and_has_no_entry_twice():
    state = state_with_ratings()
    many = dataclasses.replace(LEAGUE, opponents="prioritized", matches=9)
    drawn = draw_opponents(many, state, 1, 2, ("p1r1",))
    assert sorted(drawn[1:]) == ["p0r1", "p1r0", "p1r1", "p2r1"]
    draws = [
        [
            draw_opponents(dataclasses.replace(LEAGUE, seed=seed), state, 1, round, ())
            for round in range(20)
        ]
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    empty = state_after([LEAGUE.header()])
    assert draw_opponents(LEAGUE, empty, 0, 0, ()) == ("random",)
    plain = dataclasses.replace(LEAGUE, opponents=None)
    assert draw_opponents(plain, state, 1, 2, ()) == ()


def test_win_rates_are_those_of_the_games_though_the_ratings_are_equal():
    """Rock, paper, scissors: a wins against b, who wins against c, who wins against a."""
    matches = [Match(name, "random", 5, 0, 5) for name in "abc"]
    matches += [Match(*pair, 100, 0, 0) for pair in ("ab", "bc", "ca")]
    ratings = rate_players(matches)
    assert {rating.elo for rating in ratings.values()} == {0.0}
    rates = win_rates("a", ["b", "a", "c"], matches, ratings)
    np.testing.assert_allclose(rates, [100.5 / 101, 0.5, 0.5 / 101])


def test_whoever_always_wins_still_has_somebody_to_play():
    matches = [Match("p0r0", "random", 10**6, 0, 0), Match("p1r0", "random", 0, 0, 10**6)]
    rates = win_rates("p0r0", ["p1r0"], matches, rate_players(matches))
    np.testing.assert_allclose(prioritized(rates), 1.0)


def slow_chances(rates: list[float], weight: Any) -> list[float]:
    total = 0.0
    for win_rate in rates:
        total += weight(win_rate)
    return [weight(win_rate) / total for win_rate in rates]


def test_the_weights_of_alphastar():
    """Hard opponents by (1 - x)^2, those of the same level by x (1 - x)."""
    rates = [0.02, 0.25, 0.5, 0.8, 0.97]
    for chances, weight in (
        (prioritized, lambda x: (1 - x) * (1 - x)),
        (even, lambda x: x - x * x),
    ):
        np.testing.assert_allclose(chances(np.array(rates)), slow_chances(rates, weight))


def test_opponents_of_training_are_drawn_by_their_own_rule():
    """300 draws of one of them: those of its own level come most often."""
    state, names = state_with_ratings(), ["p0r1", "p1r0", "p1r1", "p2r1"]
    rates = win_rates("p0r1", names, state.matches, state.ratings).tolist()
    league = dataclasses.replace(LEAGUE, opponents="latest", train_against="even", matches=1)
    counts = dict.fromkeys(names, 0)
    for round in range(300):
        (drawn,) = draw_training(league, state, 0, round, ("p0r1",))
        counts[drawn] += 1
    expected = slow_chances(rates, lambda x: x * (1 - x))
    np.testing.assert_allclose(np.array(list(counts.values())) / 300, expected, atol=0.09)
    assert counts["p0r1"] > counts["p1r0"]
    many = dataclasses.replace(league, matches=9)
    assert sorted(draw_training(many, state, 0, 5, ("p0r1",))) == names
    assert draw_training(many, state_after([LEAGUE.header()]), 0, 0, ()) == ("random",)
    assert draw_training(LEAGUE, state, 0, 5, ("p0r1",)) == ()


# --- the log --------------------------------------------------------------------------------------


class Pretend:
    """An engine whose rounds end at once; later rounds of later pods play better."""

    def __init__(self, crashes: int = 0, faulty: str = "") -> None:
        self.crashes, self.faulty = crashes, faulty
        self.codes: dict[int, int] = {}

    def start(self, token: int, directory: Path) -> None:
        task = pods.read_task(directory)
        root, step = directory.parents[1], directory / "checkpoints" / f"{token:012d}"
        if (task.pod, task.round) == (1, 2) and self.crashes and len(task.opponents) > 1:
            self.crashes -= 1
            self.codes[token] = -9
            return
        step.mkdir(parents=True)
        (step / "manifest.json").touch()
        matches = []
        for opponent in (*task.opponents, *task.training):
            assert not opponent.checkpoint or pods.verified_checkpoint(root, opponent).is_dir()
        for opponent in task.opponents:
            if opponent.name == self.faulty:
                matches.append((f"p{task.pod}r{task.round}", opponent.name, 0, 0, 0, "no file"))
            else:
                matches.append(outcome(task.pod, task.round, opponent.name))
        report = {
            "token": token, "score": 0.5, "standard_error": 0.1, "episodes": 10 * len(matches),
            "frames": 100 * (task.round + 1), "seconds": 1.0, "digest": DIGEST,
            "checkpoint": step.relative_to(root).as_posix(), "matches": matches,
        }  # fmt: skip
        write_json(directory / pods.REPORT, report)
        self.codes[token] = 0

    is_ready, waiting = True, frozenset[int]()

    def poll(self) -> dict[int, int]:
        codes, self.codes = self.codes, {}
        return codes

    def stop(self, token: int) -> None: ...
    def kill(self, token: int) -> None: ...
    def close(self) -> None: ...


def outcome(pod: int, round: int, opponent: str) -> Match:
    other = 0 if opponent == "random" else int(opponent[1]) + 2 * int(opponent[3])
    wins = int(np.clip(5 + pod + 2 * round - other, 0, 9))
    return Match(f"p{pod}r{round}", opponent, wins, 1, 9 - wins)


def run(directory: Path, tournament: Tournament = LEAGUE, engine: Any = None) -> TournamentState:
    with Leaderboard(directory, tournament.header()) as board:
        loop = Orchestrator(
            tournament, board, engine or Pretend(), StopSignals(), lambda state: None
        )
        assert loop.run() == 0
        check_index(board)
        return board.state


def check_index(board: Leaderboard) -> None:
    """The index has the last ratings of all entries."""
    with sqlite3.connect(f"file:{board.directory / INDEX}?mode=ro", uri=True) as index:
        rows = index.execute("SELECT id, score, standard_error FROM entries").fetchall()
        ranked = index.execute("SELECT id FROM board").fetchall()
    index.close()
    assert [name for (name,) in ranked] == [entry.id for entry in board.state.board]
    assert {name: rating for name, *rating in rows} == {
        e.id: [e.score, e.standard_error]
        for e in accepted_entries(read_events(board.directory)).values()
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(orchestrator, "PAUSE_SECONDS", 0.0)


def test_an_entry_that_has_left_the_leaderboard_stays_away_though_its_rating_rises(
    tmp_path, monkeypatch
):
    def by_chance(pod: int, round: int, opponent: str) -> Match:
        wins = int(np.random.default_rng([pod, round, *opponent.encode()]).integers(10))
        return Match(f"p{pod}r{round}", opponent, wins, 0, 9 - wins)

    monkeypatch.setitem(globals(), "outcome", by_chance)
    highest = []
    for seed in range(4):
        league = dataclasses.replace(LEAGUE, rounds=5, matches=4, seed=seed)
        state = run(tmp_path / str(seed), league)  # which compares the index
        away = state.ratings.keys() - state.board.by_id.keys() - {league.anchor}
        highest.append(max(state.ratings[name].elo for name in away) - state.board[-1].score)
    assert max(highest) > 0.0


def test_scores_are_ratings_and_selection_works_on_them(tmp_path):
    """Also of entries that were rated before: a later match changes them."""
    league = dataclasses.replace(LEAGUE, selection=selection.Truncation(fraction=0.4))
    state = run(tmp_path, league)
    assert state_after(read_events(tmp_path)) == state
    entries = accepted_entries(read_events(tmp_path))
    assert len(entries) == 12
    ratings = rate_players(state.matches)
    assert ratings == state.ratings
    assert {name: (e.score, e.standard_error) for name, e in entries.items()} == {
        name: rating for name, rating in ratings.items() if name != "random"
    }
    for kept in state.board:
        assert kept.score == ratings[kept.id].elo
    assert [e.score for e in state.board] == sorted((e.score for e in state.board), reverse=True)
    assert max(ratings, key=lambda name: ratings[name].elo) == "p2r3"
    adopted = [e for e in entries.values() if e.parents and e.parents[0][:2] != e.id[:2]]
    assert {e.pod for e in adopted} == {0}  # the weakest
    assert any(path.is_dir() for path in tmp_path.glob("pods/*/checkpoints/*"))


def test_killed_before_and_after_every_event_a_league_has_the_same_ratings(tmp_path, monkeypatch):
    """Generations wait for each other, so that the order of ends does not matter.

    A round keeps its opponents of training, whose checkpoints are there.
    """
    league = dataclasses.replace(
        LEAGUE, pods=2, rounds=3, selection=selection.Generational(group_size=1, parents=2),
        opponents="prioritized", train_against="latest", matches=1,
    )  # fmt: skip
    plain = run(tmp_path / "plain", league)
    starts = trained_against(tmp_path / "plain")
    assert starts[0, 0] == starts[1, 0] == {("random",)}
    assert all(len(drawn) == 1 for drawn in starts.values())
    assert {name for drawn in starts.values() for names in drawn for name in names} > {"random"}
    events = len(read_events(tmp_path / "plain"))
    for at in range(1, events):
        for after in (False, True):
            directory = tmp_path / f"{at}{after}"
            with killed(monkeypatch, at, after=after):
                run(directory, league)
            before = state_after(read_events(directory)).matches
            state = run(directory, league)
            assert state.matches[: len(before)] == before
            assert sorted(state.matches) == sorted(plain.matches)  # none is lost or twice there
            assert state.ratings == plain.ratings
            assert trained_against(directory) == starts


def test_an_opponent_that_cannot_be_played_costs_its_match_alone(tmp_path):
    league = dataclasses.replace(LEAGUE, opponents="latest", matches=3)
    state = run(tmp_path, league, Pretend(faulty="p1r0"))
    faults = [match for match in state.matches if match.fault]
    assert {match.opponent for match in faults} == {"p1r0"}
    assert len(faults) == 3
    assert len(state.ratings) == 1 + 12
    page = write_tournament_report(tmp_path, tmp_path / "report.html").read_text()
    assert page.count("no match with p1r0") == 3


def test_an_opponent_that_ends_the_process_costs_its_match_and_not_the_pod(tmp_path):
    """The last attempt plays and trains against the anchor alone."""
    league = dataclasses.replace(LEAGUE, train_against="past")
    state = run(tmp_path, league, Pretend(crashes=99))
    starts = [
        event
        for event in read_events(tmp_path)
        if isinstance(event, Started) and (event.pod, event.round) == (1, 2)
    ]
    first, second, last = ((event.opponents, event.training) for event in starts)
    assert len(starts) == LEAGUE.retries
    assert first == second
    assert [len(names) for names in first] == [1 + LEAGUE.matches, LEAGUE.matches]
    assert last == (("random",), ("random",))
    assert all(pod.round == 4 for pod in state.pods.values())


def trained_against(directory: Path) -> dict[tuple[int, int], set[tuple[str, ...]]]:
    """The opponents of training that any attempt at each round had."""
    found: dict[tuple[int, int], set[tuple[str, ...]]] = {}
    for event in read_events(directory):
        if isinstance(event, Started):
            found.setdefault((event.pod, event.round), set()).add(event.training)
    return found


def test_a_report_of_other_matches_is_refused(tmp_path):
    with Leaderboard(tmp_path, LEAGUE.header()) as board:
        attempt = board.start(0, 0, hyperparameters={}, experiment={}, opponents=("random",))
        path = "pods/p0r0/checkpoints/1"
        (tmp_path / path).mkdir(parents=True)
        right = Submitted(
            0, 0, attempt.token, 0.5, 0.1, 10, LEAGUE.evaluation, 100, 1.0, path, DIGEST,
            matches=(Match("p0r0", "random", 5, 0, 5),),
        )  # fmt: skip
        for matches, words in (
            ((), "did not play its opponents: random"),
            ((Match("p0r0", "minimax-1", 5, 0, 5),), "did not play its opponents"),
            ((Match("p9r0", "random", 5, 0, 5),), "did not play its opponents"),
            ((Match("p0r0", "random", 15, 0, -5),), "a negative number of games"),
        ):
            refused = board.submit(dataclasses.replace(right, matches=matches))
            assert refused is not None
            assert words in refused
        assert board.submit(right) is None
        assert board.state.board[0].score == board.state.ratings["p0r0"].elo == 0.0


# --- what is shown --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_leaderboard_and_the_report_show_ratings_and_results(tmp_path):
    state = run(tmp_path)
    best = state.board[0]
    interval = f"{best.score:+.0f} ± {1.96 * best.standard_error:.0f}"
    out = io.StringIO()
    with LiveStandings(4, tmp_path, whole=True, file=out) as live:
        live.show(state)
    lines = out.getvalue().splitlines()
    assert any("rating" in line and "hyperparameters" in line for line in lines)
    assert any(best.id in line and interval in line for line in lines)
    assert any(line.strip().startswith("random") and "%" in line for line in lines)
    assert "random is rated 0" in " ".join(out.getvalue().split())  # lines break anywhere
    page = write_tournament_report(tmp_path, tmp_path / "report.html").read_text()
    assert f"<td>{interval}</td>" in page
    assert "<h2>Matches</h2>" in page
    shown = entry_as_json(best, state)
    assert shown["matches"][0]["opponent"] == "random"
    assert json.loads(json.dumps(shown))["score"] == best.score


def test_what_is_no_league_is_refused(tmp_path):
    pytest.importorskip("pgx")
    catch = dataclasses.replace(LEAGUE, experiments=(recipes.find("catch_a2c"),))
    (game,) = LEAGUE.experiments
    network = TorsoNetwork(MLP((4,)), memory="gru", memory_size=4)
    recurrent = dataclasses.replace(
        game, recipe="tic_tac_toe", agent=dataclasses.replace(game.agent, network=network)
    )
    poker = dataclasses.replace(game, environment="pgx:kuhn_poker,opponent=self")
    for league, words in (
        (catch, "need a game of two players"),
        (dataclasses.replace(LEAGUE, anchor="nobody"), "there is no opponent 'nobody'"),
        (dataclasses.replace(LEAGUE, experiments=(recurrent,)), "tic_tac_toe remembers the game"),
        (
            dataclasses.replace(LEAGUE, experiments=(poker,), anchor="minimax-2"),
            "minimax cannot look ahead in kuhn_poker",
        ),
        (dataclasses.replace(LEAGUE, matches=0), "matches must be at least 1"),
        (dataclasses.replace(LEAGUE, opponents=None, train_against="past"), "add `opponents`"),
    ):
        with pytest.raises(ConfigError, match=words):
            league.check()


# --- real games -----------------------------------------------------------------------------------

TINY = Experiment(
    recipe="tiny",
    environment="pgx:tic_tac_toe,opponent=self",
    agent=PPO(network=TorsoNetwork(MLP((8,)))),
    driver=AnakinConfig(num_envs=8, rollout_length=8, updates_per_chunk=1),
    frames=64,
    devices=1,
)


@pytest.mark.filterwarnings("ignore")  # of pgx, when it is imported
@pytest.mark.usefixtures("lenient_ranks")
class TestGames:
    @pytest.fixture(autouse=True)
    def needs(self):
        pytest.importorskip("pgx")

    @pytest.mark.slow
    def test_a_pod_plays_and_a_fault_stays_in_its_match(self, tmp_path, monkeypatch):
        league = dataclasses.replace(
            LEAGUE, experiments=(TINY,), pods=1, rounds=1, round_frames=64, episodes=16
        )
        league.check()
        state = run(tmp_path, league, InlineEngine())
        first = state.board[0]
        assert state.matches[0].games == 16
        entry = (first.checkpoint, first.digest)
        path = tmp_path / first.checkpoint
        opponents = (
            pods.Reference("random"),
            pods.Reference("changed", first.checkpoint, "0" * 64),
            pods.Reference("gone", "pods/p7r0/checkpoints/000000000001", DIGEST),
            pods.Reference("crashing", *entry),
            pods.Reference("p0r0", *entry),
        )
        task = pods.Task(0, 0, 1, TINY, (), 64, None, league.evaluation_seed, 16, opponents)
        load = pods.trained_player

        def crash(*_: Any) -> Any:
            raise RuntimeError("a fault for the test")

        def player(name: str, *args: Any, **kwargs: Any) -> Any:
            real = load(name, *args, **kwargs)
            return real._replace(move=crash) if name == "crashing" else real

        monkeypatch.setattr(pods, "trained_player", player)
        anchor, changed, missing, crashing, itself = pods.play(task, path)
        assert anchor == state.matches[0]  # the same games again
        assert "not the checkpoint on the leaderboard" in changed.fault
        assert "is not a sealed checkpoint" in missing.fault
        assert crashing == Match("p0r0", "crashing", 0, 0, 0, "RuntimeError: a fault for the test")
        assert itself.games == 16
        assert not itself.fault
        monkeypatch.setattr(pods, "opponent_player", crash)
        with pytest.raises(RuntimeError, match="a fault for the test"):
            pods.play(task, path)

    @pytest.mark.slow
    def test_a_pod_trains_against_entries_and_the_anchor_in_the_place_of_a_lost_one(
        self, tmp_path, capfd
    ):
        league = dataclasses.replace(
            LEAGUE, experiments=(TINY,), pods=1, rounds=2, round_frames=64, episodes=4,
            train_against="prioritized", matches=1,
        )  # fmt: skip
        league.check()
        state = run(tmp_path, league, InlineEngine())
        configs = [pods.read_config(tmp_path / f"pods/p0r{i}/config.json") for i in (0, 1)]
        first, second = (config["experiment"]["environment"] for config in configs)
        assert first == "pgx:tic_tac_toe,opponent=random,evaluate_against=random"
        path = tmp_path / "pods" / "p0r0" / "checkpoints" / f"{1:012d}"
        assert second == f"pgx:tic_tac_toe,opponent={path},evaluate_against=random"
        opponent = configs[1]["environment"]["inner"]["opponents"][0]
        assert opponent["digest"] == pods.digest(path)
        # The entry is gone, and the round is tried again: it begins anew against the anchor.
        shutil.rmtree(path)
        directory = tmp_path / "pods" / "p0r1"
        pods.write_task(directory, dataclasses.replace(pods.read_task(directory), parents=()))
        assert pods.run(directory) == 0
        assert "against random in the place of p0r0" in capfd.readouterr().out
        config = pods.read_config(directory / "config.json")
        assert config["experiment"]["environment"] == first
        assert state.pods[0].round == 2

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("train_against", [None, "prioritized"])
    def test_a_league_killed_in_the_middle_has_the_same_ratings(
        self, train_against, tmp_path, monkeypatch
    ):
        """Real training and games."""
        league = dataclasses.replace(
            LEAGUE, experiments=(TINY,), selection=selection.Generational(group_size=1),
            pods=3, rounds=3, round_frames=640, size=16, opponents="prioritized",
            train_against=train_against,
        )  # fmt: skip
        plain = run(tmp_path / "plain", league, InlineEngine())
        rounds = 0
        play = pods.play

        def killing(*args: Any) -> Any:
            nonlocal rounds
            rounds += 1
            if rounds == 5:  # the second pod's second round has trained
                raise Killed
            return play(*args)

        monkeypatch.setattr(pods, "play", killing)
        with pytest.raises(Killed):
            run(tmp_path / "killed", league, InlineEngine())
        state = run(tmp_path / "killed", league, InlineEngine())
        assert state.ratings == plain.ratings
        assert sorted(state.matches) == sorted(plain.matches)
