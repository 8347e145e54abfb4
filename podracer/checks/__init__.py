"""Checks of a user's agent and environment, by abstract evaluation, but for actions under masks.

All raise `ConfigError` with one sentence that names the method, the leaf, and the expected and the
actual value.
"""

from podracer.checks.agent import check_agent as check_agent
from podracer.checks.agent import check_fields as check_fields
from podracer.checks.environment import check_environment as check_environment
from podracer.checks.environment import check_spec as check_spec
