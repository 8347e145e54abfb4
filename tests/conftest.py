"""Eight virtual devices, loud broadcasting, one compile cache for all tests."""

import os
import tempfile
from pathlib import Path

import jax
import pytest

CACHE = Path(tempfile.gettempdir()) / f"podracer-test-cache-{os.getuid()}"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
