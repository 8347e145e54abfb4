"""Errors that a user can cause or meet, each with a stable exit code."""

WEIGHTED_SUM = "a reward is one number, of several objectives a sum, `dot(weights, rewards)`"
"""Remedy in the messages on rewards that are vectors."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra; until a release anybody may own our name."""
    return f'pip install -e ".[{extra}]" in the clone of podracer'


class PodracerError(Exception):
    """Failure with a stable exit code; the message is one clear sentence."""

    exit_code = 70


class ConfigError(PodracerError):
    """Invalid configuration; raised before anything is compiled."""

    exit_code = 78


class EnvironmentFault(PodracerError):
    """Failure of an environment that raised, hung or died more often than it may."""

    exit_code = 72


class CheckpointError(PodracerError):
    """Missing or damaged checkpoint."""

    exit_code = 65


class StorageError(PodracerError, OSError):
    """File or directory that cannot be read or written; what was stored before is untouched."""

    exit_code = 73


class NonFiniteError(PodracerError):
    """Update with a value that is not finite; it was not applied."""
