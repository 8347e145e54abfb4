"""Games of one player of pgx: the contract, ends, and names."""

from __future__ import annotations

import pytest
from episodes import check_contract, check_episodes
from walk import slow

from podracer.envs import make
from podracer.errors import ConfigError

# Games, and how many steps are enough to see an end.
CASES = {
    "pgx:minatar-breakout": 60,
    "pgx:minatar-freeway": 4,
    "pgx:2048": 4,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what pgx says when it is imported or used
    pytest.mark.usefixtures("lenient_ranks"),
]


def cases() -> list:
    return [name if "breakout" in name else slow(name) for name in CASES]


@pytest.mark.parametrize("name", cases())
def test_keeps_the_contract(name):
    check_contract(name)


@pytest.mark.parametrize("name", cases())
def test_episodes_begin_and_end_as_they_should(name):
    check_episodes(name, CASES[name])


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"has no game .*did you mean"):
        make("pgx:minatar-breakoutx")
