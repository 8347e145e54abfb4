"""The blueprint of a run's agent, and its environment, from its configuration."""

from __future__ import annotations

from typing import Any

import jax

from podracer import envs
from podracer.agent import Blueprint, Context, ReadsFile
from podracer.checks import check_fields, check_spec
from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.drivers.driver import arguments_of
from podracer.environment import Environment, HostEnvironments, features
from podracer.errors import CheckpointError, ConfigError
from podracer.io.paths import user_path
from podracer.io.reading import LARGE_FILE, read_limited
from podracer.io.text import remember_secrets
from podracer.schedules import over_run

# The values that programs need, of the settings under which they fail.
_JAX_SETTINGS = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_disable_jit": False,  # docs/troubleshooting.md shows how to run a single update without it
}


def build(experiment: Experiment) -> tuple[Blueprint, Environment | HostEnvironments]:
    """Return the blueprint of the agent for its environment, and the environment."""
    _check_jax_settings()
    check_fields(experiment.agent)
    env: Any = experiment.environment
    remember_secrets(to_json(experiment))
    if isinstance(env, str):
        env = envs.make(env)
    settings = over_run(experiment.agent, experiment.num_steps)
    context = _context(settings, experiment.driver.rollout_length)
    blueprint = Blueprint(settings, check_spec(env), context, arguments_of(env))
    if (check_agent := features(env).check_agent) is not None:
        check_agent(blueprint.build(), experiment)
    return blueprint, env


def _check_jax_settings() -> None:
    """Raise `ConfigError` if a setting of JAX excludes podracer's programs."""
    for name, needed in _JAX_SETTINGS.items():
        value = getattr(jax.config, name)
        if value != needed:
            raise ConfigError(
                f"podracer's programs need JAX's setting {name} to be {needed}, but it is {value}: "
                f"unset {name.upper()}, or call jax.config.update({name!r}, {needed!r})."
            )


def _context(settings: Any, rollout_length: int) -> Context:
    if not isinstance(settings, ReadsFile) or (name := settings.data_file) is None:
        return Context(rollout_length)
    try:
        content = read_limited(user_path(name), LARGE_FILE)
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"{type(settings).__name__} needs the file {name!r}, which cannot be "
            f"read: {getattr(error, 'strerror', None) or error}."
        ) from error
    return Context(rollout_length, settings.read(content))
