"""DiscoRL: students that are trained by a rule which its authors discovered, such as Disco103."""

from podracer.agents.disco.agent import Disco

__all__ = ["Disco"]
