"""Flags that belong to another agent or architecture than that of a command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from podracer.cli.arguments import flag_names


def refuse_foreign_flags(command: str, parts: Any, arguments: Sequence[str]) -> None:
    """Raise `ConfigError`, which says whose it is, for a flag of another agent or architecture.

    `parts` are the dataclasses with the flags of the command.
    """
    from podracer.types import ConfigError

    own = set(flag_names(parts))
    for flag in unknown_flags(own, arguments):
        if owners := owners_of(flag):
            raise ConfigError(
                f"{command} has no flag --{flag.replace('_', '-')}: it belongs to "
                f"{', '.join(owners)}."
            )


def unknown_flags(own: set[str], arguments: Sequence[str]) -> Iterator[str]:
    """Yield the names of flags, with underscores, that are none of `own`."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and not {name, name.removeprefix("no_")} & own:
            yield name


def owners_of(flag: str) -> list[str]:
    """Return whose flag a name is, with underscores: of an architecture, a torso, or agents."""
    from podracer.agents import AGENTS
    from podracer.drivers.anakin import AnakinConfig
    from podracer.drivers.sebulba import SebulbaConfig
    from podracer.networks import CNN, MLP, ResNet

    name = flag.removeprefix("no_")
    parts = {
        "--arch anakin": AnakinConfig(),
        "--arch sebulba": SebulbaConfig(),
        "--torso cnn": CNN(),
        "--torso resnet": ResNet(),
        "--torso mlp": MLP(),
    }
    agents = {kind.__name__: kind() for kind in AGENTS.values()}

    def those_with_it(parts: dict[str, Any]) -> list[str]:
        return [owner for owner, part in parts.items() if {flag, name} & set(flag_names(part))]

    return those_with_it(parts) or those_with_it(agents)
