from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from podracer.ops.clipped_losses import kl_estimate


def test_the_kl_estimate_is_exact_near_0_and_far_from_it():
    magnitudes = np.geomspace(1e-6, 8, 200)
    log_ratio = np.concatenate([-magnitudes, magnitudes]).astype(np.float32)
    exact = np.expm1(log_ratio, dtype=np.float64) - log_ratio
    np.testing.assert_allclose(kl_estimate(jnp.asarray(log_ratio)), exact, rtol=3e-5)
    assert kl_estimate(jnp.zeros(())) == 0
