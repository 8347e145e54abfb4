"""Check of an environment and its specification against their contract."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from podracer import types
from podracer.checks.errors import describe_error, structure_change, trace, type_text
from podracer.environment import (
    AutoReset,
    HostEnvironments,
    action_struct,
    evaluation_environment,
    is_of_gymnasium,
)
from podracer.errors import WEIGHTED_SUM, ConfigError
from podracer.types import action_mask, leaves_by_path


def check_environment(environment: Any, *, restarts: bool = False) -> types.EnvironmentSpec:
    """Return the specification of a device environment; raise `ConfigError` if it is broken.

    Leaves of the state and of timesteps must have the shapes and dtypes that the specification and
    the contract of `Environment` ask for, both from `reset` and from `step`. Both must be pure: two
    traces give the same program. `restarts` refuses episodes that end with none to follow.
    """
    if isinstance(environment, AutoReset):
        check_environment(environment.inner)  # its messages name the user's own class and methods
    spec = check_spec(environment)
    if isinstance(environment, HostEnvironments):
        raise ConfigError(
            f"{spec.name} runs on the host, and not in JAX: train in it by Sebulba, without "
            "`auto_reset`."
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    (state, first_timestep), _ = _evaluate(spec.name, "reset", environment, key)
    _check_timestep(spec, "reset", first_timestep)
    for path, leaf in leaves_by_path(state).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigError(
                f"{spec.name}: state{path} is a random key; an environment holds none and uses "
                "those passed to `reset` and `step`."
            )
    inputs = (key, state, action_struct(spec))
    (new_state, timestep), program = _evaluate(spec.name, "step", environment, *inputs)
    _check_timestep(spec, "step", timestep)
    _check_same(spec.name, "state", state, new_state)
    if restarts:
        _check_restarts(spec.name, program, (new_state, timestep))
    return spec


def _check_restarts(name: str, program: Any, result: Any) -> None:
    """Raise `ConfigError` for a program of `step` that ends episodes and never begins one."""
    variables = jax.tree.unflatten(jax.tree.structure(result), program.jaxpr.outvars)[1]
    dependent = {*program.jaxpr.invars}
    for equation in program.jaxpr.eqns:
        if any(x in dependent for x in equation.invars if not hasattr(x, "val")):
            dependent.update(equation.outvars)
    ends = [x in dependent for x in (variables.last, variables.discount) if not hasattr(x, "val")]
    if any(ends) and not getattr(variables.first, "val", True):
        raise ConfigError(
            f"{name}: episodes end in `step`, and no new one begins, as `first` is never set: "
            "train in podracer.auto_reset(...)."
        )


def check_spec(environment: Any) -> types.EnvironmentSpec:
    """Return the specification of an environment of any kind; raise `ConfigError` if it is none."""
    if isinstance(environment, AutoReset):
        return check_spec(environment.inner)  # whose specification it has
    spec = _read_spec(environment)
    leaves = jax.tree.leaves(spec.observation)
    kinds = sorted({type(x).__name__ for x in leaves if not isinstance(x, types.ArraySpec)})
    if kinds or not leaves:
        leaf_kinds = f", not of {', '.join(kinds)}" if kinds else ""
        raise ConfigError(
            f"{spec.name}: spec.observation must be a tree of podracer.ArraySpec{leaf_kinds}."
        )
    if not any(math.prod(leaf.shape) for leaf in leaves):
        raise ConfigError(f"{spec.name}: spec.observation has no numbers, by which agents act.")
    for path, leaf in leaves_by_path(spec.observation).items():
        name, dtype = f"{spec.name}: spec.observation{path}", leaf.dtype
        if not jnp.isdtype(dtype, ("bool", "integral", "real floating")):
            raise ConfigError(f"{name} must be of real numbers or bool, and not of {dtype}.")
        if (canonical := np.dtype(jax.dtypes.canonicalize_dtype(dtype))) != dtype:
            raise ConfigError(
                f"{name} is {dtype}, of which devices keep {canonical}: declare and return that."
            )
        if leaf.scaled and dtype != np.uint8:
            raise ConfigError(f"{name} is {dtype}, but only uint8 can be `scaled`.")
    if not isinstance(spec.action, types.Discrete | types.MultiDiscrete | types.Continuous):
        raise ConfigError(
            f"{spec.name}: spec.action must be podracer.Discrete, MultiDiscrete or Continuous, but "
            f"it is a {type(spec.action)}."
        )
    _check_action_mask(spec)
    for name, keys in spec.groups.items():
        if isinstance(keys, str):  # its letters would be keys
            raise ConfigError(f"{spec.name}: spec.groups[{name!r}] is a tuple: write {(keys,)}.")
    spec.keys(tuple(spec.groups))
    has_start = any(np.any(getattr(space, "start", 0)) for space in (spec.action, *leaves))
    # Data of an environment of the host are replayed in JAX, but actions are played on the host.
    if has_start and not isinstance(evaluation_environment(environment), HostEnvironments):
        raise ConfigError(f"{spec.name}: environments in JAX count from 0: leave `start` out.")
    return spec


def _read_spec(environment: Any) -> types.EnvironmentSpec:
    if isinstance(environment, type):
        raise ConfigError(
            f"{environment.__name__} is a class: pass an instance, or "
            f"podracer.Gymnasium({environment.__name__}) for a class of Gymnasium."
        )
    kind = type(environment).__name__
    try:
        spec = environment.spec
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # its code 0 would count as success
        is_property = inspect.getattr_static(environment, "spec", None) is not None
        if is_property or not isinstance(error, AttributeError):
            raise ConfigError(f"{kind}.spec cannot be read: {describe_error(error)}") from error
        name = getattr(environment, "__qualname__", kind)
        raise ConfigError(
            f"{name} is no environment, as it has no `spec`; agents and experiments are checked by "
            "podracer.check_agent."
        ) from None
    if isinstance(spec, types.EnvironmentSpec):
        return spec
    if is_of_gymnasium(type(environment)):
        registered = getattr(spec, "id", None)
        example = kind if registered is None else f'"{registered}"'
        raise ConfigError(f"{kind} is one of Gymnasium: pass podracer.Gymnasium({example}).")
    advice = ": put @property above it" if inspect.ismethod(spec) else ""
    actual = f"a {type(spec).__name__}{advice}"
    raise ConfigError(f"{kind}.spec must be an EnvironmentSpec, but it is {actual}.")


def _check_action_mask(spec: types.EnvironmentSpec) -> None:
    mask = action_mask(spec.observation)
    if mask is None:
        return
    if isinstance(spec.action, types.Continuous):
        raise ConfigError(f"{spec.name}: only discrete actions have an {types.ACTION_MASK}.")
    number = sum(spec.action.components)
    if mask != types.ArraySpec((number,), np.bool_):
        text = type_text(mask) if isinstance(mask, types.ArraySpec) else repr(mask)
        raise ConfigError(
            f"{spec.name}: spec.observation[{types.ACTION_MASK!r}] must be bool[{number}], an "
            f"entry for each action, but it is {text}."
        )


def _evaluate(name: str, method: str, environment: Any, *args: Any) -> tuple[Any, Any]:
    """Return what a method returns, in shapes, and its program."""
    arrays, structure = jax.tree.flatten(eqx.filter(environment, eqx.is_array))
    place = f"{name}: `{method}`"

    def call(arrays: Any, *args: Any) -> Any:  # arguments, not to be printed
        owner = eqx.combine(structure.unflatten(arrays), environment) if arrays else environment
        return getattr(owner, method)(*args)

    with jax.checking_leaks():  # such as of an environment that keeps its state on itself
        program, result = trace(place, call, arrays, *args, owner=environment)
        is_pure = isinstance(environment, AutoReset)  # if the environment in it is
        # Traced alike, as JAX's caches would change how the same program is printed.
        is_pure = is_pure or _text(program) == _text(trace(place, call, arrays, *args)[0])
    if not is_pure:
        raise ConfigError(
            f"{place} changes from call to call, and what it did in the first one would "
            "be compiled: what changes, such as an attribute that counts, belongs in the state, "
            "and random numbers are drawn with the key."
        )
    parts = result if isinstance(result, tuple) else ()
    if len(parts) != 2 or not isinstance(parts[1], types.TimeStep):
        raise ConfigError(f"{place} must return the pair (state, TimeStep).")
    return result, program


def _text(program: Any) -> str:
    """Return a traced program with its constants, without the addresses of Python objects."""
    constants = [
        x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x).tobytes()
        for x in program.consts
    ]
    return re.sub(r"0x[0-9a-f]+", "", f"{program} {constants}")


def _check_timestep(spec: types.EnvironmentSpec, method: str, timestep: types.TimeStep) -> None:
    leaf = jax.ShapeDtypeStruct
    expected = {
        "observation": jax.tree.map(lambda x: leaf(x.shape, x.dtype), spec.observation),
        "reward": leaf((), jnp.float32),
        "discount": leaf((), jnp.float32),
        "first": leaf((), jnp.bool_),
        "last": leaf((), jnp.bool_),
    }
    for field, leaves in expected.items():
        _check_same(spec.name, f"{method}().timestep.{field}", leaves, getattr(timestep, field))


def _check_same(name: str, part: str, expected: types.PyTree, tree: types.PyTree) -> None:
    expected_leaves, leaves = leaves_by_path(expected), leaves_by_path(tree)
    for path, leaf in expected_leaves.items():
        if path not in leaves:
            raise ConfigError(f"{name}: {part}{path} is missing; expected {type_text(leaf)}.")
    for path, leaf in leaves.items():
        if path not in expected_leaves:
            raise ConfigError(f"{name}: {part}{path} was not expected; got {type_text(leaf)}.")
        spec = expected_leaves[path]
        wanted, actual = type_text(spec), type_text(leaf)
        if part.endswith(".reward") and spec.shape == () and len(leaf.shape) == 1:
            raise ConfigError(
                f"{name}: {part} must be {wanted}, but it is {actual}: "
                f"{WEIGHTED_SUM}, and of several agents make rows, "
                f"`podracer_environments.agents.agents_as_rows(env, {leaf.shape[0]})`."
            )
        if wanted != actual:
            raise ConfigError(f"{name}: {part}{path} must be {wanted}, but it is {actual}.")
        if getattr(leaf, "weak_type", False) != getattr(spec, "weak_type", False):
            raise ConfigError(
                f"{name}: {part}{path} is weakly typed, a Python number somewhere: "
                f"write jnp.asarray(x, jnp.{spec.dtype}) to make it {wanted}."
            )
    if jax.tree.structure(expected) != jax.tree.structure(tree):
        change = structure_change(expected, tree, part)
        raise ConfigError(f"{name}: {part} must keep its structure: {change}.")
