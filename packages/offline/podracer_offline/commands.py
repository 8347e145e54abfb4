"""The command `podracer record`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from podracer.cli.arguments import parse
from podracer.cli.run_options import output_file
from podracer.cli.runs import EpisodeOptions
from podracer.cli.values import Limits
from podracer.io.addresses import output_folder


@dataclasses.dataclass(frozen=True)
class RecordOptions(EpisodeOptions):
    """Flags of `podracer record`."""

    output: Path | None = None
    """Path of the .npz file. By default data.npz in the run."""
    episodes: Annotated[int, Limits(high=2**20)] = 100
    """Number of episodes, each in its own environment; at least 1."""
    distribution: bool = False
    """Also record the distributions that the policy draws its actions from, the soft targets of a
    student."""


def record(arguments: Sequence[str]) -> int:
    """Write episodes of a run as a data set, to learn from."""
    options = parse(RecordOptions, "record", arguments, description=record.__doc__ or "")
    from podracer.evaluate import ActingRule
    from podracer.io.run_directory import write_bytes
    from podracer.scores.runs import acting_text
    from podracer_offline.environment import acting_name
    from podracer_offline.episodes import record_episodes

    experiment = options.reopen()
    path = output_file(options.output, output_folder(options.run) / "data.npz", (".npz",))
    run, acting, parameters = options.open(experiment)
    environment = acting_name(run.env, experiment.environment)
    dataset = record_episodes(
        run.agent,
        run.env,
        *parameters,
        episodes=options.episodes,
        rule=ActingRule(**acting),
        name=environment if isinstance(environment, str) else "",
        with_distributions=options.distribution,
    )
    write_bytes(path, dataset.encode())
    returns = dataset.returns
    print(
        f"{path}: {len(returns)} episodes, {len(dataset.reward)} transitions, "
        f"{acting_text(**acting)}, mean return {returns.mean():g}"
    )
    return 0
