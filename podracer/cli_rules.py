"""The command for runs that learned an update rule: `podracer rule`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from podracer.cli import RunPath, parse


def rule(arguments: Sequence[str]) -> int:
    """`podracer rule`: the rule at a run's newest checkpoint as a file."""

    @dataclasses.dataclass(frozen=True)
    class RuleCommand:
        run: RunPath
        """The run's directory."""
        out: Path | None = None
        """The file; by default rule.npz in the run."""

    parsed = parse(RuleCommand, "rule", arguments)
    from podracer.agents.lpg import LPG
    from podracer.io.rules import write_rule
    from podracer.training import load_run
    from podracer.types import ConfigError

    agent, env, state = load_run(parsed.run)
    if not isinstance(agent, LPG):
        raise ConfigError(
            f"{parsed.run} learned no update rule: its agent is {type(agent).__name__}."
        )
    out = parsed.out or parsed.run / "rule.npz"
    about = {"environment": env.spec.name, "updates": int(state.update)}
    write_rule(out, agent.rule, state.learner.shared["rule"], about)
    print(f"{out}  use it: podracer train catch --rule {out}")
    return 0
