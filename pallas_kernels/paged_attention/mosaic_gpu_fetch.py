"""The memory warpgroup of the Mosaic GPU kernels: tiles of pages into shared memory, ahead of those who multiply.

A tile of keys lies in shared memory as `kv_tile` rows of the head, cut into blocks of 8 rows by one swizzle, as wgmma reads it. It is
put together from boxes: a box is the part of one page that fits (or a whole small page), and one TMA copy fetches its keys and another
its values. Where wgmma cannot multiply what pages hold, boxes arrive as they are stored and are widened from there: 8-bit numbers to
16 bits, float32 numbers to three bfloat16 that add up to them. Does not know which queries read the tile. Next: `mosaic_gpu_decode`,
`mosaic_gpu_prefill`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_plan import WARPGROUP_ROWS, TilePlan, scales_of_box
from pallas_kernels.paged_attention.mosaic_gpu_tile import Ref, Walk, in_parts, operand, swizzled

KEYS, VALUES = 0, 1
"""The parts of a page."""


class Stored(NamedTuple):
    """Shared memory of tiles as pages hold them, `[num_stored, kv_tile, H]`, and the barriers that say that a tile is here.

    Scales of 8-bit pages lie box by box, `[num_stored, 2, boxes, scales_of_box]`.
    """

    keys: Ref
    values: Ref
    scales: Ref | None
    arrived: Ref


class Stages(NamedTuple):
    """Shared memory of `num_stages` tiles, and the barriers that say that a stage is filled, and that its readers are done with it.

    Keys and values are `[num_stages, num_parts, kv_tile, H]`, scales of 8-bit pages `[num_stages, 2, kv_tile]`. A stage is filled from
    `stored`, or by TMA where that is None.
    """

    keys: Ref
    values: Ref
    scales: Ref | None
    filled: Ref
    used: Ref
    stored: Stored | None

    def scaled(self, x: jax.Array, slot: jax.Array, kind: int, *, key_axis: int) -> jax.Array:
        """`x` times the scale of each key (`kind` KEYS) or value (VALUES) of a stage; x itself where pages have no scales."""
        if self.scales is None:
            return x
        of_key = plgpu.load(self.scales.at[slot, kind], layout=plgpu.Layout.WGMMA.reduce(1 - key_axis))
        return x * jax.lax.broadcast_in_dim(of_key, x.shape, (key_axis,))


def stages(plan: TilePlan, page_dtype: Any, dtype: Any, num_readers: int) -> Stages:
    """Scratch for `fetch_tiles` and `num_readers` warpgroups that each read every tile; `dtype` is that of wgmma's operands."""
    tiles = (plan.num_stages, plan.num_parts, plan.kv_tile)
    has_scales = jnp.dtype(page_dtype).itemsize == 1
    stored = None
    if plan.num_stored:
        copies = plgpu.Barrier(num_arrivals=(4 if has_scales else 2) * plan.boxes_in_tile, num_barriers=plan.num_stored)
        boxes = plgpu.SMEM((plan.num_stored, 2, plan.boxes_in_tile, scales_of_box(plan.box)), jnp.float32)
        numbers = _as_stored(plan, page_dtype)
        stored = Stored(numbers, numbers, boxes if has_scales else None, copies)
    return Stages(
        operand(plan, (*tiles, plan.head_dim), dtype),
        operand(plan, (*tiles, plan.padded_head_dim), dtype),
        plgpu.SMEM((plan.num_stages, 2, plan.kv_tile), jnp.float32) if has_scales else None,
        plgpu.Barrier(num_arrivals=1 if stored else 2 * plan.boxes_in_tile, num_barriers=plan.num_stages),
        plgpu.Barrier(num_arrivals=num_readers, num_barriers=plan.num_stages),
        stored,
    )


def _as_stored(plan: TilePlan, page_dtype: Any) -> Any:
    """Keys or values as stored, swizzled where rows allow it: so the lanes of a load meet different banks."""
    shape, item = (plan.num_stored, plan.kv_tile, plan.head_dim), jnp.dtype(page_dtype).itemsize
    sizes = (64, 32) if item == 1 else (128, 64)  # of rows that are loaded 64 numbers at a time
    swizzle = next((size for size in sizes if plan.head_dim * item % size == 0), None)
    return plgpu.SMEM(shape, page_dtype) if swizzle is None else swizzled(shape, page_dtype, swizzle)


class Pages(NamedTuple):
    """A layer in device memory: keys and values `[num_pages, 2, K, page_size, H]`, scales `[num_pages, 2, K, page_size]` or None."""

    numbers: Ref
    scales: Ref | None


def fetch_tiles(pages: Pages, table: Ref, to: Stages, *, plan: TilePlan, head: jax.Array, steps: Walk) -> None:
    """The memory warpgroup: fills stages with the tiles of a walk, as many ahead of their readers as there are stages.

    Args:
        table: [P], the row's.
    """
    copy = functools.partial(_start_copies, pages, table, plan=plan, head=head, steps=steps)
    stored = to.stored

    def await_readers(i: jax.Array) -> jax.Array:
        slot = jax.lax.rem(i, plan.num_stages)
        pl.when(i >= plan.num_stages)(lambda: plgpu.barrier_wait(to.used.at[slot]))
        return slot

    def copy_tile(i: jax.Array, _: None) -> None:
        slot = await_readers(i)
        copy(i, to.keys.at[slot, 0], to.values.at[slot, 0], None, to.filled.at[slot])

    def widen_tile(i: jax.Array, stored: Stored) -> None:
        plgpu.barrier_wait(stored.arrived.at[jax.lax.rem(i, plan.num_stored)])
        slot = await_readers(i)
        _widen(to, stored, i, plan=plan, steps=steps)
        plgpu.commit_smem()  # also: all threads have read what the next copies overwrite
        plgpu.barrier_arrive(to.filled.at[slot])

    def copy_and_widen(i: jax.Array, _: None) -> None:
        """Widens the tile whose place tile i takes, then starts the copies of tile i."""
        assert stored is not None
        pl.when(i >= plan.num_stored)(lambda: widen_tile(i - plan.num_stored, stored))

        @pl.when(i < steps.count)
        def _start() -> None:
            slot = jax.lax.rem(i, plan.num_stored)
            scales = None if stored.scales is None else stored.scales.at[slot]
            copy(i, stored.keys.at[slot], stored.values.at[slot], scales, stored.arrived.at[slot])

    if stored is None:
        jax.lax.fori_loop(0, steps.count, copy_tile, None)
    else:
        jax.lax.fori_loop(0, jnp.where(steps.count > 0, steps.count + plan.num_stored, 0), copy_and_widen, None)


def release(used: Ref, i: jax.Array, plan: TilePlan, steps: Walk) -> None:
    """A reader is done with tile i. Nobody waits for the last ones."""

    @pl.when(i + plan.num_stages < steps.count)
    def _arrive() -> None:
        plgpu.barrier_arrive(used.at[jax.lax.rem(i, plan.num_stages)])


def _start_copies(
    pages: Pages,
    table: Ref,
    i: jax.Array,
    keys: Ref,
    values: Ref,
    scales: Ref | None,
    barrier: Ref,
    *,
    plan: TilePlan,
    head: jax.Array,
    steps: Walk,
) -> None:
    """Starts the copies of tile i, each of which arrives at `barrier`. TMA takes 64-bit strides: no offset of ours can overflow.

    A box that no query of the block sees is not copied, and its page table entry not read: whatever page that names may belong to
    another row, or to nobody. What lies in its place in shared memory then is masked like the rest.
    """
    page_size = pages.numbers.shape[3]
    for j in range(plan.boxes_in_tile):
        position = steps.origin + i * plan.kv_tile + j * plan.box
        is_seen = (position + plan.box > steps.first) & (position < steps.end)
        rows = pl.ds(j * plan.box, plan.box)

        @pl.when(is_seen)
        def _copy(position: jax.Array = position, rows: Any = rows, j: int = j) -> None:
            page = table[position // page_size]
            places = pl.ds(pl.multiple_of(jax.lax.rem(position, page_size), plan.box), plan.box)
            width = pl.ds(0, values.shape[-1])  # what lies past the head is 0, written by TMA
            plgpu.copy_gmem_to_smem(pages.numbers.at[page, KEYS, head, places], keys.at[rows], barrier)
            plgpu.copy_gmem_to_smem(pages.numbers.at[page, VALUES, head, places, width], values.at[rows], barrier)
            if scales is not None:
                assert pages.scales is not None
                for kind in (KEYS, VALUES):
                    of_box = scales.at[kind, j, pl.ds(0, plan.box)]
                    plgpu.copy_gmem_to_smem(pages.scales.at[page, kind, head, places], of_box, barrier)

        @pl.when(jnp.logical_not(is_seen))
        def _leave_out() -> None:
            for _ in range(2 if scales is None else 4):
                plgpu.barrier_arrive(barrier)


def _widen(to: Stages, stored: Stored, i: jax.Array, *, plan: TilePlan, steps: Walk) -> None:
    """Writes the operands of tile i from what is stored, 64 columns at a time where the head allows it; call `commit_smem` then.

    Columns past the head, where values are padded, stay as they are: they become rows of the output that nobody reads.
    """
    slot, source = jax.lax.rem(i, plan.num_stages), jax.lax.rem(i, plan.num_stored)
    step = WARPGROUP_ROWS if plan.head_dim % WARPGROUP_ROWS == 0 else plan.head_dim
    for numbers, operands in ((stored.keys, to.keys), (stored.values, to.values)):
        for row in range(0, plan.kv_tile, WARPGROUP_ROWS):
            for column in range(0, plan.head_dim, step):
                at = pl.ds(row, WARPGROUP_ROWS), pl.ds(column, step)
                for n, part in enumerate(_widened(numbers.at[source, *at], plan.num_parts, operands.dtype)):
                    operands.at[slot, n, *at][...] = part
    if to.scales is not None and stored.scales is not None:
        _arrange_scales(stored.scales.at[source], to.scales.at[slot], steps.origin + i * plan.kv_tile, plan=plan, steps=steps)


def _arrange_scales(boxes: Ref, scales: Ref, start: jax.Array, *, plan: TilePlan, steps: Walk) -> None:
    """Scales of a tile, which begins at position `start`: [2, boxes, scales_of_box] -> [2, kv_tile]."""
    place = plgpu.broadcasted_iota(jnp.int32, (plan.box,), 0, layout=plgpu.Layout.WGMMA.reduce(0))

    def widen_box(j: jax.Array, _: None) -> None:
        at = pl.multiple_of(j * plan.box, plan.box)
        position = start + at + place
        is_inside = (position >= steps.first) & (position < steps.end)
        for kind in (KEYS, VALUES):
            of_box = plgpu.load(boxes.at[kind, j, pl.ds(0, plan.box)], layout=plgpu.Layout.WGMMA.reduce(0))
            # Places that nobody has written since their last owner may hold NaN, and weights there are 0.
            scales.at[kind, pl.ds(at, plan.box)][...] = jnp.where(is_inside, of_box, jnp.zeros_like(of_box))

    jax.lax.fori_loop(0, plan.boxes_in_tile, widen_box, None)


def _widened(stored: Ref, num_parts: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Stored numbers as operands of `dtype`, without a rounding."""
    if num_parts > 1:
        return in_parts(plgpu.load(stored, layout=plgpu.Layout.WGMMA), num_parts, dtype)
    numbers = plgpu.load(stored, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if jnp.issubdtype(stored.dtype, jnp.floating):
        numbers = numbers.astype(jnp.float16).astype(jnp.float32)  # capability 9.0 converts 8-bit floats to float16 only
    return (plgpu.layout_cast(numbers.astype(dtype), plgpu.Layout.WGMMA),)
