"""Settings by their names: one table for flags, `--vary`, help pages and messages.

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
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from podracer.cli.values import Limits, Mark, classes_of, item_of, options_of, read_value
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
    "tensorboard": "every run writes its curves for TensorBoard into its directory.",
}

Explain = Callable[[str], str]  # returns a sentence about an unknown name, or ""


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
        """Sentences of a help page: those among the markers, or the docstring below the field."""
        texts = [mark for mark in self.marks if isinstance(mark, str)]
        return texts[0] if texts else _field_texts(self.owner).get(self.path.split(".")[-1], "")

    @property
    def is_part(self) -> bool:
        """Whether the value has settings of its own; a schedule is one value."""
        return dataclasses.is_dataclass(self.value) and classes_of(self.hint) is not None

    @property
    def is_positional(self) -> bool:
        """Whether its words need no flag."""
        return Mark.POSITIONAL in self.marks

    @property
    def word(self) -> str:
        """Name in usages and sentences of a setting without a flag."""
        return self.path.removesuffix("s" if item_of(self.hint) else "").upper()

    @property
    def choices(self) -> dict[str, type]:
        """Classes that the part may have, by name."""
        kinds = classes_of(self.hint) or ()
        kinds = () if kinds == (self.hint,) else kinds
        if self.path == "agent":
            from podracer.agents import with_packages

            kinds = tuple(with_packages().values())
        return {kind.__name__.removesuffix("Config"): kind for kind in kinds}

    def choose(self, text: str, flag: str) -> Any:
        """Return a part of the class that a text names, as it is if it has that class."""
        if text == "None" and types.NoneType in options_of(self.hint):
            return None
        names = [x.name for x in dataclasses.fields(self.value)] if self.is_part else []
        if not self.choices:
            example = f"{self.flag}.{names[0].replace('_', '-')}"
            raise ConfigError(f"{flag} has settings of its own, such as {example}.")
        kinds = {name.lower(): kind for name, kind in self.choices.items()}
        kind = kinds.get(text.lower().replace("-", ""))
        if kind is None:
            raise ConfigError(f"{flag} cannot be {text!r}: {nearest(text, self.choices)}")
        if type(self.value) is kind:
            return self.value
        names = [x.name for x in dataclasses.fields(kind) if x.name in _KEPT and x.name in names]
        return kind(**{name: getattr(self.value, name) for name in names})

    def read(self, words: Sequence[str]) -> Any:
        """Return the value that words give, within the limits of a marker."""
        value = read_value(self.hint, words, self.flag, is_run=Mark.RUN in self.marks)
        for limits in (mark for mark in self.marks if isinstance(mark, Limits)):
            limits.check(self.flag, value)
        return value


def settings_of(part: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a configuration, those of a part after the part itself."""
    hints = _hints(type(part))
    for field in dataclasses.fields(part):
        hint, value = hints[field.name], getattr(part, field.name)
        marks = getattr(hint, "__metadata__", ())
        if not (field.metadata.get("derived") or field.name == "spec" or NO_FLAG in marks):
            hint = hint.__origin__ if marks else hint
            yield (setting := Setting(prefix + field.name, hint, marks, value, type(part)))
            if setting.is_part:
                yield from settings_of(value, f"{setting.path}.")


_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


@functools.cache
def _field_texts(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, by the field's name."""
    texts = {}
    for base in reversed(kind.__mro__):
        body: list[ast.stmt] = []
        with contextlib.suppress(OSError, TypeError, SyntaxError):  # a class without a file
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(x))
                ):
                    texts[name] = " ".join(x.split())
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

    def split(self, setting: Setting | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the words of the value, and those that belong to no flag.

        Raises `ConfigError` where there is no value; several numbers may be none.
        """
        hint = setting.hint if setting else None
        item = item_of(hint)
        is_empty = not self.words or (item is str and not all(self.words))
        if is_empty and hint is not bool and item in (None, str):
            raise ConfigError(
                f"{self.spelling} needs a value: write it behind the flag, or leave it out."
            )
        count = len(self.words) if item else int(hint is not bool)
        count = 1 if self.is_joined else count
        return self.words[:count], self.words[count:]


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


class Table:
    """The settings of a command by path, and sentences about what it does not have."""

    def __init__(self, parts: Mapping[str, Any], command: str = "", explain: Explain | None = None):
        self.parts = parts
        self.settings = {x.path: x for part in parts.values() for x in settings_of(part)}
        self.command = command
        self.explain = explain or (lambda name: "")

    def paths(self, name: str) -> list[str]:
        """Return the shallowest paths that a name is or ends, in the spelling of Python."""
        ends = [x for x in self.settings if x == name or x.endswith(f".{name}")]
        depth = min((path.count(".") for path in ends), default=0)
        return [path for path in ends if path.count(".") == depth]

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
        depths = {}
        for flag in flags:
            paths = self.paths(flag.name)
            setting = self.settings[paths[0]] if len(paths) == 1 else None
            if setting is not None and (setting.is_part or setting.choices):
                depths[flag] = setting.path.count(".")
        return min(depths, key=depths.__getitem__, default=None)

    def with_values(self, values: Mapping[str, Any]) -> Table:
        """Return the table of the same configurations with other values, by path."""
        parts = {title: with_values(part, values) for title, part in self.parts.items()}
        return Table(parts, self.command, self.explain)

    def _unknown(self, flag: Flag) -> str:
        """Return the sentence about an unknown flag: its name here, or whose it is."""
        problem, last = f"There is no flag {flag.spelling} here:", flag.name.split(".")[-1]
        own_name = last.removeprefix("no_")
        for path, setting in self.settings.items():  # by another beginning, or with hyphens
            if path.endswith(f".{last}") or path.replace(".", "_").endswith(f"_{flag.name}"):
                return f"{problem} did you mean {setting.flag}?"
        for name in OTHER_NAMES.get(last, ()):
            if self.paths(name):
                return f"{problem} did you mean --{name.replace('_', '-')}?"
        if sentence := self.explain(flag.name):
            return sentence
        owners = [
            f"{setting.flag} {choice}"
            for setting in self.settings.values()
            for choice, kind in setting.choices.items()
            if any(x.path.endswith(f".{own_name}") for x in settings_of(kind(), "."))
        ]
        if owners:
            return f"{self.command} has no flag {flag.spelling}: it belongs to {', '.join(owners)}."
        if last in _OF_OTHERS:
            return f"{problem} {_OF_OTHERS[last]}"
        names = [x.flag.removeprefix("--") for x in self.settings.values()]
        names = names if "." in flag.name else [name.split(".")[-1] for name in names]
        page = f"`podracer {self.command} --help` lists what there is."
        hint = nearest(flag.name.removeprefix("no_").replace("_", "-"), names, page)
        return f"{problem} {hint.replace('mean ', 'mean --').replace(' or ', ' or --')}"

    def refuse(self, word: str, flag: Flag | None) -> None:
        """Raise `ConfigError` for a word that no setting takes; it may stand behind a flag."""
        if sentence := self.explain(word):
            raise ConfigError(sentence)
        name, equals, text = word.partition("=")
        advice = f"`podracer {self.command} --help` lists what there is."
        if equals and re.fullmatch(r"[a-z_.]+", name):  # the spelling of version 0.1
            old = Flag(f"--{name.replace('_', '-')}", (text,), True)
            advice = f"write {self.find(old).flag} {text}."
        elif word.lower() in ("true", "false", "yes", "no", "on", "off"):
            advice = "a flag that is on or off has no value: write --NAME or --no-NAME."
        elif flag is not None and self.find(flag).hint is not bool:
            several = "several are for a sweep, --vary NAME=VALUE,VALUE."
            advice = f"{flag.spelling} takes one value; {several}"
        raise ConfigError(f"{word!r} is none of the arguments of {self.command}: {advice}")
