"""Any environment of jumanji (Bonnet et al. 2024) with one discrete or bounded action."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.arrays import as_dictionary, box, described, load, strong
from podracer.io.names import nearest
from podracer.types import ConfigError, Discrete, EnvironmentSpec, PyTree, TimeStep


def jumanji(name: str, **options: Any) -> AutoReset:
    """The jumanji environment `name`, such as `Snake-v1`, restarting by itself.

    `options` are those of its constructor. Raises `ConfigError` where jumanji is not installed,
    for an unknown name or option, and for actions of another kind.
    """
    return auto_reset(Jumanji(name, tuple(sorted(options.items()))))


@dataclasses.dataclass(frozen=True)
class Jumanji:
    """One environment, whose ends are marked only. Observations are dictionaries, with
    `action_mask` where jumanji has one."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _load(self.name, self.options)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name, self.options)[1]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = _load(self.name, self.options)
        state, timestep = strong(env.reset(key))
        return _without_key(state), restart(as_dictionary(timestep.observation))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, spec = _load(self.name, self.options)
        if not isinstance(spec.action, Discrete):
            action = action.reshape(env.action_spec.shape)
        state, timestep = strong(env.step(_with_key(state, key), action))
        over = timestep.last()
        terminal = over & (timestep.discount == 0)
        made = transition(
            as_dictionary(timestep.observation), timestep.reward, terminal=terminal, timeout=over
        )
        return _without_key(state), made


def _without_key(state: Any) -> Any:
    """Keys are given to each step, so a state keeps none."""
    return dataclasses.replace(state, key=()) if hasattr(state, "key") else state


def _with_key(state: Any, key: jax.Array) -> Any:
    return dataclasses.replace(state, key=key) if hasattr(state, "key") else state


@functools.cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[Any, EnvironmentSpec]:
    library = load("jumanji", f"jumanji:{name}", "jumanji")
    known = load("jumanji.registration", f"jumanji:{name}", "jumanji").registered_environments()
    if name not in known:
        raise ConfigError(f"jumanji has no environment {name!r}: {nearest(name, known)}")
    with jax.ensure_compile_time_eval():
        try:
            env = library.make(name, **dict(options))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"jumanji cannot make {name!r}: {error}.") from error
        space = env.action_spec
        _, timestep = jax.eval_shape(env.reset, jax.random.key(0))
    if hasattr(space, "num_values") and jnp.ndim(space.num_values) == 0:
        action = Discrete(int(space.num_values))
    elif hasattr(space, "minimum") and jnp.issubdtype(space.dtype, jnp.floating):
        action = box(f"jumanji:{name}", space.minimum, space.maximum, space.shape)
    else:
        raise ConfigError(f"jumanji:{name} has several discrete actions at once.")
    observation = described(as_dictionary(timestep.observation))
    return env, EnvironmentSpec(f"jumanji:{name}", observation, action)
