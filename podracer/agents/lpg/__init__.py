"""LPG (learned policy gradient): discovers an update rule, and students that are trained by one."""

from podracer.agents.lpg.discovery import LPG
from podracer.agents.lpg.rule import UpdateRule
from podracer.agents.lpg.student import LPGStudent

__all__ = ["LPG", "LPGStudent", "UpdateRule"]
