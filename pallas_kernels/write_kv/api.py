"""Writes a step's keys and values into their pages, in place where the page array is donated.

Does not know which token owns which page: `write_page` and `write_offset` say it. Attention over what was written is
`pallas_kernels.paged_attention`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def write_kv(
    pages: Float[Array, "num_pages parts K page_size H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    write_page: Int32[Array, "T"],
    write_offset: Int32[Array, "T"],
) -> jax.Array:
    """Returns `pages` with `k[t]`, `v[t]` at place `write_offset[t]` of page `write_page[t]`.

    Pages with one part hold keys alone: `v` is None.

    Values are cast to the dtype of `pages`. Padding tokens write to page 0, the null page, whose contents are never read
    as keys; where several tokens write one place, which one stays is not defined. Page ids must be in range. The scatter is in
    place when `pages` is donated to the jitted caller and not read afterwards.
    """
    assert pages.shape[1] == (1 if v is None else 2), pages.shape
    kv = (k[:, None] if v is None else jnp.stack((k, v), axis=1)).astype(pages.dtype)  # [T, parts, K, H]
    # Two index arrays around slices: NumPy's rule puts the indexed axis first, so a token's window is [parts, K, H].
    return pages.at[write_page, :, :, write_offset].set(kv, mode="promise_in_bounds")
