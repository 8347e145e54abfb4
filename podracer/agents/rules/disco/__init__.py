"""DiscoRL: students that a discovered rule such as Disco103 trains."""

from podracer.agents.rules.disco.rule_file import RuleSize
from podracer.agents.rules.disco.student import Disco

__all__ = ["Disco", "RuleSize"]
