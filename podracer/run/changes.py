"""Changes of a run while it trains: other numbers of its agent and of its environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Blueprint
from podracer.config.experiment import Experiment, check_types, replace_fields
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.driver import arguments_of
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.io.differences import leaves
from podracer.schedules import over_run
from podracer.types import blank_timestep


def merged(old: Mapping[str, Any], new: Any) -> dict[str, Any]:
    """Return nested values of fields with others in their place. Raises `ConfigError`."""
    if not isinstance(new, Mapping) or not new.keys() <= {"agent", "environment"}:
        raise ConfigError(
            'a change must be fields, as {"agent": {"learning_rate": 1e-4}} or '
            f'{{"environment": {{...}}}}, not {new!r}.'
        )
    return _merged(old, new)


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(new, Mapping):
        return _without_array(new)
    old = old if isinstance(old, Mapping) else {}
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def _without_array(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_without_array, value))
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    return np.asarray(value).tolist() if is_array else value


def in_json(value: Any) -> Any:
    """Return values without objects: of a dataclass, such as a schedule, the numbers of its fields.

    Its other fields are as they were, or the change would have been refused.
    """
    if dataclasses.is_dataclass(value):
        fields = (x.name for x in dataclasses.fields(value) if not x.metadata.get("static"))
        value = {name: getattr(value, name) for name in fields}
    if isinstance(value, Mapping):
        return {name: in_json(part) for name, part in value.items()}
    return _without_array(value)


def changed_blueprint(
    experiment: Experiment,
    blueprint: Blueprint,
    env: Environment | HostEnvironments,
    changes: Mapping[str, Any],
) -> Blueprint:
    """Return a run's blueprint with other values of fields, for the programs that are compiled.

    Raises `ConfigError` for a field that is unknown, out of range, or compiled into a program.
    """
    new = blueprint
    if part := changes.get("environment"):
        new = dataclasses.replace(new, environment=_arguments(experiment, env, part))
    if part := changes.get("agent"):
        changed = experiment.with_fields({"agent": part})
        check_types(changed)
        changed.check()
        settings = over_run(changed.agent, changed.num_steps)
        if jax.tree.structure(settings) != jax.tree.structure(blueprint.settings):
            raise _fixed(experiment.agent, "agent", part)
        new = dataclasses.replace(new, settings=jax.tree.map(_like, blueprint.settings, settings))
        if not isinstance(experiment.driver, AnakinConfig):
            _check_actors(blueprint, new)
    return new


def _arguments(experiment: Experiment, env: Any, part: Mapping[str, Any]) -> Any:
    """Return the environment with its arguments alone, and other numbers in some fields."""
    if not isinstance(experiment.driver, AnakinConfig):
        raise ConfigError(
            "an environment's numbers change under Anakin alone: take "
            "`driver=podracer.AnakinConfig()`, or let the environment on the host change itself."
        )
    new = replace_fields(env, _with_arrays(env, part))
    are_numbers = jax.tree.map(eqx.is_inexact_array_like, env)
    fixed = partial(eqx.filter, filter_spec=are_numbers, inverse=True)
    has_parts = jax.tree.structure(new) == jax.tree.structure(env)
    if not (has_parts and eqx.tree_equal(fixed(env), fixed(new))):
        raise _fixed(env, "environment", part)
    numbers = jax.tree.map(_like, *(eqx.filter(x, are_numbers) for x in (env, new)))
    return eqx.combine(numbers, arguments_of(new))


def _with_arrays(old: Any, value: Any) -> Any:
    """Return nested values with arrays for the lists that a checkpoint has of arrays."""
    if isinstance(value, Mapping):
        return {name: _with_arrays(getattr(old, name, None), x) for name, x in value.items()}
    is_array = isinstance(value, list) and not isinstance(old, tuple)
    return np.asarray(value, np.float32) if is_array else value


def _fixed(owner: Any, name: str, part: Mapping[str, Any]) -> ConfigError:
    numbers = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree_util.tree_leaves_with_path(owner)
        if eqx.is_inexact_array_like(leaf)
    ]
    remedy = "declare the class by `podracer.struct`, and its other fields by `podracer.static()`"
    if numbers:
        remedy = f"what can change is {', '.join(numbers)}"
    return ConfigError(
        f"a change names {', '.join(path for path, _ in leaves({name: part}))}, but that is "
        f"compiled into the program of {type(owner).__name__}: {remedy}."
    )


def _like(old: Any, new: Any) -> np.ndarray:
    """Return a number as an array of the shape and the dtype of the old one."""
    try:
        value = np.asarray(new, jnp.result_type(old))
    except (TypeError, ValueError):
        raise ConfigError(f"a number must change to a number, not to {new!r}.") from None
    if value.shape != np.shape(old) or not np.isfinite(value).all():
        raise ConfigError(
            f"a number must change to a finite one of the same shape {np.shape(old)}, not "
            f"to {new!r}."
        )
    return value


def _check_actors(old: Blueprint, new: Blueprint) -> None:
    """Raise `ConfigError` if a number changes that actors act by, whose programs have it."""

    def act(blueprint: Blueprint, *inputs: Any) -> Any:
        params, carry, timestep, keys = inputs
        return blueprint.build().act(params, carry, timestep, keys, True)

    agent, key = old.build(), jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda key: agent.actor_params(agent.init(key, 1)), key)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    inputs = params, jax.eval_shape(lambda: agent.carry(1)), blank_timestep(old.spec, 1), keys
    program = jax.make_jaxpr(act)(old, *inputs).jaxpr
    used = {id(x) for x in (*program.outvars, *(x for e in program.eqns for x in e.invars))}
    paths = jax.tree_util.tree_leaves_with_path(old.settings)
    values = zip(paths, jax.tree.leaves(new.settings), program.invars, strict=False)
    for (path, old_value), new_value, variable in values:
        if old_value != new_value and id(variable) in used:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".start")
            raise ConfigError(
                f"a change names agent.{name}, but actors act by it, and their programs are "
                "compiled with it: it can change under Anakin."
            )
