"""Attention over pages on wgmma and TMA (capability 9.0), in Pallas Mosaic GPU: what it serves, and which kernel gets which tokens.

How the kernels walk memory. The pages of a layer are [num_pages, 2, K, page_size, H]: the keys of one page and kv head are one piece of
page_size x H numbers, its values another. A block serves one kv head. It walks the keys that its queries can see, [first, end), in
tiles of `kv_tile` keys (64 or 128, whatever the page size). A tile is put together from boxes, a box being what one page and one tile
share: a small page whole, or a tile's part of a large one. Page 16, tile 64, a row of 200 keys with a window of 100 (first = 100,
end = 200):

    page table row   [  .   .   .   .   .   .  41   7  93  12   5  88  30 | garbage ]     entries that no query sees are not read
    positions                              96  112 128 144 160 176 192 208
    first tile       96..159 = pages 41, 7, 93, 12: 4 boxes of keys, 4 of values          (96..99 are copied, and masked)
    second tile      160..223 = pages 5, 88, 30:    3 boxes each, the fourth is left out  (200..223 are masked)

    device memory                          shared memory: a ring of stages
    page 41 keys   [16, H] -- TMA -->      keys   [ 41 | 7 | 93 | 12 ]  kv_tile x H, 8 rows by one swizzle to a block, as wgmma reads it
    page 41 values [16, H] -- TMA -->      values [ 41 | 7 | 93 | 12 ]  likewise
                                           filled: counts the boxes of a stage     used: its readers are done with it

A memory warpgroup runs ahead: it waits for `used`, looks up the page of each box in device memory and starts its two copies, which
arrive at `filled` by themselves. The warpgroups that multiply wait for `filled`, and arrive at `used`. Each key and value that a block
sees is thus read once, for all heads that share it; all arithmetic on addresses is TMA's, in 64 bits.

Masks. Scores of keys that a query does not see become -inf. In the first and the last tile of a walk, where places lie outside [first,
end), values are set to 0 in shared memory: their weights are 0, but 0 x NaN is NaN, and nobody has written those places since their
last owner.

Which kernel. `mosaic_gpu_decode` takes steps with one token a row, and the rows that open a mixed step with one token each: keys lie on
wgmma's M, the few query rows of a kv head on N, and a row's keys are split over blocks when rows are few, which one reduce (XLA) puts
together. `mosaic_gpu_prefill` takes the other rows: tokens and heads lie on M, 128 rows of them in a block. Head dimensions that are no
multiple of 64 (80, 96) have a smaller swizzle (32 and 64 bytes), and decode's values, which have the head on M, are padded to 128
columns by TMA, with zeros it does not read.

Pages of 8 and of 32 bits. wgmma multiplies 16-bit numbers (8-bit floats too, but not values that lie along the head; float32 as tf32,
11 bits). So TMA leaves such tiles as they are stored in a ring of their own, and the memory warpgroup widens one after the other into a
stage: 8-bit numbers to bfloat16, which holds them exactly, float32 numbers to three bfloat16 that add up to them (six products
then stand for one). Scales multiply scores and weights, in float32:

    device memory                       stored as they are               stages, as wgmma reads them
    page 41 keys   int8 [16, H] -TMA->  [ 41 | 7 | 93 | 12 ]  -widen->   keys [64, H] bf16
    page 41 scales      [16]    -TMA->  a row of 32 for each box  -->    scales [64], 0 outside [first, end)

What it leaves to `triton`: latent pages of one part, and what shared memory is too small for (float32 heads of 192 and 256, wide groups).

Does not know the tuning of a card (`mosaic_gpu_plan` has the heuristics). Rules: `reference`. Next: `mosaic_gpu_tile`, `mosaic_gpu_fetch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.paged_attention import mosaic_gpu_plan as planning

if TYPE_CHECKING:
    from pallas_kernels.dispatch import Needs
    from pallas_kernels.paged_attention.mosaic_gpu_fetch import Pages
    from pallas_kernels.paged_attention.mosaic_gpu_tile import Rules

CAPABILITY = (9, 0)
"""The one that has wgmma."""
_TILES = {"kv_tile": (64, 128), "num_stages": (1, 2, 3, 4)}
TUNABLES = {"decode": {**_TILES, "num_splits": (1, 2, 4, 8, 16)}, "prefill": _TILES}
"""What `tuning` may try of `Sizes`, by launch; what does not fit shared memory does not compile, and is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What may be tuned of a launch: see `mosaic_gpu_plan.TilePlan`, and `num_splits` there; 1 in prefill."""

    kv_tile: int
    num_stages: int
    num_splits: int = 1


def lacks(needs: Needs, capability: tuple[int, int]) -> str | None:
    """What this implementation has not got for a layer on such a card, or None when it serves it; several things separated by "; "."""
    found = []
    if capability != CAPABILITY:
        found.append(f"wgmma on capability {capability[0]}.{capability[1]}")
    if needs.num_parts != 2:
        found.append("pages of one part (latent attention)")
    if needs.head_dim > 256 or needs.head_dim % 16:
        found.append(f"head_dim {needs.head_dim} (it has multiples of 16 up to 256)")
    if needs.page_size % 8:
        found.append(f"page_size {needs.page_size} (it has multiples of 8)")
    if needs.group > planning.WARPGROUP_ROWS:
        found.append(f"{needs.group} query heads for a kv head (it has up to {planning.WARPGROUP_ROWS})")
    shape: dict[str, int] = {
        "head_dim": needs.head_dim, "group": needs.group, "page_size": needs.page_size, "max_keys": 1 << 20,
        "page_bytes": jnp.dtype(needs.page_dtype).itemsize,
    }  # fmt: skip
    out_bytes = 4 if needs.q_dtype == "float32" else 2
    if not found and (planning.plan_decode(**shape) is None or planning.plan_prefill(**shape, out_bytes=out_bytes) is None):
        found.append(
            f"shared memory for head_dim {needs.head_dim} with {needs.group} query heads for a kv head, {needs.q_dtype} queries and "
            f"{needs.page_dtype} pages"
        )
    return "; ".join(found) or None


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
    """See `api.paged_attention`. Rows that open a mixed step with one token each go the way of decode."""
    from pallas_kernels.paged_attention import mosaic_gpu_fetch, mosaic_gpu_prefill, mosaic_gpu_tile

    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads, page_size = page_tables.shape[0], pages.shape[2], pages.shape[3]
    group, max_keys = num_heads // num_kv_heads, page_tables.shape[1] * page_size
    rules = mosaic_gpu_tile.Rules(scale=scale, window=window, chunk=chunk, soft_cap=soft_cap)
    grouped = _operands(q, pages.dtype).reshape(-1, num_tokens, num_kv_heads, group, head_dim)
    grouped_sinks = None if sinks is None else sinks.reshape(num_kv_heads, group)
    if pages.dtype == jnp.uint8:
        pages = jax.lax.bitcast_convert_type(pages, jnp.float8_e4m3fn)
    stored = mosaic_gpu_fetch.Pages(pages, kv_scales)
    if is_decode:
        return _decode(grouped, stored, page_tables, kv_length, grouped_sinks, rules).reshape(q.shape).astype(q.dtype)
    num_single = jnp.cumprod(jnp.diff(row_start) == 1).sum()
    of_single = _decode(
        jnp.pad(grouped, ((0, 0), (0, max(0, num_rows - num_tokens)), (0, 0), (0, 0), (0, 0)))[:, :num_rows],
        stored, page_tables, jnp.where(jnp.arange(num_rows) < num_single, kv_length, 0), grouped_sinks, rules,
    )  # fmt: skip
    plan = planning.plan_prefill(
        head_dim=head_dim, group=group, page_size=page_size, page_bytes=pages.dtype.itemsize, max_keys=max_keys,
        out_bytes=q.dtype.itemsize,
    )  # fmt: skip
    assert plan is not None, (head_dim, group)
    plan, _ = _tuned(plan, "prefill", {"keys": max_keys}, pages=pages, group=group)
    tiles = mosaic_gpu_prefill.query_tiles(row_start, position, num_single, plan)
    out = mosaic_gpu_prefill.prefill(grouped, stored, page_tables, tiles, grouped_sinks, plan=plan, rules=rules, out_dtype=q.dtype)
    of_single = jnp.pad(of_single, ((0, max(0, num_tokens - num_rows)), (0, 0), (0, 0), (0, 0)))[:num_tokens]
    is_single = (token_row < num_single)[:, None, None, None]
    is_padding = (token_row == num_rows)[:, None, None, None]
    return jnp.where(is_padding, 0.0, jnp.where(is_single, of_single, out)).reshape(q.shape).astype(q.dtype)


def _operands(q: jax.Array, page_dtype: DTypeLike) -> jax.Array:
    """Queries as wgmma's operands [num_parts, *q.shape]: of the dtype of 16-bit pages, or else bfloat16.

    Float16 would do for numbers of 8 bits, but not for weights times scales, which may be smaller than it holds.
    """
    page_bytes = jnp.dtype(page_dtype).itemsize
    if page_bytes == 2:
        return q.astype(page_dtype)[None]
    parts, rest = [], q.astype(jnp.float32)
    for _ in range(planning.num_parts(page_bytes)):
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))  # XLA may drop a pair of conversions, but not this
        rest = rest - parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)


def _decode(q: jax.Array, pages: Pages, page_tables: jax.Array, kv_length: jax.Array, sinks: jax.Array | None, rules: Rules) -> jax.Array:
    """q [num_parts, B, K, group, H], one token a row -> [B, K, group, H] float32. Rows of length 0 give 0; sinks [K, group]."""
    from pallas_kernels.paged_attention import mosaic_gpu_decode

    _, num_rows, num_kv_heads, group, head_dim = q.shape
    page_size = pages.numbers.shape[3]
    max_keys = page_tables.shape[1] * page_size
    plan = planning.plan_decode(
        head_dim=head_dim, group=group, page_size=page_size, page_bytes=pages.numbers.dtype.itemsize, max_keys=max_keys
    )
    assert plan is not None, (head_dim, group)
    padding = ((0, 0), (0, plan.num_queries - group))
    packed = jnp.moveaxis(jnp.pad(q, ((0, 0), (0, 0), *padding, (0, 0))), 0, 2)
    num_splits = planning.num_splits(num_rows=num_rows, num_kv_heads=num_kv_heads, max_keys=max_keys, kv_tile=plan.kv_tile)
    plan, num_splits = _tuned(plan, "decode", {"rows": num_rows, "keys": max_keys}, num_splits, pages=pages.numbers, group=group)
    partials = mosaic_gpu_decode.decode(packed, pages, page_tables, kv_length, plan=plan, rules=rules, num_splits=num_splits)
    out = mosaic_gpu_decode.merge(partials, None if sinks is None else jnp.pad(sinks, padding))
    return out[:, :, :group]


def _tuned[P: planning.TilePlan](
    plan: P, kind: str, rounded: dict[str, int], num_splits: int = 1, *, pages: jax.Array, group: int
) -> tuple[P, int]:
    """The plan of a launch and its splits, as measured where they were."""
    page_size = pages.shape[3]
    shape_class = tuning.shape_class(
        kind, rounded=rounded, group=group, head_dim=plan.head_dim, page_size=page_size, page_bytes=pages.dtype.itemsize
    )
    computed = Sizes(kv_tile=plan.kv_tile, num_stages=plan.num_stages, num_splits=num_splits)
    sizes = tuning.tuned("paged_attention", "mosaic_gpu", shape_class, computed)
    box = math.gcd(page_size, sizes.kv_tile)
    return replace(plan, kv_tile=sizes.kv_tile, box=box, num_stages=sizes.num_stages), sizes.num_splits
