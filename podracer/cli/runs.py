"""The commands for a finished run: `eval`, `play`, `report`, `fingerprint`, `rule`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from podracer.cli.arguments import parse, take_values
from podracer.cli.run_options import AtCheckpoint, CheckpointOptions, PolicyName, output_file
from podracer.cli.values import Count, Limits, Mark, RunPath
from podracer.errors import ConfigError
from podracer.io.addresses import COPIES, in_addresses, output_folder
from podracer.io.directories import is_tournament, quoted_path
from podracer.io.text import print_json

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer.run.loading import LoadedRun


@dataclasses.dataclass(frozen=True)
class EpisodeOptions(CheckpointOptions):
    """Flags of the commands that run episodes: who acts in them, and which they are."""

    policy: PolicyName | None = None
    """Policy that acts: `greedy` or `sampled`. By default the policy of the run's evaluations."""
    epsilon: Annotated[float | None, Limits(0, 1)] = None
    """Probability, in [0, 1], of a random action. By default as in the run's evaluations."""
    seed: Annotated[int | None, Limits(0, 2**32 - 1)] = None
    """Random seed of the episodes. By default the run's, which repeats the evaluation at
    this checkpoint."""

    def open(self, experiment: Experiment) -> tuple[LoadedRun, dict[str, Any], tuple[Any, ...]]:
        """Return the run, the policy and the epsilon that act, and arguments of the episodes.

        The latter are the parameters that act, and what determines the episodes: a key and an
        update. All are those of the run's evaluations, unless flags give others.
        """
        import jax

        from podracer.agent import policy_params

        run = self.load(experiment)
        key, update = run.state.key, 0 if experiment.fixed_evaluation else run.state.update
        if self.seed is not None:
            key, update = jax.random.key(self.seed), 0
        policy, epsilon = experiment.evaluation_policy, experiment.evaluation_epsilon
        acting = {
            "policy": policy if self.policy is None else self.policy,
            "epsilon": epsilon if self.epsilon is None else self.epsilon,
        }
        return run, acting, (policy_params(run.agent, run.state.learner), key, update)


@dataclasses.dataclass(frozen=True)
class EvalOptions(EpisodeOptions):
    """Evaluate a run at a checkpoint."""

    recipe: str | None = None
    """Recipe that made the run, such as my_package.recipes:mine. It is needed if the run's agent,
    network or environment is your own. Its own flags change the environment: --leak 0.6."""
    environment: str | None = None
    """Environment to evaluate in, by default the run's own: the same with other options, or another
    with equal observations and actions. A name that has a module imported, such as
    gymnasium:my_package:Maze-v0, must be given."""
    episodes: Annotated[int, Limits(high=2**20)] = 100
    """Number of episodes, each in its own environment; at least 1."""
    json: bool = False
    """Print one JSON object."""


def evaluate(arguments: Sequence[str]) -> int:
    """Run `podracer eval`: evaluate a checkpoint in whole episodes."""
    recipe, remaining = _recipe_of_flags(arguments)
    options = parse(EvalOptions, "eval", remaining)
    if recipe is not None and options.environment is not None:
        raise ConfigError("name an environment, or give the flags of a recipe's own: not both.")
    elsewhere = options.environment if recipe is None else recipe.environment

    from podracer.config.serialization import to_json
    from podracer.evaluate import make_evaluator
    from podracer.scores.runs import environment_text
    from podracer.types import Discrete

    experiment = options.reopen(elsewhere, recipe)
    run, acting, inputs = options.open(experiment)
    result = make_evaluator(run.agent, run.env, options.episodes, **acting)(*inputs)
    figures = {
        "environment": environment_text(to_json(experiment.environment)),
        "episodes": options.episodes,
        "distinct_episodes": int(result.distinct_episodes),
        **acting,
        "return_mean": float(result.returns.mean()),
        "return_std": float(result.returns.std()),
        "return_min": float(result.returns.min()),
        "return_max": float(result.returns.max()),
        "length_mean": float(result.lengths.mean()),
        "unfinished": int(result.unfinished),
        **({"broken": result.broken} if result.broken else {}),
        "updates": int(run.state.update),
        **({} if run.pod is None else {"pod": run.pod}),
    }
    if options.json:
        print_json(figures)
    else:
        for name, value in figures.items():
            print(f"{name:18} {value:g}" if isinstance(value, float) else f"{name:18} {value}")
    if result.repetition:
        ways = ["--policy sampled"] if acting["policy"] == "greedy" else []
        ways += ["--epsilon 0.01"] if isinstance(run.env.spec.action, Discrete) else []
        remedy = f": to measure more take {' or '.join(ways)}" if ways else ""
        print(f"podracer: {result.repetition}{remedy}.", file=sys.stderr)
    return 0


def _recipe_of_flags(arguments: Sequence[str]) -> tuple[Experiment | None, Sequence[str]]:
    """Return the experiment that flags of a recipe's own make, None without, and the others."""
    name = take_values(arguments, {"recipe": str})[0].get("recipe")
    if name is None or name.endswith(".json"):
        return None, arguments
    from podracer import recipes
    from podracer.cli.recipe_flags import find_modules_here

    find_modules_here(name)
    reserved = {field.name for field in dataclasses.fields(EvalOptions)}
    types = {x: hint for x, hint in recipes.options_of(name).items() if x not in reserved}
    values, remaining = take_values(arguments, types)
    return recipes.find(name, **values) if values else None, remaining


@dataclasses.dataclass(frozen=True)
class PlayOptions(EpisodeOptions):
    """Film a run at a checkpoint."""

    output: Path | None = None
    """Path of a .gif or .mp4 file. By default play.gif in the run."""
    episodes: Count = 3
    """Number of episodes to show; at least 1."""
    max_steps: Annotated[int, Limits(high=100_000)] = 500
    """Largest number of environment steps to show, from 1 to 100,000."""
    fps: Annotated[int, Limits(0, 1000)] = 0
    """Frames per second of the film, up to 1,000; 0 chooses by its length."""


def play(options: PlayOptions) -> int:
    """Run `podracer play`: film episodes of a checkpoint."""
    from podracer.reports.recording import record_frames
    from podracer.reports.video import write_video
    from podracer.scores.runs import acting_text

    experiment = options.reopen()
    path = output_file(options.output, output_folder(options.run) / "play.gif", (".gif", ".mp4"))
    run, acting, arguments = options.open(experiment)
    limits = {"episodes": options.episodes, "max_steps": options.max_steps}
    frames, returns = record_frames(run.agent, run.env, *arguments, **acting, **limits)
    write_video(frames, path, options.fps or (5 if len(frames) < 100 else 30))
    returns_text = ", ".join(f"{r:g}" for r in returns) or "none"
    of_pod = "" if run.pod is None else f" of pod {run.pod}"
    print(f"{path}: {len(frames)} frames{of_pod}, {acting_text(**acting)}, returns {returns_text}")
    return 0


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Write one HTML page about runs or a tournament."""

    runs: Annotated[tuple[Path, ...], Mark.RUN, Mark.POSITIONAL]
    """Directories or addresses of one or more runs, or the directory of one tournament."""
    output: Path | None = None
    """Path of the HTML file. By default report.html in the run, of several runs comparison.html in
    the folder that they share."""
    every: Annotated[float, Limits(0)] = 0.0
    """Seconds between two versions of a page that is written anew, and loaded anew by a browser,
    until Ctrl-C, such as while the runs train; 0 writes it once."""


def report(options: ReportOptions) -> int:
    """Run `podracer report`: write an HTML page about runs or a tournament."""
    from podracer.reports.run import write_report

    folders = {run.resolve() for run in options.runs}
    page = output_folder(options.runs[0]) / "report.html"
    if len(folders) > 1:  # no run's own page; of copies, which end, in the working directory
        are_copies = any(run != output_folder(run) for run in options.runs)
        shared = "" if are_copies else os.path.commonpath([folder.parent for folder in folders])
        page = Path(shared) / "comparison.html"
    path = output_file(options.output, page, (".html", ".htm"))
    sources = [COPIES.get(run, run) for run in options.runs]  # an address is read at each version
    write = partial(write_report, sources)
    if tournaments := list(filter(is_tournament, options.runs)):
        from podracer.reports.tournament import write_tournament_report

        if len(options.runs) > 1:
            raise ConfigError(f"{tournaments[0]} holds a tournament: report it alone.")
        write = partial(write_tournament_report, sources[0])
    print(write(path, options.every), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while options.every:
            time.sleep(options.every)
            write(path, options.every)
    return 0


@dataclasses.dataclass(frozen=True)
class FingerprintOptions:
    """Print the SHA-256 of the complete training state at a checkpoint."""

    run: RunPath
    """Directory of the run, or its address in a store."""
    checkpoint: AtCheckpoint = "newest"


def fingerprint(options: FingerprintOptions) -> int:
    """Run `podracer fingerprint`: print the SHA-256 of the complete training state."""
    from podracer.io.checkpoint import stored_fingerprint
    from podracer.io.seal import check_is_run, is_there
    from podracer.io.steps import CHECKPOINTS

    if not is_there(options.run / CHECKPOINTS):
        check_is_run(options.run)
    step, digest = stored_fingerprint(options.run, options.checkpoint)
    print(f"{digest}  {in_addresses(str(options.run))} at update {step}")
    return 0


@dataclasses.dataclass(frozen=True)
class RuleOptions(CheckpointOptions):
    """Write the update rule that a run learned to a file."""

    output: Path | None = None
    """Path of the file. By default rule.npz in the run."""


def rule(options: RuleOptions) -> int:
    """Run `podracer rule`: write the update rule of a checkpoint to a file."""
    from podracer.io.run_directory import write_bytes

    experiment = options.reopen()
    run = options.load(experiment)
    if (learned := run.agent.rule) is None:
        raise ConfigError(f"{options.run} learned no update rule: its agent is {run.agent.name}.")
    path = output_file(options.output, output_folder(options.run) / "rule.npz", (".npz",))
    origin = {"environment": run.env.spec.name, "updates": int(run.state.update)}
    write_bytes(path, learned.export(run.state.learner, origin))
    print(f"{path}  use it: podracer train catch --update-rule {quoted_path(path)}")
    return 0
