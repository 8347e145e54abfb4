"""Data sets, and agents that learn from them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podracer_offline.avril import AVRIL as AVRIL
    from podracer_offline.cloning import Cloning as Cloning
    from podracer_offline.comparison import agreement as agreement
    from podracer_offline.dataset import Dataset as Dataset
    from podracer_offline.environment import replay as replay
    from podracer_offline.episodes import record_episodes as record_episodes
    from podracer_offline.iql import IQL as IQL
    from podracer_offline.records import FromData as FromData
    from podracer_offline.td3 import TD3BC as TD3BC
    from podracer_offline.td3 import td3_bc as td3_bc
    from podracer_offline.teacher import DAgger as DAgger
    from podracer_offline.teacher import teach as teach

_MODULES = {
    "agreement": "comparison",
    "AVRIL": "avril",
    "Cloning": "cloning",
    "Dataset": "dataset",
    "replay": "environment",
    "record_episodes": "episodes",
    "IQL": "iql",
    "FromData": "records",
    "TD3BC": "td3",
    "td3_bc": "td3",
    "DAgger": "teacher",
    "teach": "teacher",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a mistyped command does not wait for JAX."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
