"""The command line: how a command is chosen and run.

JAX is imported only once a command needs it, so that a mistyped one is answered at once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Sequence

import podracer
from podracer.cli.commands import COMMANDS, LEFT, TAKE_ARGUMENTS
from podracer.cli.sentences import in_flags
from podracer.io.entry_points import installed, package_of, summary
from podracer.io.exits import STOPPED, exit_despite_threads, exit_on_stop, own_process
from podracer.io.text import explain_error, print_stderr, redact, redacted_output, while_read
from podracer.names import nearest

_STDOUT = 1  # its descriptor


def usage() -> str:
    """Return the help page of `podracer` itself."""
    lines = ["podracer: scalable reinforcement learning on accelerators", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  {f'podracer {name} {command.usage}':36} {command.summary}")
    for name, entry in installed("commands").items():
        lines.append(f"  {f'podracer {name} ...':36} {summary(entry)}")
    lines += [
        "",
        "  podracer COMMAND --help              the flags of a command",
        "  podracer --version                   the version",
    ]
    return "\n".join(lines)


def version() -> str:
    """Return one line with the versions of podracer, Python and JAX; JAX is not imported."""
    jax = importlib.metadata.version("jax")
    return f"podracer {podracer.__version__} (Python {platform.python_version()}, JAX {jax})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; `docs/reliability.md` lists the codes."""
    name, *remaining = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    json_alone = "--json" in remaining
    for stream in ("stdout", "stderr"):
        # Closed, as by a supervisor: the next file that is opened would take its place.
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if arguments is None:
        logger = logging.getLogger("podracer")
        logger.addHandler(_Handler())
        logger.propagate = False  # whatever handlers other packages give the root
        sys.argv[1:] = redact(sys.argv[1:], stable=True)  # trackers keep the command line
        if json_alone:  # libraries in C and other processes print to the descriptor
            sys.stdout = open(os.dup(_STDOUT), "w")  # noqa: SIM115
            os.dup2(sys.stderr.fileno(), _STDOUT)
    code = 0
    try:
        with while_read(), own_process(), exit_on_stop(), redacted_output(json_alone=json_alone):
            code = _run(name, remaining)
    except KeyboardInterrupt:
        print_stderr("stopped by Ctrl-C.")
        code = STOPPED
    except SystemExit as error:  # raised by the parser of flags
        code = error.code or 0
        if not isinstance(code, int):  # a module of the user raised it
            print_stderr(str(code))
            code = 70
    except Exception as error:
        if not hasattr(error, "exit_code"):
            from podracer.run.errors import classify_error

            error = classify_error(error)
        code = explain_error(error, in_flags)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if arguments is None:
        exit_despite_threads(code)
    sys.exit(code)


class _Handler(logging.Handler):
    """Handler that prints a warning as an error is printed: it speaks of flags."""

    def emit(self, record: logging.LogRecord) -> None:
        print_stderr(in_flags(self.format(record)))


def _run(name: str, arguments: list[str]) -> int:
    if name == "help" and arguments:
        name, arguments = arguments[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(version())
        return 0
    if name not in COMMANDS:
        if name in (of_packages := installed("commands")):
            return of_packages[name].load()(arguments) or 0
        hint = LEFT.get(name) or nearest(name, [*COMMANDS, *of_packages])
        error = package_of(name) or f"There is no command {name!r}: {hint}"
        print(f"podracer: {error}", file=sys.stderr)
        return 78
    command = COMMANDS[name]
    module = importlib.import_module(f"podracer.cli.{command.module}")
    run = getattr(module, command.function)
    if name in TAKE_ARGUMENTS:
        return run(arguments)
    from podracer.cli.arguments import parse

    return run(parse(getattr(module, f"{name.capitalize()}Options"), name, arguments))
