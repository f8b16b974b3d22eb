"""The oracle of `write_kv`: one token after another. Readable, slow, right on any device."""

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
    for part, vectors in enumerate((k,) if v is None else (k, v)):
        if scales is None:
            pages = _write(pages, part, vectors.astype(pages.dtype), write_page, write_offset)
        else:
            stored, vector_scales = quantize(vectors, pages.dtype)
            pages = _write(pages, part, stored, write_page, write_offset)
            scales = _write(scales, part, vector_scales, write_page, write_offset)
    return pages if scales is None else (pages, scales)


def _write(array: jax.Array, part: int, values: jax.Array, write_page: jax.Array, write_offset: jax.Array) -> jax.Array:
    """`array` [num_pages, parts, K, page_size, ...] with one part of it written, `values` [T, K, ...]."""

    def one_token(token: jax.Array, array: jax.Array) -> jax.Array:
        return array.at[write_page[token], part, :, write_offset[token]].set(values[token])

    return jax.lax.fori_loop(0, values.shape[0], one_token, jnp.asarray(array))
