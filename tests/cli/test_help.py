"""The help pages: every flag of every command and recipe has a sentence, and a plain name."""

import dataclasses
import io
import re
import sys

import pytest

from podracer import recipes
from podracer.cli.commands import COMMANDS
from podracer.cli.help import page
from podracer.cli.main import main
from podracer.cli.pods import read_spaces
from podracer.drivers.selection import PopulationBased
from podracer.io.entry_points import installed

ONE_OF_MANY = {
    "sweep": ["catch_a2c"],
    "tournament": ["cartpole_ppo"],
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
    """The help page in ASCII, and the table of its settings."""
    tables = []

    def seen(table, *words):
        tables.append(table)
        return page(table, *words)

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("podracer.cli.arguments.page", seen)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii", "replace"))
    with pytest.raises(SystemExit) as leaving:
        main([*arguments])
    assert leaving.value.code == 0
    sys.stdout.flush()
    return sys.stdout.buffer.getvalue().decode(), tables[0]


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flag_has_a_sentence_and_a_plain_name_on_a_page_of_few_lines(stride, monkeypatch):
    wrong = {}
    for arguments in list(pages())[::stride]:
        text, table = help_page([*arguments, "--help"], monkeypatch)
        lines = text.splitlines()
        assert len(lines) <= 160
        assert max(map(len, lines)) <= 120
        for setting in table.settings.values():
            place = " ".join(arguments)
            if setting.choices or not setting.is_part:
                name, short = setting.flag[2:], table.shortest_flag(setting.path)[2:]
                assert table.paths(short.replace("-", "_")) == [setting.path], place
                shown = re.search(rf"^  --(\[no-\])?({name}|{short})(,| |$)", text, re.M)
                assert shown or setting.is_positional, place
                if not re.match(r"[A-Z`].*\.$", setting.text) or name.endswith("_"):
                    wrong.setdefault(f"{name}: {setting.text!r}", place)
    assert not wrong


@pytest.mark.parametrize(
    ("arguments", "name"),
    [("train catch --help arch", "--driver, --arch"), ("eval --help run", "RUN")],
)
def test_a_page_of_a_word_finds_a_setting_by_each_of_its_names(arguments, name, monkeypatch):
    assert f"\n  {name} " in help_page(arguments.split(), monkeypatch)[0]


@pytest.mark.parametrize(
    ("word", "advice"), [("lr", "did you mean learning_rate?"), ("qqq", "--help shows all.")]
)
def test_a_page_of_a_word_in_no_name_says_so(word, advice, monkeypatch):
    text = help_page(["train", "catch", "--help", word], monkeypatch)[0]
    assert text.endswith(f"There is no setting with {word!r} in its name: {advice}\n")


def test_the_text_of_a_field_comes_before_that_of_its_type(monkeypatch):
    text = help_page(["train", "catch", "--help", "checkpoint"], monkeypatch)[0]
    assert "Checkpoint of --weights to take" in text


def test_the_page_of_tournaments_names_the_range_that_pods_draw_from_by_default(monkeypatch):
    text = " ".join(help_page(["tournament", "--help"], monkeypatch)[0].split())
    (stated,) = read_spaces(re.findall(r"by default (\w+=[\w.-]+:[\w.-]+)\.", text)).values()
    assert (stated,) == PopulationBased().bounds
