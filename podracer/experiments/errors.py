"""Errors of a run: which component failed, and with which exit code the process ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from podracer.types import PodracerError


class DeviceError(PodracerError):
    """The accelerator failed or ran out of memory."""

    exit_code = 71


@contextlib.contextmanager
def tag_component(name: str) -> Iterator[None]:
    """Tag errors raised within the context with a component's name, for `crash.json`."""
    try:
        yield
    except Exception as error:
        error.component = name  # type: ignore[attr-defined]
        raise


def classify_error(error: Exception) -> Exception:
    """Return a `DeviceError` for a failure of XLA, and every other error unchanged."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return error
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        advice = "out of device memory: take fewer environments, a shorter rollout or more devices."
    elif "DATA_LOSS" in text or "INTERNAL" in text:
        advice = "the device failed: resume on a healthy one."
    else:
        return error
    failure = DeviceError(f"{advice} ({text.strip().splitlines()[0][:300]})")
    failure.__cause__ = error
    return failure
