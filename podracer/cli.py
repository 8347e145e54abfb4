"""The command line: `podracer train`, and what to do with a run afterwards.

The only place that touches `os.environ`. JAX is imported only once a command needs it, so that a
mistyped one is answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

USAGE = """podracer: scalable reinforcement learning on accelerators

  podracer train [RECIPE] [--flags]     train an agent (default recipe: catch)
  podracer resume RUN                   continue to the configured end, exactly
  podracer eval RUN                     greedy episodes at the newest checkpoint
  podracer play RUN                     the same as a GIF or a video
  podracer report RUN [RUN ...]         one HTML page; several runs are compared
  podracer list [WHAT]                  agents, environments or recipes
  podracer fingerprint RUN              SHA-256 of the complete training state
  podracer bench NAME                   throughput, compile time apart
  podracer doctor                       devices, versions, what works here

podracer COMMAND --help shows a command's flags."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code (see `docs/reliability.md`)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0)
    name, *rest = arguments
    if name not in COMMANDS:
        _refuse(f"There is no command {name!r}", name, COMMANDS)
    try:
        sys.exit(COMMANDS[name](rest) or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"podracer: {error}", file=sys.stderr)
        sys.exit(code)


def _refuse(what: str, word: str, known: Any) -> None:
    near = difflib.get_close_matches(word, list(known), n=1)
    hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(known)}"
    print(f"podracer: {what}: {hint}.", file=sys.stderr)
    sys.exit(78)


def _parse(kind: Any, command: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Flags to a dataclass; what does not fit exits with the code of a configuration error."""
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            kind,
            prog=f"podracer {command}",
            args=list(arguments),
            config=(tyro.conf.AvoidSubcommands,),
            **options,
        )
    except SystemExit as leaving:
        sys.exit(78 if leaving.code else 0)


# --- train and resume ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several processes as one run. Found by itself on Slurm, Kubernetes (JobSet) and TPU pods."""

    coordinator: str | None = None
    """Address of process 0, such as 10.0.0.1:1234."""
    num_processes: int | None = None
    process_id: int | None = None


RunPath = Annotated[Path, tyro.conf.Positional]


def _train(arguments: Sequence[str]) -> int:
    name, rest = "catch", list(arguments)
    if rest and not rest[0].startswith("-"):
        name, rest = rest[0], rest[1:]
    devices = _flag(rest, "--devices")
    _configure_jax(devices)
    from podracer import recipes

    experiment = recipes.find(name)
    command = dataclasses.make_dataclass(
        "Train",
        [
            ("experiment", tyro.conf.OmitArgPrefixes[type(experiment)], experiment),
            ("run_dir", Path | None, None),
            ("arch", Literal["anakin"], "anakin"),
            ("hosts", Hosts, Hosts()),
        ],
        frozen=True,
    )
    parsed = _parse(command, f"train {name}", rest)
    _join_hosts(parsed.hosts)
    return _finish(parsed.experiment, parsed.run_dir, resume=False)
