"""The interpreter harness: right results in a process of its own, counted traffic, and no access outside of the arrays."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from pallas_kernels import triton_on_numpy
from pallas_kernels.triton_launch import launch

triton = pytest.importorskip("triton", reason="needs the cuda12 extra: scripts/gates has an environment for it")
tl = pytest.importorskip("triton.language")


@triton.jit
def add_one(x, out, SIZE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at // 2, mask=at < COUNT) + 1, mask=at < COUNT)


def doubled(x: np.ndarray, size: int, count: int) -> tuple[jax.Array, ...]:
    """Each element twice, plus 1, up to `count` of them."""
    return launch(
        add_one, grid=(-(-count // size),), reads={"x": x}, writes={"out": jax.ShapeDtypeStruct((20,), x.dtype)},
        num_warps=1, num_stages=1, constants={"SIZE": size, "COUNT": count},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_runs_and_counts(dtype: type) -> None:
    x = np.arange(10).astype(dtype)
    (out,), traffic = triton_on_numpy.run(doubled, x, 16, 18)
    np.testing.assert_array_equal(out[:18], np.repeat(x, 2)[:18] + 1)
    unwritten = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max
    np.testing.assert_array_equal(out[18:], np.full(2, unwritten, dtype))
    # The lanes of one load that share an address move it once: 8 and 1 elements are read, 18 are written.
    assert traffic == (9 * x.itemsize, 18 * x.itemsize)


@pytest.mark.parametrize(("length", "count"), [(8, 18), (11, 21)], ids=["load", "store"])
def test_access_outside_of_an_array_is_an_error(length: int, count: int) -> None:
    with pytest.raises(Exception, match="outside of its arrays"):
        triton_on_numpy.run(doubled, np.zeros(length, np.float32), 32, count)


def test_this_process_still_compiles() -> None:
    triton_on_numpy.run(doubled, np.zeros(10, np.float32), 16, 18)
    assert "TRITON_INTERPRET" not in os.environ
    assert isinstance(add_one, triton.JITFunction)
