"""Configuration of a tournament."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from podracer.agent import check_policy
from podracer.arguments import named
from podracer.config.experiment import Experiment, check_types
from podracer.config.serialization import KINDS, from_json, kinds_of, of_this_version, to_json
from podracer.drivers.population import Hyperparameter, Pod, with_hyperparameters
from podracer.drivers.selection import Range, Selection
from podracer.environment import evaluation_environment
from podracer.errors import ConfigError
from podracer.evaluate import MAX_EPISODES
from podracer.fields import NO_FLAG, bounded, check_ranges
from podracer.recipes import lender
from podracer.run.callbacks import find_callbacks
from podracer.run.setup import build
from podracer.schedules import over_run
from podracer.tournament.events import MAX_PODS, Header, check_settings
from podracer.tournament.leaderboard import read_events
from podracer.tournament.selection import (
    SELECTION_RULES,
    Generational,
    PopulationBased,
    SelectionRule,
)


@named
@dataclasses.dataclass(frozen=True)
class Tournament:
    """Pods, rounds, selection and engine of a tournament."""

    experiments: Annotated[tuple[Experiment, ...], NO_FLAG]
    """Initial experiments; pod i begins with experiment i modulo their number."""
    selection: SelectionRule = dataclasses.field(default_factory=PopulationBased)
    """Rule by which a pod chooses the start of its next round."""
    pods: int = bounded(4, low=1, high=MAX_PODS)
    """Number of pods, at least 1."""
    rounds: int = bounded(5, low=1)
    """Number of rounds of each pod, at least 1."""
    round_frames: int = bounded(100_000, low=1)
    """Frames that a pod trains for in a round."""
    round_seconds: float | None = bounded(None, exclusive=True)
    """Time limit of a round in seconds of training, if it comes before the frames; None for no
    limit."""
    size: int = bounded(16, low=1)
    """Maximum number of entries on the leaderboard."""
    episodes: int = bounded(100, low=1, high=MAX_EPISODES)
    """Number of held-out evaluation episodes after each round."""
    evaluation_seed: int = bounded(1_000_003, high=2**32 - 1)
    """Random seed of the held-out episodes, the same for all pods."""
    seed: int = bounded(0, high=2**32 // MAX_PODS - 2)
    """Random seed that the seeds of pods and of selection are derived from."""
    engine: Literal["local", "ray", "inline"] = "local"
    """Where pods run: `local`, processes of this machine; `ray`, a Ray cluster whose machines
    share the directory; `inline`, one after another in the tournament's own process."""
    pod_cpus: float = bounded(1.0)
    """CPUs that a pod reserves on a Ray cluster."""
    pod_gpus: float = bounded(0.0)
    """GPUs that a pod reserves on a Ray cluster; it sees no others. Below 1, pods share a GPU."""
    pod_resources: str = ""
    """Other resources that a pod reserves on a Ray cluster, such as TPU=4,memory=8GiB: memory, and
    any that nodes declare."""
    pod_placement: Literal["default", "spread"] = "default"
    """Ray's strategy to place pods: `default` fills machines up to a half before the next one,
    `spread` takes them in turn."""
    node_seconds: float = bounded(0.0)
    """Time in seconds to wait for a machine to join a Ray cluster that can hold a pod; 0 refuses
    what no machine can hold."""
    retries: int = bounded(3, low=1)
    """Number of attempts without progress, one after another, after which a pod is quarantined."""
    stall_seconds: float = bounded(1800.0, exclusive=True)
    """Time in seconds after which a pod that records nothing is killed; the evaluation of a round
    records nothing before its end."""
    straggler_seconds: float = bounded(600.0, exclusive=True)
    """Time in seconds that a generation waits for its slowest pods once one has finished."""

    def check(self) -> None:
        """Raise `ConfigError` for invalid values."""
        if not self.experiments:
            raise ConfigError("a tournament needs a recipe.")
        is_tuple = isinstance(self.experiments, tuple)
        if not is_tuple or not all(isinstance(e, Experiment) for e in self.experiments):
            raise ConfigError(
                "experiments must be a tuple of Experiment objects, such as "
                '(podracer.recipes.find("cartpole_ppo"),).'
            )
        check_types(self)
        check_ranges(self, "")
        for name in ("pod_cpus", "pod_gpus", "node_seconds", "pod_resources", "pod_placement"):
            if self.engine != "ray" and getattr(self, name) != getattr(Tournament, name):
                raise ConfigError(
                    f"`{name}` is for Ray clusters: add `engine=ray`, or leave it out."
                )
        for pod, experiment in enumerate(self.experiments):
            experiment.check()
            self._check_round(experiment)
            self.experiment_of(pod)
        if isinstance(self.selection, Generational):
            self._check_generations(self.selection)
        environments = {str(to_json(experiment.environment)) for experiment in self.experiments}
        if len(environments) > 1:
            raise ConfigError(
                "returns in different environments cannot be compared, so all recipes of a "
                f"tournament need the same one, not {', '.join(sorted(environments))}."
            )

    def _check_round(self, experiment: Experiment) -> None:
        """Raise `ConfigError` if a round cannot train with all that selection may choose."""
        earlier_frames = (self.rounds - 1) * self.round_frames
        experiment_of_round(experiment, self.round_frames, earlier_frames).check()
        experiment = experiment_of_round(experiment, self.round_frames)
        experiment.check()
        if isinstance(self.selection, PopulationBased):
            for bound in self.selection.bounds:
                for value in (bound.low, bound.high):
                    agent = with_hyperparameters(experiment.agent, {bound.name: value})
                    dataclasses.replace(experiment, agent=agent).check()
            varied = {item.name for pod in experiment.pods for item in pod.hyperparameters}
            varied &= {bound.name for bound in self.selection.bounds}
            if varied or isinstance(experiment.exchange, Selection):
                raise ConfigError(
                    f"the sweep {experiment.recipe!r} chooses hyperparameters by itself, which "
                    "PopulationBased would overwrite: take another `selection`, such as Truncation."
                )

    def _check_generations(self, rule: Generational) -> None:
        """Raise `ConfigError` if pods that are fused may differ."""
        agents = {type(experiment.agent) for experiment in self.experiments}
        if len(agents) > 1:
            names = ", ".join(sorted(agent.__name__ for agent in agents))
            raise ConfigError(f"generations fuse learners: recipes need one agent, not {names}.")
        if rule.group_size > 1 and len(self.experiments) > 1:
            raise ConfigError(
                f"the {rule.group_size} pods of a group are fused, so they need one recipe, not "
                f"{len(self.experiments)}."
            )

    @property
    def evaluation(self) -> str:
        """Digest of the evaluation's settings; only scores with equal digests are compared."""
        environments = sorted({str(to_json(e.environment)) for e in self.experiments})
        acting = sorted({(e.evaluation_policy, e.evaluation_epsilon) for e in self.experiments})
        text = json.dumps([environments, acting, self.evaluation_seed])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def experiment_of(self, pod: int) -> Experiment:
        """Return the initial experiment of a pod, with seeds of its own.

        Schedules of its whole run last for all rounds.
        """
        experiment = self.experiments[pod % len(self.experiments)]
        num_steps = experiment_of_round(experiment, self.round_frames).num_steps
        agent = over_run(experiment.agent, self.rounds * num_steps)
        return with_pod_seeds(dataclasses.replace(experiment, agent=agent), self.seed, pod)

    def header(self) -> Header:
        """Return the first line of the log."""
        numbers = (self.seed, self.pods, self.size)
        return Header(to_json(self), *numbers, self.evaluation, self.episodes)


def experiment_of_round(experiment: Experiment, frames: int, parent_frames: int = 0) -> Experiment:
    """Return an experiment whose training ends at least `frames` after its parent's."""
    driver = experiment.driver
    updates = math.ceil(frames / driver.steps_per_update)
    chunk = min(driver.updates_per_chunk, updates)  # the first round's, for all
    return dataclasses.replace(
        experiment,
        driver=dataclasses.replace(driver, updates_per_chunk=chunk),
        frames=parent_frames + frames,
        evaluations=0,
        target_return=None,
    )


def with_pod_seeds(experiment: Experiment, seed: int, pod: int) -> Experiment:
    """Return the experiment with the seeds of a pod in a tournament with this seed."""
    pod_seed = (seed + 1) * 10_000 + pod
    pods = tuple(
        dataclasses.replace(member, seed=(pod_seed + 100_000_000 * index) % 2**32)
        for index, member in enumerate(experiment.pods, 1)
    )
    return dataclasses.replace(experiment, seed=pod_seed, pods=pods)


def with_values(pod: Pod, values: Mapping[str, float]) -> Pod:
    """Return a member of a population with other hyperparameters."""
    merged = {item.name: item.value for item in pod.hyperparameters} | dict(values)
    return Pod(pod.seed, tuple(Hyperparameter(name, value) for name, value in merged.items()))


_KINDS = {**KINDS, **SELECTION_RULES, "Tournament": Tournament, "Range": Range}


def read_tournament(directory: Path, user_experiments: Sequence[Experiment] = ()) -> Tournament:
    """Read the configuration of a tournament.

    `user_experiments` is as in `restore_experiment`. Raises `ConfigError` if there is none.
    """
    header = read_events(directory)[0]
    assert isinstance(header, Header)
    check_settings(header)
    try:
        experiments = [
            restore_experiment(data, user_experiments) for data in header.tournament["experiments"]
        ]
        settings = of_this_version(header.tournament)
        tournament = from_json({**settings, "experiments": experiments}, _KINDS)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{directory} holds a log that is not a tournament's: {error}."
        ) from error
    if not isinstance(tournament, Tournament):
        raise ConfigError(f"{directory} holds a log that is not a tournament's.")
    return tournament


def restore_experiment(
    data: Mapping[str, Any], user_experiments: Sequence[Experiment]
) -> Experiment:
    """Return an experiment from its JSON.

    `user_experiments` have agents, networks or environments of the user's own: the one of the same
    name, or an installed package's, lends what no file can bring back. Raises `ConfigError` where
    that is missing.
    """
    recipe = next((e for e in user_experiments if e.recipe == data["recipe"]), None)
    recipe = lender(recipe, data["recipe"])
    kinds = KINDS if recipe is None else {**KINDS, **kinds_of(recipe)}
    return from_json(of_this_version(data, kinds), kinds, recipe)


def check_pods(tournament: Tournament, user_experiments: Sequence[Experiment]) -> None:
    """Raise `ConfigError` if pods with `user_experiments` cannot run all of a tournament's."""
    names: dict[str, Experiment] = {}
    for experiment in user_experiments:
        if names.setdefault(experiment.recipe, experiment) != experiment and _is_own(experiment):
            raise ConfigError(
                f"several recipes have the name {experiment.recipe!r}: give each its own `recipe`."
            )
    for experiment in tournament.experiments:
        try:
            restore_experiment(to_json(experiment), user_experiments)
        except ConfigError as error:
            raise ConfigError(
                f"pods cannot make {experiment.recipe!r} again: name its recipe as MODULE:FUNCTION,"
                f" which pods can import, or take the engine `inline`. ({error})"
            ) from error
    for experiment in tournament.experiments:
        blueprint, env = build(experiment)  # fails as in each pod
        check_policy(blueprint.build(), "pods compete by their policies' returns")
        evaluation_environment(env)  # fails where there is none to play in
        find_callbacks(experiment.callbacks or (), Path("pods"))  # fails where one is unknown


def _is_own(experiment: Experiment) -> bool:
    """Return whether an experiment has parts that no file can bring back."""
    try:
        from_json(to_json(experiment))
    except ConfigError:
        return True
    return False
