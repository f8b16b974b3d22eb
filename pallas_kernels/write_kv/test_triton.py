"""The Triton kernel of `write_kv`: interpreted against the reference, bit for bit, and compiled in place for cards that are not here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import deviceless, triton_on_numpy
from pallas_kernels.write_kv.api import write_kv
from pallas_kernels.write_kv.triton import write_kv as triton_write_kv

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)


def stored_form(vectors: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
    """What the pages are to hold of vectors, and the scales; NumPy's and ml_dtypes' rounding is to the nearest, halves to even."""
    if dtype.itemsize > 1:
        return vectors.astype(dtype), None
    vectors, largest = vectors.astype(np.float32), np.float32(127 if dtype == np.int8 else 448)
    peak = np.abs(vectors).max(axis=-1)
    scales = np.where(peak == 0, np.float32(1), peak / largest)
    scaled = np.clip(vectors / scales[..., None], -largest, largest)
    return (np.rint(scaled).astype(dtype) if dtype == np.int8 else scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)), scales


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from((np.float32, np.float16, np.int8, np.uint8)),
    source=st.sampled_from((np.float32, np.float16)),
    num_tokens=st.integers(1, 9),
    num_kv_heads=st.sampled_from((1, 2, 3, 8)),
    head_dim=st.sampled_from((64, 80, 96, 576)),
    page_size=st.sampled_from((8, 16, 32)),
    has_values=st.booleans(),
)
def test_drawn_shapes_equal_reference(
    seed: int, dtype: type, source: type, num_tokens: int, num_kv_heads: int, head_dim: int, page_size: int, has_values: bool
) -> None:
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 99, (6, 1 + has_values, num_kv_heads, page_size, head_dim)).astype(dtype)
    scales = rng.uniform(1, 2, pages.shape[:4]).astype(np.float32) if pages.itemsize == 1 else None
    k, v = (rng.standard_normal((2, num_tokens, num_kv_heads, head_dim)) * 10.0 ** rng.integers(-3, 4, (2, num_tokens, 1, 1))).astype(
        source
    )
    k[0, 0] = 0.0
    page, offset = np.divmod(page_size + rng.permutation(5 * page_size)[:num_tokens], page_size)
    args = (pages, k, v if has_values else None, page.astype(np.int32), offset.astype(np.int32))
    written, _ = triton_on_numpy.run(write_kv, *args, scales=scales, implementation="triton")
    expected = pages.copy(), scales
    for part, vectors in enumerate((k, v)[: pages.shape[1]]):
        stored, expected_scales = stored_form(vectors, pages.dtype)
        expected[0][page, part, :, offset] = stored
        if scales is not None:
            scales[page, part, :, offset] = expected_scales
    jax.tree.map(np.testing.assert_array_equal, written, expected[0] if scales is None else expected)


def test_nan_of_a_token_shows_in_the_scale_of_its_vector() -> None:
    k = np.ones((1, 3, 16), np.float32)
    k[0, 1, 3] = np.nan
    pages, scales = np.zeros((3, 2, 3, 8, 16), np.int8), np.ones((3, 2, 3, 8), np.float32)
    where = np.array([2], np.int32), np.array([5], np.int32)
    (_, written), _ = triton_on_numpy.run(write_kv, pages, k, np.ones_like(k), *where, scales=scales, implementation="triton")
    assert np.argwhere(np.isnan(written)).tolist() == [[2, 0, 1, 5]]


def far_page() -> tuple[np.ndarray, np.ndarray]:
    """Runs in the interpreting process: writes into a page past 2^31 elements, in memory that nobody else touches; returns that page."""
    pages = np.zeros((2**31 // 1024 + 8, 2, 1, 8, 64), np.int8)
    scales = np.zeros(pages.shape[:4], np.float32)
    k = np.ones((1, 1, 64), np.float32)
    where = np.array([len(pages) - 1], np.int32), np.array([3], np.int32)
    triton_write_kv(pages, k, 2 * k, *where, scales=scales)  # NumPy arrays are written where they are
    return pages[-1], scales[-1]


def test_page_past_two_to_the_31_elements() -> None:
    (page, scales), _ = triton_on_numpy.run(far_page)
    expected, expected_scales = np.zeros_like(page), np.zeros_like(scales)
    expected[:, :, 3], expected_scales[:, 0, 3] = 127, np.array([1, 2], np.float32) / np.float32(127)
    np.testing.assert_array_equal(page, expected)
    np.testing.assert_array_equal(scales, expected_scales)


@pytest.mark.parametrize("card", ["H200", "A100", "A10", "L40", "B200", "RTX_PRO_6000"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8])
def test_compiles_in_place(dtype: Any, card: str) -> None:
    pages = jax.ShapeDtypeStruct((4096, 2, 8, 16, 128), dtype)
    scales = jax.ShapeDtypeStruct(pages.shape[:4], jnp.float32) if dtype == jnp.uint8 else None
    kv, place = jax.ShapeDtypeStruct((256, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.int32)

    def write(state: tuple[jax.Array, jax.Array | None], *rest: jax.Array) -> Any:
        return write_kv(state[0], *rest, scales=state[1], implementation="triton")

    compiled = deviceless.compile_for(card, write, (pages, scales), kv, kv, place, place, donate_argnums=0)
    text = compiled.as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert " copy(" not in text
    assert compiled.memory_analysis().alias_size_in_bytes == sum(
        np.prod(a.shape) * a.dtype.itemsize for a in (pages, scales) if a is not None
    )
