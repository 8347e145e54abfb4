"""DiscoRL: students that a discovered rule such as Disco103 trains, and discovery of such rules."""

from podracer.agents.disco.agent import Disco
from podracer.agents.disco.discovery import DiscoDiscovery
from podracer.agents.disco.new_rule import RuleSize

__all__ = ["Disco", "DiscoDiscovery", "RuleSize"]
