"""The command line: `podracer train`, and what to do with a run afterwards.

The only place that touches `os.environ`. JAX is imported only once a command needs it, so that a
mistyped one is answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from podracer.cli.arguments import Arch, RunPath, named_arch, parse, recipe_of, taken
from podracer.experiments.hosts import Hosts, act_at_once, join
from podracer.tournament import is_tournament

USAGE = """podracer: scalable reinforcement learning on accelerators

  podracer train [RECIPE] [--flags]   train an agent (default recipe: catch)
  podracer sweep [RECIPE] --vary ...  many seeds and hyperparameters as one program
  podracer tournament [RECIPE ...]    pods that compete, and start again from the best
  podracer leaderboard DIR            how a tournament stands
  podracer resume RUN                 continue to the configured end, exactly
  podracer eval RUN                   greedy episodes at the newest checkpoint
  podracer play RUN                   the same as a GIF or a video
  podracer report RUN [RUN ...]       one HTML page; several runs are compared
  podracer list [WHAT]                agents, environments or recipes
  podracer fingerprint RUN            SHA-256 of the complete training state
  podracer bench NAME                 throughput, compile time apart
  podracer tune RECIPE                the fastest split, threads and batch here
  podracer rule RUN                   the update rule that a run learned, as a file
  podracer backtest RUN               a run that trades, beside the baselines
  podracer promote MODELS RUN         make it the current model if it is better
  podracer rollback MODELS            go back to the model before
  podracer doctor                     devices, versions, what works here

podracer COMMAND --help shows a command's flags."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; `docs/reliability.md` lists them."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        sys.exit(0)
    if name not in COMMANDS:
        _refuse(f"There is no command {name!r}", name, COMMANDS)
    try:
        sys.exit(COMMANDS[name](rest))
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


def _refuse(what: str, word: str, known: Iterable[str]) -> None:
    near = difflib.get_close_matches(word, list(known), n=1)
    hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(known)}"
    print(f"podracer: {what}: {hint}.", file=sys.stderr)
    sys.exit(78)


# --- train and resume ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and how."""

    run_dir: Path | None = None
    """Where the run is kept; by default a new directory under runs/."""
    rule: Path | None = None
    """Teach the recipe's network by the update rule in this file, see `podracer rule`."""
    arch: Arch = "anakin"
    """The architecture. Its flags follow it: see `podracer train RECIPE --arch sebulba --help`."""


def _train(arguments: Sequence[str]) -> int:
    named = bool(arguments) and not arguments[0].startswith("-")
    recipe, rest = (arguments[0], arguments[1:]) if named else ("catch", arguments)

    experiment, rest = recipe_of(recipe, rest)
    if rule := taken(rest, "rule"):
        from podracer.experiments.recipes import with_update_rule

        experiment = with_update_rule(experiment, rule)
    arch = named_arch(rest) or experiment.arch
    experiment = experiment.under(arch)
    fields = [("place", Place), ("experiment", type(experiment)), ("hosts", Hosts)]
    command = dataclasses.make_dataclass("Train", fields, frozen=True)
    parsed = parse(command, f"train {recipe}", rest, command(Place(arch=arch), experiment, Hosts()))
    return _run(parsed.experiment, parsed.place.run_dir, parsed.hosts, resume=False)


def _resume(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Resume:
        run: RunPath
        """The run's directory."""
        hosts: Hosts = dataclasses.field(default_factory=Hosts)

    parsed = parse(Resume, "resume", arguments)
    if is_tournament(parsed.run):
        from podracer.cli import pods
        from podracer.tournament.config import read_tournament

        return pods.run_tournament(read_tournament(parsed.run), parsed.run)
    from podracer.experiments.experiment import read_experiment

    return _run(read_experiment(parsed.run), parsed.run, parsed.hosts, resume=True)


def _run(experiment: Any, run_dir: Path | None, hosts: Hosts, *, resume: bool) -> int:
    experiment.check()
    if experiment.arch == "sebulba" and experiment.devices <= 1:
        act_at_once()
    join(hosts, experiment.devices)
    import jax

    from podracer.experiments.training import train

    result = train(experiment, run_dir=run_dir, resume=resume, show=True)
    if jax.process_index() == 0:
        _close(result)
    return result.exit_code


def _close(result: Any) -> None:
    """The last lines of a run."""
    from podracer.agents.lpg.agent import LPG
    from podracer.reports.console import summarize

    outcomes = {0: "Finished", 75: "Preempted, saved", 130: "Stopped, saved"}
    then = "rule" if isinstance(result.agent, LPG) else "play"
    summarize(result.run_dir, outcomes[result.exit_code], then=then)


# --- about this machine --------------------------------------------------------------------------


def _list(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class List:
        what: Annotated[
            Literal["all", "agents", "environments", "recipes"], tyro.conf.Positional
        ] = "all"

    what = parse(List, "list", arguments).what
    from podracer import envs
    from podracer.experiments import recipes
    from podracer.experiments.experiment import AGENTS

    tables = {
        "agents": [(kind.__name__, (kind.__doc__ or "").split("\n")[0]) for kind in AGENTS],
        "environments": [
            (name, about if status == "installed" else f"{about} [{status}]")
            for name, about, status in envs.names()
        ],
        "recipes": [
            (name, (make.__doc__ or "").split("\n")[0]) for name, make in recipes.RECIPES.items()
        ],
    }
    for title in tables if what == "all" else (what,):
        print(f"{title}:")
        for name, about in sorted(tables[title]):
            print(f"  {name:24} {about}")
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """Say what this machine has and what works on it."""

    parse(Doctor, "doctor", arguments)
    from podracer.cli.doctor import examine

    return examine()


def _from(module: str, command: str) -> Callable[[Sequence[str]], int]:
    """A command of another file, imported when it is called."""

    def run(arguments: Sequence[str]) -> int:
        return getattr(importlib.import_module(f"podracer.cli.{module}"), command)(arguments)

    return run


COMMANDS = {
    "train": _train,
    "sweep": _from("pods", "sweep"),
    "tournament": _from("pods", "tournament"),
    "leaderboard": _from("pods", "leaderboard"),
    "resume": _resume,
    "eval": _from("runs", "evaluate"),
    "play": _from("runs", "play"),
    "report": _from("runs", "report"),
    "list": _list,
    "fingerprint": _from("runs", "fingerprint"),
    "bench": _from("bench", "bench"),
    "tune": _from("bench", "tune"),
    "rule": _from("runs", "rule"),
    "backtest": _from("trading", "backtest"),
    "promote": _from("trading", "promote"),
    "rollback": _from("trading", "rollback"),
    "doctor": _doctor,
}
