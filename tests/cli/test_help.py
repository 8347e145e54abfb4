"""The help pages: every flag of every command and recipe has a sentence, and a plain name."""

import dataclasses
import io
import re
import sys

import pytest

from podracer import recipes
from podracer.cli.commands import COMMANDS
from podracer.cli.main import main
from podracer.io.entry_points import installed

ONE_OF_MANY = {
    "sweep": ["catch_a2c"],
    "tournament": ["cartpole_ppo"],
    "tune": ["cartpole_ppo"],
}  # commands that take a recipe; `train` is walked through below


def kinds(config):
    """The classes of a configuration and of all inside it: they decide which flags there are."""
    inside = (getattr(config, field.name) for field in dataclasses.fields(config))
    return (type(config), *(kinds(x) for x in inside if dataclasses.is_dataclass(x)))


def pages():
    """Arguments that show a help page each: all commands, every kind of agent, every driver."""
    yield from (
        [command, *ONE_OF_MANY.get(command, [])]
        for command in [*COMMANDS, *installed("commands")]
        if command != "train"
    )
    yield ["tournament", "--selection", "Softmax"]
    shown = set()
    for recipe in recipes.RECIPES:
        experiment = recipes.find(recipe)
        for arch in ("anakin", "sebulba"):
            flags_of = {kinds(experiment.agent), arch}  # which do not depend on each other
            if not flags_of <= shown:
                shown |= flags_of
                yield ["train", recipe, "--arch", arch]


def help_page(arguments, monkeypatch):
    """The help page in ASCII, in one column of groups."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii", "replace"))
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--help"])
    assert leaving.value.code == 0
    sys.stdout.flush()
    return sys.stdout.buffer.getvalue().decode()


def flags(page):
    """The flags of a help page and their texts, without the defaults."""
    texts, flag = {}, None
    for line in page.splitlines():
        if line.startswith("  --") and not line.startswith("  ---"):
            invocation, *text = re.split(r" {2,}", line.strip(), maxsplit=1)
            flag = re.split("[ ,]", invocation)[0]
            texts[flag] = " ".join(text)
        elif not line.startswith("   "):
            flag = None
        elif flag:
            texts[flag] += line
    defaults = r"\((?:default|required|sets)\b"
    return {flag: re.split(defaults, " ".join(text.split()))[0] for flag, text in texts.items()}


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flag_has_a_sentence_and_a_plain_name(stride, monkeypatch):
    wrong = {}
    for arguments in list(pages())[::stride]:
        for flag, text in flags(help_page(arguments, monkeypatch)).items():
            if not re.match(r"\s*[A-Z`].*\.\s*$", text, re.S) or flag.endswith("_"):
                wrong.setdefault(f"{flag}: {text.strip()!r}", " ".join(arguments))
    assert not wrong


def test_groups_are_named_and_the_run_comes_first(monkeypatch):
    page = help_page(["train", "cartpole_dqn"], monkeypatch)
    titles = re.findall(r"^ ([a-z_.]+ options) *$", page, re.M)
    parts = [
        f"agent{part} options"
        for part in ("", ".network", ".network.torso", ".optimizer", ".replay")
    ]
    assert titles[0] == "run options"
    assert sorted(titles[1:6]) == parts
    assert titles[6:] == ["anakin options", "hosts options"]
    order = [page.index(f"--{flag} ") for flag in ("frames", "seed", "run-dir", "arch", "devices")]
    assert order == sorted(order)
