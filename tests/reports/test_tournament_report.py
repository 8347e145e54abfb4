"""A tournament's page says what its log says, at any moment, and stands alone."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import io
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from charts import blocks, figures

from podracer.reports.standings import LiveStandings
from podracer.reports.tournament import write_tournament_report
from podracer.reports.tournament_log import TournamentLog, varying_hyperparameters
from podracer.tournament import leaderboard
from podracer.tournament.events import Failed, Header, PodState, Stopped, Submitted, state_after
from podracer.tournament.leaderboard import Leaderboard

HOSTILE = "<script>alert(1)</script> & {x} $y$"


def header(*recipes, pods=3):
    evaluation = {"evaluation_policy": "greedy", "evaluation_epsilon": 0.0}
    experiments = [
        {"recipe": recipe, "agent": {"note": HOSTILE}, **evaluation} for recipe in recipes
    ]
    settings = {
        "experiments": experiments,
        "selection": {"kind": "KTournament", "k": 3},
        "rounds": 4,
    }
    return Header(settings, seed=7, pods=pods, size=3, evaluation="e1", episodes=10)


def start(board, pod, *parents, rate=0.001, recipe="catch_a2c"):
    return board.start(
        pod,
        board.state.pods[pod].round,
        parents=parents,
        hyperparameters={"learning_rate": rate, "clip_epsilon": 0.1 * len(recipe)},
        experiment={"recipe": recipe},
    )


def submit(board, attempt, score, frames=1000, **other):
    checkpoint = f"pods/p{attempt.pod}r{attempt.round}/checkpoints/{attempt.token}"
    (board.directory / checkpoint).mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(b"").hexdigest()
    where = attempt.pod, attempt.round, attempt.token
    report = Submitted(*where, score, 0.25, 10, "e1", frames, 1.0, checkpoint, digest, **other)
    return board.submit(report)


def play(board):
    """Ten seconds an event: pod 2 fails for good, and pod 1 is best, by way of pod 0."""
    first, second, third = (start(board, pod, rate=10.0 ** -(pod + 1)) for pod in range(3))
    submit(board, first, 5.0)
    submit(board, second, 1.0)
    board.fail(Failed(2, 0, third.token, HOSTILE))
    board.record(Stopped(2, "quarantined", "enough of it"))
    submit(board, third, 9.0)  # refused
    start(board, 1, "p0r0", rate=0.05)
    again = start(board, 1, "p0r0", rate=0.05)  # the one before was interrupted
    submit(board, again, 1234.5, frames=2500)
    submit(board, start(board, 0, "p0r0", rate=0.1), 4.0, frames=2000)


@pytest.fixture(scope="module")
def tournament(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "mine"
    ticks = itertools.count(1e9, 10.0)
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: next(ticks))
        patch.setattr(leaderboard, "time", clock)
        with Leaderboard(directory, header("catch_a2c")) as board:
            play(board)
    return directory


@pytest.fixture(scope="module")
def page(tournament):
    return page_of(tournament)


def page_of(directory):
    text = write_tournament_report(directory, directory / "report.html").read_text("utf-8")
    return re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)


def rows_of(page, title):
    """The cells of a section's table."""
    section = page.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [[html.unescape(c) for c in re.findall(r"<t[hd][^>]*>(.*?)</t", row)] for row in rows]


def test_wall_time_survives_a_clock_that_is_set_back(tmp_path, monkeypatch):
    """Neither while a process writes nor between two."""
    wall, ticks = [1e9], itertools.count(0.0, 10.0)
    clock = SimpleNamespace(time=lambda: wall[0], monotonic=lambda: next(ticks))
    monkeypatch.setattr(leaderboard, "time", clock)
    with Leaderboard(tmp_path, header("catch_a2c")) as board:
        first = start(board, 0)
        wall[0] -= 30 * 86_400
        submit(board, first, 5.0)
    with Leaderboard(tmp_path) as board:
        start(board, 0, "p0r0")
    log = TournamentLog(leaderboard.read_events(tmp_path))
    assert log.seconds == 30.0  # ten for each event; nothing passed between the processes


def test_failures_are_listed_with_their_reasons(page):
    assert rows_of(page, "Failures") == [
        ["Time", "Pod", "Round", "What", "Reason"],
        ["1:00", "2", "0", "failed", HOSTILE],
        ["1:10", "2", "", "quarantined", "enough of it"],
        ["1:20", "2", "0", "report refused", "attempt 3 at round 0 is not the current one"],
    ]


def test_a_page_is_self_contained_and_draws_what_the_log_says(page):
    assert "://" not in page
    assert "default-src 'none'" in page
    assert not re.findall('(?:src|srcset|href)="', page)
    assert set(blocks(page)) == {"scores", "lineage", "hyperparameters"}
    drawn = figures(page)
    _, dots, *_, winners, best = drawn["Score over wall time"]["data"]
    assert dots["y"] == [5, 1, 1234.5, 4]
    assert winners["text"][0].startswith("p1r1 from p0r0<br>score 1,234, 2.50k frames")
    assert best["y"] == [5, 5, 1234.5, 1234.5, 1234.5]
    rates = drawn["learning_rate"]
    axis = rates["layout"]["yaxis"]
    assert (axis["type"], axis["exponentformat"]) == ("log", "e")  # not 100µ for a rate of 1e-4
    assert rates["data"][1]["y"] == [0.1, 0.01, 0.05, 0.1]
    links, entries, ancestors, _ = drawn["Entries by round and pod"]["data"]
    assert entries["marker"]["color"] == [5, 1, 1234.5, 4]
    assert list(zip(entries["x"], entries["y"], strict=True)) == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert (links["x"].count(None), ancestors["x"].count(None)) == (2, 1)


def test_the_log_has_the_ancestors_of_the_best_entry(tournament):
    log = TournamentLog(leaderboard.read_events(tournament))
    assert [entry.id for entry in log.ancestry] == ["p1r1", "p0r0"]
    assert varying_hyperparameters(log.entries.values()) == ["learning_rate"]
    assert varying_hyperparameters(log.ancestry[:1]) == []


def test_the_standings_show_hostile_text_as_it_is():
    """From a log that somebody wrote: neither markup of the table nor commands to the terminal."""
    state = state_after([header("catch_a2c")])
    hostile = "\x1b[31m [red]x[/nothing] \x9b2J"
    failed = PodState(status="failed", reason=hostile)
    out = io.StringIO()
    with LiveStandings(3, Path("run"), whole=True, file=out) as live:
        live.show(dataclasses.replace(state, pods={0: failed}))
    assert r"\x1b[31m [red]x[/nothing] \x9b2J" in out.getvalue()
    assert "\x1b[31m" not in out.getvalue()
