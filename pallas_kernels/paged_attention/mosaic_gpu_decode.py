"""Decode on wgmma: one query token a row. A block is one row, one kv head and one share of the row's keys.

wgmma's M is a multiple of 64, and a decode has a few query rows for each kv head. So the operands are swapped: keys lie on M, the
query rows of the group on N (padded to 8), and after the softmax the head dimension lies on M:

    S [kv_tile, R] = K [kv_tile, H] Q^T [H, R]          O^T [H, R] += V^T [H, kv_tile] P [kv_tile, R]

One warpgroup copies tiles (`mosaic_gpu_fetch`), the other multiplies. Shares of one row are put together by `merge`
(the reduce of Flash-Decoding: Dao et al., 2023). Next: `mosaic_gpu`, which calls both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_gpu_fetch as fetch
from pallas_kernels.paged_attention import mosaic_gpu_tile as tile
from pallas_kernels.paged_attention.mosaic_gpu_plan import DecodePlan
from pallas_kernels.paged_attention.mosaic_gpu_tile import LOG2_E, NO_SCORE, Ref, Rules

_COMPUTE, _MEMORY = 0, 1


class Partials(NamedTuple):
    """The softmax of S shares of a row's keys: values [B, K, S, R, H] not yet divided, base-2 peak and total [B, K, S, R]; float32."""

    values: jax.Array
    peak: jax.Array
    total: jax.Array


class _Shared(NamedTuple):
    """Shared memory of a block, and its barriers."""

    q: Ref
    kv: fetch.Stages
    weights: Ref
    out: Ref
    peak: Ref
    total: Ref
    q_here: Ref


def decode(
    q: jax.Array, pages: fetch.Pages, page_tables: jax.Array, kv_length: jax.Array, *, plan: DecodePlan, rules: Rules, num_splits: int
) -> Partials:
    """The partial softmaxes of one token a row, at position `kv_length - 1`.

    Args:
        q: [B, K, num_parts, R, H], R the query heads of a kv head, padded to a multiple of 8; the operands of wgmma.
        page_tables, kv_length: See `api.paged_attention`.
        num_splits: S, shares of each row's visible keys.
    """
    num_rows, num_kv_heads, num_parts, num_queries, head_dim = q.shape
    shares = (num_rows, num_kv_heads, num_splits, num_queries)
    per_query = plgpu.SMEM((num_queries,), jnp.float32)
    scratch = _Shared(
        q=tile.operand(plan, (num_parts, num_queries, head_dim), q.dtype),
        kv=fetch.stages(plan, pages.numbers.dtype, q.dtype, num_readers=1),
        weights=tile.operand(plan, (num_parts, num_queries, plan.kv_tile), q.dtype),
        out=plgpu.SMEM((num_queries, plan.padded_head_dim), jnp.float32),
        peak=per_query,
        total=per_query,
        q_here=plgpu.Barrier(num_arrivals=plan.num_parts),
    )
    kernel = plgpu.kernel(
        functools.partial(_block, plan=plan, rules=rules, num_splits=num_splits),
        out_type=(jax.ShapeDtypeStruct((*shares, plan.padded_head_dim), jnp.float32), *[jax.ShapeDtypeStruct(shares, jnp.float32)] * 2),
        scratch_types=[scratch],
        grid=(num_rows, num_kv_heads, num_splits),
        grid_names=("row", "head", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    values, peak, total = kernel(q, pages, page_tables, kv_length)
    return Partials(values[..., :head_dim], peak, total)


def merge(partials: Partials, sinks: jax.Array | None) -> jax.Array:
    """The one reduce: [B, K, R, H] float32 from shares. Rows without keys give 0.

    Args:
        sinks: [K, R], a logit that takes part without a value.
    """
    peak = partials.peak.max(axis=2)
    sink = None if sinks is None else sinks.astype(jnp.float32)[None] * LOG2_E
    if sink is not None:
        peak = jnp.maximum(peak, sink)
    factor = jnp.exp2(partials.peak - peak[:, :, None])
    total = (partials.total * factor).sum(axis=2)
    if sink is not None:
        total += jnp.exp2(sink - peak)
    values = (partials.values * factor[..., None]).sum(axis=2)
    return values / jnp.where(total == 0.0, 1.0, total)[..., None]


def _block(
    q: Ref, pages: fetch.Pages, page_tables: Ref, kv_length: Ref, *refs: Ref, plan: DecodePlan, rules: Rules, num_splits: int
) -> None:
    *outputs, shared = refs
    row, head, split = jax.lax.axis_index("row"), jax.lax.axis_index("head"), jax.lax.axis_index("split")
    warpgroup = jax.lax.axis_index("warpgroup")
    end = kv_length[row]
    steps = tile.walk(rules.first_visible(end - 1), end, plan, share=split, num_shares=num_splits)

    @pl.when(warpgroup == _MEMORY)
    def _fetch() -> None:
        fetch.fetch_tiles(pages, page_tables.at[row], shared.kv, plan=plan, head=head, steps=steps)

    @pl.when(warpgroup == _COMPUTE)
    def _attend() -> None:

        @pl.when(steps.count > 0)
        def _fetch_queries() -> None:
            for n in range(plan.num_parts):  # TMA has five dimensions, and tiles make two of one
                plgpu.copy_gmem_to_smem(q.at[row, head, n], shared.q.at[n], shared.q_here)
            plgpu.barrier_wait(shared.q_here)

        step = functools.partial(_one_tile, shared=shared, plan=plan, rules=rules, steps=steps)
        per_query = plgpu.Layout.WGMMA.reduce(0)
        num_queries = plan.num_queries
        peak, total, acc = jax.lax.fori_loop(0, steps.count, step, (
            plgpu.layout_cast(jnp.full((num_queries,), NO_SCORE, jnp.float32), per_query),
            plgpu.layout_cast(jnp.zeros((plan.kv_tile, num_queries), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.zeros((plan.padded_head_dim, num_queries), jnp.float32), plgpu.Layout.WGMMA),
        ))  # fmt: skip
        shared.out.transpose((1, 0))[...] = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
        shared.peak[...] = peak
        shared.total[...] = total.sum(0)
        plgpu.commit_smem()
        for source, target in zip((shared.out, shared.peak, shared.total), outputs, strict=True):
            plgpu.copy_smem_to_gmem(source, target.at[row, head, split])
        plgpu.wait_smem_to_gmem(0)


type _State = tuple[jax.Array, jax.Array, jax.Array]
"""Running softmax of R queries: base-2 peak [R], weights [kv_tile, R] (summed over the tiles, not yet within one: that sum goes through
shared memory), weighted values [H, R]."""


def _one_tile(i: jax.Array, state: _State, *, shared: _Shared, plan: DecodePlan, rules: Rules, steps: tile.Walk) -> _State:
    """Takes tile i of the walk into the running softmax (Milakov and Gimelshein, arXiv 1805.02867)."""
    peak, total, acc = state
    slot = jax.lax.rem(i, plan.num_stages)
    start = steps.origin + i * plan.kv_tile
    shape = plan.kv_tile, plan.num_queries
    plgpu.barrier_wait(shared.kv.filled.at[slot])

    def multiply_keys(product: Ref) -> jax.Array:
        for a, b in tile.PRODUCTS[plan.num_parts]:
            plgpu.wgmma(product, shared.kv.keys.at[slot, a], shared.q.at[b].transpose((1, 0)))
        return product[...]

    logits = rules.logits(shared.kv.scaled(pl.run_scoped(multiply_keys, plgpu.ACC(shape)), slot, fetch.KEYS, key_axis=0))
    position = start + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    logits = jnp.where((position >= steps.first) & (position < steps.end), logits, -jnp.inf)
    new_peak = jnp.maximum(peak, logits.max(0))
    decay = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(logits - jax.lax.broadcast_in_dim(new_peak, shape, (1,)))
    total = total * jax.lax.broadcast_in_dim(decay, shape, (1,)) + weights
    times_scales = shared.kv.scaled(weights, slot, fetch.VALUES, key_axis=0)
    for n, part in enumerate(tile.in_parts(times_scales, plan.num_parts, shared.weights.dtype)):
        shared.weights.at[n].transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)

    @pl.when(tile.is_cut(start, plan.kv_tile, steps))
    def _mask() -> None:
        for n in range(plan.num_parts):
            tile.mask_values(shared.kv.values.at[slot, n], start, steps)

    plgpu.commit_smem()

    def multiply_values(product: Ref) -> jax.Array:
        for a, b in tile.PRODUCTS[plan.num_parts]:
            plgpu.wgmma(product, shared.kv.values.at[slot, a].transpose((1, 0)), shared.weights.at[b].transpose((1, 0)))
        return product[...]

    values = pl.run_scoped(multiply_values, plgpu.ACC((plan.padded_head_dim, plan.num_queries)))
    fetch.release(shared.kv.used, i, plan, steps)
    return new_peak, total, acc * jax.lax.broadcast_in_dim(decay, acc.shape, (1,)) + values
