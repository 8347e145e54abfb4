"""The command that checks an environment: `podracer check`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Annotated, Any

from podracer.cli.values import Mark
from podracer.errors import ConfigError
from podracer.io.text import print_json


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """Check an environment: what it declares, then what it does in random play, in this process."""

    environment: Annotated[str, Mark.POSITIONAL]
    """Name of the environment, as `podracer list environments` shows them, or MODULE:NAME of an
    environment, or of a class or a function that makes one."""
    json: bool = False
    """Print one JSON object."""


def check(options: CheckOptions) -> int:
    """Run `podracer check`: return 0 if agents can be trained in the environment, else 78."""
    from podracer.checks.errors import describe_error
    from podracer.cli.recipe_flags import find_modules_here
    from podracer.environment import is_of_gymnasium
    from podracer.envs.catalog import has_name
    from podracer.envs.host.gymnasium import Gymnasium
    from podracer.run.environment_check import examine

    environment: Any = options.environment
    module, _, attribute = options.environment.partition(":")
    if module.endswith(".py"):
        name = f"{Path(module).stem}:{attribute or 'NAME'}"
        raise ConfigError(f"{module!r} is a file: in its folder name the module, {name}.")
    find_modules_here(options.environment)
    if attribute.isidentifier() and not has_name(options.environment):
        try:
            environment = getattr(importlib.import_module(module), attribute)
            is_class = isinstance(environment, type) and not is_of_gymnasium(environment)
            if is_class or inspect.isroutine(environment):
                instance = environment()
                is_gymnasium = is_of_gymnasium(type(instance))
                environment = Gymnasium(environment, workers=0) if is_gymnasium else instance
        except (Exception, SystemExit) as error:  # its code 0 would count as success
            problem = f"There is no environment {options.environment!r}"
            raise ConfigError(f"{problem}: {describe_error(error)}") from error
    report = examine(environment)
    if options.json:
        print_json(report.to_json())
    else:
        print(report)
    return 0 if report.usable else 78
