"""Work of programs as the benchmarks count it, in their traces."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts

from work import Work, count


def test_a_matrix_product_counts_two_operations_for_each_multiplication():
    work = count(lambda x, w: x @ w, jnp.zeros((3, 4)), jnp.zeros((4, 5)))
    assert work == Work(operations=1, flops=2 * 3 * 4 * 5, bytes_written=4 * 3 * 5)


def test_a_convolution_counts_its_window():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    work = count(convolve, jnp.zeros((2, 9, 9, 3)), jnp.zeros((3, 3, 3, 8)))
    assert work.flops == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)


def test_a_loop_counts_as_often_as_it_runs_and_a_while_once():
    def body(x, _):
        return jnp.sin(x), None

    assert count(lambda x: jax.lax.scan(body, x, length=7)[0], 1.0).operations == 7
    unbounded = count(lambda x: jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, x), 1.0)
    assert unbounded.operations == 2


def test_an_update_in_place_writes_only_what_changes():
    work = count(lambda x: x.at[2].set(1.0), jnp.zeros(1000))
    assert work.bytes_written < 100
    loop = jax.lax.dynamic_update_index_in_dim
    assert count(lambda x, i: loop(x, 1.0, i, 0), jnp.zeros(1000), 3).bytes_written < 100


def test_what_no_result_needs_is_not_counted():
    def function(x):
        return x + 1, jnp.sin(x) @ x

    assert count(lambda x: function(x)[0], jnp.ones(4)).operations == 1
    assert count(jax.jit(lambda x: jax.jit(function)(x)[0]), jnp.ones(4)).operations == 1


def test_a_platforms_own_form_is_not_counted_and_the_longer_branch_is():
    def function(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: jnp.sin(jnp.cos(x)), default=jnp.sin)

    assert count(function, 1.0).operations == 1
    work = count(lambda p, x: jax.lax.cond(p, lambda x: jnp.sin(jnp.cos(x)), jnp.sin, x), True, 1.0)
    assert work.operations == 2
