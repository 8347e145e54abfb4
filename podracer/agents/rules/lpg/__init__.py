"""LPG (learned policy gradient): discovers an update rule, and students that are trained by one."""

from podracer.agents.rules.lpg.discovery import LPG
from podracer.agents.rules.lpg.rule import UpdateRule
from podracer.agents.rules.lpg.student import LPGStudent

__all__ = ["LPG", "LPGStudent", "UpdateRule"]
