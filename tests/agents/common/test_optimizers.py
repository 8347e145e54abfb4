"""Settings of optimizers: what they mean, and which are refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax
import pytest

from podracer.agents.common.optimizers import Optimizer
from podracer.errors import ConfigError
from podracer.fields import check_ranges


@pytest.mark.parametrize(
    ("name", "expected"), [("adam", optax.scale_by_adam), ("radam", optax.scale_by_radam)]
)
def test_momentum_is_that_of_adam_and_of_radam(name, expected):
    optimizers = Optimizer(name, adam_momentum=0.5).build(), expected(b1=0.5, eps=1e-5)
    states = [optimizer.init(jnp.zeros(())) for optimizer in optimizers]
    for grad in (1.0, -3.0, 2.0):
        pairs = zip(optimizers, states, strict=True)
        steps = [optimizer.update(jnp.float32(grad), state) for optimizer, state in pairs]
        (ours, _), (theirs, _) = steps
        assert ours == theirs
        states = [state for _, state in steps]


@pytest.mark.parametrize("decay", ["adam_momentum", "rmsprop_decay"])
def test_a_mean_that_never_moves_is_refused(decay):
    check_ranges(dataclasses.replace(Optimizer(), **{decay: 0.9999}), "optimizer")
    with pytest.raises(ConfigError, match=f"optimizer.{decay} must lie in .0, 0.999999."):
        check_ranges(dataclasses.replace(Optimizer(), **{decay: 1.0}), "optimizer")
