"""The command line: `podracer train`, and what to do with a run afterwards.

The only place that touches `os.environ`. JAX is imported only once a command needs it, so that a
mistyped one is answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro

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


def parse(kind: Any, command: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Flags to a dataclass; what does not fit exits as a configuration error."""
    config = (tyro.conf.AvoidSubcommands, tyro.conf.OmitArgPrefixes)
    options = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            kind, prog=f"podracer {command}", args=list(arguments), config=config, **options
        )
    except SystemExit as leaving:
        sys.exit(78 if leaving.code else 0)


Arch = Literal["anakin", "sebulba"]
RunPath = Annotated[Path, tyro.conf.Positional]


# --- train and resume ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several processes as one run. Under Slurm's srun and on TPU pods they find each other;
    elsewhere give all three, or set them as JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (an indexed Kubernetes job numbers its processes itself)."""

    coordinator: str | None = None
    """Address of process 0, such as 10.0.0.1:1234."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""

    def filled(self) -> Hosts:
        """With what the launcher left in the environment."""

        def number(*names: str) -> int | None:
            found = [os.environ[name] for name in names if name in os.environ]
            return int(found[0]) if found and found[0].isdigit() else None

        if "JAX_COORDINATOR_ADDRESS" not in os.environ or self != Hosts():
            return self
        return Hosts(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            number("JAX_NUM_PROCESSES"),
            number("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
        )


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
    if rule := _taken(rest, "rule"):
        from podracer.recipes import taught_by

        experiment = taught_by(experiment, rule)
    arch = _named_arch(rest) or experiment.arch
    experiment = experiment.under(arch)
    fields = [("place", Place), ("experiment", type(experiment)), ("hosts", Hosts)]
    command = dataclasses.make_dataclass("Train", fields, frozen=True)
    parsed = parse(command, f"train {recipe}", rest, command(Place(arch=arch), experiment, Hosts()))
    return _run(parsed.experiment, parsed.place.run_dir, parsed.hosts, resume=False)


def recipe_of(name: str, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The recipe, told what its own flags say, and the flags that are left."""
    from podracer import recipes

    rest = list(arguments)
    options = {own: given for own in recipes.options_of(name) if (given := _taken(rest, own))}
    return recipes.find(name, **options), rest


def _taken(arguments: list[str], name: str) -> str | None:
    """The value of `--name`, taken out of the arguments: a flag of the recipe itself."""
    for i, argument in enumerate(arguments):
        flag, _, joined = argument.partition("=")
        if flag == f"--{name}" and (joined or i + 1 < len(arguments)):
            value = joined or arguments[i + 1]
            del arguments[i : i + 1 + (not joined)]
            return value
    return None


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """What a flag says, before those that depend on it are known; it stays where it is."""
    for given, following in itertools.pairwise([*arguments, ""]):
        name, joined, value = given.partition("=")
        if name == flag:
            return value if joined else following
    return None


def _named_arch(arguments: Sequence[str]) -> Arch | None:
    value = value_of(arguments, "--arch")
    return cast(Arch, value) if value in get_args(Arch) else None


def _resume(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Resume:
        run: RunPath
        """The run's directory."""
        hosts: Hosts = dataclasses.field(default_factory=Hosts)

    parsed = parse(Resume, "resume", arguments)
    if is_tournament(parsed.run):
        from podracer import cli_pods
        from podracer.tournament.config import read_tournament

        return cli_pods.run_tournament(read_tournament(parsed.run), parsed.run)
    from podracer.experiment import read_experiment

    return _run(read_experiment(parsed.run), parsed.run, parsed.hosts, resume=True)


def _run(experiment: Any, run_dir: Path | None, hosts: Hosts, *, resume: bool) -> int:
    experiment.check()
    if experiment.arch == "sebulba" and experiment.devices <= 1:
        act_at_once()
    join(hosts, experiment.devices)
    import jax

    from podracer.training import train

    result = train(experiment, run_dir=run_dir, resume=resume, show=True)
    if jax.process_index() == 0:
        _close(result)
    return result.exit_code


def _close(result: Any) -> None:
    """The last lines of a run."""
    from podracer.agents.lpg import LPG
    from podracer.io.console import summarise

    outcomes = {0: "Finished", 75: "Preempted, saved", 130: "Stopped, saved"}
    then = "rule" if isinstance(result.agent, LPG) else "play"
    summarise(result.run_dir, outcomes[result.exit_code], then=then)


def join(hosts: Hosts, devices: int) -> None:
    """Set JAX up for this process's part; nothing may have touched a device before."""
    import jax

    from podracer.types import ConfigError

    hosts = hosts.filled()
    given = [hosts.coordinator, hosts.num_processes, hosts.process_id]
    several = any(x is not None for x in given)
    if several and any(x is None for x in given):
        raise ConfigError("give --coordinator, --num-processes and --process-id together.")
    if several and not 0 <= hosts.process_id < hosts.num_processes:  # type: ignore[operator]
        raise ConfigError(
            f"--process-id {hosts.process_id} must lie below --num-processes {hosts.num_processes}."
        )
    if devices:
        if several and devices % hosts.num_processes:  # type: ignore[operator]
            raise ConfigError(
                f"--devices {devices} cannot be split evenly over {hosts.num_processes} processes."
            )
        # Virtual devices, where the run is on a CPU; accelerators do not look at this.
        jax.config.update("jax_num_cpu_devices", devices // (hosts.num_processes or 1))
    if several:
        jax.distributed.initialize(hosts.coordinator, hosts.num_processes, hosts.process_id)
    elif _in_cluster():
        jax.distributed.initialize()


def act_at_once() -> None:
    """On a CPU, run what is dispatched in the thread that dispatches it.

    An actor waits for each inference anyway, and handing it to another thread costs half of a
    small one. With several CPU devices the collectives need those threads.
    """
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _in_cluster() -> bool:
    """Whether a launcher whose variables JAX reads by itself started several processes."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return (tasks.isdigit() and int(tasks) > 1) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


# --- about this machine --------------------------------------------------------------------------


def _list(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class List:
        what: Annotated[
            Literal["all", "agents", "environments", "recipes"], tyro.conf.Positional
        ] = "all"

    what = parse(List, "list", arguments).what
    from podracer import envs, recipes
    from podracer.experiment import AGENTS

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
    from podracer.doctor import examine

    return examine()


def _from(module: str, command: str) -> Callable[[Sequence[str]], int]:
    """A command of another file, imported when it is called."""

    def run(arguments: Sequence[str]) -> int:
        return getattr(importlib.import_module(f"podracer.{module}"), command)(arguments)

    return run


COMMANDS = {
    "train": _train,
    "sweep": _from("cli_pods", "sweep"),
    "tournament": _from("cli_pods", "tournament"),
    "leaderboard": _from("cli_pods", "leaderboard"),
    "resume": _resume,
    "eval": _from("cli_runs", "evaluate"),
    "play": _from("cli_runs", "play"),
    "report": _from("cli_runs", "report"),
    "list": _list,
    "fingerprint": _from("cli_runs", "fingerprint"),
    "bench": _from("cli_measure", "bench"),
    "tune": _from("cli_measure", "tune"),
    "rule": _from("cli_runs", "rule"),
    "backtest": _from("cli_trading", "backtest"),
    "promote": _from("cli_trading", "promote"),
    "rollback": _from("cli_trading", "rollback"),
    "doctor": _doctor,
}
