"""The oracle of `paged_attention`: one token at a time, every page of its row gathered. Readable, slow, right on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_kv import stored_values


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    token_row: jax.Array,
    position: jax.Array,
    *,
    is_decode: bool,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """See `api.paged_attention`."""
    num_rows, max_pages = page_tables.shape
    _, num_parts, num_kv_heads, page_size, head_dim = pages.shape
    group = q.shape[1] // num_kv_heads
    key_position = jnp.arange(max_pages * page_size)

    def one_token(query: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
        length = jnp.where(row < num_rows, kv_length[jnp.minimum(row, num_rows - 1)], 0)
        is_visible = (key_position <= at) & (key_position < length)
        if window is not None:
            is_visible &= key_position > at - window
        if chunk is not None:
            is_visible &= key_position >= at // chunk * chunk
        is_page_visible = is_visible.reshape(max_pages, page_size).any(axis=1)
        page_ids = jnp.where(is_page_visible, page_tables[jnp.minimum(row, num_rows - 1)], 0)
        kv = stored_values(pages[page_ids])  # [P, parts, K, page_size, H]
        if kv_scales is not None:
            kv *= kv_scales[page_ids][..., None]
        kv = kv.transpose(1, 2, 0, 3, 4).reshape(num_parts, num_kv_heads, max_pages * page_size, head_dim)
        # 0 x NaN is NaN: values that are not visible are taken out, not only given no weight.
        kv = jnp.where(is_visible[None, None, :, None], kv, 0.0)
        k, v = kv[0], kv[-1]

        grouped = query.astype(jnp.float32).reshape(num_kv_heads, group, head_dim)
        scores = jnp.einsum("kgh,ksh->kgs", grouped, k, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(is_visible[None, None, :], scores, -jnp.inf)
        peak = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            peak = jnp.maximum(peak, sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1))
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1) - peak)
        out = jnp.einsum("kgs,ksh->kgh", weights, v, precision="highest") / jnp.where(total == 0.0, 1.0, total)
        return out.reshape(query.shape).astype(query.dtype)

    return jax.lax.map(lambda token: one_token(*token), (q, token_row, position))
