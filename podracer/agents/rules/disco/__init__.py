"""DiscoRL: students that a discovered rule such as Disco103 trains."""

from podracer.agents.rules.disco.student import Disco as Disco
