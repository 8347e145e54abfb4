"""The commands about a run: `podracer eval`, `play`, `to_progress`, `fingerprint` and `rule`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from podracer.cli.arguments import RunPath, parse
from podracer.tournament import is_tournament


def evaluate(arguments: Sequence[str]) -> int:
    """`podracer eval`: greedy episodes at the newest checkpoint."""

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

    from podracer.agent import policy_params
    from podracer.evaluate import make_evaluator
    from podracer.experiments.training import load_run, use_compilation_cache

    use_compilation_cache()
    agent, env, state = load_run(parsed.run)
    key = state.key if parsed.seed is None else jax.random.key(parsed.seed)
    greedy = make_evaluator(agent, env, _positive("--episodes", parsed.episodes))
    result = greedy(policy_params(agent, state.learner), key)
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


def play(arguments: Sequence[str]) -> int:
    """`podracer play`: the same as a GIF or a video."""

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

    from podracer.agent import policy_params
    from podracer.evaluate import record_frames
    from podracer.experiments.training import load_run, use_compilation_cache
    from podracer.reports.video import write_video

    use_compilation_cache()
    agent, env, state = load_run(parsed.run)
    key = state.key if parsed.seed is None else jax.random.key(parsed.seed)
    frames, returns = record_frames(
        agent,
        env,
        policy_params(agent, state.learner),
        key,
        episodes=_positive("--episodes", parsed.episodes),
        max_steps=_positive("--max-steps", parsed.max_steps),
    )
    out = parsed.out or parsed.run / "play.gif"
    write_video(frames, out, parsed.fps or (5 if len(frames) < 100 else 30))
    print(f"{out}: {len(frames)} frames, returns {', '.join(f'{r:g}' for r in returns) or 'none'}")
    return 0


def report(arguments: Sequence[str]) -> int:
    """`podracer report`: one HTML page, of runs or of a tournament."""

    @dataclasses.dataclass(frozen=True)
    class Report:
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """One or more run directories, or that of a tournament."""
        out: Path | None = None
        """The HTML file; by default report.html in the first run."""

    parsed = parse(Report, "report", arguments)
    from podracer.reports.run import write_report
    from podracer.types import ConfigError

    if not parsed.runs:
        raise ConfigError("report needs at least one run directory.")
    out = parsed.out or parsed.runs[0] / "report.html"
    if tournaments := list(filter(is_tournament, parsed.runs)):
        from podracer.reports.tournament import write_tournament_report

        if len(parsed.runs) > 1:
            raise ConfigError(f"{tournaments[0]} holds a tournament: report it alone.")
        print(write_tournament_report(tournaments[0], out))
        return 0
    for run in parsed.runs:
        if not (run / "config.json").is_file():
            raise ConfigError(f"{run} holds no run: there is no config.json in it.")
    print(write_report(parsed.runs, out))
    return 0


def fingerprint(arguments: Sequence[str]) -> int:
    """`podracer fingerprint`: SHA-256 of the complete training state."""

    @dataclasses.dataclass(frozen=True)
    class Fingerprint:
        run: RunPath
        """The run's directory."""

    parsed = parse(Fingerprint, "fingerprint", arguments)
    from podracer.io.checkpoint import stored_fingerprint

    step, digest = stored_fingerprint(parsed.run / "checkpoints")
    print(f"{digest}  {parsed.run} at update {step}")
    return 0


def _positive(flag: str, value: int) -> int:
    from podracer.types import ConfigError

    if value < 1:
        raise ConfigError(f"{flag} must be at least 1, but it is {value}.")
    return value


def rule(arguments: Sequence[str]) -> int:
    """`podracer rule`: the rule at a run's newest checkpoint as a file."""

    @dataclasses.dataclass(frozen=True)
    class RuleCommand:
        run: RunPath
        """The run's directory."""
        out: Path | None = None
        """The file; by default rule.npz in the run."""

    parsed = parse(RuleCommand, "rule", arguments)
    from podracer.agents.lpg.agent import LPG
    from podracer.agents.lpg.rule_file import write_rule
    from podracer.experiments.training import load_run
    from podracer.types import ConfigError

    agent, env, state = load_run(parsed.run)
    if not isinstance(agent, LPG):
        raise ConfigError(
            f"{parsed.run} learned no update rule: its agent is {type(agent).__name__}."
        )
    out = parsed.out or parsed.run / "rule.npz"
    if not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent} to write {out.name} into.")
    about = {"environment": env.spec.name, "updates": int(state.update)}
    write_rule(out, agent.rule, state.learner.shared["rule"], about)
    print(f"{out}  use it: podracer train catch --rule {out}")
    return 0
