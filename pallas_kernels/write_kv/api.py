"""Writes a step's keys and values into their pages, in place where the page array is donated.

Does not know which token owns which page: `write_page` and `write_offset` say it. Attention over what was written is
`pallas_kernels.paged_attention`. Next: `reference` (the rules as code), `xla` (any device).
"""

from __future__ import annotations

from typing import overload

import jax
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from pallas_kernels import dispatch
from pallas_kernels.quantized_kv import is_quantized

type Pages = (
    Float[Array, "num_pages parts K page_size H"]
    | Int8[Array, "num_pages parts K page_size H"]
    | UInt8[Array, "num_pages parts K page_size H"]
)


@overload
def write_kv(
    pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    write_page: Int32[Array, "T"],
    write_offset: Int32[Array, "T"],
    *,
    scales: None = None,
    implementation: str | None = None,
) -> jax.Array: ...
@overload
def write_kv(
    pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    write_page: Int32[Array, "T"],
    write_offset: Int32[Array, "T"],
    *,
    scales: Float32[Array, "num_pages parts K page_size"],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def write_kv(
    pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    write_page: Int32[Array, "T"],
    write_offset: Int32[Array, "T"],
    *,
    scales: Float32[Array, "num_pages parts K page_size"] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns `pages` with `k[t]`, `v[t]` at place `write_offset[t]` of page `write_page[t]`; with `scales`, also those.

    Pages with one part hold keys alone: `v` is None.

    Values are cast to the dtype of `pages`. Pages of int8, or of uint8 that holds the bits of float8_e4m3fn, need `scales`: each token's
    vector of each part and head is stored as value / scale, its scale being max|value| / 127 (int8) or / 448 (uint8), 1 where all are 0
    (math is float32, rounded to the nearest).

    Padding tokens write to page 0, the null page, whose contents are never read as keys; where several tokens write one place, which one
    stays is not defined. Page ids must be in range. The writing is in place when `pages` and `scales` are donated to the jitted caller
    and not read afterwards.

    Raises:
        ValueError: unknown or unavailable `implementation`.
    """
    assert pages.shape[1] == (1 if v is None else 2), pages.shape
    assert is_quantized(pages.dtype) == (scales is not None), (pages.dtype, scales)
    assert scales is None or scales.shape == pages.shape[:4], (scales.shape, pages.shape)
    run = dispatch.load("write_kv", implementation or dispatch.choose(dispatch.this_device())[0])
    written: jax.Array | tuple[jax.Array, jax.Array] = run(pages, k, v, write_page, write_offset, scales=scales)
    return written
