"""Writing into pages as one scatter, which XLA does in place on a donated array. Rules: `api`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_kv import quantize


def write_kv(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    write_page: jax.Array,
    write_offset: jax.Array,
    *,
    scales: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.write_kv`."""
    kv = k[:, None] if v is None else jnp.stack((k, v), axis=1)  # [T, parts, K, H]
    # Two index arrays around slices: NumPy's rule puts the indexed axis first, so a token's window is [parts, K, H].
    if scales is None:
        return pages.at[write_page, :, :, write_offset].set(kv.astype(pages.dtype), mode="promise_in_bounds")
    kv, kv_scales = quantize(kv, pages.dtype)
    pages = pages.at[write_page, :, :, write_offset].set(kv, mode="promise_in_bounds")
    return pages, scales.at[write_page, :, :, write_offset].set(kv_scales, mode="promise_in_bounds")
