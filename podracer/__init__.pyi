# The names of `podracer`, 50 at most; `__init__.py` reads from here where each of them comes from.
# All others are in the modules that docs/api lists.

__version__: str

from podracer.agent import Agent as Agent
from podracer.agent import Blueprint as Blueprint
from podracer.agent import Context as Context
from podracer.agents import A2C as A2C
from podracer.agents import DQN as DQN
from podracer.agents import PPO as PPO
from podracer.agents import SAC as SAC
from podracer.agents.common.optimizers import Optimizer as Optimizer
from podracer.config.experiment import Experiment as Experiment
from podracer.devices.reductions import global_grad as global_grad
from podracer.devices.reductions import global_mean as global_mean
from podracer.devices.reductions import mean_of as mean_of
from podracer.drivers.anakin import AnakinConfig as AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig as SebulbaConfig
from podracer.environment import Environment as Environment
from podracer.environment import auto_reset as auto_reset
from podracer.environment import restart as restart
from podracer.environment import transition as transition
from podracer.envs.catalog import make as make
from podracer.envs.host.gymnasium import Gymnasium as Gymnasium
from podracer.errors import ConfigError as ConfigError
from podracer.evaluate import make_evaluator as make_evaluator
from podracer.fields import bounded as bounded
from podracer.fields import static as static
from podracer.fields import struct as struct
from podracer.networks import CNN as CNN
from podracer.networks import MLP as MLP
from podracer.networks import Head as Head
from podracer.networks import Network as Network
from podracer.networks import TorsoNetwork as TorsoNetwork
from podracer.policy import Policy as Policy
from podracer.run.callbacks import Control as Control
from podracer.run.environment_check import check_environment as check_environment
from podracer.run.loading import load as load
from podracer.run.loading import load_policy as load_policy
from podracer.run.loop import Callback as Callback
from podracer.run.result import Boundary as Boundary
from podracer.run.result import Result as Result
from podracer.run.setup import check_agent as check_agent
from podracer.run.training import train as train
from podracer.run.warm_start import Weights as Weights
from podracer.schedules import Linear as Linear
from podracer.types import ArraySpec as ArraySpec
from podracer.types import Continuous as Continuous
from podracer.types import Discrete as Discrete
from podracer.types import EnvironmentSpec as EnvironmentSpec
from podracer.types import LearnerState as LearnerState
from podracer.types import MultiDiscrete as MultiDiscrete
from podracer.types import TimeStep as TimeStep
from podracer.types import Trajectory as Trajectory
