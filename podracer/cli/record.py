"""The command `podracer record`: episodes of a run as a data set."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from podracer.cli.arguments import Limits
from podracer.cli.run_options import OutputFile, output_file
from podracer.cli.runs import EpisodeOptions
from podracer.io.copies import output_folder


@dataclasses.dataclass(frozen=True)
class RecordOptions(EpisodeOptions):
    """Record episodes of a run as a data set."""

    output: OutputFile = None
    """Path of the .npz file. By default data.npz in the run."""
    episodes: Annotated[int, Limits(high=2**20)] = 100
    """Number of episodes, each in its own environment; at least 1."""
    distribution: bool = False
    """Also record the distributions that the policy draws its actions from, the soft targets of a
    student."""


def record(options: RecordOptions) -> int:
    """Run `podracer record`: write the transitions of a checkpoint's episodes to a file."""
    from podracer.agent import policy_params
    from podracer.devices.startup import use_compilation_cache
    from podracer.envs.data import acting_name
    from podracer.evaluate import ActingRule
    from podracer.io.run_directory import write_bytes
    from podracer.run.episodes import record_episodes
    from podracer.scores.runs import acting_text

    use_compilation_cache()
    experiment = options.reopen()
    path = output_file(options.output, output_folder(options.run) / "data.npz", (".npz",))
    run = options.load(experiment)
    acting = options.acting(experiment)
    environment = acting_name(run.env, experiment.environment)
    dataset = record_episodes(
        run.agent,
        run.env,
        policy_params(run.agent, run.state.learner),
        *options.key_and_update(experiment, run.state),
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
