"""Trained policies as opponents in games of two players: in matches, and frozen, to train against.

`pgx:GAME,opponent=RUN` names a run, `RUN:POD` a pod of a sweep, `RUN/checkpoints/UPDATES` a
checkpoint; several stand between plus signs. The parameters are constants of the compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import envs
from podracer.agent import Blueprint, policy_params
from podracer.config.serialization import recipe_name
from podracer.environment import AutoReset, AutoResetState, auto_reset
from podracer.envs.model import WithModel
from podracer.envs.opponents import find_opponent
from podracer.envs.pgx import SelfPlay, load_game, observe
from podracer.errors import CheckpointError, ConfigError
from podracer.io.paths import user_path
from podracer.io.reading import read_limited
from podracer.io.seal import CONFIG, MANIFEST
from podracer.io.steps import CHECKPOINTS, read_chosen
from podracer.io.text import print_stderr
from podracer.run.restore import reopen, restore_run
from podracer.types import Params, PyTree, TimeStep

Move = Callable[[PyTree, jax.Array, Any, PyTree], jax.Array]
"""A function of parameters, a key, a game of pgx and its state that returns a legal action."""


def trained_move(name: str, blueprint: Blueprint, env: Any, *, sampled: bool) -> Move:
    """Return the moves of an agent, called `name`, that learned in `env`.

    The first raises `ConfigError` for an agent with memory: a player sees a position only. An agent
    that plans in the game does so for both players, whomever it trained against.
    """
    game_name, shows_state = find_game_name(env), isinstance(env, WithModel)
    if shows_state:
        spec = WithModel(auto_reset(SelfPlay(game_name))).spec
        blueprint = dataclasses.replace(blueprint, spec=spec)
    agent = blueprint.build()

    def move(params: PyTree, key: jax.Array, game: Any, position: PyTree) -> jax.Array:
        observation = observe(game_name, position)
        if shows_state:
            observation = {
                "observation": observation,
                "state": AutoResetState(position, jnp.bool_(False)),
            }
        rows = jax.tree.map(lambda x: x[None], observation)
        no = jnp.zeros(1, bool)
        timestep = TimeStep(rows, jnp.zeros(1), jnp.ones(1), no, no)
        memory = agent.carry(1)
        action, _, new_memory = agent.act(params, memory, timestep, key[None], sampled)
        leaves = map(jax.tree.leaves, (memory, new_memory))
        if any(x is not y for x, y in zip(*leaves, strict=True)):
            raise ConfigError(
                f"{name} remembers the game: take an agent whose network has no memory."
            )
        return action[0]

    return move


def find_game_name(env: Any) -> str:
    """Return the name of an environment's game. Raises `ConfigError` if it has not two players."""
    inner = env.environment if isinstance(env, WithModel) else env
    name = getattr(inner.inner, "name", "") if isinstance(inner, AutoReset) else ""
    if not env.spec.name.startswith("pgx:") or load_game(name)[0].num_players != 2:
        raise ConfigError(f"matches need a game of two players of pgx, and not {env.spec.name}.")
    return name


# --- to train against -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedOpponent:
    """The policy at a checkpoint as an opponent, which draws its moves.

    It is read once. The first move raises `ConfigError` for an agent with memory.
    """

    directory: str
    pod: int | None
    updates: int
    digest: str  # SHA-256 of the checkpoint's manifest
    recipe: Any = dataclasses.field(metadata={"derived": True}, compare=False)
    """Experiment that lends its classes, see `make_environment`."""

    def __call__(self, key: jax.Array, game: Any, state: PyTree) -> jax.Array:
        policy = _read(self)
        return policy.move(policy.params, key, game, state)


class _Policy(NamedTuple):
    game: str
    move: Move
    params: Params


@functools.cache
def _read(opponent: TrainedOpponent) -> _Policy:
    directory, recipe = Path(opponent.directory), opponent.recipe
    if recipe is not None and recipe.recipe != recipe_name(directory):
        recipe = None
    experiment = reopen(directory, recipe)
    stand_in = without_runs(experiment.environment)
    run = restore_run(
        directory,
        dataclasses.replace(experiment, environment=stand_in),
        lambda name, _: envs.make(name),  # no run among its opponents
        pod=opponent.pod,
        checkpoint=opponent.updates,
    )
    # On the host: constants of a program on any devices.
    params = jax.tree.map(np.asarray, policy_params(run.agent, run.state.learner))
    move = trained_move(opponent.directory, run.blueprint, run.env, sampled=True)
    return _Policy(find_game_name(run.env), move, params)


def make_environment(name: str, recipe: Any = None) -> Any:
    """Make an environment by name, as `envs.make` does, with opponents that are runs.

    `recipe` is an experiment that lends its own classes to runs of the same recipe. Raises
    `ConfigError` for a run of another game, `CheckpointError` if it has no whole checkpoint.
    """
    game = name.partition(",")[0].rpartition("pgx:")[2]
    trained: dict[str, Any] = {}
    for option, names in _opponents(name).items():
        if any(find_run(part)[0] for part in names):
            opponents = tuple(
                _find(part, game, recipe) if find_run(part)[0] else part for part in names
            )
            trained[option] = opponents if option == "opponent" else opponents[0]
    return envs.make(name, **trained)


def with_opponents(name: str, opponents: Sequence[str], evaluate_against: str) -> str:
    """Return the name of an environment against other opponents, of which each game draws one."""
    replaced = (*_OPTIONS, "opening_moves")  # these are for self-play only
    base = [part for part in name.split(",") if part.partition("=")[0] not in replaced]
    options = (f"opponent={'+'.join(opponents)}", f"evaluate_against={evaluate_against}")
    return ",".join((*base, *options))


def without_runs(
    environment: Any, *, keep_planned: bool = False, keep_evaluation: bool = False
) -> Any:
    """Return the name of an environment with random opponents in the place of runs.

    Its states have the same structure. With `keep_planned` the opponents of training stay where the
    agent plans in the game (`model:`). With `keep_evaluation` the opponents of evaluation stay,
    which without `evaluate_against` are the same. An environment that is no name is returned as it
    is.
    """
    if not isinstance(environment, str):
        return environment
    parts, opponents = environment.split(","), _opponents(environment)
    of_evaluation = "evaluate_against" if "evaluate_against" in opponents else "opponent"
    for option, names in opponents.items():
        if keep_planned and option == "opponent" and environment.startswith("model:"):
            continue
        if keep_evaluation and option == of_evaluation:
            continue
        opponent_names = (part if part == "self" or _is_named(part) else "random" for part in names)
        parts[parts.index(f"{option}={'+'.join(names)}")] = f"{option}={'+'.join(opponent_names)}"
    return ",".join(parts)


def find_run(name: str) -> tuple[Path | None, int | None]:
    """Return the directory and the pod that a name, `RUN` or `RUN:POD`, means, None for neither."""
    name = str(user_path(name))
    directory, _, pod = name.rpartition(":")
    if not _is_named(name) and Path(name).is_dir():
        return Path(name), None
    if pod.isdecimal() and directory and Path(directory).is_dir():
        return Path(directory), int(pod)
    return None, None


_OPTIONS = ("opponent", "evaluate_against")


def _opponents(name: str) -> dict[str, list[str]]:
    """Return the names of the opponents in the name of an environment, by option."""
    environment, *settings = name.split(",")
    pairs = [setting.partition("=") for setting in settings]
    if "pgx:" not in environment:
        return {}
    return {
        option: value.split("+") if option == "opponent" else [value]
        for option, _, value in pairs
        if option in _OPTIONS
    }


def _is_named(name: str) -> bool:
    try:
        find_opponent(name)
    except ConfigError:
        return False
    return True


def _find(name: str, game: str, recipe: Any) -> TrainedOpponent:
    path, pod = find_run(name)
    assert path is not None
    run, choice = path, "newest"
    if path.parent.name == CHECKPOINTS and path.name.isdecimal():
        run, choice = path.parents[1], int(path.name)
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is no opponent: it holds no run, there is no {CONFIG} in it.")
    updates, manifest = read_chosen(
        run, choice, print_stderr, lambda path: (int(path.name), digest(path))
    )
    opponent = TrainedOpponent(str(run), pod, updates, manifest, recipe)
    if (own_game := _read(opponent).game) != game:
        raise ConfigError(f"{run} learned {own_game}, so it is no opponent in {game}.")
    return opponent


def digest(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which contains each file's."""
    try:
        return hashlib.sha256(read_limited(path / MANIFEST)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} is not a sealed checkpoint: {error}") from error
