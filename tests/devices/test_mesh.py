"""Gradients and means over devices equal those on one device; what cannot be shared is refused."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.devices import machine, mesh
from podracer.devices.fused import traced_for
from podracer.devices.mesh import (
    DATA,
    REPLICATED,
    SHARDED,
    check_divisible,
    find_devices,
    make_mesh,
)
from podracer.devices.reductions import (
    global_grad,
    global_grad_in_blocks,
    global_mean,
    map_blocks,
    split_evenly,
)
from podracer.errors import ConfigError


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["in"])
    error = (hidden @ params["out"] - y) ** 2
    return jnp.mean(error), {"error": jnp.mean(jnp.abs(error))}


def problem() -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(3, 16)), "out": rng.normal(size=16), "unused": np.ones(2)}
    x, y = rng.normal(size=(64, 3)), rng.normal(size=64)
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), (params, x, y))


def sharded(function, devices: int, check_vma: bool = False):
    """`function(params, x, y)` with the batch shared by the devices, result replicated."""
    return jax.jit(
        jax.shard_map(
            function,
            mesh=make_mesh(find_devices(devices)),
            in_specs=(REPLICATED, SHARDED, SHARDED),
            out_specs=REPLICATED,
            check_vma=check_vma,
        )
    )


def close(got, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), got, expected)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_gradient_of_all_shards_is_that_of_the_whole_batch(devices):
    params, x, y = problem()
    expected, _ = global_grad(loss, params, x, y, axis=None)
    step = sharded(lambda *args: global_grad(loss, *args, axis=DATA)[0], devices)
    close(step(params, x, y), expected)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("devices", [1, 4])
def test_blocks_have_the_gradient_of_the_whole(devices, count):
    params, x, y = problem()
    expected, metrics = global_grad(loss, params, x, y, axis=None)

    def step(params, x, y):
        indices = jnp.arange(len(x))
        grads, aux = global_grad_in_blocks(
            lambda params, i: loss(params, x[i], y[i]),
            params,
            indices,
            indices_in_cache=len(x) // count,
            axis=DATA,
        )
        return grads, global_mean(aux, DATA)

    close(sharded(step, devices)(params, x, y), (expected, metrics))


@pytest.mark.parametrize(
    ("limit", "platform", "at_once"),
    [(24, "cpu", 24), (7, "cpu", 6), (5, "cpu", 4), (7, "cuda", 24)],
)
def test_rows_are_mapped_in_blocks_on_a_cpu(limit, platform, at_once):
    x, w = jax.random.normal(jax.random.key(0), (24, 3)), jnp.linspace(-1, 1, 12).reshape(3, 4)
    seen = []

    def apply(w, x):
        seen.append(x.shape[0])
        return jnp.tanh(x @ w)

    def loss(w, mapped):
        return jnp.sum(jnp.square(mapped(w)))

    with traced_for(platform):
        got = jax.value_and_grad(loss)(
            w, lambda w: map_blocks(partial(apply, w), x, rows_in_cache=limit)
        )
    assert set(seen) == {at_once}
    close(got, jax.value_and_grad(loss)(w, lambda w: apply(w, x)))


def test_without_an_axis_it_is_the_plain_gradient():
    params, x, y = problem()
    grads, aux = global_grad(loss, params, x, y, axis=None)
    expected, metrics = jax.grad(loss, has_aux=True)(params, x, y)
    close((grads, aux), (expected, metrics))


def test_the_trap_that_global_grad_avoids():
    """With `check_vma=True` the same two lines return the sum over devices, not the mean: JAX
    sums the gradient of a replicated input by itself, and the mean of equal sums changes nothing.
    """
    params, x, y = problem()
    expected, _ = global_grad(loss, params, x, y, axis=None)

    def naive(params, x, y):
        return jax.lax.pmean(jax.grad(loss, has_aux=True)(params, x, y)[0], DATA)

    close(sharded(naive, 4, check_vma=False)(params, x, y), expected)
    wrong = sharded(naive, 4, check_vma=True)(params, x, y)
    close(wrong, jax.tree.map(lambda g: 4 * g, expected))


def test_global_mean_keeps_shapes_and_equals_the_mean():
    _, x, y = problem()
    tree = {"x": x, "y": [y]}
    mean = sharded(lambda _, x, y: global_mean({"x": x, "y": [y]}, DATA), 4)((), x, y)
    close(mean, jax.tree.map(lambda v: v.reshape(4, 16, *v.shape[1:]).mean(0), tree))
    assert global_mean(tree, None) is tree


def test_global_mean_is_one_collective():
    _, x, y = problem()
    text = sharded(lambda _, x, y: global_mean((x, y, x[0]), DATA), 4).lower((), x, y).as_text()
    assert text.count("all_reduce") == 1


def test_find_devices_counts():
    assert find_devices() == jax.devices()
    assert find_devices(3) == jax.devices()[:3]
    for count in (9, -1):
        with pytest.raises(ConfigError, match=rf"`devices={count}` was asked .* 8 cpu device"):
            find_devices(count)


@pytest.mark.parametrize(
    ("count", "devices", "advice"),
    [
        (10, 4, "take 2 or 5 devices, or in a new run 8 or 12"),
        (3, 4, "take 3 devices, or in a new run 4"),
        (0, 2, "take 2"),
    ],
)
def test_uneven_shares_are_refused_with_the_nearest_even_ones(count, devices, advice):
    with pytest.raises(ConfigError, match=rf"num_envs is {count}, .* {devices} devices .*{advice}"):
        check_divisible("num_envs", count, devices)


def test_hosts_of_a_tpu_that_have_not_joined_are_refused(monkeypatch):
    """JAX lists the devices of all hosts; each would save and decide for itself."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="belong to 2 processes, which have not joined"):
        find_devices()


def test_exactly_the_even_shares_pass():
    pairs, refused = set(itertools.product(range(13), range(1, 5))), set()
    for count, devices in pairs:
        try:
            check_divisible("num_envs", count, devices)
        except ConfigError:
            refused.add((count, devices))
    assert refused == {(count, devices) for count, devices in pairs if count % devices or not count}


@pytest.mark.parametrize(
    ("n", "limit", "blocks"),
    [
        (24, 24, 1),  # all of it fits
        (24, 12, 2),
        (24, 11, 3),  # a divisor below the limit
        (23, 12, 1),  # none but 1 and the whole
        (24, 0, 24),  # at least one item each
    ],
)
def test_blocks_keep_the_order_and_the_limit(n, limit, blocks):
    indices = jnp.arange(n, dtype=jnp.uint32) * 3
    split = split_evenly(indices, limit)
    assert split.shape == (blocks, n // blocks)
    np.testing.assert_array_equal(split.ravel(), indices)


GIB = 2**30


@pytest.mark.parametrize(
    ("files", "memory", "cores"),
    [
        ({}, None, None),
        ({"proc/self/cgroup": "0::/\n"}, None, None),
        (
            {
                "proc/self/cgroup": "0::/pods/a\n",
                "sys/fs/cgroup/pods/a/memory.max": "max\n",
                "sys/fs/cgroup/pods/a/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pods/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/pods/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
                "sys/fs/cgroup/pods/cpu.max": "150000 100000\n",
            },
            3 * GIB // 2,
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 7\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            GIB + 7,
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 7\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            None,
        ),
    ],
    ids=["none", "no limit", "of what it is in", "version 1 in a container", "version 1, no limit"],
)
def test_the_limits_of_a_container_hold(files, memory, cores, tmp_path):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert machine.free_memory(tmp_path) == memory
    assert machine.cores(tmp_path) == cores


def test_a_noted_program_is_known_until_it_has_ended(monkeypatch):
    first, second = jax.devices()[:2]
    x = jax.device_put(jnp.ones(3), first)
    mesh.note_program(x)
    assert mesh.noted_program(first) is None  # on a CPU nothing waits for it
    monkeypatch.setattr(mesh, "in_turn", lambda device: True)
    assert mesh.noted_program(first) is None  # it has ended
    monkeypatch.setattr(type(x), "is_ready", lambda self: False)
    assert mesh.noted_program(first) is not None
    monkeypatch.setattr(mesh, "NEWEST", {})
    assert mesh.noted_program(second) is None
