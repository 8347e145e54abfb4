"""Anakin and lock-step Sebulba beside each other: equal to the bit, on one device and several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Blueprint, Context
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.envs import make
from podracer_testing.plugin import QUICK

UPDATES = 10


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """Optimize the programs compiled within: only then do two drivers' programs round alike."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", QUICK)


def check_parity(
    settings: Any,
    environment: Any,
    learners: int = 1,
    *,
    data: Any = None,
    rtol: float = 0.0,
) -> None:
    """Assert that each leaf of the state and each metric are equal after ten updates.

    `environment` is one, or a name. `learners` is the number of devices that learn. `data` is the
    content of the settings' file.
    With `rtol` the leaves may differ by rounding.
    """
    env = make(environment) if isinstance(environment, str) else environment
    config = SebulbaConfig(
        num_envs=16,
        rollout_length=8,
        updates_per_chunk=5,
        policy_lag=0,
        threads_per_actor=learners,  # equal shapes of batches
        learners=learners if learners > 1 else 0,
    )
    blueprint = Blueprint(settings, env.spec, Context(8, data))
    # On one device actors and learner share it.
    devices = jax.devices()[: 1 if learners == 1 else learners + 1]
    sebulba = Sebulba(blueprint, env, config, devices)
    rollout = AnakinConfig(config.num_envs, config.rollout_length, config.updates_per_chunk)
    anakin = Anakin(blueprint, env, rollout, list(sebulba.mesh.devices.flat))
    state = sebulba.init(jax.random.key(7))
    copy = jax.tree.map(jax.numpy.copy, state)
    with optimized():
        expected = list(anakin.run(copy, Orders(UPDATES)))
        with contextlib.closing(sebulba.run(state, Orders(UPDATES))) as progress:
            got = list(progress)
    check_equal(got[-1].state, expected[-1].state, rtol)
    for report, wanted in zip(got, expected, strict=True):
        assert report.frames == wanted.frames
        for metric, value in wanted.metrics.items():
            if value is None:
                assert report.metrics[metric] is None, metric
            else:
                np.testing.assert_allclose(
                    report.metrics[metric], value, 1e-5, 1e-7, err_msg=metric
                )


def check_equal(got: Any, expected: Any, rtol: float = 0.0) -> None:
    """Assert that each leaf of two states is equal to the bit, or with `rtol` nearly."""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), have in zip(leaves, jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            want, have = jax.random.key_data(want), jax.random.key_data(have)
        path_text = jax.tree_util.keystr(path)
        if rtol:
            np.testing.assert_allclose(have, want, rtol, rtol / 10, err_msg=path_text)
        else:
            np.testing.assert_array_equal(want, have, path_text)
