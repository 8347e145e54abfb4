"""Check of JAX's own settings, which environment variables change, too."""

from __future__ import annotations

import jax

from podracer.errors import ConfigError

# The values that programs need, of the settings under which they fail, or take hours for seconds.
_NEEDED = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_disable_jit": False,
}


def check_jax_settings() -> None:
    """Raise `ConfigError` if a setting of JAX excludes podracer's programs."""
    for name, needed in _NEEDED.items():
        value = getattr(jax.config, name)
        if value != needed:
            raise ConfigError(
                f"podracer's programs need JAX's setting {name} to be {needed}, but it is {value}: "
                f"unset {name.upper()}, or call jax.config.update({name!r}, {needed!r})."
            )
