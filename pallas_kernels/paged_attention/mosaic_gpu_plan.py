"""The sizes of the Mosaic GPU kernels: tiles, pipeline stages, splits, shared memory; and what they cannot serve.

Plain arithmetic on shapes, so that `dispatch` can ask without loading a GPU compiler. Next: `mosaic_gpu_tile` uses the sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARED_MEMORY_BYTES = 232_448 - 4_096
"""Of a block on capability 9.0, less what Mosaic takes for barriers and for reductions across warps."""
HALF_A_CORE_BYTES = 110 * 1024
"""A block this small shares its core with a second one, which computes while the first waits at its start or end."""
NUM_CORES = 132
MAX_SPLITS = 16
MIN_TILES_IN_SPLIT = 4
"""A split shorter than that costs more in its start, its end and the reduce than it brings."""
WARPGROUP_ROWS = 64
"""wgmma's M is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """The shape of a kernel's tiles.

    Attributes:
        kv_tile: Keys (and values) that a step of the loop takes; a multiple of 64, whatever the page size.
        box: Rows of one copy: the largest count that divides both a page and a tile.
        num_stages: Tiles of keys and values in flight or in use.
        head_dim, padded_head_dim: As stored, and the next multiple of 64: decode has the head dimension on wgmma's M.
        swizzle: Bytes of the swizzle of all wgmma operands: the largest that divides a row of the head.
        num_queries: Query rows of a block: wgmma's N for decode (a multiple of 8), M for prefill.
        is_quantized: Pages of 8 bits, converted on their way to the multiplication.
    """

    kv_tile: int
    box: int
    num_stages: int
    head_dim: int
    padded_head_dim: int
    swizzle: int
    num_queries: int
    is_quantized: bool = False

    @property
    def boxes_in_tile(self) -> int:
        """Copies that fetch the keys of a tile."""
        return self.kv_tile // self.box

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: keys and values."""
        return 2 * self.kv_tile * (self.head_dim + self.padded_head_dim)


def swizzle_of(head_dim: int) -> int | None:
    """The swizzle for rows of `head_dim` 16-bit elements; None when wgmma has none: below 32 bytes it takes no swizzle."""
    return next((size for size in (128, 64, 32) if head_dim * 2 % size == 0), None)


def plan_decode(*, head_dim: int, group: int, page_size: int, max_keys: int, is_quantized: bool) -> TilePlan | None:
    """Tiles for one token a row, the `group` query heads of a kv head on wgmma's N; None where shared memory is too small.

    Args:
        max_keys: What a page table row can name.
    """
    swizzle = swizzle_of(head_dim)
    assert swizzle is not None, head_dim
    num_queries = -(-group // 8) * 8
    for kv_tile in (128, 64) if head_dim <= 64 and max_keys > 64 else (64,):
        plan = TilePlan(
            kv_tile=kv_tile, box=math.gcd(page_size, kv_tile), num_stages=2, head_dim=head_dim,
            padded_head_dim=-(-head_dim // 64) * 64, swizzle=swizzle, num_queries=num_queries, is_quantized=is_quantized,
        )  # fmt: skip
        fixed = num_queries * (2 * head_dim + 2 * kv_tile + 4 * plan.padded_head_dim)
        if (stages := _stages(plan, fixed)) is not None:
            return _with_stages(plan, stages)
    return None


def _stages(plan: TilePlan, fixed_bytes: int) -> int | None:
    """As many stages (up to four) as leave room for a second block on the core, else two if they fit at all."""
    if fixed_bytes + 2 * plan.stage_bytes > SHARED_MEMORY_BYTES:
        return None
    return max(2, min(4, (HALF_A_CORE_BYTES - fixed_bytes) // plan.stage_bytes))


def _with_stages(plan: TilePlan, num_stages: int) -> TilePlan:
    from dataclasses import replace

    return replace(plan, num_stages=num_stages)


def num_splits(*, num_rows: int, num_kv_heads: int, max_keys: int, kv_tile: int) -> int:
    """In how many parts a row's keys are walked: enough blocks for four on each core, no more than the longest row can use."""
    wanted = -(-4 * NUM_CORES // (num_rows * num_kv_heads))
    longest = -(-max_keys // kv_tile) // MIN_TILES_IN_SPLIT
    return max(1, min(wanted, longest, MAX_SPLITS))
