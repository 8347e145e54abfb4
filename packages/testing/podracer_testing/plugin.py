"""Pytest plugin: eight virtual devices, loud broadcasting, one compile cache, quick compilation.

Nearly all the time of a cold run goes into compiling programs that then run for milliseconds.
They are compiled with few optimizations, here and in the processes that tests start, which is
over twice as fast; `JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` compiles them as users do.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

MAPPINGS = Path("/proc/self/maps")
CACHE = Path(tempfile.gettempdir()) / f"podracer-test-cache-{os.getuid()}"

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
QUICK = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
if QUICK:  # a few tests optimize their programs, but LLVM need not
    flags = [os.environ.get("XLA_FLAGS", "")]
    if jax.__version_info__ < (0, 11):  # without its passes these versions round by the context
        flags += ["--xla_backend_optimization_level=1", "--xla_cpu_use_fusion_emitters=false"]
    else:
        flags.append("--xla_backend_optimization_level=0")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

# Also where `nohup` started the tests, or a shell that is not interactive, in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_disable_most_optimizations", QUICK)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

gc.set_threshold(50_000, 20, 50)  # tracing allocates much and leaves little garbage


@pytest.fixture
def key() -> jax.Array:
    """Typed key of a test."""
    return jax.random.key(0)


@pytest.fixture
def lenient_ranks() -> Iterator[None]:
    """Let arrays be promoted to others' ranks, which Pgx, JAXtari and other packages rely on."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_this_module_only() -> None:
    """Keep collections, also of JAX where it looks for leaks, from going through all programs."""
    free_programs()
    gc.freeze()


def free_programs(most_mappings: int = 10_000) -> None:
    """Free the compiled programs of earlier modules if this process has too many mappings.

    A program has 18 mappings of memory or more. Linux allows a process 65,530, beyond which LLVM
    ends it.
    """
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > most_mappings:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
