"""Inside the Mosaic GPU kernels, what decode and prefill share: fetching tiles of pages, masking them, scores.

A tile of keys lies in shared memory as `kv_tile` rows of the head, cut into blocks of 8 rows by one swizzle, as wgmma reads it. It is
put together from boxes: a box is the part of one page that fits (or a whole small page), and one TMA copy fetches its keys and
another its values. Does not know which queries read the tile. Next: `mosaic_gpu_decode`, `mosaic_gpu_prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_plan import TilePlan

NO_SCORE = -1e30
"""The peak before any key: finite, so that a difference of two of them is 0 and not NaN."""
LOG2_E = 1.4426950408889634

Ref = Any
"""A reference into device or shared memory, or to barriers; Pallas gives these no public type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a token sees and how products become logits; see `api.paged_attention`."""

    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None

    def first_visible(self, position: jax.Array) -> jax.Array:
        """The first position that a token at each position sees."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        if self.chunk is not None:
            return jnp.maximum(position, 0) // self.chunk * self.chunk
        return jnp.zeros_like(position)

    def logits(self, products: jax.Array) -> jax.Array:
        """Base-2 logits of dot products: the card has a fast exp2, no exp."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1). The card's own tanh is off by 2^-11, which the cap multiplies.
        power = jnp.exp2(products * (2.0 * LOG2_E * self.scale / self.soft_cap))
        return (self.soft_cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@dataclass(frozen=True, slots=True)
class Walk:
    """The tiles that a block visits, in positions of its row.

    Attributes:
        first, end: Some query of the block sees keys in `[first, end)`, and none sees another.
        origin: Where the block's first tile starts; a multiple of the box.
        count: Tiles.
    """

    first: jax.Array
    end: jax.Array
    origin: jax.Array
    count: jax.Array


def walk(first: jax.Array, end: jax.Array, plan: TilePlan, *, part: jax.Array | int = 0, num_parts: int = 1) -> Walk:
    """The tiles of the `part`-th of equal shares of `[first, end)`; shares that are left over have none."""
    origin = first // plan.box * plan.box
    in_all = (jnp.maximum(end - origin, 0) + plan.kv_tile - 1) // plan.kv_tile
    share = (in_all + num_parts - 1) // num_parts
    count = jnp.clip(in_all - part * share, 0, share)
    return Walk(first, end, origin + part * share * plan.kv_tile, count)


def operand(plan: TilePlan, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that wgmma reads. Both of its operands must have the same swizzle."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    elements = plan.swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, elements)), swizzle(plan.swizzle)))


class Stages(NamedTuple):
    """Shared memory of `num_stages` tiles, and the barriers that say that a stage is filled, and that its readers are done with it."""

    keys: Ref
    values: Ref
    filled: Ref
    used: Ref


def stages(plan: TilePlan, dtype: Any, num_readers: int) -> Stages:
    """Scratch for `fetch_tiles` and `num_readers` warpgroups that each read every tile."""
    return Stages(
        operand(plan, (plan.num_stages, plan.kv_tile, plan.head_dim), dtype),
        operand(plan, (plan.num_stages, plan.kv_tile, plan.padded_head_dim), dtype),
        plgpu.Barrier(num_arrivals=2 * plan.boxes_in_tile, num_barriers=plan.num_stages),
        plgpu.Barrier(num_arrivals=num_readers, num_barriers=plan.num_stages),
    )


def fetch_tiles(pages: Ref, table: Ref, to: Stages, *, plan: TilePlan, head: jax.Array, steps: Walk) -> None:
    """The memory warpgroup: copies the tiles of a walk, as many ahead of their readers as there are stages.

    A box that no query of the block sees is not copied, and its page table entry not read: whatever page that names may belong to
    another row, or to nobody. What lies in its place in shared memory then is masked like the rest.

    Args:
        pages: [num_pages, 2, K, page_size, H]. TMA takes 64-bit strides: no offset of ours can overflow.
        table: [P], the row's.
    """
    page_size = pages.shape[3]

    def one_tile(i: jax.Array, _: None) -> None:
        slot = jax.lax.rem(i, plan.num_stages)

        @pl.when(i >= plan.num_stages)
        def _await_readers() -> None:
            plgpu.barrier_wait(to.used.at[slot])

        for j in range(plan.boxes_in_tile):
            position = steps.origin + i * plan.kv_tile + j * plan.box
            is_seen = (position + plan.box > steps.first) & (position < steps.end)
            rows = pl.ds(j * plan.box, plan.box)

            @pl.when(is_seen)
            def _copy(position: jax.Array = position, rows: Any = rows) -> None:
                page = table[position // page_size]
                places = pl.ds(pl.multiple_of(jax.lax.rem(position, page_size), plan.box), plan.box)
                width = pl.ds(0, plan.padded_head_dim)  # what lies past the head is 0, written by TMA
                plgpu.copy_gmem_to_smem(pages.at[page, 0, head, places], to.keys.at[slot, rows], to.filled.at[slot])
                plgpu.copy_gmem_to_smem(pages.at[page, 1, head, places, width], to.values.at[slot, rows], to.filled.at[slot])

            @pl.when(jnp.logical_not(is_seen))
            def _leave_out() -> None:
                plgpu.barrier_arrive(to.filled.at[slot])
                plgpu.barrier_arrive(to.filled.at[slot])

    jax.lax.fori_loop(0, steps.count, one_tile, None)


def release(used: Ref, i: jax.Array, plan: TilePlan, steps: Walk) -> None:
    """A reader is done with tile i. Nobody waits for the last ones."""

    @pl.when(i + plan.num_stages < steps.count)
    def _arrive() -> None:
        plgpu.barrier_arrive(used.at[jax.lax.rem(i, plan.num_stages)])


def is_cut(start: jax.Array, kv_tile: int, steps: Walk) -> jax.Array:
    """Whether a tile holds places outside the walk: the first and the last of a walk may."""
    return (start < steps.first) | (start + kv_tile > steps.end)


def mask_values(values: Ref, start: jax.Array, steps: Walk) -> None:
    """Puts 0 over the values of a tile that lie outside the walk: their weights are 0, but 0 x NaN is NaN.

    For tiles that are cut. Call `commit_smem` before the multiplication.
    """
    kv_tile, width = values.shape
    step = 64 if width % 64 == 0 else width  # few registers at once: the kernel's sums stay in theirs
    position = start + plgpu.broadcasted_iota(jnp.int32, (kv_tile, step), 0, layout=plgpu.Layout.WGMMA)
    is_inside = (position >= steps.first) & (position < steps.end)
    for at in range(0, width, step):
        columns = values.at[:, pl.ds(at, step)]
        loaded = plgpu.load(columns, layout=plgpu.Layout.WGMMA)
        columns[...] = jnp.where(is_inside, loaded, jnp.zeros_like(loaded))
