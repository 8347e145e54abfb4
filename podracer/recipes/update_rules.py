"""`--update-rule`: any experiment with discrete actions, trained by the update rule of a file."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.agents import Disco
from podracer.agents.rules.disco.rule_file import is_disco_rule
from podracer.agents.rules.lpg.rule_file import decode_rule
from podracer.agents.rules.lpg.student import lpg_student
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.io.npz import digest_of
from podracer.io.paths import user_path
from podracer.io.reading import read_limited
from podracer.networks import Table


def with_update_rule(experiment: Experiment, file: str) -> Experiment:
    """Return the experiment with its agent's network trained by the update rule of a file.

    The file says which agent takes the place of the experiment's: one that `podracer rule` wrote
    makes an `LPGStudent`, a published one of DiscoRL a `Disco`, whose replay grows where it would
    not hold four rollouts. An experiment whose agent is a `Disco` keeps all of its settings.
    """
    path = user_path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no rule at {path}: write one with `podracer rule RUN`.")
    content = read_limited(path)
    if is_disco_rule(content):
        agent = _disco(experiment, str(path), content)
    else:
        agent = _lpg_student(experiment.agent, str(path), content)
    driver = experiment.driver
    if isinstance(driver, AnakinConfig):
        driver = dataclasses.replace(driver, fused=False)
    return dataclasses.replace(
        experiment, recipe=f"{experiment.recipe}_under_rule", agent=agent, driver=driver
    )


def _disco(experiment: Experiment, path: str, content: bytes) -> Disco:
    old: Any = experiment.agent
    if not isinstance(old, Disco):
        # `Buffer.add` needs a ring of three rollouts for each environment, of four where
        # observations are stacks of frames.
        replay = Disco().replay
        capacity = max(replay.capacity, 4 * experiment.driver.steps_per_update)
        replay = dataclasses.replace(replay, capacity=capacity)
        old = Disco(learning_rate=old.learning_rate, network=old.network, replay=replay)
    agent = dataclasses.replace(old, rule_file=path, rule_digest=digest_of(content))
    agent.read(content)  # raises where the file is damaged
    return agent


def _lpg_student(old: Any, path: str, content: bytes) -> Any:
    if isinstance(old, Disco):
        raise ConfigError(f"{path} is not a rule of DiscoRL, which the agent Disco needs.")
    rule, _ = decode_rule(content, path)
    rate = {} if isinstance(old.network, Table) else {"learning_rate": old.learning_rate}
    return lpg_student(
        rule,
        old.network,
        rule_file=path,
        rule_digest=digest_of(content),
        discount=old.discount,
        **rate,
    )
