"""The command line: the table of commands, and how one is chosen and run.

JAX is imported only once a command needs it, so that a mistyped one is answered at once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from podracer.io.names import nearest


class Command(NamedTuple):
    """A command: the file of `podracer.cli` and the function that run it, and its line of help."""

    module: str
    function: str
    usage: str
    about: str


COMMANDS = {
    "train": Command("train", "train", "[RECIPE] [--flags]", "train an agent (default: catch)"),
    "sweep": Command("pods", "sweep", "[RECIPE] --vary ...", "many settings and seeds at once"),
    "tournament": Command("pods", "tournament", "[RECIPE ...]", "pods that restart from the best"),
    "leaderboard": Command("pods", "leaderboard", "DIR", "the ranking of a tournament"),
    "resume": Command("train", "resume", "RUN", "continue a run exactly, to its configured end"),
    "eval": Command("runs", "evaluate", "RUN", "whole episodes at the newest checkpoint"),
    "play": Command("runs", "play", "RUN", "episodes as a GIF or a video"),
    "report": Command("runs", "report", "RUN [RUN ...]", "one HTML page; several runs compare"),
    "list": Command("listing", "list_names", "[WHAT]", "agents, environments or recipes"),
    "fingerprint": Command("runs", "fingerprint", "RUN", "SHA-256 of the whole training state"),
    "bench": Command("bench", "bench", "NAME", "measure throughput and compile time"),
    "tune": Command("bench", "tune", "RECIPE", "the fastest Sebulba settings on this machine"),
    "rule": Command("runs", "rule", "RUN", "the update rule that a run learned, as a file"),
    "backtest": Command("trading", "backtest", "RUN", "a trading run beside the baselines"),
    "promote": Command("trading", "promote", "MODELS RUN", "make it the current model, if better"),
    "rollback": Command("trading", "rollback", "MODELS", "go back to the previous model"),
    "doctor": Command(
        "doctor", "doctor", "", "show devices and versions, and test what works here"
    ),
}


def usage() -> str:
    """Return the help page of `podracer` itself."""
    lines = ["podracer: scalable reinforcement learning on accelerators", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  {f'podracer {name} {command.usage}':36} {command.about}")
    lines += [
        "",
        "  podracer COMMAND --help              the flags of a command",
        "  podracer --version                   the version",
        "  podracer --completion SHELL          a completion script for bash, zsh or fish",
    ]
    return "\n".join(lines)


def version() -> str:
    """Return one line with the versions of podracer, Python and JAX; JAX is not imported."""
    own, jax = (importlib.metadata.version(package) for package in ("podracer", "jax"))
    return f"podracer {own} (Python {platform.python_version()}, JAX {jax})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; `docs/reliability.md` lists the codes."""
    name, *remaining = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        sys.exit(_run(name, remaining))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            traceback.print_exc()
            sys.exit(70)
        print(f"podracer: {error}", file=sys.stderr)
        sys.exit(code)


def _run(name: str, arguments: list[str]) -> int:
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(version())
        return 0
    if name == "--completion":
        from podracer.cli.completion import script

        print(script(arguments[0] if arguments else ""))
        return 0
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        print(f"podracer: There is no command {name!r}: {hint}", file=sys.stderr)
        return 78
    command = COMMANDS[name]
    module = importlib.import_module(f"podracer.cli.{command.module}")
    return getattr(module, command.function)(arguments)
