"""Settings by their names: one table for flags, `--vary`, help pages, completion and messages.

A flag is the path of a setting in Python, `--agent.learning-rate`, or the end of that path,
`--learning-rate`. Of several paths with one end the shallowest is meant; two that are equally deep
are refused. A part of another class is chosen by its name, `--agent.network.torso CNN`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from podracer.cli.values import Kind, Limits, Mark, kind_of
from podracer.errors import ConfigError
from podracer.names import NO_FLAG, OTHER_NAMES, nearest

ALIASES = {"arch": "driver", "out": "output"}
# What a part of another class keeps of the one before it, where both have it.
_KEPT = ("num_envs", "rollout_length", "updates_per_chunk", "layer_norm")
_DEVICE = "JAX takes an accelerator by itself, and JAX_PLATFORMS=cpu before the command the CPU."
_OF_OTHERS = {  # flags of other libraries that are no setting here
    **dict.fromkeys(("gpu", "cuda", "device", "use_gpu", "no_gpu", "cpu", "tpu"), _DEVICE),
    **{name: f"write --track {name}." for name in ("wandb", "trackio", "mlflow")},
    "mirror": "write --attach mirror:ADDRESS.",
    "resume": "podracer resume RUN goes on with a run.",
    "render": "podracer play RUN films a run.",
    "tensorboard": "every run writes its curves for TensorBoard into its directory.",
}


class Flag(NamedTuple):
    """A flag as it was written: `--name word word`, or `--name=word`."""

    spelling: str  # with the hyphens
    words: tuple[str, ...]  # those behind it, up to the next flag
    is_joined: bool

    @property
    def name(self) -> str:
        """Name in the spelling of Python."""
        name = self.spelling.lstrip("-").replace("-", "_")
        return ALIASES.get(name, name)

    @property
    def arguments(self) -> list[str]:
        """The words of the command line that it was."""
        if self.is_joined:
            return [f"{self.spelling}={self.words[0]}", *self.words[1:]]
        return [self.spelling, *self.words]

    def split(self, hint: Any = str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the words that give a value of a type, and those that belong to no flag.

        Raises `ConfigError` where there is no value; several numbers may be none.
        """
        kind, is_switch = kind_of(hint), hint is bool
        count = len(self.words) if kind.is_tuple else int(not is_switch)
        count = 1 if self.is_joined else count
        words = tuple(filter(None, self.words[:count])) if kind.is_tuple else self.words[:count]
        may_be_none = kind.is_tuple and kind.names in (("int",), ("float",))
        if not (words or is_switch or may_be_none):
            raise ConfigError(
                f"{self.spelling} needs a value: write it behind the flag, or leave it out."
            )
        return words, self.words[count:]


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """Return the words before the first flag, and the flags with the words behind them."""
    first: list[str] = []
    flags: list[Flag] = []
    for word in arguments:
        if re.match(r"--?[a-zA-Z]", word):
            spelling, equals, text = word.partition("=")
            flags.append(Flag(spelling, (text,) if equals else (), bool(equals)))
        elif flags:
            flags[-1] = flags[-1]._replace(words=(*flags[-1].words, word))
        else:
            first.append(word)
    return first, flags


class Setting(NamedTuple):
    """A field of a configuration at any depth; a part has settings of its own."""

    path: str
    hint: Any  # type without the markers
    marks: tuple[Any, ...]
    value: Any  # `dataclasses.MISSING` for one that must be given
    owner: type  # class of the field

    @property
    def flag(self) -> str:
        """Longest name of the flag, with hyphens in front."""
        return f"--{self.path.replace('_', '-')}"

    @property
    def text(self) -> str:
        """Sentences of a help page: the docstring below the field, or those among the markers."""
        texts = [_field_texts(self.owner).get(self.path.split(".")[-1], ""), *self.marks]
        return next((text for text in texts if text and isinstance(text, str)), "")

    @property
    def kind(self) -> Kind:
        """Type as a reader of texts meets it."""
        if self.path == "agent":
            from podracer.agents import with_packages

            return Kind(with_packages(), ())
        return kind_of(self.hint)

    @property
    def is_part(self) -> bool:
        """Whether the value has settings of its own; a schedule is one value."""
        return dataclasses.is_dataclass(type(self.value)) and not kind_of(self.hint).reads_texts

    @property
    def choices(self) -> dict[str, type]:
        """Classes that the part may have, by name; {} where there is one alone."""
        kinds = {x: kind for x, kind in self.kind.words.items() if isinstance(kind, type)}
        return {} if self.hint in kinds.values() else kinds

    @property
    def is_positional(self) -> bool:
        """Whether its words need no flag."""
        return Mark.POSITIONAL in self.marks

    @property
    def word(self) -> str:
        """Name in usages and sentences of a setting without a flag."""
        return self.path.removesuffix("s" if self.kind.is_tuple else "").upper()

    def read(self, words: Sequence[str], spelling: str = "") -> Any:
        """Return the value that words give, within the limits of a marker.

        A part stays as it is if it has the class that they name, or keeps what both have.
        """
        if self.is_part and not self.choices:
            example = f"{self.flag}.{dataclasses.fields(self.value)[0].name.replace('_', '-')}"
            raise ConfigError(f"{spelling} has settings of its own, such as {example}.")
        name = spelling if self.choices else self.flag
        name = self.word if self.is_positional else name
        value = self.kind.read(words, name, is_run=Mark.RUN in self.marks)
        if isinstance(value, type):
            names = {x.name for x in dataclasses.fields(value)}.intersection(_KEPT)
            common = {x: getattr(self.value, x) for x in names if hasattr(self.value, x)}
            return self.value if type(self.value) is value else value(**common)
        for low, high in (mark for mark in self.marks if isinstance(mark, Limits)):
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not low <= number <= high:
                    limits = f"[{low:,}, {high:,}]"
                    raise ConfigError(f"{self.flag} must lie in {limits}, but it is {number}.")
        return value


def settings_of(part: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a configuration: all of its own before those of its parts."""
    hints, parts = _hints(type(part)), []
    for field in dataclasses.fields(part):
        hint, value = hints[field.name], getattr(part, field.name)
        marks = getattr(hint, "__metadata__", ())
        if not (field.metadata.get("derived") or field.name == "spec" or NO_FLAG in marks):
            hint = hint.__origin__ if marks else hint
            yield (setting := Setting(prefix + field.name, hint, marks, value, type(part)))
            parts += [setting] if setting.is_part else []
    for setting in parts:
        yield from settings_of(setting.value, f"{setting.path}.")


_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


@functools.cache
def _field_texts(owner: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, by the field's name."""
    texts = {}
    for base in reversed(owner.__mro__):
        with contextlib.suppress(OSError, TypeError):  # a class without a file
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, text in itertools.pairwise(ast.iter_child_nodes(tree)):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    name, text = ast.unparse(field.target), ast.literal_eval(text.value)
                    texts[name] = " ".join(text.split())
    return texts


def with_values(part: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a configuration with other values, by path."""
    changes = {}
    for field in dataclasses.fields(part):
        path = prefix + field.name
        if path in values:
            changes[field.name] = values[path]
        elif any(name.startswith(f"{path}.") for name in values):
            changes[field.name] = with_values(getattr(part, field.name), values, f"{path}.")
    return dataclasses.replace(part, **changes) if changes else part


class Table:
    """The settings of a command's configurations, by path.

    `explain` returns a sentence about an unknown name, or "".
    """

    def __init__(
        self,
        parts: Sequence[Any],
        command: str = "",
        explain: Callable[[str], str] = lambda name: "",
    ):
        self.settings = {x.path: x for part in parts for x in settings_of(part)}
        self.command, self.explain = command, explain
        self.advice = f"`podracer {command} --help` lists what there is."

    def paths(self, name: str) -> list[str]:
        """Return the shallowest paths that a name is or ends, in the spelling of Python."""
        ends = [x for x in self.settings if x == name or x.endswith(f".{name}")]
        depth = min((path.count(".") for path in ends), default=0)
        return [path for path in ends if path.count(".") == depth]

    def shortest_flag(self, path: str) -> str:
        """Return the shortest flag that names a setting."""
        parts = path.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        name = next(end for end in ends if self.paths(end) == [path])
        return f"--{name.replace('_', '-')}"

    def find(self, flag: Flag) -> Setting:
        """Return the setting that a flag names; `--no-x` names `x`. Raises `ConfigError`."""
        paths = self.paths(flag.name) or self.paths(flag.name.removeprefix("no_"))
        if not paths:
            raise ConfigError(self._unknown(flag))
        if len(paths) > 1:
            names = " or ".join(self.settings[path].flag for path in paths)
            raise ConfigError(f"{flag.spelling} is ambiguous: write {names}.")
        return self.settings[paths[0]]

    def choice(self, flags: Sequence[Flag]) -> Flag | None:
        """Return the flag that chooses a part, of several the one of least depth."""
        settings = [(flag, self.settings[x]) for flag in flags for x in self.paths(flag.name)[:1]]
        choices = [(x.path.count("."), flag) for flag, x in settings if x.is_part or x.choices]
        return min(choices, key=lambda choice: choice[0])[1] if choices else None

    def read(self, flag: Flag) -> tuple[Setting, Any, list[tuple[str, Flag | None]]]:
        """Return the setting that a flag names, its value, and the words that are left over."""
        setting = self.find(flag)
        words, extra_words = flag.split(setting.hint)
        if setting.hint is bool and not words:
            words = ("true" if self.paths(flag.name) else "false",)
        return setting, setting.read(words, flag.spelling), [(word, flag) for word in extra_words]

    def _unknown(self, flag: Flag) -> str:
        """Return the sentence about an unknown flag: its name here, or whose it is."""
        problem, last = f"There is no flag {flag.spelling} here:", flag.name.split(".")[-1]
        for path, setting in self.settings.items():  # by another beginning, or with hyphens
            if path.endswith(f".{last}") or path.replace(".", "_").endswith(f"_{flag.name}"):
                return f"{problem} did you mean {setting.flag}?"
        for name in OTHER_NAMES.get(last, ()):
            if self.paths(name):
                return f"{problem} did you mean --{name.replace('_', '-')}?"
        if sentence := self.explain(flag.name):
            return sentence
        end = f".{last.removeprefix('no_')}"
        owners = [
            f"{setting.flag} {choice}"
            for setting in self.settings.values()
            for choice, kind in setting.choices.items()
            if any(x.path.endswith(end) for x in settings_of(kind(), "."))
        ]
        if owners:
            return f"{self.command} has no flag {flag.spelling}: it belongs to {', '.join(owners)}."
        if last in _OF_OTHERS:
            return f"{problem} {_OF_OTHERS[last]}"
        names = [x.flag.removeprefix("--") for x in self.settings.values()]
        names = names if "." in flag.name else [name.split(".")[-1] for name in names]
        hint = nearest(flag.name.removeprefix("no_").replace("_", "-"), names, self.advice)
        return f"{problem} {hint.replace('mean ', 'mean --').replace(' or ', ' or --')}"

    def refuse(self, word: str, flag: Flag | None) -> None:
        """Raise `ConfigError` for a word that no setting takes; it may stand behind a flag."""
        if sentence := self.explain(word):
            raise ConfigError(sentence)
        name, equals, text = word.partition("=")
        advice = self.advice
        if equals and re.fullmatch(r"[a-z_.]+", name):  # the spelling of version 0.1
            advice = f"write {self.find(Flag('--' + name, (text,), True)).flag} {text}."
        elif word.lower() in ("true", "false", "yes", "no", "on", "off"):
            advice = "a flag that is on or off has no value: write --NAME or --no-NAME."
        elif flag is not None and self.find(flag).hint is not bool:
            advice = f"{flag.spelling} takes one value; more for a sweep, --vary NAME=VALUE,VALUE."
        raise ConfigError(f"{word!r} is none of the arguments of {self.command}: {advice}")
