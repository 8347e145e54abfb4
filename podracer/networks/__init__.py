"""Networks: pairs of pure functions, and the built-in torsos, recurrent layers and heads."""

from podracer.networks.convolutions import CNN as CNN
from podracer.networks.convolutions import ResNet as ResNet
from podracer.networks.network import LAST_STEP as LAST_STEP
from podracer.networks.network import Head as Head
from podracer.networks.network import Network as Network
from podracer.networks.network import NetworkBuilder as NetworkBuilder
from podracer.networks.network import outputs as outputs
from podracer.networks.table import Table as Table
from podracer.networks.torsos import MLP as MLP
from podracer.networks.torsos import TorsoNetwork as TorsoNetwork
