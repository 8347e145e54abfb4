"""Networks: pure functions `init` and `apply`, and the built-in torsos, memories and heads."""

from podracer.networks.build import CNN as CNN
from podracer.networks.build import MLP as MLP
from podracer.networks.build import Head as Head
from podracer.networks.build import Network as Network
from podracer.networks.build import NetworkBuilder as NetworkBuilder
from podracer.networks.build import ResNet as ResNet
from podracer.networks.build import Table as Table
from podracer.networks.build import TorsoNetwork as TorsoNetwork
from podracer.networks.build import outputs as outputs
