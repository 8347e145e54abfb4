"""Check of an experiment's agent against its contract."""

from __future__ import annotations

from podracer import checks, recipes
from podracer.agent import Blueprint
from podracer.arguments import typed
from podracer.config.experiment import Experiment, check_types
from podracer.run.setup import build


@typed
def check_agent(
    experiment: Experiment | Blueprint | str,
    *,
    num_envs: int | None = None,
    num_devices: int = 2,
) -> None:
    """Raise `ConfigError` that names the function if an agent breaks the contract of `Agent`.

    An experiment, or a recipe by its name, brings the environment, the data, the length of rollouts
    and the number of environments; a blueprint has 256 of them. The agent is traced with `num_envs`
    environments on each of `num_devices` devices. Their states must not drift apart. On a CPU their
    reductions must have an order. Nothing is computed.
    """
    if isinstance(experiment, str):
        experiment = recipes.find(experiment)
    if isinstance(experiment, Experiment):
        check_types(experiment)
        experiment.check()
        blueprint, default = build(experiment)[0], experiment.driver.num_envs
    else:
        blueprint, default = experiment, 256
    checks.check_agent(blueprint, num_envs=num_envs or default, num_devices=num_devices)
