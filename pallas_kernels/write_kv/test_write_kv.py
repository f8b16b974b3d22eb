"""Writing into pages: right places, right numbers, in place."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import write_kv

NUM_PAGES, K, PAGE_SIZE, H = 9, 3, 8, 16
IMPLEMENTATIONS = ("reference", "xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_each_token_lies_in_its_place(num_parts: int, dtype: jnp.dtype, implementation: str) -> None:
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((NUM_PAGES, num_parts, K, PAGE_SIZE, H)).astype(dtype)
    place = rng.permutation(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE))[:20]
    k, v = rng.standard_normal((2, 20, K, H)).astype(np.float32)
    page, offset = (place // PAGE_SIZE).astype(np.int32), (place % PAGE_SIZE).astype(np.int32)
    expected = pages.copy()
    for token in range(20):
        for part, vectors in enumerate((k, v)[:num_parts]):
            expected[page[token], part, :, offset[token]] = vectors[token].astype(dtype)
    write = jax.jit(functools.partial(write_kv, implementation=implementation))
    np.testing.assert_array_equal(np.asarray(write(pages, k, v if num_parts == 2 else None, page, offset)), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "largest"), [(np.int8, 127), (np.uint8, 448)])
def test_quantized_pages(dtype: type, largest: int, implementation: str) -> None:
    """Stored x scale is the value within half a step of the 8-bit format; one scale for each token, part and head."""
    rng = np.random.default_rng(1)
    pages, scales = np.zeros((NUM_PAGES, 2, K, PAGE_SIZE, H), dtype), np.full((NUM_PAGES, 2, K, PAGE_SIZE), np.nan, np.float32)
    k, v = rng.standard_normal((2, 4, K, H)).astype(np.float32) * np.float32(10.0) ** np.arange(-4, 8, 3)[:, None, None]
    k[1, 2] = 0.0
    page, offset = np.array([1, 4, 4, 8], np.int32), np.array([7, 0, 3, 5], np.int32)
    write = jax.jit(functools.partial(write_kv, implementation=implementation))
    written, written_scales = map(np.asarray, write(pages, k, v, page, offset, scales=scales))
    assert written.dtype == dtype
    numbers = written.astype(np.float32) if dtype == np.int8 else written.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for part, vectors in enumerate((k, v)):
        for token in range(4):
            scale = written_scales[page[token], part, :, offset[token]]
            peak = np.abs(vectors[token]).max(axis=-1)
            np.testing.assert_allclose(scale, np.where(peak == 0, 1.0, peak / largest), rtol=1e-6)
            stored = numbers[page[token], part, :, offset[token]]
            exact = vectors[token] / scale[:, None]
            # int8: half of 1. float8_e4m3fn: 3 bits of mantissa, so half of 1/8 of the power of two below; subnormals step by 2^-9.
            half_step = 0.5 if dtype == np.int8 else np.maximum(np.exp2(np.floor(np.log2(np.abs(exact) + 1e-30))) / 16, 2.0**-10)
            assert (np.abs(stored - exact) <= half_step * 1.0001).all()
    untouched = np.ones((NUM_PAGES, PAGE_SIZE), bool)
    untouched[page, offset] = False
    assert np.isnan(written_scales.transpose(0, 3, 1, 2)[untouched]).all()
    assert not written.transpose(0, 3, 1, 2, 4)[untouched].any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_nan_of_a_token_is_still_one_when_it_is_read(dtype: type) -> None:
    """The sampler looks for NaN: 8 bits must not hide it. It shows in the scale of its own vector, and nowhere else."""
    k = np.ones((1, K, H), np.float32)
    k[0, 1, 3] = np.nan
    scales = np.ones((NUM_PAGES, 2, K, PAGE_SIZE), np.float32)
    pages, page, offset = np.zeros((*scales.shape, H), dtype), np.array([2], np.int32), np.array([0], np.int32)
    _, written = jax.jit(write_kv)(pages, k, np.ones_like(k), page, offset, scales=scales)
    assert np.argwhere(np.isnan(np.asarray(written))).tolist() == [[2, 0, 1, 0]]


def test_padding_goes_to_the_null_page() -> None:
    pages = np.zeros((NUM_PAGES, 2, K, PAGE_SIZE, H), np.float32)
    kv = np.full((4, K, H), np.nan, np.float32)
    kv[0] = 1.0
    page, offset = np.array([3, 0, 0, 0], np.int32), np.array([5, 0, 0, 0], np.int32)
    written = np.asarray(jax.jit(write_kv)(pages, kv, kv, page, offset))
    assert (written[3, :, :, 5] == 1.0).all()
    assert written[1:].sum() == 2 * K * H


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8])
def test_is_in_place(dtype: jnp.dtype) -> None:
    pages = jax.ShapeDtypeStruct((NUM_PAGES, 2, K, PAGE_SIZE, H), dtype)
    kv = jax.ShapeDtypeStruct((4, K, H), jnp.float32)
    place = jax.ShapeDtypeStruct((4,), jnp.int32)
    scales = jax.ShapeDtypeStruct(pages.shape[:4], jnp.float32) if pages.dtype.itemsize == 1 else None

    def write(state: tuple[jax.Array, jax.Array | None], *rest: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
        return write_kv(state[0], *rest, scales=state[1])

    compiled = jax.jit(write, donate_argnums=0).lower((pages, scales), kv, kv, place, place).compile()
    text = compiled.as_text()
    assert not re.findall(rf"\w+\[{NUM_PAGES},2,{K},{PAGE_SIZE}(?:,{H})?\]\S* (?:copy|convert|transpose)\(.*", text)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(np.prod(a.shape) * a.dtype.itemsize for a in (pages, scales) if a is not None)
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes
