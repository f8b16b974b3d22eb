"""Attention over pages on wgmma and TMA (capability 9.0), in Pallas Mosaic GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import mosaic_gpu_plan as planning

if TYPE_CHECKING:
    from pallas_kernels.dispatch import Needs

CAPABILITY = (9, 0)
"""The one that has wgmma."""


def lacks(needs: Needs, capability: tuple[int, int]) -> str | None:
    """What this implementation has not got for a layer on such a card, or None when it serves it."""
    if capability != CAPABILITY:
        return f"wgmma, which capability {capability[0]}.{capability[1]} has not"
    if needs.num_parts != 2:
        return "pages of one part (latent attention)"
    if needs.page_dtype not in ("bfloat16", "float16"):
        return f"{needs.page_dtype} pages: wgmma multiplies 16-bit numbers"
    if needs.head_dim > 256 or planning.swizzle_of(needs.head_dim) is None:
        return f"head_dim {needs.head_dim}: it serves multiples of 16 up to 256"
    if needs.page_size % 8:
        return f"page_size {needs.page_size}: it serves multiples of 8"
    return None


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
    from pallas_kernels.paged_attention import mosaic_gpu_decode
    from pallas_kernels.paged_attention.mosaic_gpu_tile import Rules

    num_rows = page_tables.shape[0]
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    group = q.shape[1] // num_kv_heads
    max_keys = page_tables.shape[1] * page_size
    plan = planning.plan_decode(head_dim=head_dim, group=group, page_size=page_size, max_keys=max_keys, is_quantized=False)
    assert plan is not None and is_decode
    rules = Rules(scale=scale, window=window, chunk=chunk, soft_cap=soft_cap)
    padding = ((0, 0), (0, 0), (0, plan.num_queries - group), (0, 0))
    packed = jnp.pad(q.reshape(num_rows, num_kv_heads, group, head_dim).astype(pages.dtype), padding)
    num_splits = planning.num_splits(num_rows=num_rows, num_kv_heads=num_kv_heads, max_keys=max_keys, kv_tile=plan.kv_tile)
    partials = mosaic_gpu_decode.decode(packed, pages, page_tables, kv_length, plan=plan, rules=rules, num_splits=num_splits)
    grouped_sinks = None if sinks is None else jnp.pad(sinks.reshape(num_kv_heads, group), padding[1:3])
    out = mosaic_gpu_decode.merge(partials, grouped_sinks)
    return out[:, :, :group].reshape(q.shape).astype(q.dtype)
