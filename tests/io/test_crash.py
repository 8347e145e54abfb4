"""What a failed run leaves behind: its error and stacks, no secret, nothing for other users."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from podracer.errors import ConfigError
from podracer.io.crash import retire_crash, write_crash
from podracer.io.text import printable, redact


def crash(directory: Path, error: BaseException, **facts: object) -> dict:
    write_crash(directory, error, **facts)
    return json.loads((directory / "crash.json").read_text())


def failure() -> ValueError:
    try:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the effect") from error
    except ValueError as error:
        return error


def test_a_crash_tells_what_where_and_how_far(tmp_path: Path) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="actor-3")
    thread.start()
    try:
        facts = crash(
            tmp_path,
            failure(),
            component="learner",
            last_update=12,
            last_checkpoint=10,
            path=tmp_path,
            shape=(1, 2),
        )
    finally:
        release.set()
        thread.join()
    assert (facts["code"], facts["component"], facts["exception"]) == (70, "learner", "ValueError")
    assert (facts["last_update"], facts["last_checkpoint"]) == (12, 10)
    assert (facts["path"], facts["shape"]) == (str(tmp_path), [1, 2])
    assert "the cause" in facts["traceback"]
    assert "the effect" in facts["traceback"]
    stacks = {name.split(" ")[0]: stack for name, stack in facts["threads"].items()}
    assert "wait" in stacks["actor-3"]
    assert "write_crash" in stacks["MainThread"]
    assert facts["versions"]["jax"]


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 78), (OSError("x"), 70)])
def test_a_crash_carries_the_exit_code(tmp_path: Path, error, code: int) -> None:
    assert crash(tmp_path, error)["code"] == code


VARIABLES = {
    "WANDB_API_KEY": "0f" * 20,
    "MY_PASSWORD": "correct horse",
    "MYPASS": "tr0ub4dor",
    "DATABASE_PWD": "s3same",
    "SHORT_TOKEN": "x7Qp",
    "SSH_KEY": "first line of a key\nsecond line of a key",
    "SESSION": "c0ffee-c0ffee",
    "NPM_AUTH": "npmAuth99",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "/kWx/Zt4+aB9",  # looks like a path
    "DATABASE_URL": "postgres://me:hunter22@db.example.org/runs",
    "SOME_SETTING": "Innocent-Name-1",  # no name of a secret: left out all the same
}
TEXTS = {
    "name=value": ("api_key=k3y-value, next", "k3y-value"),
    "quoted": ("{'token': 'quoted-value'}", "quoted-value"),
    "header": ("Authorization: Bearer header-value", "header-value"),
    "address": ("https://me:in-address@example.org:80/x", "in-address"),
    "query": ("GET /x?access_token=query-value&step=7", "query-value"),
    "database": ("pwd: db-value", "db-value"),
    "signed": ("https://a/x?X-Amz-Credential=me%2F1&X-Amz-Signature=in-query&n=1", "in-query"),
    "camel": ("AccountName=me;AccountKey=in-account==;n=1", "in-account"),
    "short": ("smtpAuth=in-short, db_pass=x", "in-short"),
    "scheme": ("authorization: token in-scheme", "in-scheme"),
    "spaces": ("Maze-v0,password=correct horse in-words,size=3", "in-words"),
    "at": ("ftp://me:in@address@example.org/x", "address@"),
    "list": ("{'token': ['first', 'in-list'], 'n': 1}", "in-list"),
    "escaped": (json.dumps({"reply": json.dumps({"token": "an in-json"})}), "in-json"),
    "unended": ("password='in-quote", "in-quote"),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_no_value_of_a_variable_reaches_a_crash(name: str, tmp_path: Path, monkeypatch) -> None:
    value = VARIABLES[name]
    monkeypatch.setenv(name, value)
    texts = (f"login with {value} failed", repr(value), json.dumps({"reply": value}))
    crash(tmp_path, RuntimeError(" ".join(texts)), reply=texts, notes={"inner": [value]})
    text = (tmp_path / "crash.json").read_text()
    assert [line for line in value.splitlines() if line in text] == []
    assert "login with [redacted]" in text


@pytest.mark.parametrize("name", TEXTS)
def test_what_looks_like_a_secret_is_left_out(name: str) -> None:
    text, secret = TEXTS[name]
    assert secret not in redact(text)


KEPT = """
bypass passes author authority significance signal compass sigma pass_rate authorName num_tokens
tokenizer secretary COMPASS Signal sort_key monkey session
"""


@pytest.mark.parametrize("word", KEPT.split())
def test_a_word_that_only_contains_one_is_no_name_of_a_secret(word: str) -> None:
    settings = {word: "kept", "options": [[word, "kept"]], "name": f"maze,{word}=kept: {word}=kept"}
    assert redact(settings) == settings
    assert redact("in the backward pass: less; add `,token=...`") == (
        "in the backward pass: less; add `,token=...`"
    )


def test_the_time_for_a_long_text_grows_with_its_length() -> None:
    """It was quadratic, which took hours for these."""
    for word in ("a" * 300_000, "token" * 60_000, "a-" * 150_000):
        assert redact(f"no secret in {word} but in api_key=s3cr3t7") == (
            f"no secret in {word} but in api_key=[redacted]"
        )
    assert redact(f"{'token' * 60_000}=s3cr3t7").endswith("token=[redacted]")


def test_what_is_no_secret_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HARMLESS_FOLDER", str(tmp_path))
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("HARMLESS_WORD", "podracer")
    monkeypatch.setenv("HARMLESS_NUMBERS", "0,1,2,3")
    text = f"podracer could not read {tmp_path}/data.csv at 0,1,2,3: step=7"
    assert redact(text) == text
    facts = crash(tmp_path, RuntimeError("x"), config={"api_key": "k", "steps": 3, "Password": [1]})
    assert facts["config"] == {"api_key": "[redacted]", "steps": 3, "Password": "[redacted]"}
    assert "https://me:[redacted]@example.org/x" in redact("at https://me:word@example.org/x")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("XDG_SESSION_CLASS", "user", "/home/user/runs/a is in use"),
        ("XDG_CURRENT_DESKTOP", "ubuntu:GNOME", "ubuntu:GNOME"),
        ("DESKTOP_SESSION", "gnome-xorg", "gnome-xorg"),
        ("RECIPE", "atari_ppo", "there is no recipe 'atari_pp': did you mean atari_ppo?"),
        ("RECIPE", "memory_r2d2", "recipe memory_r2d2"),
        ("MOCK_AUTH", "true", '{"is_truer": true}'),
        ("KEYBOARD", "pinball", "pgx:pinball"),
        ("LOGIN_PASSWORD", "tournament", "the tournaments are in runs"),
    ],
)
def test_an_ordinary_variable_destroys_no_message(name: str, value: str, text: str, monkeypatch):
    monkeypatch.setenv(name, value)
    assert redact(text) == text


def test_a_long_word_is_left_out_as_a_whole(monkeypatch) -> None:
    monkeypatch.setenv("LOGIN_PASSWORD", "tournament")
    text = "tournament, my_tournament2 or a tournaments"
    assert redact(text) == "[redacted], my_[redacted]2 or a tournaments"
    assert redact(repr("by\ntournament")) == r"'by\n[redacted]'"
    assert redact("LOGIN_PASSWORD=hunter") == "LOGIN_PASSWORD=[redacted]"
    monkeypatch.setenv("SESSION_ID", "x7Qp")
    assert redact("session x7Qp") == "session [redacted]"


def test_others_cannot_read_a_crash(tmp_path: Path) -> None:
    crash(tmp_path, ValueError("x"))
    assert stat.S_IMODE(os.stat(tmp_path / "crash.json").st_mode) == 0o600


def test_a_retired_crash_is_kept_under_another_name(tmp_path: Path) -> None:
    retire_crash(tmp_path)  # there is none
    facts = crash(tmp_path, ValueError("x"))
    retire_crash(tmp_path)
    assert os.listdir(tmp_path) == ["crash.previous.json"]
    assert json.loads((tmp_path / "crash.previous.json").read_text()) == facts


def test_control_characters_are_spelled_out() -> None:
    name = "a\x1b[2Jb\x07\r\x9b\u202ec\n\té"
    assert printable(name) == "a\\x1b[2Jb\\x07\\r\\x9b\\u202ec\n\té"


def test_a_crash_that_cannot_be_written_is_only_mentioned(tmp_path: Path, capsys) -> None:
    write_crash(tmp_path / "password=abcdef", ValueError("x"))
    error = capsys.readouterr().err
    assert "crash.json could not be written" in error
    assert "abcdef" not in error
