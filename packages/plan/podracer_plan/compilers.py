"""The compilers of accelerators, started without a device."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import jax

from podracer.devices.startup import GPU_FLAGS, add_xla_flags


def prepare_compilers() -> None:
    """Let the compilers of accelerators start without a device, before JAX starts its own.

    They print warnings that there is no device, some of which no setting suppresses.
    """
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",  # asks a server of the cloud
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v3-8",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # checks driver and cuDNN
    }
    add_xla_flags(GPU_FLAGS | {"--xla_gpu_autotune_level": "0"})  # autotuning would run kernels
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        os.environ.setdefault(name, "3")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    with without_stderr():
        jax.devices()


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard what libraries write to the standard error stream, past Python."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
