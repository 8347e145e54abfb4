"""Running moments equal those of all data at once, on any number of devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.devices.mesh import DATA, REPLICATED, SHARDED, find_devices, make_mesh
from podracer.devices.reductions import Moments, init_moments, merge, moments_of, normalize
from podracer.types import ArraySpec

ITEM = {"vector": ArraySpec((3,)), "number": ArraySpec(()), "image": ArraySpec((2, 2, 1), np.uint8)}


def add(moments: Moments, items, axis: str | None) -> Moments:
    """Merge in a batch of numbers, or of items as in ITEM."""
    number = items["number"] if isinstance(items, dict) else items
    return merge(moments, moments_of(items, axis, batch_axes=number.ndim))


update = jax.jit(lambda moments, items: add(moments, items, None))


def batches(count: int, shape: tuple[int, ...], seed: int = 0) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "vector": jnp.asarray(rng.normal(i, 2.0 + i, (*shape, 3)), jnp.float32),
            "number": jnp.asarray(rng.exponential(3.0, shape), jnp.float32),
            "image": jnp.asarray(rng.integers(0, 256, (*shape, 2, 2, 1)), jnp.uint8),
        }
        for i in range(count)
    ]


def gathered(data: list[dict[str, jax.Array]], name: str) -> np.ndarray:
    """Every item of a leaf, `[items, ...]`, in double precision."""
    shape = ITEM[name].shape
    return np.concatenate([np.asarray(b[name], np.float64).reshape(-1, *shape) for b in data])


@pytest.mark.parametrize("shape", [(32,), (7, 4)])
def test_updates_equal_the_moments_of_all_data(shape):
    data = batches(5, shape)
    moments = init_moments(ITEM)
    for batch in data:
        moments = update(moments, batch)
    for name in ITEM:
        items = gathered(data, name)
        assert moments.count == len(items)
        np.testing.assert_allclose(moments.mean[name], items.mean(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(moments.variance[name], items.var(0), rtol=1e-4)


def test_items_without_weight_do_not_count_and_half_precision_does_not_overflow():
    data = batches(1, (7, 4))[0]
    weights = jnp.asarray(np.random.default_rng(0).random((7, 4)) < 0.7, jnp.float32)
    counted = jax.tree.map(lambda x: x[weights == 1], data)
    weighted, plain = moments_of(data, None, weights), moments_of(counted, None, batch_axes=1)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), weighted, plain)
    none = moments_of(data, None, jnp.zeros((7, 4)))
    jax.tree.map(np.testing.assert_array_equal, merge(init_moments(ITEM), none).count, 0.0)
    half = moments_of(jnp.float16([[-300.0, 300.0]]), None)
    assert half.variance == 90_000


@pytest.mark.parametrize("devices", [2, 4])
def test_shards_equal_one_device(devices):
    sharded_update = jax.jit(
        jax.shard_map(
            lambda moments, items: add(moments, items, DATA),
            mesh=make_mesh(find_devices(devices)),
            in_specs=(REPLICATED, SHARDED),
            out_specs=REPLICATED,
            check_vma=False,
        )
    )
    many = one = init_moments(ITEM)
    for batch in batches(3, (8, 5)):
        many = jax.device_get(sharded_update(many, batch))
        one = update(one, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), many, one)


def test_a_large_offset_does_not_drown_the_variance():
    """The naive mean of squares less the square of the mean would be off by thousands here."""
    rng = np.random.default_rng(0)
    moments = init_moments(ArraySpec(()))
    data = [rng.normal(1e5, 1.0, 512).astype(np.float32) for _ in range(4)]
    for batch in data:
        moments = update(moments, batch)
    np.testing.assert_allclose(moments.variance, np.concatenate(data).var(dtype=float), rtol=0.02)


def test_many_small_updates_keep_their_precision():
    rng = np.random.default_rng(0)
    data = rng.normal(3.0, 2.0, (3000, 8)).astype(np.float32)

    @jax.jit
    def run(data):
        return jax.lax.scan(
            lambda moments, batch: (add(moments, batch, None), None),
            init_moments(ArraySpec(())), data,
        )[0]  # fmt: skip

    moments = run(data)
    np.testing.assert_allclose(moments.mean, data.mean(dtype=float), rtol=1e-4)
    np.testing.assert_allclose(moments.variance, data.var(dtype=float), rtol=1e-4)


def test_a_long_run_of_single_items_keeps_the_variance():
    """After 2^24 items one more weighs less than a float32 resolves."""
    items = jnp.tile(jnp.sqrt(1.2) * jnp.float32([0, 0, 0, 2, 0, 0, 0, -2]), 2**17)[:, None]
    moments = Moments(jnp.float32(2**24), jnp.float32(0), jnp.float32(1.2))
    step = lambda moments, item: (add(moments, item, None), None)  # noqa: E731
    moments = jax.jit(partial(jax.lax.scan, step))(moments, items)[0]
    np.testing.assert_allclose(moments.mean, 0.0, atol=1e-4)
    np.testing.assert_allclose(moments.variance, 1.2, rtol=0.02)


def test_fresh_moments_change_nothing():
    batch = batches(1, (4,))[0]
    same = normalize(init_moments(ITEM), batch, clip=1e9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), same, batch)


def test_normalized_items_have_zero_mean_and_unit_variance():
    data = batches(3, (16, 8))
    moments = init_moments(ITEM)
    for batch in data:
        moments = update(moments, batch)
    made = [jax.device_get(normalize(moments, batch)) for batch in data]
    for name in ITEM:
        items = gathered(made, name)
        np.testing.assert_allclose(items.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(items.var(0), 1, atol=2e-2)


def test_normalized_items_are_clipped():
    moments = Moments(jnp.float32(1), jnp.float32(2), jnp.float32(4))
    items = jnp.array([2.0, 4.0, 1e6, -1e6])
    np.testing.assert_allclose(normalize(moments, items), [0, 1, 10, -10], rtol=1e-6)
    np.testing.assert_allclose(normalize(moments, items, clip=0.5), [0, 0.5, 0.5, -0.5])


def test_a_constant_observation_stays_finite():
    moments = update(init_moments(ArraySpec(())), jnp.full(8, 7.0))
    np.testing.assert_array_equal(normalize(moments, jnp.full(3, 7.0)), 0)


def test_indices_and_masks_are_no_quantities() -> None:
    """Normalized, an index would be no state any more, and a mask would allow every action."""
    spec = {
        "action_mask": ArraySpec((3,), np.bool_),
        "position": ArraySpec((2,)),
        "state": ArraySpec((), np.int32, num_values=5),
    }
    items = {
        "action_mask": jnp.array([[[True, False, True]], [[False, True, True]]]),
        "position": jnp.array([[[1.0, 5.0]], [[3.0, 5.0]]]),
        "state": jnp.array([[4], [2]], jnp.int32),
    }
    moments = merge(init_moments(spec), moments_of(items, None))
    normalized = normalize(moments, items)
    np.testing.assert_allclose(normalized["position"][:, 0, 0], [-1, 1], rtol=1e-5)
    for name in ("action_mask", "state"):
        assert normalized[name].dtype == items[name].dtype
        np.testing.assert_array_equal(normalized[name], items[name])
