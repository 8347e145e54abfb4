"""Scalable reinforcement learning on accelerators: the Podracer architectures on JAX.

    import podracer
    result = podracer.train("catch", seed=1)

Names are imported when they are first used, so that `import podracer` and a mistyped command cost
nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podracer.agent import Agent as Agent
    from podracer.checks import check_agent as check_agent
    from podracer.checks import check_environment as check_environment
    from podracer.drivers.anakin import AnakinConfig as AnakinConfig
    from podracer.environment import Environment as Environment
    from podracer.environment import auto_reset as auto_reset
    from podracer.environment import restart as restart
    from podracer.environment import transition as transition
    from podracer.envs.host.gymnasium import Gymnasium as Gymnasium
    from podracer.experiments.experiment import Experiment as Experiment
    from podracer.experiments.training import Result as Result
    from podracer.experiments.training import load as load
    from podracer.experiments.training import train as train
    from podracer.types import ArraySpec as ArraySpec
    from podracer.types import ConfigError as ConfigError
    from podracer.types import Continuous as Continuous
    from podracer.types import Discrete as Discrete
    from podracer.types import EnvironmentSpec as EnvironmentSpec
    from podracer.types import LearnerState as LearnerState
    from podracer.types import TimeStep as TimeStep
    from podracer.types import Trajectory as Trajectory
    from podracer.types import static as static
    from podracer.types import struct as struct

_HOMES = {
    "agent": ("Agent",),
    "checks": ("check_agent", "check_environment"),
    "drivers.anakin": ("AnakinConfig",),
    "environment": (
        "Environment",
        "auto_reset",
        "restart",
        "transition",
    ),
    "envs.host.gymnasium": ("Gymnasium",),
    "experiments.experiment": ("Experiment",),
    "experiments.training": ("Result", "load", "train"),
    "types": (
        "ArraySpec",
        "ConfigError",
        "Continuous",
        "Discrete",
        "EnvironmentSpec",
        "LearnerState",
        "TimeStep",
        "Trajectory",
        "static",
        "struct",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'podracer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"podracer.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
