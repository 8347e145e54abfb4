"""The command line: `podracer train`, and what to do with a run afterwards.

The only place that touches `os.environ`. JAX is imported only once a command needs it, so that a
mistyped one is answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro

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


def _named_arch(arguments: Sequence[str]) -> Arch | None:
    """What `--arch` says, before the flags that depend on it are known."""
    for flag, value in itertools.pairwise([*arguments, ""]):
        name, _, joined = flag.partition("=")
        if name == "--arch" and (joined or value) in get_args(Arch):
            return cast(Arch, joined or value)
    return None


def _resume(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Resume:
        run: RunPath
        """The run's directory."""
        hosts: Hosts = dataclasses.field(default_factory=Hosts)

    parsed = parse(Resume, "resume", arguments)
    if (parsed.run / "leaderboard.jsonl").is_file():
        from podracer import cli_pods
        from podracer.tournament.orchestrator import read_tournament

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
        _close(result.run_dir, result.exit_code)
    return result.exit_code


def _close(run_dir: Path, exit_code: int) -> None:
    """The last lines of a run."""
    from podracer.io.console import summarise

    outcomes = {0: "Finished", 75: "Preempted, saved", 130: "Stopped, saved"}
    summarise(run_dir, outcomes[exit_code])


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


# --- after training ------------------------------------------------------------------------------


def _eval(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Eval:
        run: RunPath
        """The run's directory."""
        episodes: int = 100
        """How many greedy episodes, each in an environment of its own."""
        seed: int | None = None
        """Of the episodes; by default the run's, so that it repeats the run's own evaluation."""
        json: bool = False
        """Print one JSON object."""

    parsed = parse(Eval, "eval", arguments)
    import jax

    from podracer.evaluate import make_evaluator
    from podracer.training import load_run, use_compilation_cache

    use_compilation_cache()
    agent, env, state = load_run(parsed.run)
    key = state.key if parsed.seed is None else jax.random.key(parsed.seed)
    evaluate = make_evaluator(agent, env, _positive("--episodes", parsed.episodes))
    result = evaluate(agent.actor_params(state.learner), key)
    figures = {
        "episodes": parsed.episodes,
        "return_mean": float(result.returns.mean()),
        "return_std": float(result.returns.std()),
        "return_min": float(result.returns.min()),
        "return_max": float(result.returns.max()),
        "length_mean": float(result.lengths.mean()),
        "unfinished": result.unfinished,
        "updates": int(state.update),
    }
    if parsed.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:12} {value:g}" if isinstance(value, float) else f"{name:12} {value}")
    return 0


def _play(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Play:
        run: RunPath
        """The run's directory."""
        out: Path | None = None
        """A .gif or .mp4 file; by default play.gif in the run."""
        episodes: int = 3
        """Greedy episodes to show."""
        max_steps: int = 500
        """Stop after so many steps."""
        fps: int = 0
        """Frames per second; 0 chooses by the length."""
        seed: int | None = None
        """Of the episodes; by default the run's."""

    parsed = parse(Play, "play", arguments)
    import jax

    from podracer.evaluate import record_frames
    from podracer.io.video import write_video
    from podracer.training import load_run, use_compilation_cache

    use_compilation_cache()
    agent, env, state = load_run(parsed.run)
    key = state.key if parsed.seed is None else jax.random.key(parsed.seed)
    frames, returns = record_frames(
        agent,
        env,
        agent.actor_params(state.learner),
        key,
        episodes=_positive("--episodes", parsed.episodes),
        max_steps=_positive("--max-steps", parsed.max_steps),
    )
    out = parsed.out or parsed.run / "play.gif"
    write_video(frames, out, parsed.fps or (5 if len(frames) < 100 else 30))
    print(f"{out}: {len(frames)} frames, returns {', '.join(f'{r:g}' for r in returns) or 'none'}")
    return 0


def _report(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Report:
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """One or more run directories, or that of a tournament."""
        out: Path | None = None
        """The HTML file; by default report.html in the first run."""

    parsed = parse(Report, "report", arguments)
    from podracer.io.report import write_report
    from podracer.types import ConfigError

    if not parsed.runs:
        raise ConfigError("report needs at least one run directory.")
    out = parsed.out or parsed.runs[0] / "report.html"
    if tournaments := [run for run in parsed.runs if (run / "leaderboard.jsonl").is_file()]:
        from podracer.io.tournament_report import write_tournament_report

        if len(parsed.runs) > 1:
            raise ConfigError(f"{tournaments[0]} holds a tournament: report it alone.")
        print(write_tournament_report(tournaments[0], out))
        return 0
    for run in parsed.runs:
        if not (run / "config.json").is_file():
            raise ConfigError(f"{run} holds no run: there is no config.json in it.")
    print(write_report(parsed.runs, out))
    return 0


def _fingerprint(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Fingerprint:
        run: RunPath
        """The run's directory."""

    parsed = parse(Fingerprint, "fingerprint", arguments)
    from podracer.io.checkpoint import stored_fingerprint

    step, digest = stored_fingerprint(parsed.run / "checkpoints")
    print(f"{digest}  {parsed.run} at update {step}")
    return 0


# --- about this machine --------------------------------------------------------------------------


def _list(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class List:
        what: Annotated[
            Literal["all", "agents", "environments", "recipes"], tyro.conf.Positional
        ] = "all"

    what = parse(List, "list", arguments).what
    from podracer import envs, recipes

    agents = {type(make().agent) for make in recipes.RECIPES.values()}
    tables = {
        "agents": [(kind.__name__, (kind.__doc__ or "").split("\n")[0]) for kind in agents],
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


def _sweep(arguments: Sequence[str]) -> int:
    from podracer import cli_pods

    return cli_pods.sweep(arguments)


def _tournament(arguments: Sequence[str]) -> int:
    from podracer import cli_pods

    return cli_pods.tournament(arguments)


def _leaderboard(arguments: Sequence[str]) -> int:
    from podracer import cli_pods

    return cli_pods.leaderboard(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from podracer import cli_measure

    return cli_measure.bench(arguments)


def _tune(arguments: Sequence[str]) -> int:
    from podracer import cli_measure

    return cli_measure.tune(arguments)


def _rule(arguments: Sequence[str]) -> int:
    from podracer import cli_rules

    return cli_rules.rule(arguments)


def _backtest(arguments: Sequence[str]) -> int:
    from podracer import cli_trading

    return cli_trading.backtest(arguments)


def _promote(arguments: Sequence[str]) -> int:
    from podracer import cli_trading

    return cli_trading.promote(arguments)


def _rollback(arguments: Sequence[str]) -> int:
    from podracer import cli_trading

    return cli_trading.rollback(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """Say what this machine has and what works on it."""

    parse(Doctor, "doctor", arguments)
    from podracer.doctor import examine

    return examine()


def _positive(flag: str, value: int) -> int:
    from podracer.types import ConfigError

    if value < 1:
        raise ConfigError(f"{flag} must be at least 1, but it is {value}.")
    return value


COMMANDS = {
    "train": _train,
    "sweep": _sweep,
    "tournament": _tournament,
    "leaderboard": _leaderboard,
    "resume": _resume,
    "eval": _eval,
    "play": _play,
    "report": _report,
    "list": _list,
    "fingerprint": _fingerprint,
    "bench": _bench,
    "tune": _tune,
    "rule": _rule,
    "backtest": _backtest,
    "promote": _promote,
    "rollback": _rollback,
    "doctor": _doctor,
}
