"""Ragged prefill on wgmma: query tiles, each inside one row. A block is one query tile and one kv head.

The query heads of the kv head are packed with the tokens on wgmma's M, token-major, each token's heads padded to a power of two (G), so
that 64 rows of a warpgroup are 64 / G whole tokens:

    S [64, kv_tile] = Q [64, H] K^T [H, kv_tile]          O [64, H] += P [64, kv_tile] V [kv_tile, H]

Two warpgroups multiply, each for its 64 rows, a third copies tiles of pages for both (`mosaic_gpu_fetch`): while one is
in its softmax the other has the tensor cores (as in FlashAttention-3, arXiv 2407.08608). P goes from the softmax to the second product in
registers. Which row a tile lies in is worked out by XLA, once a step: all layers have the same arguments. Next: `mosaic_gpu`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import mosaic_gpu_fetch as fetch
from pallas_kernels.paged_attention import mosaic_gpu_tile as tile
from pallas_kernels.paged_attention.mosaic_gpu_plan import REDUCTION_BYTES, WARPGROUP_ROWS, PrefillPlan
from pallas_kernels.paged_attention.mosaic_gpu_tile import LOG2_E, NO_SCORE, Ref, Rules


class QueryTiles(NamedTuple):
    """Where the query tiles of a step lie: int32 [num_tiles] each, num_tiles a bound that no step exceeds.

    A tile takes `[base, base + tokens in a tile)`; base is aligned so that TMA can copy from there, and what lies before `first` or from
    `stop` on belongs to other rows, or to nobody. Tiles that are left over have first = stop.
    """

    row: jax.Array
    base: jax.Array
    first: jax.Array
    stop: jax.Array
    position: jax.Array
    """Of the token `first`."""


class _Shared(NamedTuple):
    """Shared memory of a block, and its barriers; those of warpgroups come first."""

    q: Ref
    kv: fetch.Stages
    masked: Ref
    out: Ref
    sinks: Ref
    q_here: Ref


def query_tiles(row_start: jax.Array, position: jax.Array, num_single: jax.Array, plan: PrefillPlan) -> QueryTiles:
    """Cuts the rows `[num_single, B)` into tiles.

    Args:
        row_start: [B + 1], see `api.paged_attention`.
        position: [T], likewise.
        num_single: Leading rows that somebody else serves.
    """
    num_tokens, num_rows = position.shape[0], row_start.shape[0] - 1
    width, aligned = plan.num_compute * plan.tokens_in_warpgroup, max(1, 8 // plan.group)
    is_mine = (jnp.arange(num_rows) >= num_single) & (row_start[1:] > row_start[:-1])
    start = row_start[:-1] // aligned * aligned
    count = jnp.where(is_mine, (row_start[1:] - start + width - 1) // width, 0)
    end = jnp.cumsum(count)
    rows_at_most = min(num_rows, num_tokens)
    num_tiles = rows_at_most + (num_tokens + rows_at_most * (aligned - 1)) // width
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(end, index, side="right"), num_rows - 1).astype(jnp.int32)
    base = start[row] + (index - (end - count)[row]) * width
    first = jnp.clip(jnp.maximum(base, row_start[row]), 0, num_tokens - 1)
    stop = jnp.where(index < end[-1], jnp.minimum(base + width, row_start[row + 1]), first)
    return QueryTiles(row, base, first, stop, position[first])


def prefill(
    q: jax.Array,
    pages: fetch.Pages,
    page_tables: jax.Array,
    tiles: QueryTiles,
    sinks: jax.Array | None,
    *,
    plan: PrefillPlan,
    rules: Rules,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Attention of the tokens of query tiles: [T, K, group, H] in `out_dtype`. The output of other tokens is not written.

    Args:
        q: [num_parts, T, K, group, H], the operands of wgmma.
        page_tables: See `api.paged_attention`.
        sinks: [K, group] or None.
    """
    _, num_tokens, num_kv_heads, group, head_dim = q.shape
    spare = (
        plan.num_compute * plan.tokens_in_warpgroup + -num_tokens % 8
    )  # the last tile reaches past the last token; TMA sees rows in eights
    padding = plan.group - group
    packed = jnp.pad(q, ((0, 0), (0, spare), (0, 0), (0, padding), (0, 0)))
    packed = packed.transpose(2, 0, 1, 3, 4).reshape(num_kv_heads, plan.num_parts, -1, head_dim)
    row_sinks = jnp.zeros((num_kv_heads, WARPGROUP_ROWS), jnp.float32)
    if sinks is not None:
        row_sinks = jnp.tile(jnp.pad(sinks.astype(jnp.float32) * LOG2_E, ((0, 0), (0, padding))), (1, plan.tokens_in_warpgroup))
    rows = (plan.num_compute, WARPGROUP_ROWS)
    scratch = _Shared(
        q=tile.operand(plan, (plan.num_compute, plan.num_parts, WARPGROUP_ROWS, head_dim), q.dtype),
        kv=fetch.stages(plan, pages.numbers.dtype, q.dtype, num_readers=plan.num_compute),
        masked=plgpu.Barrier(num_barriers=plan.num_stages),
        out=plgpu.SMEM((*rows, plan.chunk), out_dtype),
        sinks=plgpu.SMEM(rows, jnp.float32),
        q_here=plgpu.Barrier(num_arrivals=plan.num_parts + 1, num_barriers=plan.num_compute),
    )
    kernel = plgpu.kernel(
        functools.partial(_block, plan=plan, rules=rules, has_sinks=sinks is not None),
        out_type=jax.ShapeDtypeStruct(q.shape[1:], out_dtype),
        scratch_types=[scratch],
        grid=(num_kv_heads, tiles.row.shape[0]),
        grid_names=("head", "tile"),
        num_threads=plan.num_compute + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES["prefill"]),
    )
    out: jax.Array = kernel(packed, row_sinks, pages, page_tables, tiles)
    return out


def _block(
    q: Ref,
    sinks: Ref,
    pages: fetch.Pages,
    page_tables: Ref,
    tiles: Any,
    out: Ref,
    shared: _Shared,
    *,
    plan: PrefillPlan,
    rules: Rules,
    has_sinks: bool,
) -> None:
    head, index = jax.lax.axis_index("head"), jax.lax.axis_index("tile")
    warpgroup = jax.lax.axis_index("warpgroup")
    row, base, first, stop, position = (ref[index] for ref in tiles)
    first_key = rules.first_visible(position)
    end_key = jnp.where(stop > first, position + stop - first, first_key)
    steps = tile.walk(first_key, end_key, plan)

    @pl.when(warpgroup == plan.num_compute)
    def _fetch() -> None:
        _set_registers(plan, is_memory=True)
        fetch.fetch_tiles(pages, page_tables.at[row], shared.kv, plan=plan, head=head, steps=steps)

    @pl.when((warpgroup < plan.num_compute) & (stop > first))
    def _attend() -> None:
        _set_registers(plan, is_memory=False)
        my_base = base + warpgroup * plan.tokens_in_warpgroup
        my_rows = pl.ds(pl.multiple_of(my_base * plan.group, 8), WARPGROUP_ROWS)
        for n in range(plan.num_parts):
            plgpu.copy_gmem_to_smem(q.at[head, n, my_rows], shared.q.at[warpgroup, n], shared.q_here.at[warpgroup])
        plgpu.copy_gmem_to_smem(sinks.at[head], shared.sinks.at[warpgroup], shared.q_here.at[warpgroup])
        plgpu.barrier_wait(shared.q_here.at[warpgroup])
        # Of the warpgroup's first token. Those before `first` and from `stop` on are computed like the others, and not stored.
        my_position = position + my_base - first
        step = functools.partial(
            _one_tile, shared=shared, plan=plan, rules=rules, steps=steps, warpgroup=warpgroup, my_position=my_position
        )
        per_query = plgpu.Layout.WGMMA.reduce(1)
        nothing = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, plan.chunk), jnp.float32), plgpu.Layout.WGMMA)
        peak = plgpu.load(shared.sinks.at[warpgroup], layout=per_query)
        if not has_sinks:
            peak = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), NO_SCORE, jnp.float32), per_query)
        total = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), float(has_sinks), jnp.float32), per_query)
        chunks = plan.head_dim // plan.chunk
        _, total, acc = jax.lax.fori_loop(0, steps.count, step, (peak, total, (nothing,) * chunks))
        _store(acc, total, out, shared.out.at[warpgroup], plan=plan, head=head, my_base=my_base, first=first, stop=stop)


def _set_registers(plan: PrefillPlan, *, is_memory: bool) -> None:
    """Gives to those who multiply what copying does not need; of two warpgroups each has the most there are anyway."""
    if plan.num_compute == 2:
        memory = 72 if plan.num_stored else 40
        plgpu.set_max_registers(memory if is_memory else (504 - memory) // 2 // 8 * 8, action="decrease" if is_memory else "increase")


type _State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]
"""Running softmax of 64 queries: base-2 peak [64], sum of weights [64], weighted values by chunks of the head [64, chunk]."""


def _one_tile(
    i: jax.Array,
    state: _State,
    *,
    shared: _Shared,
    plan: PrefillPlan,
    rules: Rules,
    steps: tile.Walk,
    warpgroup: jax.Array,
    my_position: jax.Array,
) -> _State:
    """Takes tile i of the walk into the running softmax (Milakov and Gimelshein, arXiv 1805.02867)."""
    peak, total, acc = state
    slot = jax.lax.rem(i, plan.num_stages)
    start = steps.origin + i * plan.kv_tile
    shape = WARPGROUP_ROWS, plan.kv_tile
    plgpu.barrier_wait(shared.kv.filled.at[slot])
    _mask_values_once(shared, slot, start, steps, warpgroup, plan)

    def multiply_keys(product: Ref) -> jax.Array:
        for a, b in tile.PRODUCTS[plan.num_parts]:
            plgpu.wgmma(product, shared.q.at[warpgroup, a], shared.kv.keys.at[slot, b].transpose((1, 0)))
        return product[...]

    logits = rules.logits(shared.kv.scaled(pl.run_scoped(multiply_keys, plgpu.ACC(shape)), slot, fetch.KEYS, key_axis=1))
    logits = _mask_logits(logits, start, my_position, plan=plan, rules=rules)
    new_peak = jnp.maximum(peak, logits.max(1))
    decay = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(logits - jax.lax.broadcast_in_dim(new_peak, shape, (0,)))
    total = total * decay + weights.sum(1)
    parts = tile.in_parts(shared.kv.scaled(weights, slot, fetch.VALUES, key_axis=1), plan.num_parts, shared.kv.values.dtype)

    def multiply_values(product: Ref, at: int) -> jax.Array:
        for a, b in tile.PRODUCTS[plan.num_parts]:
            plgpu.wgmma(product, parts[a], shared.kv.values.at[slot, b, :, pl.ds(at, plan.chunk)])
        return product[...]

    def add(old: jax.Array, at: int) -> jax.Array:
        added = pl.run_scoped(functools.partial(multiply_values, at=at), plgpu.ACC((WARPGROUP_ROWS, plan.chunk)))
        return old * jax.lax.broadcast_in_dim(decay, old.shape, (0,)) + added

    acc = tuple(add(old, n * plan.chunk) for n, old in enumerate(acc))
    fetch.release(shared.kv.used, i, plan, steps)
    return new_peak, total, acc


def _mask_values_once(
    shared: _Shared, slot: jax.Array, start: jax.Array, steps: tile.Walk, warpgroup: jax.Array, plan: PrefillPlan
) -> None:
    """One warpgroup masks the values that all multiply with, the others wait."""

    def mask() -> None:
        for n in range(plan.num_parts):
            tile.mask_values(shared.kv.values.at[slot, n], start, steps)
        plgpu.commit_smem()
        if plan.num_compute > 1:
            plgpu.barrier_arrive(shared.masked.at[slot])

    @pl.when(tile.is_cut(start, plan.kv_tile, steps))
    def _mask() -> None:
        pl.when(warpgroup == 0)(mask)
        pl.when(warpgroup != 0)(lambda: plgpu.barrier_wait(shared.masked.at[slot]))


def _mask_logits(logits: jax.Array, start: jax.Array, my_position: jax.Array, *, plan: PrefillPlan, rules: Rules) -> jax.Array:
    """-inf where a query does not see a key. Most tiles of a long row lie wholly inside what all 64 rows see, and cost nothing."""
    last_position = my_position + plan.tokens_in_warpgroup - 1
    is_whole = (start + plan.kv_tile - 1 <= my_position) & (rules.first_visible(last_position) <= start)

    def mask(logits: jax.Array) -> jax.Array:
        rows = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        query = my_position + rows // plan.group
        key = start + plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        last = jax.lax.broadcast_in_dim(query, logits.shape, (0,))
        first = jax.lax.broadcast_in_dim(rules.first_visible(query), logits.shape, (0,))
        return jnp.where((key <= last) & (key >= first), logits, -jnp.inf)

    return jax.lax.cond(is_whole, lambda logits: logits, mask, logits)


def _store(
    acc: tuple[jax.Array, ...],
    total: jax.Array,
    out: Ref,
    staging: Ref,
    *,
    plan: PrefillPlan,
    head: jax.Array,
    my_base: jax.Array,
    first: jax.Array,
    stop: jax.Array,
) -> None:
    """Divides and writes the warpgroup's tokens that lie in `[first, stop)`, a chunk of the head after the other."""
    factor = 1.0 / jnp.where(total == 0.0, 1.0, total)
    group = out.shape[2]
    for n, values in enumerate(acc):
        staging[...] = (values * jax.lax.broadcast_in_dim(factor, values.shape, (0,))).astype(staging.dtype)
        plgpu.commit_smem()

        def one_token(token: jax.Array, _: None, at: int = n * plan.chunk) -> None:
            rows = pl.ds((token - my_base) * plan.group, group)
            plgpu.copy_smem_to_gmem(staging.at[rows], out.at[token, head, :, pl.ds(at, plan.chunk)])

        jax.lax.fori_loop(jnp.maximum(first, my_base), jnp.minimum(stop, my_base + plan.tokens_in_warpgroup), one_token, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=n + 1 < len(acc))
