"""The help page of a command: its settings with their values, and what they mean."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Sequence

from podracer.cli.settings import ALIASES, Setting, Table
from podracer.cli.values import format_value
from podracer.names import nearest

# The settings of a run in the order of the page: what matters first comes first.
_ORDER = (
    "frames", "seed", "run_dir", "environment", "agent", "driver", "devices", "size", "evaluations",
    "evaluation_episodes", "evaluation_policy", "evaluation_epsilon", "fixed_evaluation",
    "target_return", "max_seconds", "save_seconds", "keep_best", "stall_seconds",
)  # fmt: skip
_LONG = 40  # settings, above which each has one line
_COLUMN = 34  # where texts begin
_ADVICE = (
    "Values are those of the recipe. A flag of a group may have its whole name, such as "
    "--driver.num-envs. `--help WORD` shows the whole texts of settings whose names hold this word."
)


def page(table: Table, description: str, words: Sequence[str] = ()) -> str:
    """Return the help page of a command, in groups; of settings with `words` in their names."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    words_of_usage = [_name(x, "") for x in table.settings.values() if x.is_positional]
    lines = [" ".join(["usage: podracer", table.command, *words_of_usage, "[--flags]"])]
    settings = [x for x in table.settings.values() if x.choices or not x.is_part]
    is_long = len(settings) > _LONG and not words
    lines += ["", *textwrap.wrap(description, width)]
    lines += ["", *textwrap.wrap(_ADVICE, width)] if is_long else []
    names = {x.path: f"{x.flag} {_name(x, x.flag)}" for x in settings}
    settings = [x for x in settings if not words or any(word in names[x.path] for word in words)]
    if not settings and words:
        advice = nearest(words[0], [path.rpartition(".")[2] for path in names], "--help shows all.")
        lines += ["", f"There is no setting with {words[0]!r} in its name: {advice}"]
    ranks = {path: rank for rank, path in enumerate(_ORDER if is_long else ())}
    settings.sort(key=lambda x: ("." in x.path, ranks.get(x.path, len(_ORDER))))
    for path, group in itertools.groupby(settings, lambda x: x.path.rpartition(".")[0]):
        lines.append("")
        if path:
            kind = type(table.settings[path].value)
            summary = (inspect.getdoc(kind) or "").partition("\n")[0]
            title = f"{path}: {kind.__name__}. {summary}"
            lines.append(textwrap.shorten(title, width, placeholder=" ..."))
        for setting in group:
            flag = table.shortest_flag(setting.path) if is_long else setting.flag
            lines += _lines(setting, _name(setting, flag), width, is_long)
    return "\n".join(lines)


def _name(setting: Setting, flag: str) -> str:
    """Return the name as it is written: a flag, or the word in the place of one."""
    if setting.is_positional:
        return f"{setting.word} ..." if setting.kind.is_tuple else setting.word
    names = [flag, *(f"--{x}" for x, path in ALIASES.items() if path == setting.path)]
    return f"--[no-]{flag[2:]}" if setting.hint is bool else ", ".join(names)


def _lines(setting: Setting, name: str, width: int, is_short: bool) -> list[str]:
    """Return a setting, its value and its text, on one line if it `is_short`."""
    value = format_value(setting.value).removesuffix("Config")
    if isinstance(setting.value, bool):
        value = "(on)" if setting.value else "(off)"
    if setting.value is dataclasses.MISSING:
        value = ""
    left = f"  {name} {value}".rstrip()
    choices = "" if setting.kind.names else "|".join(setting.kind.words)
    if is_short:
        text = f"[{choices}] {setting.text}" if choices and len(choices) < _COLUMN else setting.text
        left = f"{left:{_COLUMN}}  "
        return [left + textwrap.shorten(text, max(width - len(left), 20), placeholder=" ...")]
    text = f"{setting.text} One of {choices}." if choices else setting.text
    lines = textwrap.wrap(text, width - _COLUMN)
    if len(left) < _COLUMN and lines:
        left = f"{left:{_COLUMN}}{lines.pop(0)}"
    return [left, *(" " * _COLUMN + line for line in lines)]
