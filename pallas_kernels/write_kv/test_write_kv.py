"""Writing into pages: right places, in place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import write_kv
from pallas_kernels.write_kv.reference import write_kv_reference

NUM_PAGES, K, PAGE_SIZE, H = 9, 3, 8, 16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_equals_reference(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((NUM_PAGES, 2, K, PAGE_SIZE, H)).astype(dtype)
    place = rng.permutation(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE))[:20]
    k, v = rng.standard_normal((2, 20, K, H)).astype(np.float32)
    page, offset = (place // PAGE_SIZE).astype(np.int32), (place % PAGE_SIZE).astype(np.int32)
    expected = write_kv_reference(pages, k, v, page, offset)
    np.testing.assert_array_equal(np.asarray(jax.jit(write_kv)(pages, k, v, page, offset)), expected)


def test_padding_goes_to_the_null_page() -> None:
    pages = np.zeros((NUM_PAGES, 2, K, PAGE_SIZE, H), np.float32)
    kv = np.full((4, K, H), np.nan, np.float32)
    kv[0] = 1.0
    page, offset = np.array([3, 0, 0, 0], np.int32), np.array([5, 0, 0, 0], np.int32)
    written = np.asarray(jax.jit(write_kv)(pages, kv, kv, page, offset))
    assert (written[3, :, :, 5] == 1.0).all()
    assert written[1:].sum() == 2 * K * H


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_is_in_place(dtype: jnp.dtype) -> None:
    pages = jax.ShapeDtypeStruct((NUM_PAGES, 2, K, PAGE_SIZE, H), dtype)
    kv = jax.ShapeDtypeStruct((4, K, H), dtype)
    place = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(pages, kv, kv, place, place).compile()
    text = compiled.as_text()
    assert not re.findall(rf"\w+\[{NUM_PAGES},2,{K},{PAGE_SIZE},{H}\]\S* (?:copy|convert|transpose)\(.*", text)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == np.prod(pages.shape) * pages.dtype.itemsize
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes
