"""`linear`: shapes, dtypes and bias, against plain products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.linear import linear


@pytest.mark.parametrize("out", [(6,), (2, 3), (3, 4, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_number_of_output_axes(out: tuple[int, ...], has_bias: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, bias = jax.random.normal(keys[0], (7, 8)), jax.random.normal(keys[1], (*out, 8)), jax.random.normal(keys[2], out)
    expected = np.tensordot(np.asarray(x, np.float64), np.asarray(weight, np.float64), axes=(1, -1))
    if has_bias:
        expected += np.asarray(bias)
    np.testing.assert_allclose(linear(x, weight, bias if has_bias else None), expected, rtol=1e-5, atol=1e-5)


def test_sums_are_float32_and_may_stay_so() -> None:
    x, weight = jnp.full((2, 4096), 1.0, jnp.bfloat16), jnp.full((3, 4096), 1.0, jnp.bfloat16).at[:, 0].set(2.0)
    assert linear(x, weight).dtype == jnp.bfloat16
    exact = linear(x, weight, out_dtype=jnp.float32)
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(exact, 4097.0)  # a bfloat16 sum would stop at 256


def test_a_wider_weight_widens_the_product_only() -> None:
    x, weight = jnp.ones((2, 3), jnp.float16), jnp.array([[1.0, 2.0**-13, 0.0]], jnp.float32)
    assert linear(x, weight).dtype == jnp.float16
    np.testing.assert_array_equal(linear(x, weight, out_dtype=jnp.float32), 1.0 + 2.0**-13)
