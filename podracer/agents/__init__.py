"""Built-in agents, one file each; each is exported here."""

from podracer.agents.a2c import A2C as A2C
from podracer.agents.avril import AVRIL as AVRIL
from podracer.agents.cloning import Cloning as Cloning
from podracer.agents.ddpg import DDPG as DDPG
from podracer.agents.dqn import DQN as DQN
from podracer.agents.frodo import Frodo as Frodo
from podracer.agents.impala import Impala as Impala
from podracer.agents.iql import IQL as IQL
from podracer.agents.muzero import MuZero as MuZero
from podracer.agents.ppo import PPO as PPO
from podracer.agents.pqn import PQN as PQN
from podracer.agents.q_lambda import QLambda as QLambda
from podracer.agents.qt_opt import QTOpt as QTOpt
from podracer.agents.r2d2 import R2D2 as R2D2
from podracer.agents.rules.disco.discovery import DiscoDiscovery as DiscoDiscovery
from podracer.agents.rules.disco.student import Disco as Disco
from podracer.agents.rules.lpg.discovery import LPG as LPG
from podracer.agents.rules.lpg.student import LPGStudent as LPGStudent
from podracer.agents.sac import SAC as SAC
from podracer.agents.stacx import Stacx as Stacx
from podracer.io.entry_points import installed

AGENTS: dict[str, type] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type)
}


def with_packages() -> dict[str, type]:
    """Return all agents by name, also those of installed packages, which are imported."""
    return AGENTS | {name: entry.load() for name, entry in installed("agents").items()}
