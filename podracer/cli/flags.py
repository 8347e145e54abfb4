"""The flags of a configuration: which field each is, its name, and whose an unknown one is."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import tyro

from podracer.cli.arguments import check_limits, parse
from podracer.errors import ConfigError
from podracer.fields import NO_FLAG
from podracer.names import OTHER_NAMES
from podracer.schedules import Linear

Path = tuple[str, ...]  # the names of fields that lead to one


class Field(NamedTuple):
    """A field that is a flag, or a part with flags of its own."""

    name: str
    hint: Any
    value: Any
    text: str | None

    @property
    def is_part(self) -> bool:
        """Whether the field holds fields that are flags."""
        return is_part(self.value)

    @property
    def flag(self) -> str:
        """Name of the flag: the field's, or the one that a marker gives."""
        markers = getattr(self.hint, "__metadata__", ())
        names = filter(None, (getattr(marker, "name", None) for marker in markers))
        return next(names, "") or self.name.strip("_").replace("_", "-")


class Group(NamedTuple):
    """Fields with a title of their own in a help page."""

    description: str | None
    fields: Sequence[Field]


def group_of(part: Any) -> Group:
    """Return the group of a dataclass, given as a value or as a type."""
    kind = part if isinstance(part, type) else type(part)
    return Group(kind.__doc__, fields_of(part))


def is_part(value: Any) -> bool:
    """Return whether a value is a dataclass whose fields are flags; a schedule is one flag."""
    return dataclasses.is_dataclass(value) and not isinstance(value, Linear)


def fields_of(part: Any) -> list[Field]:
    """Return the fields of a dataclass, given as a value or as a type, that are flags or parts."""
    kind = part if isinstance(part, type) else type(part)
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = field_texts(kind)
    fields = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        hidden = {NO_FLAG, tyro.conf.Suppress} & {*getattr(hint, "__metadata__", ())}
        if field.name != "spec" and not field.metadata.get("derived") and not hidden:
            value = getattr(part, field.name, tyro.MISSING)
            fields.append(Field(field.name, hint, value, texts.get(field.name)))
    return fields


@functools.cache
def field_texts(kind: type) -> dict[str, str]:
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


def flag_names(fields: Sequence[Field], path: Path = ()) -> dict[Path, str]:
    """Return the name of each flag, without hyphens in front, by the path of its field.

    A flag is named as its field. Where two parts have flags of the same name, the second part's
    begin with its name: `rnd-network.hidden`.
    """
    names = {(*path, field.name): field.flag for field in fields if not field.is_part}
    for part in fields:
        if part.is_part:
            inner = flag_names(fields_of(part.value), (*path, part.name))
            clashes = {*inner.values()} & {*names.values()}
            prefix = f"{part.name.replace('_', '-')}." if clashes else ""
            names |= {place: prefix + name for place, name in inner.items()}
    return names


def names_of_command(groups: Mapping[str, Group]) -> dict[Path, str]:
    """Return the names of all flags of a command; an agent's yield to the others."""
    names: dict[Path, str] = {}
    for title in sorted(groups, key="agent".__eq__):
        for path, name in flag_names(groups[title].fields, (title,)).items():
            names[path] = f"{title}.{name}" if name in names.values() else name
    return names


def parse_parts(
    groups: Mapping[str, Group],
    command: str,
    arguments: Sequence[str],
    description: str = "",
    explain: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Parse the flags of several groups at once.

    Returns the values of each group's fields. `explain` may raise a better error for an unknown
    flag, by default one with its name or its owner.
    """
    names = names_of_command(groups)
    if explain is None:
        explain = partial(_explain, command, names=names, has_agent="agent" in groups)
    blanks = {title: _blank(group, (title,), names) for title, group in groups.items()}
    default = _dataclass("Command", "", {title: (type(x), x) for title, x in blanks.items()})
    parsed = parse(type(default), command, arguments, default, description, explain)
    values = {title: _values(x.fields, getattr(parsed, title)) for title, x in groups.items()}
    for title, group in groups.items():
        check_limits({field.name: field.hint for field in group.fields}, values[title])
    return values


def _blank(group: Group, path: Path, names: Mapping[Path, str]) -> Any:
    """Return an object that tyro fills in the place of a group, with the names of the flags."""
    items = {}
    for field in group.fields:
        place = (*path, field.name)
        if field.is_part:
            value = _blank(group_of(field.value), place, names)
            hint = Annotated[type(value), tyro.conf.arg(help=field.text)]
        else:
            name = names[place] if names[place] != field.name.replace("_", "-") else None
            value = field.value
            hint = Annotated[field.hint, tyro.conf.arg(name=name, help=field.text)]
        items[field.name] = (hint, value)
    return _dataclass("Blank", group.description, items)


def _dataclass(name: str, doc: str | None, items: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return an object with attributes of these types and values."""
    fields = [(key, hint) for key, (hint, _) in items.items()]
    kind = dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__doc__": doc or ""})
    return kind(**{key: value for key, (_, value) in items.items()})


def _values(fields: Sequence[Field], blank: Any) -> dict[str, Any]:
    """Return the values of fields as they were filled in; parts are parts again."""
    values = {}
    for field in fields:
        value = getattr(blank, field.name)
        if field.is_part:
            value = dataclasses.replace(field.value, **_values(fields_of(field.value), value))
        values[field.name] = value
    return values


def _explain(command: str, flag: str, names: Mapping[Path, str], has_agent: bool) -> None:
    """Raise `ConfigError` for an unknown flag that has another name or another owner."""
    name = flag.removeprefix("--").replace("_", "-")
    for other_name in OTHER_NAMES.get(name.replace("-", "_"), ()):
        if (own_name := other_name.replace("_", "-")) in names.values():
            raise ConfigError(f"There is no flag {flag} here: did you mean --{own_name}?")
    if has_agent and (owners := owners_of(name)):
        raise ConfigError(f"{command} has no flag --{name}: it belongs to {', '.join(owners)}.")


def owners_of(flag: str) -> list[str]:
    """Return whose flag a name is: of an architecture, a torso, or agents."""
    from podracer.agents import with_packages
    from podracer.drivers.anakin import AnakinConfig
    from podracer.drivers.sebulba import SebulbaConfig
    from podracer.networks import CNN, MLP, ResNet

    parts = {
        "--arch anakin": AnakinConfig(),
        "--arch sebulba": SebulbaConfig(),
        "--torso cnn": CNN(),
        "--torso resnet": ResNet(),
        "--torso mlp": MLP(),
    }
    agents = {kind.__name__: kind() for kind in with_packages().values()}

    def those_with_it(parts: Mapping[str, Any]) -> list[str]:
        wanted = {flag, flag.removeprefix("no-")}
        return [x for x, part in parts.items() if wanted & {*flag_names(fields_of(part)).values()}]

    return those_with_it(parts) or those_with_it(agents)
