"""Selection rules: as their sources say, by frequency; pure; and never the best one lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standings import entry, ranking, stand

from podracer.drivers.selection import Range
from podracer.errors import ConfigError
from podracer.tournament.events import (
    Absent,
    Event,
    Failed,
    Header,
    Started,
    Stopped,
    Submitted,
    accepted_entries,
    kept_entries,
    state_after,
)
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer.tournament.selection import (
    Generational,
    Independent,
    KTournament,
    PopulationBased,
    SelectionRule,
    SelectionView,
    Softmax,
    Start,
    Truncation,
    Uniform,
    choose,
    generator,
    perturb,
    softmax,
)

RULES: list[SelectionRule] = [
    Independent(),
    Uniform(),
    Softmax(),
    KTournament(),
    Truncation(),
    PopulationBased(),
    Generational(),
    Generational(group_size=3, parents=1),
]


BY_SCORE = [Independent(), Softmax(), KTournament(), Truncation(), PopulationBased()]


def frequencies(rule: SelectionRule, view: SelectionView, draws: int = 4000) -> dict[str, float]:
    """How often each parent is chosen."""
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for _ in range(draws):
        start = choose(rule, view, rng)
        assert start is not None
        counts.update(start.parents)
    return {name: count / draws for name, count in counts.items()}


def assert_close(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Within four standard deviations of 4000 draws."""
    for name in found.keys() | expected.keys():
        p = expected.get(name, 0.0)
        assert abs(found.get(name, 0.0) - p) <= 4 * math.sqrt(p * (1 - p) / 4000), (name, found)


FOUR = [entry(0, 1.0), entry(1, 4.0), entry(2, 2.0), entry(3, 3.0)]  # best: 1, 3, 2, 0


@pytest.mark.parametrize(
    ("low", "high", "field"), [("a", 1.0, "low"), (1e-3, None, "high"), (0.0, True, "high")]
)
def test_the_ends_of_a_range_are_numbers(low, high, field):
    with pytest.raises(ConfigError, match=f"Range.{field} cannot be .*: it must be a number"):
        Range("x", low, high)


def test_independent_goes_on_with_its_own() -> None:
    assert frequencies(Independent(), stand(0, FOUR), 10) == {"p0r0": 1.0}


def test_uniform_draws_all_alike() -> None:
    expected = {f"p{pod}r0": 0.25 for pod in range(4)}
    assert_close(frequencies(Uniform(), stand(1, FOUR)), expected)


# --- frequencies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "temperature", [3.0, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.5, 1.0))]
)
def test_softmax_draws_by_standardized_score(temperature: float) -> None:
    scores = np.array([4.0, 3.0, 2.0, 1.0])
    z = (scores - scores.mean()) / scores.std()
    p = np.exp(z / temperature) / np.exp(z / temperature).sum()
    np.testing.assert_allclose(softmax(list(scores), temperature), p, rtol=1e-12)
    shifted = softmax(list(1e3 * scores - 7.0), temperature)
    np.testing.assert_allclose(shifted, p, rtol=1e-9)
    newcomer = frequencies(Softmax(temperature), stand(9, FOUR))
    assert_close(newcomer, {"p1r0": p[0], "p3r0": p[1], "p2r0": p[2], "p0r0": p[3]})
    # Pod 2 has the score 2: what is not better is not taken.
    own = frequencies(Softmax(temperature), stand(2, FOUR))
    assert_close(own, {"p1r0": p[0], "p3r0": p[1], "p2r0": p[2] + p[3]})


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.floats(1e-300, 1e300),
)
def test_softmax_takes_any_finite_scores(scores: list[float], temperature: float) -> None:
    p = softmax(scores, temperature)
    assert np.isfinite(p).all()
    assert abs(p.sum() - 1) < 1e-9
    assert p[int(np.argmax(scores))] == p.max()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_k_tournament_takes_the_best_of_k(k: int) -> None:
    order, drawn = ["p1r0", "p3r0", "p2r0", "p0r0"], min(k, 4)
    chances = [math.comb(3 - rank, drawn - 1) / math.comb(4, drawn) for rank in range(4)]
    newcomer = frequencies(KTournament(k), stand(9, FOUR))
    assert_close(newcomer, dict(zip(order, chances, strict=True)))
    own = frequencies(KTournament(k), stand(3, FOUR))
    assert_close(own, {"p1r0": chances[0], "p3r0": 1 - chances[0]})


def test_truncation_replaces_the_bottom_by_the_top() -> None:
    ten = [entry(pod, float(pod)) for pod in range(10)]
    rule = Truncation(0.3)
    for pod in range(10):
        found = frequencies(rule, stand(pod, ten))
        if pod < 3:
            assert_close(found, {f"p{top}r0": 1 / 3 for top in (7, 8, 9)})
        else:
            assert found == {f"p{pod}r0": 1.0}


@pytest.mark.parametrize(
    ("pods", "copies"), [(1, 0), (2, 1), (3, 1), (4, 1), (5, 1), (8, 2), (10, 2)]
)
def test_truncation_of_small_populations(pods: int, copies: int) -> None:
    newest = [entry(pod, float(pod)) for pod in range(pods)]
    starts = [
        choose(Truncation(0.2), stand(pod, newest), generator(0, 0, 0)) for pod in range(pods)
    ]
    changed = [pod for pod in range(pods) if starts[pod].parents != (f"p{pod}r0",)]
    assert changed == list(range(copies))


# --- hyperparameters ------------------------------------------------------------------------------

BOUNDS = (Range("learning_rate", 1e-5, 1e-2), Range("entropy", 0.0, 0.02))


def test_perturbed_values_are_near_or_drawn_and_within_bounds() -> None:
    rng = np.random.default_rng(0)
    values = {"learning_rate": 1e-3, "entropy": 0.01, "discount": 0.99}
    found = [perturb(values, PopulationBased(BOUNDS), rng) for _ in range(4000)]
    assert all(each["discount"] == 0.99 for each in found)
    assert all(1e-5 <= each["learning_rate"] <= 1e-2 for each in found)
    assert all(0.0 <= each["entropy"] <= 0.02 for each in found)
    for name, value in (("learning_rate", 1e-3), ("entropy", 0.01)):
        kinds = Counter(
            next((f for f in (0.8, 1.2) if each[name] == value * f), "drawn") for each in found
        )
        shares = {str(kind): count / 4000 for kind, count in kinds.items()}
        assert_close(shares, {"0.8": 0.375, "1.2": 0.375, "drawn": 0.25})
    assert values == {"learning_rate": 1e-3, "entropy": 0.01, "discount": 0.99}


def test_draws_are_even_on_their_scale() -> None:
    rng = np.random.default_rng(0)
    rates = [Range("x", 1e-5, 1e-1).draw(rng) for _ in range(4000)]
    shares = np.histogram(np.log10(rates), 4, (-5, -1))[0] / 4000
    assert_close({str(i): x for i, x in enumerate(shares)}, {str(i): 0.25 for i in range(4)})
    values = [Range("x", -1.0, 1.0).draw(rng) for _ in range(4000)]
    shares = np.histogram(values, 4, (-1, 1))[0] / 4000
    assert_close({str(i): x for i, x in enumerate(shares)}, {str(i): 0.25 for i in range(4)})


def test_values_are_clipped_to_their_bounds() -> None:
    rng, rule = np.random.default_rng(0), PopulationBased(BOUNDS, resample=0.0)
    for _ in range(50):
        found = perturb({"learning_rate": 1e-2, "entropy": 5.0}, rule, rng)
        assert found["learning_rate"] in (8e-3, 1e-2)
        assert found["entropy"] == 0.02


def test_population_based_training_copies_and_perturbs() -> None:
    rule = PopulationBased(BOUNDS, fraction=0.5, resample=0.0)
    newest = [
        entry(0, 1.0, learning_rate=1e-4, entropy=0.01),
        entry(1, 2.0, learning_rate=1e-3, entropy=0.02),
    ]
    loser = choose(rule, stand(0, newest), generator(0, 0, 1))
    assert loser.parents == ("p1r0",)
    assert loser.hyperparameters["learning_rate"] in (8e-4, 1.2e-3)
    assert loser.hyperparameters["entropy"] in (0.016, 0.02)
    winner = choose(rule, stand(1, newest), generator(0, 1, 1))
    assert winner == Start(("p1r0",), newest[1].hyperparameters)
    starts = [choose(rule, stand(pod, ()), generator(0, pod, 0)) for pod in range(20)]
    assert all(start.parents == () for start in starts)
    assert len({start.hyperparameters["learning_rate"] for start in starts}) == 20


# --- generations ----------------------------------------------------------------------------------


def test_generations_as_published_have_two_parents_of_five_groups_each() -> None:
    # 10 groups of 8 pods; pods of a group differ by less than groups do. Best: 9, then 8.
    newest = [entry(8 * g + k, g + 0.1 * k, g=float(g)) for g in range(10) for k in range(8)]
    children: Counter[int] = Counter()
    for pod in range(80):
        start = choose(Generational(group_size=8), stand(pod, newest), generator(0, pod, 1))
        assert start is not None
        group = int(start.hyperparameters["g"])
        assert start.parents == tuple(f"p{8 * group + k}r0" for k in range(8))
        children[group] += 1
        assert pod // 8 not in (8, 9) or group == pod // 8  # the parents go on
    assert children == {9: 40, 8: 40}


def test_a_group_is_worth_the_mean_of_its_pods() -> None:
    newest = [entry(0, 10.0), entry(1, 0.0), entry(2, 6.0), entry(3, 6.0)]
    rule = Generational(group_size=2, parents=1)
    starts = [choose(rule, stand(pod, newest), generator(0, pod, 1)) for pod in range(4)]
    assert all(start is not None and start.parents == ("p2r0", "p3r0") for start in starts)


def test_a_generation_waits_for_all_but_the_absent() -> None:
    rule = Generational(group_size=2, parents=1)
    old = [entry(0, 1.0, 1), entry(1, 2.0, 1), entry(2, 9.0, 0), entry(3, 3.0, 1)]
    rounds = {0: 2, 1: 2, 2: 1, 3: 2}
    waiting = stand(0, old, round=2, rounds=rounds)
    assert choose(rule, waiting, generator(0, 0, 2)) is None
    # Absent: its old score does not count, and the other pod stands for the group.
    del rounds[2]
    start = choose(rule, stand(0, old, round=2, rounds=rounds), generator(0, 0, 2))
    assert start == Start(("p3r1",), {})
    # A generation behind, it holds nobody, and starts when it has ended: from the same parents.
    rounds[2] = 1
    later = stand(0, old, round=3, rounds={**rounds, 0: 3, 1: 3, 3: 3})
    late = [*old[:2], entry(2, 4.0, 1), old[3]]
    assert choose(rule, later, generator(0, 0, 3)) is not None
    start = choose(rule, stand(2, late, round=2), generator(0, 2, 2))
    assert start == Start(("p2r1", "p3r1"), {})


def test_a_first_generation_is_fresh() -> None:
    for pod in range(4):
        assert choose(Generational(), stand(pod, FOUR, round=0), generator(0, pod, 0)) == Start()


def test_who_joins_late_does_not_wait_for_itself() -> None:
    joining = stand(3, FOUR[:3], rounds={0: 1, 1: 1, 2: 1, 3: 0})
    start = choose(Generational(), joining, generator(0, 3, 1))
    assert start is not None
    assert start.parents == ("p2r0",)  # after pod 0, in turn


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_board_of_no_entry_and_of_one(rule: SelectionRule) -> None:
    start = choose(rule, stand(0, (), round=0), generator(0, 0, 0))
    assert start is not None
    assert start.parents == ()
    assert frequencies(rule, stand(0, [entry(0, 1.0)]), 20) == {"p0r0": 1.0}


@pytest.mark.parametrize("rule", BY_SCORE, ids=str)
def test_who_is_equal_or_best_goes_on(rule: SelectionRule) -> None:
    assert frequencies(rule, stand(1, FOUR), 50) == {"p1r0": 1.0}
    ties = [entry(pod, 1.0) for pod in range(4)]
    assert frequencies(rule, stand(0, ties), 50) == {"p0r0": 1.0}


# --- every rule -----------------------------------------------------------------------------------


ROWS = st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), st.integers(0, 2), st.booleans())


@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=30, deadline=None, database=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=9), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_rules_are_pure_and_keep_the_best(
    rule: SelectionRule, rows: list[tuple[float, int, bool]], size: int, seed: int
) -> None:
    newest = [entry(pod, score, round) for pod, (score, round, _) in enumerate(rows)]
    rounds = {pod: round + 1 for pod, (_, round, absent) in enumerate(rows) if not absent}
    board = ranking([*newest, entry(0, 3.0, 7)])[:size]
    known = {each.id for each in (*board, *newest)}
    starts = []
    for pod, (_, round, _) in enumerate(rows):
        stands = stand(pod, newest, round=round + 1, board=board, rounds=rounds)
        start = choose(rule, stands, generator(seed, pod, round))
        assert start == choose(rule, stands, generator(seed, pod, round))
        assert start is None or known.issuperset(start.parents)
        assert start is None or rule == Generational(3, 1) or len(start.parents) == 1
        starts.append(start)
    best = ranking(newest)[0].pod
    if rule in (Independent(), Truncation(), PopulationBased()):
        assert starts[best] == Start((newest[best].id,), {})
    if rule in (Softmax(), KTournament()):  # no pod takes a step back
        scores = {each.id: each.score for each in (*board, *newest)}
        chosen = [scores[start.parents[0]] for start in starts if start]
        assert all(a >= b.score for a, b in zip(chosen, newest, strict=True))
    if rule == Generational() and starts[best] and newest[best].round == max(r for _, r, _ in rows):
        assert starts[best] == Start((newest[best].id,), {})


def test_a_generation_leaves_out_the_quarantined_and_waits_for_no_absent(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, Header({}, 0, 5, 9, "e", 1)) as board:
        for pod in range(4):
            begin(board, pod, Start())
            attempt = board.state.pods[pod].attempt
            assert attempt is not None
            submit(board, attempt, float(pod))
        begin(board, 1, Start(("p1r0",)))
        board.record(Absent(1, 1))
        board.record(Stopped(2, "quarantined", "failures"))
        board.record(Stopped(3, "quarantined", "failures"))
        rule, rng = Generational(group_size=1, parents=1), generator(0, 0, 1)
        assert choose(rule, SelectionView(board.state, 0, 1), rng) is None  # pod 4 has not ended
        board.record(Absent(4, 0))
        start = choose(rule, SelectionView(board.state, 0, 1), rng)
        assert start is not None
        assert start.parents == ("p1r0",)


# --- whole tournaments (T10) ----------------------------------------------------------------------


def play(directory: Path, rule: SelectionRule, steps: int, rng: np.random.Generator) -> None:
    """A tournament of six pods with faults, in an order that `rng` decides."""
    header = Header({}, seed=3, pods=6, size=4, evaluation="e", episodes=1)
    board = Leaderboard(directory, header)
    for step in range(steps):
        pod = int(rng.integers(6))
        now = board.state.pods[pod]
        if now.status == "running" and now.attempt is not None:
            if rng.random() < 0.2:
                board.fail(Failed(pod, now.round, now.attempt.token, "killed"))
            elif rng.random() < 0.2:
                board.record(Absent(pod, now.round))
            else:
                submit(board, now.attempt, float(rng.normal()) + now.round)
        elif now.status == "waiting":
            choice = choose_after(rule, board.state, pod)
            if choice is not None:
                begin(board, pod, choice)
        elif now.status == "quarantined":
            board.release(pod)
        elif now.attempt is not None:  # failed: the same round again
            begin(board, pod, Start(now.attempt.parents, now.attempt.hyperparameters))
        if rng.random() < 0.02:
            board.record(Stopped(pod, "quarantined", "failures"))
        board.collect_garbage()
        assert all((directory / e.checkpoint).is_dir() for e in kept_entries(board.state))
        if step % 50 == 49:  # as after a kill
            board.close()
            board = Leaderboard(directory, header)
    board.close()


def choose_after(rule: SelectionRule, state: Any, pod: int) -> Start | None:
    round = state.pods[pod].round
    return choose(rule, SelectionView(state, pod, round), generator(state.header.seed, pod, round))


def begin(board: Leaderboard, pod: int, start: Start) -> None:
    board.start(
        pod,
        board.state.pods[pod].round,
        parents=start.parents,
        hyperparameters=start.hyperparameters,
        experiment={},
    )


def submit(board: Leaderboard, attempt: Started, score: float) -> None:
    checkpoint = f"pods/p{attempt.pod}r{attempt.round}/checkpoints/{attempt.token}"
    (board.directory / checkpoint).mkdir(parents=True)
    rest = ("e", 1, 1.0, checkpoint, "0" * 64)
    told = Submitted(attempt.pod, attempt.round, attempt.token, score, 0.0, 1, *rest)
    assert board.submit(told) is None


def decisions(rule: SelectionRule, events: list[Event]) -> list[tuple[Started, Start | None]]:
    """Each first attempt at a round, beside what the rule says to the log before it."""
    found, seen = [], set()
    for number, event in enumerate(events):
        if isinstance(event, Started) and (event.pod, event.round) not in seen:
            seen.add((event.pod, event.round))
            found.append((event, choose_after(rule, state_after(events[:number]), event.pod)))
    return found


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_replay_of_the_log_decides_the_same(tmp_path: Path, rule: SelectionRule) -> None:
    play(tmp_path, rule, 150, np.random.default_rng(1))
    events = read_events(tmp_path)
    entries, found = accepted_entries(events), decisions(rule, events)
    assert len(found) > 10
    for event, start in found:
        assert start == Start(event.parents, event.hyperparameters)
    best = state_after(events).board[0]
    assert best == ranking(entries.values())[0]
    assert (tmp_path / best.checkpoint).is_dir()
