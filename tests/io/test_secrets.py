"""Secrets in settings: only `config.json` holds them, and only its owner reads it."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import stat
from pathlib import Path

import pytest

import podracer
from podracer.agents.a2c import A2C
from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.drivers.anakin import AnakinConfig
from podracer.envs.catalog import imported_module
from podracer.envs.catch import Catch
from podracer.envs.host.gymnasium import Gymnasium
from podracer.errors import ConfigError
from podracer.io import text
from podracer.io.run_directory import write_json
from podracer.io.sinks import Sinks
from podracer.io.text import redact, remember_secrets
from podracer.run.resume import check_same_experiment
from podracer.tournament.events import Header
from podracer.tournament.leaderboard import LOG, Leaderboard

SECRET, PASSWORD = "k3y-0f-a-user", "pa55-0f-a-user"
NAME = f"gymnasium:Maze-v0,api_key={SECRET},url=https://me:{PASSWORD}@example.org/x,size=3"


@dataclasses.dataclass(frozen=True)
class Rented(Catch):
    """Catch on somebody's server."""

    api_key: str = SECRET
    url: str = f"https://me:{PASSWORD}@example.org/x"


EXPERIMENT = Experiment(
    recipe="rented", environment=Rented(), agent=A2C(), driver=AnakinConfig(4, 4, 4), frames=64,
    evaluations=0, devices=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    monkeypatch.setattr(text, "SECRETS_OF_SETTINGS", set())


def mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_an_error_that_quotes_a_secret_is_written_without_it(tmp_path):
    def refuse(boundary):
        raise ValueError(f"the server refused {SECRET} and {PASSWORD}")

    with pytest.raises(ValueError, match="the server refused"):
        podracer.train(EXPERIMENT, run_dir=tmp_path / "run", callbacks=[refuse])
    crash = (tmp_path / "run" / "crash.json").read_text()
    assert "the server refused [redacted] and [redacted]" in crash
    assert not any(secret in crash for secret in (SECRET, PASSWORD))


def test_what_others_read_of_settings_has_no_secret():
    settings = {"environment": NAME, "options": [["api_key", SECRET], ["size", 3]], "token": None}
    shown = json.dumps(redact(settings, stable=True))
    assert SECRET not in shown
    assert PASSWORD not in shown
    assert "gymnasium:Maze-v0,api_key=[redacted],url=https://me:[redacted]@example.org/x" in shown
    assert redact(settings, stable=True)["options"] == [["api_key", "[redacted]"], ["size", 3]]
    assert redact({"a": (1, None, "x")}, stable=True) == {"a": [1, None, "x"]}


def test_the_name_of_an_environment_has_no_secret():
    """The health of a server has it, as do the checks of an environment."""
    gymnasium = pytest.importorskip("gymnasium")

    class Pole(type(gymnasium.make("CartPole-v1").unwrapped)):
        def __init__(self, api_key: str) -> None:
            super().__init__()

    gymnasium.register("Rented-v0", Pole)
    registered = Gymnasium("Rented-v0", (("api_key", SECRET),), workers=0)
    bound = Gymnasium(functools.partial(Pole, api_key=SECRET), workers=0)
    assert registered.spec.name == "gymnasium:Rented-v0,api_key=[redacted]"
    assert bound.spec.name.endswith("Pole(api_key='[redacted]')")


def test_checkpoints_with_and_without_a_secret_are_of_the_same_experiment():
    experiment = dataclasses.replace(EXPERIMENT, environment=NAME, seed=1)
    saved = to_json(experiment)
    check_same_experiment(redact(saved, stable=True), experiment)
    check_same_experiment(saved, experiment)  # as an older version saved it
    with pytest.raises(ConfigError, match="seed was 1 and is 2"):
        check_same_experiment(redact(saved, stable=True), dataclasses.replace(experiment, seed=2))


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"seed": 1}, 0o644), ({"environment": NAME}, 0o600), ({"token": "abcdef"}, 0o600)],
)
def test_a_file_is_for_its_owner_alone_if_a_secret_is_inside(content, expected, tmp_path):
    write_json(tmp_path / "some.json", {"run": content})
    assert mode(tmp_path / "some.json") == expected


@pytest.mark.parametrize(("name", "expected"), [(NAME, 0o600), ("catch", 0o644)])
def test_the_log_of_a_tournament_is_for_its_owner_alone_if_a_secret_is_inside(
    name, expected, tmp_path
):
    tournament = {"experiments": [{"environment": name}]}
    with Leaderboard(tmp_path, Header(tournament, 0, 2, 2, "e", 1)):
        assert mode(tmp_path / LOG) == expected


def test_messages_of_the_log_have_no_secret(caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0f" * 20)
    remember_secrets({"environment": NAME})

    class Failing:
        def write(self, record):
            raise OSError(f"no login with {'0f' * 20}, {SECRET} or https://a:b3c4@example.org")

        def close(self): ...

    with Sinks([Failing()]) as sinks:
        sinks.write({"updates": 1})
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("podracer").exception("a request failed")
    assert "no login with [redacted], [redacted] or https://a:[redacted]@example.org" in caplog.text
    assert "ValueError: [redacted]" in caplog.text


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (NAME, None),
        ("gymnasium:Maze-v0,url=http://example.org:80/x", None),
        ("gymnasium:my.mazes:Maze-v0", "my.mazes"),
        ("gymnasium:Maze-v0,url=https://a:b,inner=my_mazes:Maze-v0", "my_mazes"),
        ("gymnasium:https://evil:Maze-v0", "https://evil"),
    ],
)
def test_an_address_is_no_module(name, module):
    assert imported_module(name) == module
