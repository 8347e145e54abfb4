"""The command line: how a command is chosen and run.

JAX is imported only once a command needs it, so that a mistyped one is answered at once.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import logging
import os
import platform
import select
import sys
from collections.abc import Sequence

import podracer
from podracer.cli.commands import COMMANDS, LEFT, TAKE_ARGUMENTS
from podracer.cli.sentences import in_flags
from podracer.io.addresses import in_addresses
from podracer.io.entry_points import installed, package_of, summary
from podracer.io.signals import STOPPED, exit_despite_threads, exit_on_stop, own_process
from podracer.io.text import explain_error, print_stderr, redact, redacted_output
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
    for stream in ("stdout", "stderr"):
        # Closed, as by a supervisor: the next file that is opened would take its place.
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if arguments is None:
        _log_to_stderr()
        sys.argv[1:] = redact(sys.argv[1:], stable=True)  # trackers keep the command line
    try:
        with own_process(), exit_on_stop(), redacted_output():
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
        code = 0 if _is_of_output(error) else _explain_error(error)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    if arguments is None:
        exit_despite_threads(code)
    sys.exit(code)


def _translate(sentence: str) -> str:
    """Return a sentence in what the user gave: flags, and addresses."""
    return in_flags(in_addresses(sentence))


class _Formatter(logging.Formatter):
    """Formatter of warnings, which speak of flags on the command line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a warning."""
        return _translate(super().format(record))


def _log_to_stderr() -> None:
    """Print warnings as errors are printed, whatever handlers other packages give the root."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("podracer: %(message)s"))
    logger = logging.getLogger("podracer")
    logger.addHandler(handler)
    logger.propagate = False


def _is_of_output(error: Exception) -> bool:
    """Return whether an error only says that nobody reads the output, as in `... | head`."""
    if not isinstance(error, OSError) or error.errno not in (errno.EPIPE, errno.EIO):
        return False
    poll = select.poll()
    poll.register(_STDOUT, 0)  # a hangup is reported without being asked for
    return bool(poll.poll(0))


def _explain_error(error: Exception) -> int:
    """Print what `explain_error` prints; return the exit code."""
    if not hasattr(error, "exit_code"):
        from podracer.run.errors import classify_error

        error = classify_error(error)
    return explain_error(error, _translate)


def _run(name: str, arguments: list[str]) -> int:
    if name == "help" and arguments:
        name, arguments = arguments[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(version())
        return 0
    if name in (of_packages := installed("commands")):
        return of_packages[name].load()(arguments) or 0
    if name not in COMMANDS:
        is_version, names = name == "version", [*COMMANDS, *of_packages]
        hint = "did you mean podracer --version?" if is_version else nearest(name, names)
        if name in LEFT:
            hint = f"{LEFT[name]}."
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
