"""Callables that make one Gymnasium environment. Workers unpickle them: nothing imports JAX."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Registered:
    """Environment of Gymnasium's registry."""

    entry: str | EnvSpec
    """Id, or where no module registers it in every process, the registry's entry itself."""
    module: str = ""
    """Module to import first, which registers the id."""
    options: tuple[tuple[str, Any], ...] = ()

    def load(self) -> EnvSpec:
        """Import all code and return the registry's entry."""
        from gymnasium.envs import registration

        if self.module:
            importlib.import_module(self.module)
        entry = registration.spec(self.entry) if isinstance(self.entry, str) else self.entry
        if isinstance(entry.entry_point, str):
            registration.load_env_creator(entry.entry_point)
        return entry

    def __call__(self) -> Env:
        import gymnasium

        return gymnasium.make(self.load(), disable_env_checker=True, **dict(self.options))


@dataclasses.dataclass(frozen=True, eq=False)
class Filtered:
    """Environment that shows some entries of its dictionaries of observations."""

    make: Callable[[], Env]
    entries: tuple[str, ...]

    def __call__(self) -> Env:
        from gymnasium.wrappers import FilterObservation

        return FilterObservation(self.make(), self.entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Pictured:
    """Environment whose observations are dictionaries of the `observation` and a `picture`."""

    make: Callable[[], Env]
    """Factory of environments whose `render` returns uint8 `[H, W, 3]`."""
    name: str
    """Name of the environment, for messages."""

    def __call__(self) -> Env:
        from gymnasium import spaces
        from gymnasium.wrappers import TransformObservation

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of modes that it does not have
            env = self.make()
            env.reset()
            picture = np.asarray(env.render())
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise ValueError("`render` does not return an array uint8 [H, W, 3]")
        space = spaces.Box(0, 255, picture.shape, np.uint8)
        return TransformObservation(
            env,
            lambda observation: {"observation": observation, "picture": env.render()},
            spaces.Dict({"observation": env.observation_space, "picture": space}),
        )
